"""RPS on netdevs of others, by patterns of their names: as container network plugins make them for pods."""

import errno
import os
from pathlib import Path

import pytest

from agent.engine.context import Callbacks
from agent.engine.dry_run import dry_run
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.kinds import rps_netdevs
from agent.report.records import HOST
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel
from tests.sim.passes import settle, spec_of, undone
from tests.sim.refusing import refusing
from tests.sim.two_nics import NAME1, PF0, two_nics

NET = "/sys/class/net"


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics(cpus=8)
    kernel.add_virtual("cali1f")
    kernel.add_virtual("docker0")
    return kernel


def spec(*netdevs: dict[str, str], **more: object) -> NodeSpec:
    nic = {"name": "rail0", "select": {"pci": PF0}, "vfs": {"count": 2}}
    rps = {"netdevs": list(netdevs or ({"match": "cali*"},))}
    return spec_of(nic, rps=rps, **more)


def mask(kernel: Kernel, name: str, queue: int = 0) -> int:
    return int(kernel.files.read(f"{NET}/{name}/queues/rx-{queue}/rps_cpus"), 16)


def test_a_matching_netdev_spreads_over_all_cpus_and_others_are_left_alone(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, spec()).conditions)
    assert mask(kernel, "cali1f") == 0xFF
    assert mask(kernel, "docker0") == 0
    assert not dry_run(kernel.machine(), spec()).changes


def test_excluded_and_isolated_cpus_take_nothing(kernel: Kernel) -> None:
    kernel.interrupts.isolate("6-7")
    assert is_ready(settle(kernel, spec(irqs={"exclude_cpus": "0"})).conditions)
    assert mask(kernel, "cali1f") == 0b00111110
    assert not dry_run(kernel.machine(), spec(irqs={"exclude_cpus": "0"})).changes


def test_an_entry_may_name_the_cpus_and_the_first_that_matches_counts(kernel: Kernel) -> None:
    """A function that is not in the spec may match, too."""
    settle(kernel, spec({"match": "cali1?", "cpus": "2-3"}, {"match": "cali*"}, {"match": "enp65*", "cpus": "4-6"}))
    assert (mask(kernel, "cali1f"), mask(kernel, NAME1)) == (0b1100, 0b1110000)


def test_a_netdev_with_a_queue_for_each_cpu_is_not_steered(kernel: Kernel) -> None:
    kernel.add_virtual("cali8", queues=8)
    kernel.add_virtual("cali2", queues=2)
    settle(kernel, spec())
    assert [mask(kernel, "cali8", queue) for queue in range(8)] == [0] * 8
    assert [mask(kernel, "cali2", queue) for queue in range(2)] == [0xFF] * 2


def test_queues_of_a_connectx_for_af_xdp_only_count_for_nothing(kernel: Kernel) -> None:
    """Before Linux 6.1 mlx5 shows each receive queue twice."""
    kernel.add_nic("0000:61:00.0", "enp97s0", "02:00:00:00:01:02", driver="mlx5_core")
    kernel.ethtool.set("channels", kernel.netdev("0000:61:00.0").ifindex, {"combined": 4})
    for queue in range(4, 8):
        kernel.tree.put(f"{NET}/enp97s0/queues/rx-{queue}/rps_cpus", "0")
    assert is_ready(settle(kernel, spec({"match": "enp97*"})).conditions)
    assert [mask(kernel, "enp97s0", queue) for queue in range(8)] == [0xFF] * 4 + [0] * 4


def test_cpus_that_cannot_be_used_are_a_blocker_and_the_node_is_ready(kernel: Kernel) -> None:
    kernel.interrupts.isolate("6-7")
    kernel.add_virtual("cali2")
    result = settle(kernel, spec({"match": "cali*", "cpus": "6-7"}))
    [outcome] = undone(result, rps_netdevs.NAME)
    assert outcome.result == "blocked" and outcome.error.startswith("none of the CPUs 6-7 is ")
    assert is_ready(result.conditions)


