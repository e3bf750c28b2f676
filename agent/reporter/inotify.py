"""Watches folders for changed files, by inotify(7)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import sleep

from attrs import frozen

from agent.inotify import CLOSE_WRITE, DELETE, IGNORED, MOVED_TO, Q_OVERFLOW, events, opened, watch

MISSING = 5.0
"""Seconds until the watches are set again, if a folder is missing: the agent's exists only once the agent has started."""


@frozen
class Folder:
    """A folder, and what to call when a file in it has changed.

    ``written``: files are also written in place there. Otherwise a file is written under another name, and only the rename
    matters.
    """

    path: Path
    changed: Callable[[], None]
    written: bool = False

    @property
    def mask(self) -> int:
        """The inotify events to watch for."""
        return MOVED_TO | DELETE | (CLOSE_WRITE if self.written else 0)


def listen(*folders: Folder) -> None:
    """Call a folder's ``changed`` whenever a file in it was replaced or removed. This never returns.

    :raises OSError: the kernel has no more inotify instances for this user.
    """
    while True:
        descriptor = opened()
        try:
            watches = {watch(descriptor, str(each.path), each.mask): each for each in folders}
            for each in folders:
                each.changed()
            # Start over if a folder has no watch (it is missing) or if the queue overflowed, since events were lost.
            while min(watches) >= 0:
                came = list(events(os.read(descriptor, 4096)))
                for number in {number for number, _, _ in came if number in watches}:
                    watches[number].changed()
                if any(mask & (IGNORED | Q_OVERFLOW) for _, mask, _ in came):
                    break
        finally:
            os.close(descriptor)
        sleep(MISSING)
