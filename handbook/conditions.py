"""The reference of conditions and reasons: each place in the agent's code that makes one. The code is read, not run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from itertools import groupby, product
from typing import get_args

from agent.probes import Probe, probes
from agent.report.names import READY, UP_TO_DATE
from agent.report.records import Result
from handbook.markdown import cell, code, table
from handbook.source import UNKNOWN, Call, calls

ANY = "any check"
"""Stands for the type of a condition that the engine makes for any check without an answer."""

COMPUTED: Mapping[str, tuple[str, ...]] = {
    "probe.type": (ANY,),
    "first.result.capitalize()": tuple(result.capitalize() for result in get_args(Result) if result != "applied"),
    "_reason(failing)": ("the reason of the first required condition that is not True",),
    "_reason(waiting, 'NotYet')": ("the reason of `UpToDate`", "NotYet"),
}
"""The possible values of expressions that cannot be derived from constants."""

FIELDS = ("type", "status", "reason", "message", "stage", "severity", "remedy")
PUBLISHED = {"ready_condition": READY, "_up_to_date": UP_TO_DATE}

Row = tuple[str, str, str, tuple[str, ...], tuple[str, ...]]
"""Type, reason, status, and the possible messages and remedies."""

CHANGE = "the message names the change, why it is not made, and what to do: `trackbed doctor`"
SOON = "wait: it is over with the next pass; `trackbed wait`"
KERNEL = "see the kernel's log for the driver's reason (dmesg); reset the device, or reboot the node"
SERVICE = "see the service: `systemctl status trackbed`, `journalctl -u trackbed`"
SPEC = "correct the inventory and deploy again"

REMEDIES: Mapping[tuple[str, str], str] = {
    ("Converged", "Blocked"): CHANGE,
    ("Converged", "Checking"): "wait; if it stays, the message names the call that has not returned",
    ("Converged", "Converging"): SOON,
    (
        "Converged",
        "Deferred",
    ): "free the device from the users in the message, or allow more: `disruption`, `trackbed apply --allow`",
    ("Converged", "DeviceLost"): SOON,
    ("Converged", "Failed"): CHANGE,
    ("Converged", "NoSpec"): SPEC,
    ("Converged", "Observing"): "nothing: `mode` is `observe`, and the message has the first change that would be made",
    ("Converged", "PassCrashed"): f"report it with the output of `trackbed bundle`; {SERVICE}",
    ("Converged", "Starting"): SOON,
    ("Converged", "Unsupported"): "take the value out of the inventory, or set the NIC's `required` to `False`",
    ("DevicesAnswer", "DeviceHung"): KERNEL,
    ("DevicesAnswer", "DeviceUnreadable"): KERNEL,
    ("Uncontended", "Contended"): "stop the program in the message from setting the value, then `trackbed apply`",
    ("UpToDate", "Deferred"): "free the device from the users in the message, or wait until they end",
    ("UpToDate", "Refused"): SPEC,
    ("WorkerAlive", "DeviceTried"): KERNEL,
    ("WorkerAlive", "Stopped"): "`systemctl start trackbed`",
    ("WorkerAlive", "WorkerLost"): SERVICE,
    ("WorkerAlive", "WorkerStuck"): KERNEL,
    (ANY, "NotYetRead"): SOON,
    (ANY, "ProbeFailed"): "the check reads again after ten seconds; the message has the file and the error",
    (READY, "AgentSilent"): SERVICE,
    (READY, "NoReport"): SERVICE,
    (UP_TO_DATE, "AgentSilent"): SERVICE,
}
"""Remedies of the reasons for which the code has no constant text: the message has the remedy, or it is composed at run
time."""

SAID = "the message says it"


def checks() -> str:
    """The checks, each with what must hold, as its module says."""
    head = ("Check", "Condition", "Stage", "Severity", "What must hold")
    return table(head, ([code(p.name), code(p.type), p.stage, p.severity, cell(_first_paragraph(p))] for p in probes()))


def _first_paragraph(probe: Probe) -> str:
    return inspect.getdoc(inspect.getmodule(probe.judge)).partition("\n\n")[0]  # type: ignore[union-attr]


def page() -> str:
    """The conditions of the report with their reasons, then those of the Node."""
    checks = {probe.type: probe for probe in probes()}
    parts = []
    for type, rows in groupby(sorted(reasons()), key=lambda row: row[0]):
        probe = checks.get(type)
        stands = (
            f"From the check `{probe.name}`: stage {probe.stage}, severity {probe.severity}.\n\n"
            if probe is not None
            else ""
        )
        parts += [f"## {type}\n\n{stands}{_table(rows)}"]
    return "\n".join([*parts, "## Of the Node\n", *(f"### {type}\n\n{_table(rows)}" for type, rows in published())])


def reasons() -> set[Row]:
    """Each reason that the agent's code gives a condition of the report.

    :raises ValueError: a type, a status or a reason is only known at run time.
    """
    return {row for call in calls("agent", "Condition") if not _is_copy(call) for row in _rows(call)}


def _is_copy(call: Call) -> bool:
    """Whether the call copies another condition: the type is that condition's."""
    first = call.node.args[:1]
    return [ast.unparse(each) for each in first] == ["condition.type"]


def published() -> list[tuple[str, set[Row]]]:
    """The reasons of the Node's two conditions."""
    made = [call for call in calls("agent/reporter/kubernetes", "Content") if call.function in PUBLISHED]
    rows: dict[str, set[Row]] = {type: set() for type in PUBLISHED.values()}
    for call in made:
        type = PUBLISHED[call.function]
        rows[type] |= {
            (type, reason, status, tuple(call.texts(2, "message", COMPUTED)), ())
            for status, reason in product(call.texts(0, "status", COMPUTED), call.texts(1, "reason", COMPUTED))
        }
    return list(rows.items())


def _rows(call: Call) -> Iterator[Row]:
    for each in call.bound({"type": 0, "status": 1, "reason": 2}):
        type, status, reason, message, _, _, remedy = (
            each.texts(place, name, COMPUTED) for place, name in enumerate(FIELDS)
        )
        for values in (type, status, reason):
            if UNKNOWN in "".join(values):
                raise ValueError(f"{each.where}: handbook/conditions.py does not know what it can be; see COMPUTED")
        for one, state, why in product(type, status, reason):
            yield one, why, state, message, remedy


def _table(rows: Iterator[Row] | set[Row]) -> str:
    head = ("Reason", "Status", "Message", "What to do")
    return table(
        head,
        (
            (
                code(reason) if reason.isalnum() else reason,
                status,
                "<br>".join(map(cell, message)),
                "" if status == "True" else _remedy(type, reason, remedy),
            )
            for type, reason, status, message, remedy in sorted(rows, key=lambda row: (row[2], row[1:]))
        ),
    )


def _remedy(type: str, reason: str, said: tuple[str, ...]) -> str:
    """The remedy from the code, or else from this module."""
    known = "<br>".join(cell(each) for each in said if each != UNKNOWN)
    return known or REMEDIES.get((type, reason), SAID)
