"""Public reports about where interrupts are: with fewer channels than interrupts, other writers, and CPUs of claims."""

import errno
import json

import pytest

from agent.engine.dry_run import dry_run
from agent.report.names import CPU_CLAIMS
from agent.report.verdict import is_ready
from agent.spec.ranges import parse_ranges
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import rail0, settle
from tests.sim.refusing import refusing
from tests.sim.two_nics import MAC0, NAME0, PF0, two_nics

ONE = rail0()


def with_interrupts(cpus: int, number: int) -> Kernel:
    """A ConnectX on the first of two NUMA nodes, with as many interrupts of queues; the node is settled."""
    kernel = Kernel(cpus=cpus)
    kernel.add_nic(PF0, NAME0, MAC0, driver="mlx5_core")
    settle(kernel, ONE)
    kernel.interrupts.free(PF0)
    kernel.interrupts.request_all(PF0, [f"mlx5_comp{queue}@pci:{PF0}" for queue in range(number)])
    assert is_ready(settle(kernel, ONE).conditions)
    return kernel


@pytest.mark.parametrize(
    ("cpus", "number", "channels"),
    [
        pytest.param(64, 63, 16, id="seastar-503"),
        pytest.param(32, 128, 16, id="more-interrupts-than-cpus"),
        pytest.param(96, 128, 48, id="a-channel-for-each-cpu"),
    ],
)
def test_channels_have_cpus_of_their_own_though_a_driver_keeps_the_interrupts_of_more(
    cpus: int, number: int, channels: int
) -> None:
    """mlx5 keeps the completion vectors that it has had, for RDMA, when there are fewer channels."""
    kernel = with_interrupts(cpus, number)
    affinities = kernel.interrupts.affinities(PF0)
    used = [affinities[PF0, f"mlx5_comp{queue}@pci:{PF0}"] for queue in range(channels)]
    assert len({*used}) == channels


def served(kernel: Kernel) -> set[int]:
    return {cpu for cpus in kernel.interrupts.affinities(PF0).values() for cpu in parse_ranges(cpus)}


UID = "02b50f8a-a8f4-4e6b-a042-b672b4f1f075"
CLAIM = CPU_CLAIMS.replace("*", f"claim-{UID}")


def specification(*variables: str) -> str:
    """What the driver of DRA for CPUs writes when it prepares a claim, for the container runtime (CDI)."""
    device = {"name": f"claim-{UID}", "containerEdits": {"env": list(variables)}}
    return json.dumps({"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": [device]})


@pytest.mark.parametrize(
    ("variables", "owned"),
    [
        pytest.param([f"DRA_CPUSET_{UID}=1-2"], {1, 2}, id="dra-driver-cpu-140"),
        pytest.param([f"DRA_CPUSET_{UID}=0"], {0}, id="slurm-bridge-32"),
        # A second variable has the CPUs of all claims of the container.
        pytest.param([f"DRA_CPUSET_{UID}=0,3", "DRA_CPUSET_ASSIGNED=0,3"], {0, 3}, id="dra-driver-cpu-186"),
    ],
)
def test_interrupts_leave_the_cpus_of_a_claim_and_come_back(variables: list[str], owned: set[int]) -> None:
    """With this driver the kubelet's own policy for CPUs is off, and its file names no pod."""
    kernel = two_nics(cpus=8)
    last = settle(kernel, ONE)
    before = kernel.interrupts.affinities(PF0)
    assert owned <= served(kernel)
    kernel.tree.put("/var/lib/kubelet/cpu_manager_state", '{"policyName": "none", "defaultCpuSet": "", "checksum": 1}')
    kernel.tree.put("/run/cdi/nvidia.yaml", "cdiVersion: 0.5.0")
    kernel.tree.put(CLAIM, specification(*variables))
    notes = {change.note for change in dry_run(kernel.machine(), ONE).changes if change.note}
    assert notes == {f"CPU {cpu} belongs to claim {UID}" for cpu in owned}
    last = settle(kernel, ONE, last)
    assert is_ready(last.conditions)
    assert served(kernel).isdisjoint(owned)
    kernel.tree.remove(CLAIM)
    assert is_ready(settle(kernel, ONE, last).conditions)
    assert kernel.interrupts.affinities(PF0) == before


