"""A VF's interrupts go to the CPUs of the pod that has it, if the spec says so, and return when the pod ends."""

import json
from collections.abc import Iterable

import pytest

from agent.hardware.functions import pci_of
from agent.report.names import KUBELET_CPUS
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel
from tests.sim.kinds.test_cpu_owners import CGROUPS, FORMATS, NONE, give, masks, served
from tests.sim.passes import nic, settle, spec_of
from tests.sim.two_nics import PF0, PF1, two_nics

VF = f"{PF0}#0"


@pytest.fixture
def kernel() -> Kernel:
    return two_nics(cpus=16)


def spec(key: bool = True, **more: object) -> NodeSpec:
    vfs = {"count": 3, "groups": [{"index": "0-1", "irqs_on_pod_cpus": key}]}
    one, other = nic("rail0", PF0, vfs=vfs), nic("rail1", PF1)
    return spec_of(one, other, **more)


def take(kernel: Kernel, cpus: Iterable[int], target: str = VF, namespace: str = "pod") -> str:
    """A pod with these CPUs gets a VF: first the kubelet knows it, then the netdev is moved. Returns the VF's function."""
    pci = pci_of(kernel.files, target)
    kernel.host.allocated[pci] = ("team/trader",)
    kernel.host.exclusive[pci] = frozenset(cpus)
    kernel.move_away(pci, namespace)
    return pci


def cpus_of(kernel: Kernel, pci: str) -> frozenset[int]:
    return frozenset().union(*(cpus for (function, _), cpus in served(kernel).items() if function == pci))


@pytest.mark.parametrize("version", FORMATS)
def test_the_interrupts_of_a_pods_vf_go_to_its_cpus_and_return_when_it_ends(kernel: Kernel, version: str) -> None:
    last = settle(kernel, spec())
    home, link = served(kernel), kernel.netdev(pci_of(kernel.files, VF))
    kernel.tree.put(KUBELET_CPUS[0], json.dumps(FORMATS[version]))
    last = settle(kernel, spec(), last)
    before = served(kernel)
    pci = take(kernel, {1, 2})
    last = settle(kernel, spec(), last, scope=frozenset({VF}))
    assert is_ready(last.conditions)
    during = served(kernel)
    assert cpus_of(kernel, pci) == {1, 2}
    assert {key: cpus for key, cpus in during.items() if key[0] != pci} == {
        key: cpus for key, cpus in before.items() if key[0] != pci
    }
    # The pod's CPUs send, and no other CPU processes the packets that an interrupt has announced.
    assert masks(kernel, "rps", "/namespaces/pod/") == frozenset()
    assert masks(kernel, "xps", "/namespaces/pod/") <= {1, 2}
    notes = {outcome.change.note for outcome in last.outcomes if outcome.change.kind == "irqs" and outcome.change.note}
    assert all("which has the VF" in note for note in notes)
    assert notes
    kernel.writes.clear()
    last = settle(kernel, spec(), last)
    assert (kernel.writes, served(kernel)) == ([], during)
    kernel.come_back(pci, link.name)
    kernel.host.allocated.clear()
    last = settle(kernel, spec(), last, scope=frozenset({VF}))
    assert cpus_of(kernel, pci)
    assert cpus_of(kernel, pci).isdisjoint({1, 2})
    kernel.tree.put(KUBELET_CPUS[0], json.dumps(NONE))
    settle(kernel, spec(), last)
    assert served(kernel) == home


@pytest.mark.parametrize(
    ("asked", "target", "cpus"),
    [
        pytest.param(True, VF, (), id="a pod without CPUs of its own"),
        pytest.param(True, VF, (8, 9), id="CPUs that have no owner in the kubelet's file"),
        pytest.param(True, f"{PF0}#2", (1, 2), id="a VF for which the spec does not ask"),
        pytest.param(False, VF, (1, 2), id="a spec that does not ask"),
    ],
)
def test_else_they_stay_off_the_cpus_of_pods(kernel: Kernel, asked: bool, target: str, cpus: tuple[int, ...]) -> None:
    give(kernel, {"one": "1-2"})
    last = settle(kernel, spec(asked))
    before = served(kernel)
    take(kernel, cpus, target)
    last = settle(kernel, spec(asked), last)
    assert (served(kernel), is_ready(last.conditions)) == (before, True)


def test_they_go_to_the_cpus_of_all_containers_also_of_another_numa_node_or_excluded_ones(kernel: Kernel) -> None:
    entries = {"pod": {"app": "3", "proxy": "12"}}
    kernel.tree.put(KUBELET_CPUS[0], json.dumps({**NONE, "entries": entries}))
    # CRI-O can make the cgroup of a container a cpuset partition.
    kernel.tree.put(f"{CGROUPS}/kubepods.slice/cpuset.cpus.partition", "isolated")
    kernel.tree.put(f"{CGROUPS}/kubepods.slice/cpuset.cpus.effective", "3,5,12")
    wanted = spec(irqs={"exclude_cpus": "3"})
    last = settle(kernel, wanted)
    pci = take(kernel, {3, 12})
    last = settle(kernel, wanted, last)
    assert cpus_of(kernel, pci) == {3, 12}
    assert is_ready(last.conditions)


def test_two_pods_have_each_their_own(kernel: Kernel) -> None:
    give(kernel, {"one": "1", "two": "2"})
    last = settle(kernel, spec())
    first, second = take(kernel, {1}), take(kernel, {2}, f"{PF0}#1", "other")
    assert is_ready(settle(kernel, spec(), last).conditions)
    assert cpus_of(kernel, first) == {1}
    assert cpus_of(kernel, second) == {2}


@pytest.mark.parametrize("silent", ["stopped", "refuses"])
def test_they_stay_while_the_kubelet_does_not_say_who_has_the_vf(kernel: Kernel, silent: str) -> None:
    give(kernel, {"one": "1-2"})
    last = settle(kernel, spec())
    pci = take(kernel, {1, 2})
    last = settle(kernel, spec(), last)
    during = served(kernel)
    if silent == "stopped":
        kernel.host.allocated.clear()
    else:
        kernel.host.kubelet_error = OSError(110, "no answer")
    # A worker that has just started has seen no earlier pass.
    last = settle(kernel, spec())
    assert served(kernel) == during
    assert cpus_of(kernel, pci) == {1, 2}
    kernel.host.allocated["0000:99:00.1"] = ("team/other",)
    kernel.host.kubelet_error = None
    if silent == "stopped":
        settle(kernel, spec(), last)
        assert cpus_of(kernel, pci).isdisjoint({1, 2})


def test_a_pod_whose_cpus_have_no_free_vector_is_a_failure_by_name(kernel: Kernel) -> None:
    give(kernel, {"one": "1"})
    last = settle(kernel, spec())
    kernel.interrupts.vectors = {1: 0}
    take(kernel, {1})
    failed = {outcome.error for outcome in settle(kernel, spec(), last).outcomes if outcome.result == "failed"}
    assert any("no interrupt vector left" in error for error in failed)
