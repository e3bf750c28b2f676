"""Judges a report: whether it is fresh, and whether the node is ready by it. The agent, the reporter and the deploy use it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from threading import Lock

from attrs import evolve, frozen

from agent.documents import LARGEST_REPORT, read
from agent.report.records import Condition, NicVerdict, Outcome, Report, report_from_json
from agent.runtime import boot_id, uptime

STALE = 30.0
"""Seconds after which a heartbeat is too old. By then the supervisor has missed two, and the third one is late."""


class NoReport(Exception):
    """The report file is missing or cannot be read: the reason, and the remedy. Its text has both."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


@frozen
class Verdict:
    """The verdict at this moment. Later the heartbeat may be too old.

    ``report`` is None if it is missing or cannot be read. ``reasons``: why the node is not ready. ``age``: seconds since the
    heartbeat. ``fresh``: the report is of this boot, and its heartbeat is not stale.
    """

    report: Report | None
    reasons: tuple[str, ...]
    age: float = 0.0
    fresh: bool = False

    @property
    def ready(self) -> bool:
        """Whether the node is ready by a fresh report of this boot."""
        return not self.reasons

    @property
    def summary(self) -> str:
        """The verdict in a few words: "ready, with 1 warning", or "not ready" with the failing conditions."""
        conditions = self.report.conditions if self.report else ()
        if self.ready:
            return f"ready{with_warnings(conditions)}"
        types = [c.type for c in failing(conditions)]
        return f"not ready: {', '.join(types)}" if types and self.fresh else "not ready"

    def without_heartbeat(self) -> Verdict:
        """The verdict without its times, to compare it: two are equal if only the heartbeat was renewed, or grew older."""
        report = self.report
        if report is None:
            return self
        # The first reason of a report that is not fresh may have the heartbeat's age in its text.
        reasons = self.reasons if self.fresh else ("the report is not fresh", *self.reasons[1:])
        return evolve(self, reasons=reasons, age=0.0, report=evolve(report, heartbeat=0.0, uptime=0.0))


def failing(conditions: Iterable[Condition]) -> list[Condition]:
    """The required conditions that are not True."""
    return [c for c in conditions if c.severity == "required" and c.status != "True"]


def warnings(conditions: Iterable[Condition]) -> list[Condition]:
    """The conditions that are not True and are not required."""
    return [c for c in conditions if c.severity != "required" and c.status != "True"]


def with_warnings(conditions: Iterable[Condition]) -> str:
    """The number of warnings, as text that follows "ready"; empty without any."""
    number = len(warnings(conditions))
    return f", with {number} warning{'s' if number > 1 else ''}" if number else ""


def is_ready(conditions: Iterable[Condition]) -> bool:
    """Whether every required condition is True."""
    return not failing(conditions)


def passes_first(conditions: Iterable[Condition]) -> bool:
    """Whether the kubelet may start: there are conditions of the stages device and network, and the required ones are True."""
    early = [c for c in conditions if c.stage != "cluster"]
    return bool(early) and is_ready(early)


_reading = Lock()
# The reporter's threads share the last report: parsing takes seven times the memory of the text.
_parsed = lru_cache(maxsize=1)(report_from_json)


def read_report(path: Path) -> Report:
    """Read the report file. Any thread may call this: one at a time reads, and the last text is not parsed again.

    :raises NoReport: it is missing or cannot be read.
    """
    try:
        with _reading:
            return _parsed(read(path, LARGEST_REPORT))
    except FileNotFoundError:
        raise NoReport(
            f"{path} does not exist: the agent has not run since the boot, was killed, or could not write it",
            f"systemctl start trackbed; df {path.parent}",
        ) from None
    except (OSError, ValueError) as error:
        remedy = "is another version of the agent running? systemctl restart trackbed"
        raise NoReport(f"{path}: {error}", remedy) from None


def judge(path: Path, wanted_hash: str | None = None) -> Verdict:
    """Read the report file of this machine, and judge it now.

    :param wanted_hash: the spec by which the node should be ready; any, if None.
    """
    try:
        report = read_report(path)
    except NoReport as error:
        return Verdict(None, (str(error),))
    boot, now = boot_id(), uptime()
    reasons = why_not_ready(report, boot, now, wanted_hash)
    return Verdict(report, tuple(reasons), max(0.0, now - report.uptime), not why_not_fresh(report, boot, now))


def why_not_fresh(report: Report, boot: str, now: float) -> list[str]:
    """Why the report says nothing about the present node; empty if it is of this boot and its heartbeat is not stale.

    :param boot: the present boot's identifier.
    :param now: seconds since that boot.
    """
    if report.boot_id != boot:
        return ["the report is of an earlier boot; the agent is not running: systemctl status trackbed"]
    age = now - report.uptime
    return [f"the agent's last heartbeat is {age:.0f} s old; see: systemctl status trackbed"] if age > STALE else []


def why_not_ready(report: Report, boot: str, now: float, wanted_hash: str | None = None) -> list[str]:
    """Why the node is not ready by its report, one line for each reason; empty if it is ready.

    :param boot: the present boot's identifier.
    :param now: seconds since that boot.
    :param wanted_hash: the spec by which the node should be ready; any, if None. Deferred changes do not count.
    """
    reasons = why_not_fresh(report, boot, now)
    if wanted_hash is not None and report.spec_hash != wanted_hash:
        reasons.append(f"it follows spec {report.spec_hash or 'none'}, not {wanted_hash}")
        reasons += [f"the new spec was refused: {report.refusal}"] if report.refusal else []
    # The agent makes a deferred change later. A blocked change needs an operator.
    elif wanted_hash is not None and not report.up_to_date and any(o.result == "blocked" for o in report.outcomes):
        reasons += [explained(c) for c in report.conditions if c.type == "UpToDate"]
    if not report.ready or reasons:
        reasons += map(explained, failing(report.conditions))
    # A report that is not ready says why in its conditions. One that gives no condition is not ready either.
    return reasons or ([] if report.ready else ["the agent does not call it ready"])


def nic_faults(nic: NicVerdict, outcomes: Iterable[Outcome]) -> list[str]:
    """Why a NIC does not match the newest spec; empty if it does.

    :param outcomes: those of the last pass.
    """
    faults = [] if nic.ready else [f"{nic.name} is not ready ({nic.reason}): {nic.message}"]
    waiting = [
        outcome
        for outcome in outcomes
        if outcome.result in ("deferred", "blocked") and outcome.change.required and outcome.change.device == nic.pci
    ]
    return [*faults, *(f"{outcome.change}: {outcome.error}" for outcome in waiting)]


def explained(condition: Condition) -> str:
    """A condition in one line, with its reason and message."""
    return f"{condition.type} is {condition.status} ({condition.reason}): {condition.text}"
