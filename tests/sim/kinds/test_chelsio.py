"""Chelsio T4 to T6 on the simulated kernel: PF 0 to 3 have VFs, PF 4 has the netdevs of the card's ports."""

import pytest

from agent.engine.converge import Pass
from agent.hardware.functions import netdev, vf_addresses
from agent.report.records import Disruption
from agent.report.verdict import is_ready
from cli.as_spec import derive_spec
from cli.inspection import inspect, render
from tests.sim import passes
from tests.sim.kernel import PCI, Kernel
from tests.sim.passes import spec_of

PF, PORTS = "0000:04:00.0", "0000:04:00.4"
NONE = "none in this network namespace"


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    for pf, name, vfs in ((PF, "", 16), (PORTS, "enp4s0f4", 0)):
        kernel.add_nic(pf, name, f"02:00:00:00:01:0{pf[-1]}", total_vfs=vfs)
        kernel.set_driver(pf, "cxgb4")
    kernel.lose_netdev(PF)
    kernel.sriov.able.add(PF)
    return kernel


def settle(kernel: Kernel, pf: str = PF, **nic: object) -> Pass:
    spec = spec_of({"name": "port", "select": {"pci": pf}, **nic})
    return passes.settle(kernel, spec)


def test_a_pf_without_netdev_configures_its_vfs_by_the_one_they_bring(kernel: Kernel) -> None:
    vfs = {"count": 2, "groups": [{"index": "1", "mac": "02:00:00:00:0a:01", "vlan": 7}]}
    result = settle(kernel, vfs=vfs)
    assert is_ready(result.conditions), result.conditions
    (made,) = [o.change for o in result.outcomes if o.change.field == "count"]
    assert made.disruption == Disruption.NONE
    assert netdev(kernel.files, PF) == "mgmtpf1,0"
    assert [(vf.mac, vf.vlan) for vf in kernel.vfs(PF)][1] == ("02:00:00:00:0a:01", 7)
    kernel.writes.clear()
    assert is_ready(settle(kernel, vfs=vfs).conditions)
    assert kernel.writes == []
    # It has no carrier, which nothing needs.
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    assert is_ready(settle(kernel, vfs=vfs).conditions)
    derived = derive_spec(kernel.machine(), "n1", [PF])
    assert (derived.remaining, derived.spec.nics[0].mtu) == ((), None)
    assert is_ready(settle(kernel, vfs={"count": 0}).conditions)
    assert netdev(kernel.files, PF) is None


def test_a_setting_of_a_netdev_is_refused_for_such_a_pf(kernel: Kernel) -> None:
    (change,) = [o.change for o in settle(kernel, mtu=9000).outcomes]
    assert change.blocker.endswith(": mtu")
    assert "ports belong to another function" in change.remedy
    assert is_ready(settle(kernel, PORTS, mtu=9000).conditions)
    assert kernel.netdev(PORTS).mtu == 9000


@pytest.mark.parametrize("ports", ["enp4s0f4", "uplink"])
def test_a_vf_that_a_pod_has_renamed_is_named_by_the_rule_of_the_ports(kernel: Kernel, ports: str) -> None:
    """The netdev by which the VFs are configured is named by the driver, and shows no rule."""
    settle(kernel, vfs={"count": 2})
    vf = vf_addresses(kernel.files, PF)[1]
    usual = kernel.netdev(vf).name
    if ports != "enp4s0f4":
        kernel.netlink.rename(kernel.netdev(PORTS).ifindex, ports)
    kernel.move_away(vf)
    kernel.come_back(vf, "net1")
    settle(kernel, vfs={"count": 2})
    # Without a netdev whose name follows from a rule, it is not known which rule there is.
    assert kernel.netdev(vf).name == (usual if ports == "enp4s0f4" else "net1")


def test_the_netdev_of_the_ports_is_missed(kernel: Kernel) -> None:
    assert render(inspect(kernel.machine())).count(NONE) == 0
    kernel.lose_netdev(PORTS)
    (change,) = [o.change for o in settle(kernel, PORTS).outcomes]
    assert change.blocker == "its netdev is not there (driver: cxgb4)"
    assert render(inspect(kernel.machine())).count(NONE) == 1


def test_a_pf_that_never_has_a_netdev_is_not_taken_for_the_ports_while_they_have_none(kernel: Kernel) -> None:
    for pf, device in ((PF, "0x5001"), (PORTS, "0x5401")):
        kernel.tree.put(f"{PCI}/{pf}/device", device)
    nics = [
        {"name": "vfs{index}", "select": {"device": "5001", "each": True, "without": ["ports"]}, "vfs": {"count": 2}},
        {"name": "ports", "select": {"mac": "02:00:00:00:01:04"}},
    ]
    kernel.lose_netdev(PORTS)
    spec = spec_of(*nics)
    result = passes.settle(kernel, spec)
    assert [c.message.split(" ")[1] for c in result.conditions if c.type == "NicsPresent"] == ["ports"]
    assert len(kernel.vfs(PF)) == 2
