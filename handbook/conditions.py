"""The reference of conditions: the checks, and each reason with its remedy, as the agent declares them."""

from __future__ import annotations

import inspect

from agent.probes import Probe, probes
from agent.report.reasons import ANY, REASONS, Reason
from handbook.markdown import cell, code, table


def checks() -> str:
    """The checks, each with what must hold."""
    head = ("Check", "Condition", "Stage", "Severity", "What must hold")
    return table(
        head,
        ([code(p.name), code(p.type), p.stage, p.severity, cell(p.holds or _first_paragraph(p))] for p in probes()),
    )


def _first_paragraph(probe: Probe) -> str:
    """What its module says."""
    return inspect.getdoc(inspect.getmodule(probe.judge)).partition("\n\n")[0]  # type: ignore[union-attr]


def page() -> str:
    """The reasons of each condition."""
    return "\n".join(_section(type, reasons) for type, reasons in REASONS.items())


def _section(type: str, reasons: tuple[Reason, ...]) -> str:
    rows = ((code(each.name), each.status, _remedy(each)) for each in reasons)
    head = ("Reason", "Status", "What to do")
    return f"## {type if type != ANY else ANY.capitalize()}\n\n{table(head, rows)}"


def _remedy(reason: Reason) -> str:
    return cell(reason.remedy) or ("" if reason.status == "True" else "the message says it")
