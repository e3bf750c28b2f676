"""Interrupts and steering leave the CPUs that belong to pods or to partitions, and come back, on the simulated kernel."""

import json
import random
from collections.abc import Callable, Mapping

import pytest

from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.engine.retry import Failures
from agent.hardware.placement import from_mask
from agent.kinds.irqs import FULL
from agent.report.names import CPU_CLAIMS, KUBELET_CPUS
from agent.report.verdict import is_ready
from agent.spec.ranges import format_ranges, parse_ranges
from tests.sim.kernel import Kernel
from tests.sim.kinds.test_placement import spec
from tests.sim.passes import again, condition, settle
from tests.sim.two_nics import PF0, two_nics

STATE = KUBELET_CPUS[0]
CGROUPS = "/sys/fs/cgroup"

# What kubelets write, by the format: the inputs of TestCheckpointStateRestore of pkg/kubelet/cm/cpumanager/state, with other
# CPUs. In the fourth, only what is in `data` counts.
FORMATS = {
    "v1": {
        "policyName": "static",
        "defaultCpuSet": "0,3-15",
        "entries": {"containerID1": "1-2"},
        "checksum": 2026311253,
    },
    "v2": {
        "policyName": "static",
        "defaultCpuSet": "0,3-15",
        "entries": {"pod": {"container1": "1", "container2": "2", "container3": ""}},
        "checksum": 1942532442,
    },
    "v3": {
        "policyName": "static",
        "defaultCpuSet": "0,3-15",
        "entries": {"pod1": {"container1": "1"}},
        "podEntries": {"pod2": {"cpuSet": "2"}},
        "checksum": 766259872,
    },
    # A kubelet that is killed between two writes leaves CPUs of a pod in the default set, too.
    "kubernetes-136604": {
        "policyName": "static",
        "defaultCpuSet": "0-15",
        "entries": {"pod": {"container1": "1-2"}},
        "checksum": 1942532442,
    },
    "v4": {
        "policyName": "other",
        "defaultCPUSet": "0-15",
        "checksum": 1234,
        "data": '{"policyName":"static","entries":{"pod":{"container1":"1"}},"podEntries":{"pod":{"cpuSet":"1-2"}}}',
        "dataChecksum": 1032795074,
    },
}
NONE = {"policyName": "static", "defaultCpuSet": "0-15", "checksum": 1353318690}


@pytest.fixture
def kernel() -> Kernel:
    return two_nics(cpus=16)


def give(kernel: Kernel, pods: Mapping[str, str]) -> None:
    """The kubelet gives CPUs to pods."""
    kernel.tree.put(STATE, json.dumps({**NONE, "entries": {pod: {"app": cpus} for pod, cpus in pods.items()}}))


def served(kernel: Kernel) -> dict[tuple[str, str], frozenset[int]]:
    """The CPUs of each interrupt, by function and by the driver's name for the interrupt."""
    return {key: frozenset(parse_ranges(cpus)) for key, cpus in kernel.interrupts.affinities().items()}


def masks(kernel: Kernel, kind: str, under: str = "") -> frozenset[int]:
    """The CPUs in all masks of RPS or XPS."""
    paths = [path for path in kernel.tree.files if path.startswith(under) and path.endswith(f"/{kind}_cpus")]
    return frozenset().union(*(from_mask(kernel.files.read(path)) for path in paths))


@pytest.mark.parametrize("version", FORMATS)
def test_interrupts_and_masks_leave_the_cpus_of_a_pod_while_it_runs(kernel: Kernel, version: str) -> None:
    kernel.add_virtual("veth1")
    wanted = spec(rps={"enable": True, "netdevs": [{"match": "veth*"}]})
    result = settle(kernel, wanted)
    before = served(kernel), masks(kernel, "rps"), masks(kernel, "xps")
    assert all({1, 2} <= cpus for cpus in (frozenset().union(*before[0].values()), *before[1:]))
    kernel.tree.put(STATE, json.dumps(FORMATS[version]))
    planned = [change for change in dry_run(kernel.machine(), wanted).changes if change.note]
    holder = {"v1": "container containerID1", "v3": "pod pod1"}.get(version, "pod pod")
    assert any(change.note == f"CPU 1 belongs to {holder}" for change in planned)
    result = settle(kernel, wanted, result)
    assert is_ready(result.conditions)
    during = served(kernel)
    assert all(cpus.isdisjoint({1, 2}) for cpus in (*during.values(), masks(kernel, "rps"), masks(kernel, "xps")))
    assert {key for key, cpus in during.items() if cpus != before[0][key]} == {
        key for key, cpus in before[0].items() if not cpus.isdisjoint({1, 2})
    }
    assert again(kernel, wanted, result) == ([], ())
    kernel.tree.put(STATE, json.dumps(NONE))
    assert is_ready(settle(kernel, wanted, result).conditions)
    assert (served(kernel), masks(kernel, "rps"), masks(kernel, "xps")) == before