def test_a_netdev_that_appears_later_is_steered_by_a_pass_over_the_host_alone(kernel: Kernel) -> None:
    first = settle(kernel, spec())
    kernel.add_virtual("cali77")
    kernel.writes.clear()
    announced: list[object] = []
    result = settle(kernel, spec(), first.have, frozenset({HOST}), Callbacks(announce=announced.append))
    assert mask(kernel, "cali77") == 0xFF
    assert announced == [], "the node stays ready"
    assert [path for path, _ in kernel.writes] == [f"{NET}/cali77/queues/rx-0/rps_cpus"]
    assert is_ready(result.conditions)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_a_netdev_that_vanishes_before_the_write_is_no_fault(kernel: Kernel, number: int) -> None:
    def vanish(operation: str, where: str, value: str) -> OSError | None:
        if "/cali1f/" not in where:
            return None
        kernel.remove_virtual("cali1f")
        return OSError(number, os.strerror(number), where)

    kernel.fault = vanish
    result = settle(kernel, spec())
    assert not [o for o in result.outcomes if o.change.kind == rps_netdevs.NAME]
    assert is_ready(result.conditions)


def test_a_write_that_is_refused_is_reported_and_the_node_is_ready(kernel: Kernel) -> None:
    kernel.fault = refusing(errno.EPERM, "/cali1f/")
    result = settle(kernel, spec())
    assert [o.result for o in undone(result, rps_netdevs.NAME)] == ["failed"]
    assert is_ready(result.conditions)


def test_netdevs_of_the_spec_s_nics_follow_rps_enable_and_never_a_pattern(kernel: Kernel) -> None:
    settle(kernel, spec({"match": "enp*", "cpus": "7"}))
    masks = {mask(kernel, name) for name in ("enp33s0", "enp33s0v0", "enp33s0v1")}
    assert 1 << 7 not in masks
    settle(kernel, spec({"match": "enp*", "cpus": "7"}))
    assert {mask(kernel, name) for name in ("enp33s0", "enp33s0v0", "enp33s0v1")} == masks


def test_no_more_netdevs_than_the_bound_are_set(kernel: Kernel) -> None:
    for number in range(rps_netdevs.MOST):
        kernel.add_virtual(f"cali-{number:04}")
    result = settle(kernel, spec())
    assert (
        sum(mask(kernel, name) != 0 for name in kernel.files.names(NET) if name.startswith("cali")) == rps_netdevs.MOST
    )
    (outcome,) = undone(result, rps_netdevs.NAME)
    assert outcome.error.endswith("match 1025 netdevs; 1024 are steered")
    assert is_ready(result.conditions)


def test_masks_that_leave_the_spec_are_restored(kernel: Kernel, originals: Originals) -> None:
    kernel.files.write(f"{NET}/cali1f/queues/rx-0/rps_cpus", "01")
    settle(kernel, spec(), originals=originals)
    assert mask(kernel, "cali1f") == 0xFF
    settle(kernel, spec({"match": "veth*"}), originals=originals)
    assert mask(kernel, "cali1f") == 1


def test_the_original_of_a_netdev_that_is_gone_is_forgotten(
    kernel: Kernel, originals: Originals, tmp_path: Path
) -> None:
    settle(kernel, spec(), originals=originals)
    assert "cali1f" in (tmp_path / ORIGINALS).read_text()
    kernel.remove_virtual("cali1f")
    settle(kernel, spec(), originals=originals)
    Originals.load(tmp_path / ORIGINALS)  # it writes what is left
    assert "cali1f" not in (tmp_path / ORIGINALS).read_text()


def test_a_name_that_returns_with_each_pod_is_no_contention(kernel: Kernel) -> None:
    failures = Failures()
    for _ in range(10):
        settle(kernel, spec(), failures=failures)
        assert mask(kernel, "cali1f") == 0xFF
        kernel.remove_virtual("cali1f")
        kernel.add_virtual("cali1f")


def test_a_mask_that_another_program_writes_again_and_again_is_left_to_it(kernel: Kernel) -> None:
    failures = Failures()
    for _ in range(10):
        result = settle(kernel, spec(), failures=failures)
        kernel.files.write(f"{NET}/cali1f/queues/rx-0/rps_cpus", "01")
    assert "put back" in undone(settle(kernel, spec(), failures=failures), rps_netdevs.NAME)[0].error
    assert is_ready(result.conditions)
