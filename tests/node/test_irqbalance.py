"""irqbalance would undo what was pinned."""

import pytest

from tests.node.evidence import Node, equal, judge

pytestmark = pytest.mark.irqbalance

UNIT = "irqbalance.service"


@pytest.fixture(scope="module", autouse=True)
def disabled(node: Node) -> None:
    if node.spec.irqs.irqbalance != "disabled":
        pytest.skip(f"{node.name}: its spec leaves irqbalance alone")


def test_it_does_not_run(node: Node) -> None:
    running = node.run("grep -lx irqbalance /proc/[0-9]*/comm 2>/dev/null || true").split()
    judge(node, [equal(UNIT, "processes", [], running)], "")


def test_its_unit_is_stopped_and_does_not_start_at_boot(node: Node) -> None:
    shown = node.run('systemctl show --property=LoadState,ActiveState,UnitFileState "$1"', UNIT)
    told = dict(line.split("=", 1) for line in shown.splitlines())
    findings = [equal(UNIT, "ActiveState", "inactive", told["ActiveState"])]
    if told["LoadState"] not in ("not-found", "masked"):
        findings.append(equal(UNIT, "UnitFileState", "disabled", told["UnitFileState"]))
    judge(node, findings, "")
