"""RPS, RFS and XPS on the simulated kernel, in the host's network namespace and in others."""

import errno
import os

import pytest

from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.hardware.functions import vf_addresses
from agent.report.records import HOST
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel
from tests.sim.passes import settle, spec_of, undone
from tests.sim.two_nics import two_nics

PF = "0000:21:00.0"
NET = "/sys/class/net"
ENTRIES = "/proc/sys/net/core/rps_sock_flow_entries"
POD = "/namespaces/pod"


@pytest.fixture
def kernel() -> Kernel:
    return two_nics(cpus=8)


def spec(**more: object) -> NodeSpec:
    nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": 3}}
    return spec_of(nic, **more)


def test_each_cpu_sends_through_one_queue(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, spec()).conditions)
    masks = [int(kernel.files.read(f"{NET}/enp33s0/queues/tx-{queue}/xps_cpus"), 16) for queue in (0, 1)]
    assert masks[0] & masks[1] == 0
    assert masks[0] | masks[1] == 0xFF


def test_a_single_transmit_queue_is_left_alone(kernel: Kernel) -> None:
    result = settle(kernel, spec())
    assert not [o for o in result.outcomes if o.change.kind == "xps" and "#" in o.change.target]
    assert not dry_run(kernel.machine(), spec()).changes


def test_masks_and_flow_tables_are_left_alone_unless_asked_for(kernel: Kernel) -> None:
    settle(kernel, spec(xps={"enable": False}))
    assert not [path for path, _ in kernel.writes if path.endswith("xps_cpus") or "flow" in path]


@pytest.mark.parametrize(
    ("off", "file"), [("xps", "tx-0/xps_cpus"), ("rps", "rx-0/rps_cpus"), ("rfs", "rx-0/rps_flow_cnt")]
)
def test_a_table_that_the_spec_does_not_set_need_not_be_readable(kernel: Kernel, off: str, file: str) -> None:
    kernel.unreadable.add(f"{NET}/enp33s0/queues/{file}")
    assert not is_ready(settle(kernel, spec(**{off: {"enable": True}})).conditions)
    assert is_ready(settle(kernel, spec(**{off: {"enable": False}})).conditions)


def test_each_queue_has_its_share_of_the_node_s_flows(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, spec(rfs={"enable": True, "entries": 4096})).conditions)
    assert kernel.files.read(ENTRIES) == "4096"
    assert kernel.files.read(f"{NET}/enp33s0/queues/rx-1/rps_flow_cnt") == "2048"
    assert kernel.files.read(f"{NET}/enp33s0v1/queues/rx-0/rps_flow_cnt") == "4096"


def test_a_table_that_is_right_is_not_written_since_that_would_empty_it(kernel: Kernel) -> None:
    wanted = spec(rfs={"enable": True})
    settle(kernel, wanted)
    kernel.files.write(f"{NET}/enp33s0/queues/rx-0/rps_flow_cnt", "0")
    kernel.writes.clear()
    settle(kernel, wanted)
    assert kernel.writes == [(f"{NET}/enp33s0/queues/rx-0/rps_flow_cnt", "16384")]


def test_flows_that_could_be_steered_to_isolated_cpus_are_a_blocker(kernel: Kernel) -> None:
    kernel.interrupts.isolate("6-7")
    (error,) = dry_run(kernel.machine(), spec(rfs={"enable": True})).errors
    assert "CPUs 6-7 are isolated" in error
    assert "rfs.isolated: true" in error
    result = settle(kernel, spec(rfs={"enable": True}))
    assert [(o.change.target, o.result) for o in undone(result)] == [(HOST, "blocked")]
    assert not is_ready(result.conditions)
    assert kernel.files.read(ENTRIES) == "0"
    assert is_ready(settle(kernel, spec(rfs={"enable": True, "isolated": True})).conditions)
    assert kernel.files.read(ENTRIES) == "32768"


def test_isolated_cpus_take_no_steered_packets_and_the_masks_still_read_back(kernel: Kernel) -> None:
    kernel.interrupts.isolate("2-3")
    assert is_ready(settle(kernel, spec()).conditions)
    masks = [int(kernel.files.read(f"{NET}/enp33s0v{index}/queues/rx-0/rps_cpus"), 16) for index in range(3)]
    assert all(mask & 0b1100 == 0 for mask in masks)
    assert any(masks)


def test_a_pod_s_vf_is_steered_in_its_own_namespace(kernel: Kernel) -> None:
    wanted = spec(rfs={"enable": True})
    settle(kernel, wanted)
    before = kernel.files.read(f"{NET}/enp33s0v1/queues/rx-0/rps_cpus")
    assert int(before, 16)
    kernel.move_away(vf_addresses(kernel.files, PF)[1])
    for attribute in ("rps_cpus", "rps_flow_cnt"):
        kernel.files.write(f"{POD}{NET}/eth1/queues/rx-0/{attribute}", "0")
    kernel.writes.clear()
    assert is_ready(settle(kernel, wanted).conditions)
    assert kernel.files.read(f"{POD}{NET}/eth1/queues/rx-0/rps_cpus") == before
    assert kernel.files.read(f"{POD}{NET}/eth1/queues/rx-0/rps_flow_cnt") == "32768"
    assert all(path.startswith(POD) for path, _ in kernel.writes)
    assert kernel.opened == []


