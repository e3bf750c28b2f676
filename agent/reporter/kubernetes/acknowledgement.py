"""The files that say what the API server has acknowledged: one for the agent, and one that outlives the reporter's process."""

from __future__ import annotations

from pathlib import Path

from attrs import define, evolve, field

from agent.report import published
from agent.report.published import Published
from agent.runtime import boot_id


@define
class Acknowledgement:
    """Writes what is published.

    ``file`` is in memory, for the agent and `trackbed status`. ``memory`` is on a disk, for this reporter after a restart.
    ``now``: what is published, and may not be written yet.
    """

    file: Path
    memory: Path
    now: Published = field(init=False)
    _written: Published | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        before = published.read(self.memory)
        self.now = _acknowledged(before) if before is not None and before.boot_id == boot_id() else Published()

    def write(self, time: float) -> None:
        """Write the files if something has changed.

        :param time: seconds since the epoch.
        """
        before = self._written
        if before is not None and not _differ(self.now, before):
            return
        self.now = self._written = evolve(self.now, since=time)
        if not published.write(self.file, self.now):
            self._written = None
        # Each try during an outage may end with another error. A new error alone is not written to the disk.
        if before is None or _differ(_acknowledged(self.now), _acknowledged(before)):
            published.write(self.memory, self.now)


def _acknowledged(one: Published) -> Published:
    return evolve(one, error="", refused=False)


def _differ(one: Published, other: Published) -> bool:
    return evolve(one, since=0.0) != evolve(other, since=0.0)
