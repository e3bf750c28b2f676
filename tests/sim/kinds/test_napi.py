"""NAPI's settings on the simulated kernel: of all instances alike, whatever the kernel has for each."""

import pytest

from agent.engine.converge import Pass
from agent.engine.originals import Originals
from agent.hardware.functions import vf_addresses
from agent.machine import QueueIrq
from agent.report.names import KUBELET_CPUS
from agent.report.records import Outcome
from agent.report.verdict import is_ready
from agent.spec.ranges import parse_ranges
from tests.sim.kernel import Kernel
from tests.sim.passes import again, rail0, settle, spec_of
from tests.sim.two_nics import two_nics

PF, NETDEV = "0000:21:00.0", "enp33s0"
ALL = {"defer_hard_irqs": 2, "gro_flush_timeout": 20000, "irq_suspend_timeout": 1000000, "threaded": True}
OLD = {name: value for name, value in ALL.items() if name != "irq_suspend_timeout"}


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics()
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    return kernel


def instances(kernel: Kernel, function: str = PF) -> list[dict[str, int]]:
    """The settings of each."""
    every = kernel.netlink.napis(kernel.netdev(function).ifindex).values()
    return [{name: value for name, value in has.items() if name not in ("irq", "pid")} for has in every]


def files(kernel: Kernel) -> list[str]:
    names = ("napi_defer_hard_irqs", "gro_flush_timeout", "threaded")
    return [kernel.files.read(f"/sys/class/net/{NETDEV}/{name}") for name in names]


def of_napi(result: Pass) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.change.kind in ("napi", "napi_instances")]


def test_all_instances_become_what_the_spec_says_and_stay_so(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, rail0(napi=ALL)).conditions)
    assert instances(kernel) == [ALL] * 4
    assert files(kernel) == ["2", "20000", "1"]
    assert again(kernel, rail0(napi=ALL)) == ([], ())


def test_an_instance_that_somebody_set_alone_is_set_back(kernel: Kernel) -> None:
    settle(kernel, rail0(napi=ALL))
    one = sorted(kernel.netlink.napis(kernel.netdev(PF).ifindex))[1]
    kernel.netlink.set_napi(one, {"gro_flush_timeout": 7, "threaded": 0})
    repaired = {outcome.change.field: outcome.change.before for outcome in of_napi(settle(kernel, rail0(napi=ALL)))}
    assert repaired["gro_flush_timeout"] == "20000,20000,7,20000"
    assert instances(kernel) == [ALL] * 4


@pytest.mark.parametrize("name", ["napi_defer_hard_irqs", "gro_flush_timeout", "threaded"])
def test_a_file_that_somebody_wrote_is_set_back(kernel: Kernel, name: str) -> None:
    settle(kernel, rail0(napi=ALL))
    kernel.files.write(f"/sys/class/net/{NETDEV}/{name}", "0")
    (repaired,) = of_napi(settle(kernel, rail0(napi=ALL)))
    assert repaired.result == "applied"
    assert instances(kernel) == [ALL] * 4


def test_new_instances_are_as_the_spec_says_in_the_pass_that_brings_them(kernel: Kernel) -> None:
    settle(kernel, rail0(napi=ALL))
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=False)
    assert is_ready(settle(kernel, rail0(napi=ALL)).conditions)
    assert instances(kernel) == [ALL] * 4
    assert is_ready(settle(kernel, rail0(napi=ALL, channels={"combined": 6})).conditions)
    assert instances(kernel) == [ALL] * 6


def test_a_vf_has_its_own_settings(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, rail0(vfs={"count": 2, "defaults": {"napi": ALL}})).conditions)
    assert [instances(kernel, vf) for vf in vf_addresses(kernel.files, PF).values()] == [[ALL]] * 2
    assert files(kernel) == ["0", "0", "0"]


def test_of_a_netdev_that_the_spec_has_down_only_the_files_are_set(kernel: Kernel) -> None:
    """The kernel refuses `threaded` then (modify_napi_threaded, net/core/net-sysfs.c), as of a veth that is down."""
    wanted = rail0(napi=ALL, state="down")
    assert is_ready(settle(kernel, wanted).conditions)
    assert files(kernel) == ["2", "20000", "0"]
    assert settle(kernel, wanted).outcomes == ()


def test_before_linux_6_13_the_files_have_all(kernel: Kernel) -> None:
    kernel.napi.each_alone = False
    assert is_ready(settle(kernel, rail0(napi=OLD)).conditions)
    assert files(kernel) == ["2", "20000", "1"]
    result = settle(kernel, rail0(napi=ALL))
    (refused,) = of_napi(result)
    assert not is_ready(result.conditions)
    assert (refused.result, refused.change.field) == ("unsupported", "irq_suspend_timeout")
    assert "since Linux 6.13" in refused.error
    assert "irq_suspend_timeout out of" in refused.remedy