@pytest.mark.parametrize(
    "written",
    [
        # A .link file with IRQAffinityPolicy=single, and with spread.
        pytest.param(["0"] * 8, id="systemd-40304"),
        pytest.param(["7", "6", "5", "4", "3", "2", "1", "0"], id="systemd-40195"),
    ],
)
def test_interrupts_that_udev_has_put_elsewhere_are_put_back(written: list[str]) -> None:
    """udev does so when it looks at a netdev, as at boot and after `udevadm trigger`."""
    kernel = two_nics(cpus=16)
    last = settle(kernel, ONE)
    before = kernel.interrupts.affinities(PF0)
    numbers = sorted(kernel.tree.folders[f"/sys/bus/pci/devices/{PF0}/msi_irqs"], key=int)
    for number, cpu in zip(numbers, written, strict=False):
        kernel.tree.put(f"/proc/irq/{number}/smp_affinity_list", cpu)
    assert kernel.interrupts.affinities(PF0) != before
    assert is_ready(settle(kernel, ONE, last).conditions)
    assert kernel.interrupts.affinities(PF0) == before


@pytest.mark.parametrize(
    ("vectors", "ready"), [pytest.param(80, True, id="ethernet-linux-ice-66"), pytest.param(20, False, id="too-few")]
)
def test_no_interrupt_stays_on_an_isolated_cpu_if_the_others_have_vectors(vectors: int, ready: bool) -> None:
    """ice asks for 64 interrupts a port, and the kernel puts those for which there is no vector on any CPU."""
    kernel = Kernel(cpus=16, nodes=1)
    kernel.interrupts.isolate("2-15")
    kernel.interrupts.vectors = {0: vectors, 1: vectors}
    kernel.add_nic(PF0, NAME0, MAC0, driver="ice")
    settle(kernel, ONE)
    kernel.interrupts.free(PF0)
    kernel.interrupts.request_all(PF0, [f"ice-{NAME0}-TxRx-{queue}" for queue in range(64)])
    assert not {*kernel.interrupts.serving.values()} <= {0, 1}
    last = settle(kernel, ONE)
    assert is_ready(last.conditions) is ready
    if ready:
        assert {*kernel.interrupts.serving.values()} == {0, 1}
    else:
        assert any("has an interrupt vector left" in outcome.error for outcome in last.outcomes)


@pytest.mark.parametrize(
    ("driver", "names"),
    [
        pytest.param("gve", [f"gve-ntfy-blk{n}@pci:{{}}" for n in range(8)], id="compute-virtual-ethernet-linux-64"),
        pytest.param("enic", [f"{NAME0}-{way}-{n}" for way in ("tx", "rx") for n in range(4)], id="seastar-1165"),
    ],
)
def test_the_interrupts_of_both_directions_of_a_queue_are_on_one_cpu(driver: str, names: list[str]) -> None:
    """Of gve's, the first half is for what is sent, which only its source says."""
    kernel = Kernel(cpus=8, nodes=1)
    kernel.add_nic(PF0, NAME0, MAC0, driver=driver)
    settle(kernel, ONE)
    kernel.interrupts.free(PF0)
    kernel.interrupts.request_all(PF0, [name.format(PF0) for name in names])
    assert is_ready(settle(kernel, ONE).conditions)
    cpus = [kernel.interrupts.affinities(PF0)[PF0, name.format(PF0)] for name in names]
    assert cpus[:4] == cpus[4:]
    assert len({*cpus}) == 4


def test_an_interrupt_that_is_freed_before_it_is_placed_is_placed_once_it_is_back() -> None:
    kernel = two_nics(cpus=8)
    kernel.fault = refusing(errno.ENOENT, "smp_affinity_list")
    last = settle(kernel, ONE)
    assert not is_ready(last.conditions)
    kernel.fault = no_fault
    kernel.interrupts.renumber()
    assert is_ready(settle(kernel, ONE).conditions)
    assert served(kernel) <= set(range(4))
