"""Events of the files that say who owns CPUs, by inotify(7). Each concerns every device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from attrs import frozen

from agent.inotify import CREATE, DELETE, IGNORED, ISDIR, MODIFY, MOVED_TO, Q_OVERFLOW, events, opened, watch
from agent.machine import Event, EventSource


@frozen
class ReplacedFiles:
    """Files that are replaced as a whole, by their paths or patterns. Of a missing folder, the nearest above is watched."""

    paths: Collection[str]

    def concerns(self, mask: int, name: str) -> bool:
        """Whether an event is of such a file, or of a folder on its path."""
        return any(fnmatchcase(name, part) for path in self.paths for part in path.split("/"))

    def watch(self, descriptor: int) -> None:
        """Watch each folder, as far as it exists by now."""
        for path in self.paths:
            folder, mask = os.path.dirname(path), MOVED_TO | DELETE  # noqa: PTH120
            while watch(descriptor, folder, mask) < 0 and folder != "/":
                folder, mask = os.path.dirname(folder), CREATE | MOVED_TO  # noqa: PTH120


@frozen
class Cpusets:
    """The cpusets of those cgroups in which :mod:`agent.hardware.cpu_owners` looks for partitions.

    The kernel makes a partition while the write to the file lasts, and the event follows the write.
    """

    root: str

    def concerns(self, mask: int, name: str) -> bool:
        """Whether an event is of a cpuset, or of a cgroup that came or went. It may have been a partition by then."""
        return bool(mask & ISDIR) or name.startswith("cpuset.")

    def watch(self, descriptor: int) -> None:
        """Watch the cgroups that are there by now."""
        self._watch(descriptor, Path(self.root))

    def _watch(self, descriptor: int, parent: Path) -> None:
        watch(descriptor, str(parent), MODIFY | CREATE | DELETE)
        with suppress(OSError):  # it is gone
            for group in filter(Path.is_dir, parent.iterdir()):
                if _text(group / "cpuset.cpus.exclusive"):
                    self._watch(descriptor, group)
                else:
                    watch(descriptor, str(group), MODIFY)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


@frozen
class FileSource:
    """The events of some files. It is closed when nothing refers to the source any more."""

    files: ReplacedFiles | Cpusets
    descriptor: int

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self.descriptor

    def receive(self) -> tuple[list[Event], bool]:
        """Take the events that wait. Those of other files in the same folders are none."""
        came: list[tuple[int, int, str]] = []
        with suppress(BlockingIOError):
            came += events(os.read(self.descriptor, 1 << 16))
        self.files.watch(self.descriptor)
        concerned = any(mask & (IGNORED | Q_OVERFLOW) or self.files.concerns(mask, name) for _, mask, name in came)
        return [Event(every_device=True)] if concerned else [], False


def subscribe(replaced: Collection[str], cgroups: str) -> list[EventSource]:
    """Subscribe to events of files that are replaced as a whole, and of the cpusets of cgroups.

    If the kernel has no more inotify instances, a source is left out: a full reading comes regularly.

    :param replaced: the paths of the files, or patterns. ``cgroups``: the root of the cgroups.
    """
    sources: list[EventSource] = []
    for files in (ReplacedFiles(replaced), Cpusets(cgroups)):
        with suppress(OSError):
            source = FileSource(files, opened(os.O_NONBLOCK))
            weakref.finalize(source, os.close, source.descriptor)
            files.watch(source.descriptor)
            sources.append(source)
    return sources
