"""Public reports of programs that undo a value again and again: the agent stops, and names who is known to set it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from attrs import evolve

from agent.engine.contention import LIMIT
from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.machine import DcbState
from agent.report.records import Condition
from tests.sim.engine.one_nic import wanting
from tests.sim.kernel import Kernel
from tests.sim.passes import condition
from tests.sim.two_nics import NAME0, PF0, two_nics

SYSCTLS = (
    ("cilium-agent", "net.ipv4.conf.all.rp_filter", "0", "1", "cilium-30439"),
    ("kube-proxy", "net.netfilter.nf_conntrack_max", "131072", "1048576", "kops-2223"),
    ("tuned", "vm.overcommit_memory", "1", "2", "tuned-409"),
    ("kubelet", "vm.overcommit_memory", "1", "2", "kubernetes-74151"),
    ("k3s-server", "vm.overcommit_memory", "1", "2", "kubernetes-66693"),
)
"""A program, the sysctl that it sets, its value and that of the spec, and the report."""


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics()
    for _, sysctl, value, _, _ in SYSCTLS:
        _sysctl(sysctl, value, kernel)
    kernel.rdma.dcb[NAME0] = DcbState(frozenset(), frozenset())
    return kernel


def contended(kernel: Kernel, program: str, undo: Callable[[Kernel], None], nic: Any, **more: Any) -> Condition:
    """What the node says after the program has undone a value as often as the agent bears."""
    kernel.host.processes.add(program[:15])
    failures, spec = Failures(), wanting(nic, **more)
    for now in range(0, 10 * (LIMIT + 2), 10):
        memory = Memory(lambda now=now: float(now), failures)  # type: ignore[misc]
        result = converge(kernel.machine(), Goal(spec), memory)
        undo(kernel)
    return condition(result, "Uncontended")


def _sysctl(name: str, value: str, kernel: Kernel) -> None:
    kernel.tree.put(f"/proc/sys/{name.replace('.', '/')}", value)


def _mtu(kernel: Kernel) -> None:
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=1500)


def _vf_mtu(kernel: Kernel) -> None:
    kernel.netlink.set_link(kernel.netdev(vf_addresses(kernel.files, PF0)[0]).ifindex, mtu=1500)


def _vlan(kernel: Kernel) -> None:
    kernel.sriov.set(PF0, kernel.netdev(PF0), 0, vlan=5)


def _irq(kernel: Kernel) -> None:
    numbers = kernel.files.names(f"/sys/bus/pci/devices/{PF0}/msi_irqs")
    queues = [number for number in numbers if "-rx-" in kernel.files.read(f"/sys/kernel/irq/{number}/actions")]
    kernel.files.write(f"/proc/irq/{queues[0]}/smp_affinity_list", "3")


def _queue(kernel: Kernel) -> None:
    kernel.tree.put(f"/sys/class/net/{NAME0}/queues/rx-0/rps_cpus", "1")


def _pfc(kernel: Kernel) -> None:
    kernel.rdma.dcb[NAME0] = evolve(kernel.rdma.dcb[NAME0], pfc=frozenset())


MTU, VFS = {"mtu": 9000}, {"mtu": 9000, "vfs": {"count": 1, "defaults": {"vlan": 0}}}
UNTOUCHED = {"irqs": {"irqbalance": "untouched"}}


@pytest.mark.parametrize(
    ("program", "undo", "nic", "more"),
    [
        *(
            pytest.param(program, partial(_sysctl, sysctl, theirs), None, {"sysctls": {sysctl: ours}}, id=report)
            for program, sysctl, theirs, ours, report in SYSCTLS
        ),
        pytest.param("systemd-networkd", _vlan, VFS, {}, id="systemd-16219"),
        pytest.param("NetworkManager", _vf_mtu, VFS, {}, id="doca-platform-50"),
        pytest.param("irqbalance", _irq, {}, UNTOUCHED, id="irqbalance-297"),
        pytest.param("tuned", _queue, {}, {"rps": {"enable": True}}, id="cluster-node-tuning-operator-479"),
        pytest.param("sriov-network-config-daemon", _vlan, VFS, {}, id="sriov-network-operator-1028"),
        pytest.param("systemd-networkd", _mtu, MTU, {}, id="systemd-42517"),
        pytest.param("cilium-agent", _mtu, MTU, {}, id="cilium-17107"),
        pytest.param("aws-k8s-agent", _mtu, MTU, {}, id="amazon-vpc-cni-k8s-2606"),
        pytest.param("lldpad", _pfc, {"roce": {"pfc": "3"}}, {}, id="openlldp-125"),
        pytest.param("lldpad", _pfc, {"roce": {"pfc": "3,4"}}, {}, id="openlldp-41"),
        pytest.param("crio", _irq, {}, UNTOUCHED, id="cri-o-4441"),
    ],
)
def test_the_program_is_named_and_the_agent_stops(
    kernel: Kernel, program: str, undo: Callable[[Kernel], None], nic: Any, more: dict[str, Any]
) -> None:
    condition = contended(kernel, program, undo, nic, **more)
    assert (condition.status, condition.reason) == ("False", "Contended")
    assert program in condition.message, condition.message
