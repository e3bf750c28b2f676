"""Writes the report file, and the marker file that the kubelet's gate waits for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from attrs import define, evolve, field

from agent.report.names import REPORT
from agent.report.records import Condition, NicVerdict, Report, from_plain, report_to_json
from agent.report.verdict import STALE, passes_first
from agent.runtime import journal, uptime, write_atomically

READABLE = 0o644
"""The mode of files that the reporter, and operators without root, read."""

CHECKING = "Checking"
"""The reason of Converged from an event about a required device until the device has been read again."""

FIRST_PASS = "first-pass"  # noqa: S105  the name of a file


Unattended = Literal["DeviceTried", "Stopped", "WorkerLost", "WorkerStuck"]
"""The reasons of ``WorkerAlive`` while no worker watches the devices."""


@define
class Publisher:
    """Keeps the report file. Its generation grows with each change, and within one boot also across restarts of the agent.

    A report that cannot be written is removed, which needs no space: a node without a report is not ready.
    """

    folder: Path
    boot_id: str
    agent_version: str
    _last: Report = field(init=False)
    _passed: bool = field(default=False, init=False)
    _missing: set[str] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        starting = Condition("Converged", "Unknown", "Starting", "the agent has not looked at the devices yet")
        self._last = Report("", "", self.boot_id, self.agent_version, False, False, conditions=(starting,))
        # Microseconds since the boot: no change takes less than one, so this is above all earlier generations of this boot.
        self._last = evolve(self._last, generation=int(uptime() * 1_000_000), since=uptime())
        self._write()

    def publish_pass(self, message: dict[str, Any]) -> None:
        """Publish the result of the worker's pass.

        :raises ValueError: it is not a report.
        """
        stamped = {**message, "boot_id": self.boot_id, "agent_version": self.agent_version}
        self._publish(from_plain(stamped, Report))
        self._passed = self._passed or passes_first(self._last.conditions)
        self._mark()

    def publish_unattended(self, reason: Unattended, message: str) -> None:
        """Publish NotReady: no worker watches the devices now, so the last result may be outdated."""
        others = tuple(c for c in self._last.conditions if c.type != "WorkerAlive")
        lost = Condition("WorkerAlive", "False", reason, message)
        self._publish_unknown((*others, lost), lost)

    @property
    def ready(self) -> bool:
        """Whether the report says ready now."""
        return self._last.ready

    def publish_checking(self, message: str) -> None:
        """Publish NotReady: a required device may have changed and has not been read since."""
        others = tuple(c for c in self._last.conditions if c.type != "Converged")
        check = Condition("Converged", "Unknown", CHECKING, message)
        self._publish_unknown((check, *others), check)

    def _publish_unknown(self, conditions: tuple[Condition, ...], why: Condition) -> None:
        """Publish NotReady: nothing is known of any NIC."""
        nics = tuple(
            evolve(nic, ready=False, reason=why.reason, message=why.message, certainty="unknown", faulty_vfs=())
            for nic in self._last.nics
        )
        self._publish(evolve(self._last, ready=False, conditions=conditions, nics=nics))

    def renew_heartbeat(self) -> None:
        """Renew the heartbeat, and write files that could not be written before."""
        self._write()
        self._mark()

    def _publish(self, report: Report) -> None:
        if _unstamped(report) != _unstamped(self._last):
            now = uptime()
            since = self._last.since if report.ready == self._last.ready else now
            nics = _with_times(report.nics, self._last.nics, now)
            generation = self._last.generation + 1
            self._last = evolve(report, generation=generation, time=time.time(), since=since, nics=nics)
            self._write()

    def _write(self) -> None:
        self._last = evolve(self._last, heartbeat=time.time(), uptime=uptime())
        path, text = self.folder / REPORT, report_to_json(self._last)
        try:
            write_atomically(path, text, READABLE)
        except OSError:
            removed = _remove(path)
            try:
                # The removal has freed some space.
                write_atomically(path, text, READABLE)
            except OSError as error:
                self._complain(REPORT, f"{error.strerror}; {removed}")
                return
        self._missing.discard(REPORT)

    def _mark(self) -> None:
        """Write the kubelet's marker after the first verified pass of this boot, and again if it was removed."""
        marker = self.folder / FIRST_PASS
        try:
            if not self._passed or marker.exists():
                return
            write_atomically(marker, self.boot_id + "\n", READABLE)
        except OSError as error:
            self._complain(FIRST_PASS, f"{error.strerror}; the kubelet's gate waits for it")
            return
        self._missing.discard(FIRST_PASS)
        journal("the node is verified, for the first time in this boot")

    def _complain(self, name: str, why: str) -> None:
        """Log that a file cannot be written: once, until it could be written again."""
        if name not in self._missing:
            remedy = f"it is tried again with each heartbeat; make room: df {self.folder}; df -i {self.folder}"
            journal(f"{self.folder / name} cannot be written: {why}; {remedy}")
        self._missing.add(name)


def _remove(path: Path) -> str:
    """Remove an outdated report, and return the result for the journal."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"the old one cannot be removed ({error.strerror}), and counts until its heartbeat is {STALE:.0f} s old"
    return "the old one was removed, so the node counts as not ready"


def _unstamped(report: Report) -> Report:
    nics = _with_times(report.nics, (), 0.0)
    # The values do not matter: they only have to be equal in both reports.
    return evolve(report, generation=0, time=0.0, heartbeat=0.0, uptime=0.0, since=0.0, nics=nics)  # pragma: no mutate


def _with_times(nics: Iterable[NicVerdict], before: Iterable[NicVerdict], now: float) -> tuple[NicVerdict, ...]:
    """The verdicts, each with the time from which on it holds: that of the verdict before, or now."""
    known = {nic.name: nic for nic in before}
    timed = []
    for nic in nics:
        last = known.get(nic.name)
        faulty = {vf.index: vf.since for vf in last.faulty_vfs} if last is not None else {}
        since = last.since if last is not None and last.ready == nic.ready else now
        vfs = tuple(evolve(vf, since=faulty.get(vf.index, now)) for vf in nic.faulty_vfs)
        timed.append(evolve(nic, since=since, faulty_vfs=vfs))
    return tuple(timed)