@pytest.mark.parametrize("each_alone", [True, False])
def test_what_leaves_the_spec_is_as_before(kernel: Kernel, each_alone: bool) -> None:
    kernel.files.write(f"/sys/class/net/{NETDEV}/gro_flush_timeout", "5000")
    index = kernel.netdev(PF).ifindex
    first, *_, last = sorted(kernel.netlink.napis(index))
    kernel.netlink.set_napi(first, {"gro_flush_timeout": 6000, "irq_suspend_timeout": 9})
    kernel.netlink.set_napi(last, {"threaded": 1})
    kernel.napi.each_alone = each_alone
    before, originals = (instances(kernel), files(kernel)), Originals()
    settle(kernel, rail0(napi=ALL if each_alone else OLD), originals=originals)
    assert (instances(kernel), files(kernel)) != before
    assert is_ready(settle(kernel, rail0(), originals=originals).conditions)
    assert (instances(kernel), files(kernel)) == before
    assert again(kernel, rail0(), originals=originals) == ([], ())


def threads(kernel: Kernel, function: str = PF) -> list[tuple[int, ...]]:
    """The CPUs of the thread of each instance."""
    instances = kernel.netlink.napis(kernel.netdev(function).ifindex).values()
    return [kernel.host.affinities[has["pid"]] for has in instances]


def cpus_of_interrupts(kernel: Kernel) -> list[tuple[int, ...]]:
    numbers = sorted(kernel.netlink.queue_irqs(kernel.netdev(PF).ifindex))
    return [parse_ranges(kernel.files.read(f"/proc/irq/{number}/smp_affinity_list")) for number in numbers]


def test_the_thread_of_an_instance_runs_where_its_interrupt_is_served_and_follows_it() -> None:
    kernel = linked(cpus=8)
    wanted = rail0(napi={"threaded": True})
    result = settle(kernel, wanted)
    assert is_ready(result.conditions)
    before = threads(kernel)
    assert before == cpus_of_interrupts(kernel)
    assert sorted(before) == [(cpu,) for cpu in (0, 0, 1, 1, 2, 2, 3, 3)]
    kernel.tree.put(KUBELET_CPUS[0], '{"entries": {"pod": {"app": "1"}}}')
    result = settle(kernel, wanted, result)
    assert threads(kernel) == cpus_of_interrupts(kernel)
    assert (1,) not in threads(kernel)
    assert settle(kernel, wanted, result).outcomes == ()
    kernel.tree.remove(KUBELET_CPUS[0])
    assert is_ready(settle(kernel, wanted, result).conditions)
    assert threads(kernel) == before
    kernel.host.set_affinity(kernel.napi.threads[max(kernel.napi.threads)], range(8))
    (repaired,) = settle(kernel, wanted).outcomes
    assert (repaired.change.field, repaired.change.before) == ("thread-7", "0-7")
    assert threads(kernel) == before


def linked(cpus: int) -> Kernel:
    """A machine with a NIC whose driver tells the kernel which interrupt serves which queue."""
    kernel = Kernel(cpus=cpus)
    kernel.linked[PF] = (None, *(QueueIrq(queue, queue) for queue in range(8)))
    kernel.add_nic(PF, NETDEV, "02:00:00:00:01:00", node=0)
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    return kernel


def test_a_thread_whose_interrupt_is_unknown_runs_on_the_cpus_that_serve_the_nic_and_belong_to_nobody() -> None:
    kernel = Kernel(cpus=8)
    kernel.add_nic(PF, NETDEV, "02:00:00:00:01:00", node=0)
    kernel.tree.put(KUBELET_CPUS[0], '{"entries": {"pod": {"app": "1"}}}')
    assert is_ready(settle(kernel, rail0(napi={"threaded": True})).conditions)
    assert threads(kernel) == [(0, 2, 3)] * 8


def test_threads_run_everywhere_again_where_interrupts_are_not_placed_any_more() -> None:
    kernel, originals = linked(cpus=8), Originals()
    nic = {"name": "rail0", "select": {"pci": PF}, "napi": {"threaded": True}}
    settle(kernel, spec_of(nic), originals=originals)
    assert is_ready(settle(kernel, spec_of(nic, irqs={"pin": False}), originals=originals).conditions)
    assert threads(kernel) == [tuple(range(8))] * 8
    settle(kernel, spec_of(nic), originals=originals)
    assert threads(kernel) == cpus_of_interrupts(kernel)
    assert is_ready(settle(kernel, rail0(), originals=originals).conditions)
    assert kernel.host.affinities == {}
    assert again(kernel, rail0(), originals=originals) == ([], ())
