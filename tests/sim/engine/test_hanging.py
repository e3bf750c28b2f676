"""A driver that does not return from a call: the device is blamed, and the next worker does not call that driver again."""

from typing import Any

import pytest
from attrs import evolve

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.machine import Link, Machine
from agent.report.verdict import is_ready
from agent.service.activity import Activity, View
from agent.service.traced_machine import traced
from agent.spec.node import NodeSpec
from tests.sim.kernel import Hang, Kernel
from tests.sim.passes import condition, nic, spec_of
from tests.sim.two_nics import MAC0, NAME0, NAME1, PF0, PF1, two_nics

ADDRESSES = {"rail": 0, "addresses": [{"network": "10.0.0.0/16"}]}


NAPI = {"gro_flush_timeout": 20000, "threaded": True}


def spec(**select: str) -> NodeSpec:
    nics = [
        {"name": "a", "select": select or {"pci": PF0}, "mtu": 9000, "napi": NAPI, "vfs": {"count": 2}},
        nic("b", PF1, mtu=9000, channels={"combined": 2}, napi=NAPI, **ADDRESSES),
    ]
    return spec_of(*nics, node_number=7)


def follow(machine: Machine, wanted: NodeSpec, last: Pass | None = None, *events: str) -> Pass:
    have, scope = (last.have, frozenset(events)) if last else (None, None)
    return converge(machine, Goal(wanted), Memory(lambda: 0.0), have, scope)


def to_hang(kernel: Kernel, device: str, after: int, wanted: NodeSpec) -> bool:
    """A pass during which the device's driver hangs, after so many calls to it; whether it came so far."""
    kernel.hanging = {device: after}
    view = View.new()
    machine = traced(kernel.machine(), Activity.at(view.descriptor))
    try:
        follow(machine, wanted)
    except Hang:
        step = view.step()
        assert step is not None
        assert step.device == device, step
        return True
    return False


@pytest.mark.parametrize("device", [PF0, PF1])
def test_the_device_whose_driver_does_not_return_is_blamed(device: str) -> None:
    """Whatever is read or written there, and however many devices are read before it."""
    calls = 0
    while to_hang(two_nics(), device, calls, spec()):
        calls += 1
    assert calls > 20


@pytest.mark.parametrize("vf", ["0000:21:10.0", "0000:21:10.2", "0000:41:10.0", "0000:41:10.2"])
def test_a_vf_whose_driver_does_not_return_is_blamed(vf: str) -> None:
    vfs = {"count": 2, "defaults": {"mtu": 9000, "channels": {"combined": 1}}}
    nics = [nic(name, pf, mtu=9000, vfs=vfs) for name, pf in (("a", PF0), ("b", PF1))]
    calls = 0
    while to_hang(two_nics(), vf, calls, spec_of(*nics)):
        calls += 1
    assert calls > 20


def two_ports(kernel: Kernel) -> None:
    kernel.register(PF0, Link(0, "eth9", "02:00:00:00:03:00", "02:00:00:00:03:00", 1500, False, False), dev_port=1)


def representor(kernel: Kernel) -> None:
    kernel.sriov.set_count(PF0, 2)
    kernel.register(PF0, Link(0, "eth0", "02:00:00:00:04:00", "", 1500, False, False), port="pf0vf0")


@pytest.mark.parametrize("made", [lambda kernel: None, two_ports, representor], ids=["one", "two ports", "representor"])
def test_no_call_enters_a_driver_that_hangs_and_the_other_nic_is_kept_true(kernel: Kernel, made: Any) -> None:
    made(kernel)
    # The other NIC's address is already on a netdev of somebody, whose name is said.
    kernel.ip[NAME0] = ("10.0.0.7/16",)
    kernel.hanging[PF0] = 0
    machine = evolve(kernel.machine(), hung=frozenset({PF0}))
    for wanted in (spec(), spec(netdev=NAME0), spec(mac=MAC0), spec(driver="igb", netdev=NAME0)):
        result = follow(machine, wanted)
        result = follow(machine, wanted, result, PF0)
        present = condition(result, "NicsPresent")
        assert (present.status, present.reason) == ("Unknown", "DeviceHung")
        assert f"a call to {PF0} (NIC a) never returned" in present.message
    kernel.netdevs[NAME1].link = evolve(kernel.netdev(PF1), mtu=1500)
    follow(machine, spec(), result, PF1)
    assert kernel.netdev(PF1).mtu == 9000
    assert [written for written in kernel.writes if NAME0 in written[0]] == []


def test_a_name_or_an_address_that_only_its_driver_would_tell_is_unknown_and_not_missing(kernel: Kernel) -> None:
    kernel.netlink.add_altname(kernel.netdev(PF0).ifindex, "storage")
    link = kernel.netdev(PF0)
    kernel.netdevs[NAME0].link = evolve(link, mac="02:de:ad:00:00:01")
    kernel.tree.put(f"/sys/class/net/{NAME0}/address", "02:de:ad:00:00:01")
    kernel.tree.put(f"/sys/class/net/{NAME0}/addr_assign_type", "3")
    kernel.hanging[PF0] = 0
    machine = evolve(kernel.machine(), hung=frozenset({PF0}))
    for wanted in (spec(netdev="storage"), spec(mac=MAC0)):
        present = condition(follow(machine, wanted), "NicsPresent")
        assert (present.status, present.reason) == ("Unknown", "DeviceHung")
        assert f"a function that cannot be read ({PF0}: it hangs)" in present.message
    # What is certainly another device's is missing.
    assert condition(follow(machine, spec(netdev="storage", vendor="15b3")), "NicsPresent").reason == "NicMissing"
    kernel.hanging.clear()
    for wanted in (spec(netdev="storage"), spec(mac=MAC0)):
        assert is_ready(follow(kernel.machine(), wanted).conditions)
