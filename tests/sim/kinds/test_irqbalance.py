"""The policies for irqbalance on the simulated kernel."""

import pytest

from agent.engine.dry_run import dry_run
from agent.kinds.host.irqbalance import LIST, SCRIPT
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel
from tests.sim.passes import condition, nic, settle, spec_of
from tests.sim.two_nics import two_nics

PF = "0000:21:00.0"
WITH_OURS = ("/usr/sbin/irqbalance", "--foreground", f"--policyscript={SCRIPT}")


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics()
    kernel.host.processes.add("irqbalance")
    kernel.host.command_lines["irqbalance"] = WITH_OURS
    return kernel


def spec(policy: str = "banned") -> NodeSpec:
    nics = [nic("rail0", PF), {"name": "away", "select": {"vendor": "ffff"}, "required": False}]
    return spec_of(*nics, irqs={"irqbalance": policy})


def test_the_wanted_functions_are_listed_and_irqbalance_notified_before_interrupts_are_placed(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, spec()).conditions)
    assert kernel.files.read(LIST) == f"{PF}\n"
    assert kernel.host.hung_up == ["irqbalance"]
    written = [path for path, _ in kernel.writes]
    assert written.index(LIST) < min(written.index(path) for path in written if path.startswith("/proc/irq"))
    assert not dry_run(kernel.machine(), spec()).changes


@pytest.mark.parametrize(
    ("command", "ready"),
    [
        (WITH_OURS, True),
        (("irqbalance", "-f", "-l", SCRIPT), True),
        (("irqbalance", "--foreground"), False),
        ((*WITH_OURS, "--policyscript=/etc/other"), False),
        ((), True),
    ],
)
def test_an_irqbalance_without_our_script_makes_the_node_not_ready(
    kernel: Kernel, command: tuple[str, ...], ready: bool
) -> None:
    """While none runs, the list is kept for its start."""
    kernel.host.processes = {"irqbalance"} if command else set()
    kernel.host.command_lines["irqbalance"] = command
    result = settle(kernel, spec())
    assert kernel.files.read(LIST) == f"{PF}\n"
    assert is_ready(result.conditions) == ready
    assert {c.reason for c in result.conditions if c.status == "False" and c.severity == "required"} == (
        set() if ready else {"IrqbalanceUnbanned"}
    )


def test_a_nic_that_cannot_be_read_stays_on_the_list(kernel: Kernel) -> None:
    """Without it irqbalance would move the interrupts that the NIC still has."""
    settle(kernel, spec())
    kernel.unreadable.add(f"/sys/bus/pci/devices/{PF}/numa_node")
    kernel.host.hung_up.clear()
    assert "DeviceUnreadable" in {each.reason for each in settle(kernel, spec()).conditions}
    assert (kernel.files.read(LIST), kernel.host.hung_up) == (f"{PF}\n", [])


def test_another_policy_keeps_no_list(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, spec("untouched")).conditions)
    assert LIST not in [path for path, _ in kernel.writes]
    assert kernel.host.hung_up == []


def test_a_list_that_cannot_be_read_is_a_failure_and_the_condition_unknown(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.unreadable.add(LIST)
    result = settle(kernel, spec())
    (failed,) = result.outcomes
    assert (failed.change.kind, failed.change.field, failed.result) == ("irqbalance", "state", "failed")
    assert LIST in failed.error
    policy = condition(result, "IrqbalancePolicy")
    assert (policy.status, policy.reason) == ("Unknown", "NotRead")
