"""irqbalance does not run, or leaves the pinned interrupts alone."""

import pytest

from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.irqbalance

UNIT = "irqbalance.service"


# Where the deploy puts it (tasks/host/irqbalance.py).
SCRIPT = "/usr/local/libexec/trackbed-irqbalance-policy"
COMMANDS = """
for comm in $(grep -lx irqbalance /proc/[0-9]*/comm 2>/dev/null); do tr '\\0' ' ' < "${comm%comm}cmdline"; echo; done
"""


@pytest.fixture
def disabled(node: Node) -> None:
    if node.spec.irqs.irqbalance != "disabled":
        pytest.skip(f"{node.name}: its spec does not have irqbalance stopped")


def test_irqbalance_runs_with_our_policy_script(node: Node) -> None:
    if node.spec.irqs.irqbalance != "banned":
        pytest.skip(f"{node.name}: its spec does not have interrupts banned")
    last = f"--policyscript={SCRIPT}"
    findings = [Finding(UNIT, "command line", f"{last} last", said, said.split()[-1] == last) for said in lines(node)]
    judge(node, findings, "it does not run")


def lines(node: Node) -> list[str]:
    return node.run(COMMANDS).splitlines()


@pytest.mark.usefixtures("disabled")
def test_irqbalance_does_not_run(node: Node) -> None:
    running = node.run("grep -lx irqbalance /proc/[0-9]*/comm 2>/dev/null || true").split()
    judge(node, [equal(UNIT, "processes", [], running)], "")


@pytest.mark.usefixtures("disabled")
def test_irqbalances_unit_is_stopped_and_does_not_start_at_boot(node: Node) -> None:
    shown = node.run('systemctl show --property=LoadState,ActiveState,UnitFileState "$1"', UNIT)
    properties = dict(line.split("=", 1) for line in shown.splitlines())
    findings = [equal(UNIT, "ActiveState", "inactive", properties["ActiveState"])]
    if properties["LoadState"] not in ("not-found", "masked"):
        findings.append(equal(UNIT, "UnitFileState", "disabled", properties["UnitFileState"]))
    judge(node, findings, "")
