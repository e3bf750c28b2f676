"""Each reason that the agent gives is declared, with the status that it gives, and each that is declared is given."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.probes import probes
from agent.report.reasons import ANY, REASONS, condition, declared

AGENT = Path(__file__).parents[3] / "agent"
REASON = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")


def strings(node: ast.AST) -> Iterator[str]:
    return (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def test_each_call_that_makes_a_condition_gives_declared_reasons() -> None:
    known = {each.name for reasons in REASONS.values() for each in reasons}
    given = set()
    for path in AGENT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                of_maker = getattr(node.func, "id", "") in ("Condition", "condition", "_lacking")
                named = [each.value for each in node.keywords if each.arg in ("lacking", "whole")]
                arguments = [*(node.args[1:4] if of_maker else ()), *named]
                words = {text for each in arguments for text in strings(each) if REASON.fullmatch(text)}
                given |= words - {"True", "False", "Unknown", *REASONS}
    assert len(given) > 50
    assert given - known == set()


def test_a_condition_that_is_made_otherwise_has_the_declared_status() -> None:
    known = {(each.status, each.name) for reasons in REASONS.values() for each in reasons}
    pairs = set()
    for path in AGENT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Condition" and len(node.args) > 2:
                status, name = node.args[1:3]
                if isinstance(status, ast.Constant) and isinstance(name, ast.Constant):
                    pairs.add((status.value, name.value))
    assert len(pairs) > 8
    assert pairs - known == set()


def test_each_declared_reason_is_somewhere_in_the_code() -> None:
    files = (path for path in AGENT.rglob("*.py") if path.name != "reasons.py")
    written = {text for path in files for text in strings(ast.parse(path.read_text()))}
    # Those of Converged for a change that is not made are its results.
    written |= {text.capitalize() for text in written}
    assert {each.name for reasons in REASONS.values() for each in reasons} - written == set()


def test_each_check_has_a_reason_to_be_true_and_one_not_to_be() -> None:
    for probe in probes():
        statuses = {each.status for each in REASONS[probe.type]}
        assert "True" in statuses and statuses & {"False", "Unknown"}


def test_a_condition_has_the_status_and_the_remedy_of_its_reason() -> None:
    made = condition("Carrier", "NoCarrier", "no carrier on eth0", more="; look again")
    assert (made.status, made.severity) == ("False", "required")
    assert made.text.startswith("no carrier on eth0; check the cable")
    assert made.text.endswith("; look again")
    # Any check may be late.
    assert condition("Carrier", "ProbeTimedOut").status == "Unknown"
    assert declared("Carrier", "ProbeTimedOut") in REASONS[ANY]


def test_a_reason_that_nobody_declares_is_refused() -> None:
    with pytest.raises(LookupError, match=r"Carrier has no reason Dark in agent/report/reasons\.py"):
        condition("Carrier", "Dark")
    assert declared("Carrier", "Dark") is None
