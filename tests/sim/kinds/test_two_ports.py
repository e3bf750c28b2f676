"""A function with a netdev for each of its two ports, as of ConnectX-3: the first port is managed, the other one is refused."""

from typing import Any

import pytest

from agent.engine.converge import Pass
from agent.machine import Link
from agent.report.verdict import is_ready
from cli.as_inventory import derive_inventory
from cli.inspection import inspect
from tests.sim import passes
from tests.sim.cli.test_as_inventory import executed
from tests.sim.kernel import NET, PCI, Kernel
from tests.sim.passes import condition, nic, spec_of

PF = "0000:03:00.0"
# The names sort, and the netdevs appeared, in the order that is not the ports'.
FIRST, SECOND = "eth1", "eth0"
MACS = {FIRST: "02:00:00:00:03:00", SECOND: "02:00:00:00:03:01"}


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_nic(PF, SECOND, MACS[SECOND], total_vfs=4)
    kernel.register(PF, Link(0, FIRST, MACS[FIRST], MACS[FIRST], 1500, False, False))
    kernel.set_driver(PF, "mlx4_core")
    for number, name in enumerate(MACS):
        kernel.tree.put(f"{NET}/{name}/dev_port", str(number))
    kernel.rdma.add(PF, "mlx4_0", FIRST)
    kernel.rdma.add_port("mlx4_0", 2, SECOND)
    return kernel


def settle(kernel: Kernel, *selects: dict[str, str], **nic: Any) -> Pass:
    nics = [{"name": f"port{place}", "select": select, "mtu": 9000, **nic} for place, select in enumerate(selects)]
    spec = spec_of(*nics)
    return passes.settle(kernel, spec)


def mtus(kernel: Kernel) -> dict[str, int]:
    return {name: netdev.link.mtu for name, netdev in kernel.netdevs.items()}


@pytest.mark.parametrize("select", [{"pci": PF}, {"netdev": FIRST}, {"mac": MACS[FIRST]}], ids=str)
def test_the_first_port_is_managed(kernel: Kernel, select: dict[str, str]) -> None:
    result = settle(kernel, select)
    assert is_ready(result.conditions), result.conditions
    assert mtus(kernel) == {FIRST: 9000, SECOND: 1500}


@pytest.mark.parametrize("select", [{"netdev": SECOND}, {"mac": MACS[SECOND]}, {"pci": PF, "netdev": SECOND}], ids=str)
def test_another_port_is_refused_and_the_first_one_still_managed(kernel: Kernel, select: dict[str, str]) -> None:
    result = settle(kernel, select, {"netdev": FIRST})
    refused = condition(result, "NicsPresent")
    assert (refused.status, refused.reason) == ("False", "NicNotFirstPort")
    assert f"port0 ({', '.join(f'{key}={value}' for key, value in select.items())})" in refused.message
    assert f"{PF} ({FIRST})" in refused.remedy
    assert mtus(kernel) == {FIRST: 9000, SECOND: 1500}


@pytest.mark.parametrize(("down", "fine"), [(1, False), (2, True)])
def test_the_rdma_port_of_the_other_netdev_is_not_judged(kernel: Kernel, down: int, fine: bool) -> None:
    kernel.tree.put(f"/sys/class/infiniband/mlx4_0/ports/{down}/state", "1: DOWN")
    result = settle(kernel, {"pci": PF}, rdma={})
    assert is_ready(result.conditions) is fine
    assert f"mlx4_0 port {down}" in condition(result, "RdmaPorts").message or fine


def test_both_rdma_ports_of_a_function_with_one_netdev_are_judged(kernel: Kernel) -> None:
    kernel.tree.remove(f"{PCI}/{PF}/net/{SECOND}")
    kernel.tree.put("/sys/class/infiniband/mlx4_0/ports/2/state", "1: DOWN")
    assert "mlx4_0 port 2" in condition(settle(kernel, {"pci": PF}, rdma={}), "RdmaPorts").message


def test_the_inventory_of_such_a_server_asks_nothing_of_the_other_port(kernel: Kernel) -> None:
    kernel.tree.put("/sys/class/infiniband/mlx4_0/ports/1/state", "1: DOWN")
    starter = derive_inventory(kernel.machine(), "h1", "n1", [])
    assert starter.remaining == ()
    (nic,) = executed(starter.text)[1].nics
    assert (nic.rdma, nic.state) == (None, "down")
    assert f"{FIRST} {SECOND} mlx4_0" in starter.text


def test_inspect_names_the_netdev_of_a_port_that_has_no_gid_of_one(kernel: Kernel) -> None:
    for number in (1, 2):
        kernel.tree.put(f"/sys/class/infiniband/mlx4_0/ports/{number}/gid_attrs/ndevs/0", "")
    (device,) = inspect(kernel.machine()).functions[0].rdma
    assert [port.netdev for port in device.ports] == [FIRST, SECOND]
    # An InfiniBand port has no netdev without ib_ipoib.
    kernel.tree.remove(f"{PCI}/{PF}/net/{FIRST}")
    (device,) = inspect(kernel.machine()).functions[0].rdma
    assert [port.netdev for port in device.ports] == [None, SECOND]


def test_a_second_pf_of_a_port_need_not_have_a_netdev() -> None:
    """With Socket Direct, the PFs that a ConnectX has on two sockets share a netdev, which belongs to one of them."""
    kernel = Kernel()
    kernel.add_nic(PF, FIRST, MACS[FIRST], driver="mlx5_core")
    kernel.add_nic("0000:a3:00.0", "", MACS[SECOND], node=1, driver="mlx5_core")
    both = [nic(f"rail{n}", pf) for n, pf in enumerate((PF, "0000:a3:00.0"))]
    assert is_ready(passes.settle(kernel, spec_of(both[0])).conditions)
    (blocked,) = passes.undone(passes.settle(kernel, spec_of(*both)))
    assert (blocked.change.device, blocked.result) == ("0000:a3:00.0", "blocked")
    assert "take it out of the spec if another PF has its port's netdev (Socket Direct)" in blocked.change.remedy