@pytest.mark.parametrize("seed", range(20))
def test_only_queues_move_whose_own_cpu_a_pod_takes_or_gives_back(seed: int) -> None:
    choice = random.Random(seed)  # noqa: S311  the same cases in every run
    kernel = two_nics(cpus=choice.choice([4, 8, 16]))
    wanted, pods = spec(), dict[str, set[int]]()
    last = settle(kernel, wanted)
    homes = before = served(kernel)
    for step in range(8):
        was = set().union(*pods.values())
        if pods and choice.random() < 0.5:
            del pods[choice.choice(sorted(pods))]
        elif left := sorted(set(range(kernel.cpus)) - was):
            pods[f"pod{step}"] = set(choice.sample(left, choice.randint(1, len(left))))
        give(kernel, {pod: format_ranges(cpus) for pod, cpus in pods.items()})
        owned = set().union(*pods.values())
        last = settle(kernel, wanted, last)
        assert is_ready(last.conditions)
        now = served(kernel)
        for key, home in homes.items():
            if len(home) > 1:
                continue  # a management interrupt, which any CPU of the pool serves
            pool = (
                set(range(kernel.cpus // 2))
                if key[0].startswith(PF0[:7])
                else set(range(kernel.cpus // 2, kernel.cpus))
            )
            if home.isdisjoint(owned) or pool <= owned:
                assert now[key] == home
            else:
                assert now[key] <= pool - owned
            if home.isdisjoint(owned | was):
                assert now[key] == before[key]
        # A pass after the agent has started again plans the same.
        assert not dry_run(kernel.machine(), wanted).changes
        before = now
    give(kernel, {})
    settle(kernel, wanted, last)
    assert served(kernel) == homes


def test_queues_stay_if_each_cpu_of_their_pool_has_an_owner_and_the_report_names_it(kernel: Kernel) -> None:
    result = settle(kernel, spec())
    before = served(kernel)
    give(kernel, {"one": "0-3", "two": "4-7"})
    result = settle(kernel, spec(), result)
    assert (served(kernel), is_ready(result.conditions)) == (before, True)
    said = condition(result, "QueueInterrupts")
    assert (said.status, said.reason) == ("True", "CpusOwned")
    assert f"{PF0} (CPUs 0-7: pod one, pod two)" in said.message
    give(kernel, {"one": "0-3"})
    result = settle(kernel, spec(), result)
    assert condition(result, "QueueInterrupts").reason == "Recognised"
    of_pf0 = [cpus for (pci, _), cpus in served(kernel).items() if pci.startswith(PF0[:7])]
    assert frozenset().union(*of_pf0) == frozenset(range(4, 8))


def unknown_by(result: Pass, path: str) -> bool:
    """Whether the report says that the owners of CPUs are unknown because of this file."""
    said = condition(result, "QueueInterrupts")
    return (said.reason, said.severity, path in said.message) == ("OwnersUnknown", "warn", True)


@pytest.mark.parametrize(
    "content", ["", '{"policyName":"static","entr', "[]", '{"entries":{"a":{"b":"x"}}}', '{"data":7}']
)
def test_a_damaged_file_of_the_kubelet_moves_nothing_and_is_named(kernel: Kernel, content: str) -> None:
    result = settle(kernel, spec())
    before = served(kernel)
    give(kernel, {"one": "1-2"})
    result = settle(kernel, spec(), result)
    during = served(kernel)
    kernel.tree.put(STATE, content)
    result = settle(kernel, spec(), result)
    assert (served(kernel), is_ready(result.conditions)) == (during, True)
    assert unknown_by(result, STATE)
    give(kernel, {"one": "1-2"})
    assert condition(settle(kernel, spec(), result), "QueueInterrupts").reason == "Recognised"
    kernel.tree.remove(STATE)
    assert condition(settle(kernel, spec(), result), "QueueInterrupts").reason == "Recognised"
    assert served(kernel) == before


PARTITION = f"{CGROUPS}/rt.slice/cpuset.cpus.partition"
CLAIM = CPU_CLAIMS.replace("*", "claim")
# By the file of each source of owners: its text while it owns CPUs of its own.
SOURCES = {
    STATE: json.dumps({**NONE, "entries": {"one": {"app": "1"}}}),
    CLAIM: "DRA_CPUSET_02b50f8a-a8f4-4e6b-a042-b672b4f1f075=2".join('""'),
    PARTITION: "isolated",
}
OWNED = {STATE: 1, CLAIM: 2, PARTITION: 3}


@pytest.mark.parametrize("broken", SOURCES)
def test_a_source_of_owners_that_cannot_be_read_keeps_its_cpus_and_the_other_sources_give_theirs_back(
    kernel: Kernel, broken: str
) -> None:
    kernel.tree.put(f"{CGROUPS}/rt.slice/cpuset.cpus.effective", "3")
    result = settle(kernel, spec())
    before = served(kernel)
    for path, text in SOURCES.items():
        kernel.tree.put(path, text)
    result = settle(kernel, spec(), result)
    assert frozenset().union(*served(kernel).values()).isdisjoint({1, 2, 3})
    kernel.unreadable.add(broken)
    for path in SOURCES.keys() - {broken}:
        kernel.tree.remove(path)
    result = settle(kernel, spec(), result)
    serving = frozenset().union(*served(kernel).values())
    assert ({1, 2, 3} - serving, unknown_by(result, broken)) == ({OWNED[broken]}, True)
    assert is_ready(result.conditions)
    kernel.unreadable.clear()
    assert condition(settle(kernel, spec(), result), "QueueInterrupts").reason == "Recognised"
    kernel.tree.remove(broken)
    assert is_ready(settle(kernel, spec(), result).conditions)
    assert served(kernel) == before


@pytest.mark.parametrize(
    ("cgroups", "owned"),
    [
        ({"rt.slice": ("root", "1-2", "1-2")}, {1, 2}),
        ({"rt.slice": ("isolated", "1-2", "1-2")}, {1, 2}),
        # Before Linux 6.7 there are no exclusive CPUs.
        ({"rt.slice": ("root", "1-2", None)}, {1, 2}),
        ({"rt.slice": ("root invalid (Parent is not a partition root)", "0-15", "")}, set()),
        ({"user.slice": ("member", "0-15", "")}, set()),
        # A partition may have given some of its CPUs to another one.
        ({"rt.slice": ("root", "2", "1-2"), "rt.slice/a.slice": ("isolated", "1", "1")}, {1, 2}),
        # A partition far from the root has CPUs that its ancestors hold for it.
        (
            {
                "kube": ("member", "0-15", "1-4"),
                "kube/pod": ("member", "0-15", "1"),
                "kube/pod/app": ("root", "1", "1"),
            },
            {1},
        ),
        pytest.param(
            {
                "ovs.slice": ("member", "0-15", "1-2"),
                "ovs.slice/ovs-vswitchd.service": ("member", "0-15", "1-2"),
                "ovs.slice/ovs-vswitchd.service/ovsdpdk.slice": ("isolated", "1-2", "1-2"),
            },
            {1, 2},
            id="cluster-node-tuning-operator-1560",
        ),
        pytest.param({"rt.service": ("isolated", "2", "2")}, {2}, id="systemd-42013"),
        # In a cgroup without exclusive CPUs nothing can be a partition.
        ({"kube": ("member", "0-15", ""), "kube/pod": ("root invalid", "0-15", "")}, set()),
    ],
)
def test_the_cpus_of_a_cgroup_that_is_a_partition_are_left(
    kernel: Kernel, cgroups: dict[str, tuple[str, str, str | None]], owned: set[int]
) -> None:
    result = settle(kernel, spec())
    before = served(kernel)
    kernel.tree.put(f"{CGROUPS}/cgroup.procs", "1")
    for cgroup, (state, effective, exclusive) in cgroups.items():
        kernel.tree.put(f"{CGROUPS}/{cgroup}/cpuset.cpus.partition", state)
        kernel.tree.put(f"{CGROUPS}/{cgroup}/cpuset.cpus.effective", effective)
        if exclusive is not None:
            kernel.tree.put(f"{CGROUPS}/{cgroup}/cpuset.cpus.exclusive.effective", exclusive)
    assert is_ready(settle(kernel, spec(), result).conditions)
    now = frozenset().union(*served(kernel).values())
    assert now == frozenset(range(16)) - owned
    for cgroup in cgroups:
        kernel.tree.put(f"{CGROUPS}/{cgroup}/cpuset.cpus.partition", "member")
    settle(kernel, spec(), result)
    assert served(kernel) == before


def test_an_entry_that_names_its_cpus_leaves_those_of_pods_as_long_as_it_has_others(kernel: Kernel) -> None:
    kernel.add_virtual("veth1")
    wanted = spec(rps={"enable": False, "netdevs": [{"match": "veth*", "cpus": "1-3"}]})
    path = "/sys/class/net/veth1/queues/rx-0/rps_cpus"
    for pods, cpus in (({}, {1, 2, 3}), ({"one": "2"}, {1, 3}), ({"one": "1-3"}, {1, 2, 3})):
        give(kernel, pods)
        assert is_ready(settle(kernel, wanted).conditions)
        assert from_mask(kernel.files.read(path)) == cpus


def test_a_queue_whose_cpu_a_pod_takes_does_not_try_a_cpu_without_a_free_vector(kernel: Kernel) -> None:
    result = settle(kernel, spec())
    serving = list(kernel.interrupts.serving.values())
    kernel.interrupts.vectors = {cpu: serving.count(cpu) for cpu in range(7)}
    kernel.files.replace(FULL, "0-6")
    give(kernel, {"one": "2"})
    result = settle(kernel, spec(), result)
    assert is_ready(result.conditions)
    assert {(outcome.result, outcome.change.after) for outcome in result.outcomes if outcome.change.kind == "irqs"} == {
        ("applied", "7"),
        ("applied", "0-1,3-7"),
    }


def test_each_pod_moves_only_the_queues_on_its_own_cpus(kernel: Kernel) -> None:
    """Also those stay that have left the CPU of another pod."""
    result = settle(kernel, spec())
    pods: dict[str, str] = {}
    for cpu in (6, 4, 2, 0):
        before = served(kernel)
        pods[f"pod{cpu}"] = str(cpu)
        give(kernel, pods)
        result = settle(kernel, spec(), result)
        assert {key for key, cpus in served(kernel).items() if cpus != before[key]} == {
            key for key, cpus in before.items() if cpu in cpus
        }


def isolate(kernel: Kernel, pods: Mapping[str, str]) -> None:
    """A program makes a cgroup a partition, or an ordinary one again."""
    kernel.tree.put(f"{CGROUPS}/lpm/cpuset.cpus.partition", "isolated" if pods else "member")
    kernel.tree.put(f"{CGROUPS}/lpm/cpuset.cpus.exclusive.effective", "1-2")


@pytest.mark.parametrize("own", [give, pytest.param(isolate, id="intel-lpmd-117")])
def test_pods_that_come_and_go_again_and_again_are_nobody_who_interferes(
    kernel: Kernel, own: Callable[[Kernel, Mapping[str, str]], None]
) -> None:
    failures = Failures()
    last = settle(kernel, spec(), failures=failures)
    homes = served(kernel)
    for now in range(1, 30):
        own(kernel, {"one": "1-2"} if now % 2 else {})
        last = settle(kernel, spec(), last, now=float(now), failures=failures)
        assert is_ready(last.conditions), now
        assert (served(kernel) == homes) == (now % 2 == 0)