def test_a_namespace_that_ends_between_reading_and_writing_does_no_harm(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.move_away(vf_addresses(kernel.files, PF)[1])
    kernel.files.write(f"{POD}{NET}/eth1/queues/rx-0/rps_cpus", "0")

    def vanish(operation: str, where: str, value: str) -> OSError | None:
        kernel.namespaces.clear()
        return OSError(errno.ENODEV, os.strerror(errno.ENODEV), where)

    kernel.fault = vanish
    result = settle(kernel, spec())
    assert [o.result for o in result.outcomes if o.change.kind == "rps"] == ["failed"]
    assert settle(kernel, spec()).outcomes == ()


def test_a_namespace_that_cannot_be_entered_leaves_its_vf_as_it_is(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.move_away(vf_addresses(kernel.files, PF)[1])
    kernel.namespaces.clear()
    kernel.writes.clear()
    assert is_ready(settle(kernel, spec()).conditions)
    assert kernel.writes == []


def test_facts_that_only_an_earlier_spec_needed_may_be_unreadable(kernel: Kernel) -> None:
    earlier = spec(rfs={"enable": True}, irqs={"irqbalance": "banned"})
    settle(kernel, earlier)
    result = settle(kernel, spec(), verified=earlier)
    assert is_ready(result.conditions)


def test_tables_and_masks_that_leave_the_spec_are_restored(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec(rfs={"enable": True}), originals=originals)
    kernel.move_away(vf_addresses(kernel.files, PF)[1])
    left = spec(xps={"enable": False}, rps={"enable": False})
    assert is_ready(settle(kernel, left, originals=originals).conditions)
    assert kernel.files.read(ENTRIES) == "0"
    tables = [f"{NET}/enp33s0/queues/rx-0/rps_flow_cnt", f"{POD}{NET}/eth1/queues/rx-0/rps_flow_cnt"]
    masks = [f"{NET}/enp33s0/queues/tx-0/xps_cpus", f"{POD}{NET}/eth1/queues/rx-0/rps_cpus"]
    assert {int(kernel.files.read(path), 16) for path in (*tables, *masks)} == {0}


@pytest.mark.parametrize(
    ("more_irqs", "more_tx"),
    [
        pytest.param(0, 0, id="none-left"),
        pytest.param(8, 0, id="some-left"),
        pytest.param(8, 1, id="timestamps"),
        pytest.param(8, 8, id="two-classes"),
        pytest.param(8, 56, id="eight-classes"),
    ],
)
def test_receive_queues_that_no_interrupt_serves_count_for_nothing(more_irqs: int, more_tx: int) -> None:
    """Before Linux 6.1 mlx5 shows each receive queue twice, the second time for AF_XDP only.

    With fewer channels than it may have, it keeps ``more_irqs``. It has ``more_tx`` transmit queues for packets with timestamps
    (the private flag tx_port_ts) or for traffic classes (mqprio), and these belong to no class by themselves (EINVAL).
    """
    kernel = Kernel(cpus=16, nodes=1)
    kernel.add_nic(PF, "enp33s0", "02:00:00:00:01:00", driver="mlx5_core")
    folder = f"{NET}/enp33s0/queues"
    for queue in range(8, 16):
        kernel.tree.put(f"{folder}/rx-{queue}/rps_cpus", "0")
        kernel.tree.put(f"{folder}/rx-{queue}/rps_flow_cnt", "0")
    for queue in range(8, 8 + more_tx):
        kernel.tree.put(f"{folder}/tx-{queue}/xps_cpus", "0")
        if more_tx == 1:
            kernel.tree.put(f"{folder}/tx-{queue}/traffic_class", "0")
    kernel.interrupts.request_all(PF, [f"mlx5_comp{queue}@pci:{PF}" for queue in range(8, 8 + more_irqs)])
    nic = {"name": "rail0", "select": {"pci": PF}}
    assert is_ready(settle(kernel, spec_of(nic, rfs={"enable": True, "entries": 4096})).conditions)
    steered = [int(kernel.files.read(f"{folder}/rx-{queue}/rps_cpus"), 16) != 0 for queue in range(16)]
    flows = [kernel.files.read(f"{folder}/rx-{queue}/rps_flow_cnt") for queue in range(16)]
    assert steered == [True] * 8 + [False] * 8
    assert flows == ["512"] * 8 + ["0"] * 8
