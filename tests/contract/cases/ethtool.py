"""What ethtool reads and sets of igb (an 82576) and of igbvf."""

import errno

from agent.hardware.functions import vf_addresses
from agent.hardware.interrupts import function_irqs
from agent.machine import Machine, Setting
from tests.contract.asking import errno_of
from tests.contract.cases.sriov import _fresh, _link, _numvfs


def _ifindex(machine: Machine, function: str) -> int:
    return _link(machine, function).ifindex


def _vf(machine: Machine, pf: str) -> int:
    _numvfs(machine, pf, 1)
    return _ifindex(machine, vf_addresses(machine.files, pf)[0])


def _combined(machine: Machine, pf: str) -> Setting:
    return machine.ethtool.settings("channels", _ifindex(machine, pf))["combined"]


def _interrupts(machine: Machine, pf: str) -> list[str]:
    return sorted(irq.name for irq in function_irqs(machine, pf))


def _receive_queues(machine: Machine, pf: str) -> list[str]:
    queues = machine.files.names(f"/sys/class/net/{_link(machine, pf).name}/queues")
    return [name for name in queues if name.startswith("rx-")]


def a_pf_has_fewer_channels_while_it_has_vfs_and_they_are_chosen_anew(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    machine.ethtool.set("channels", _ifindex(machine, pf), {"combined": 1})
    assert _combined(machine, pf) == Setting(1, 8)
    _numvfs(machine, pf, 1)
    assert _combined(machine, pf) == Setting(2, 2)
    _numvfs(machine, pf, 0)
    assert _combined(machine, pf) == Setting(4, 8)


def channels_bring_queues_and_interrupts(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    index = _ifindex(machine, pf)
    machine.ethtool.set("channels", index, {"combined": 2})
    assert _interrupts(machine, pf) == ["management-0", "rx-0", "rx-1", "tx-0", "tx-1"]
    assert _receive_queues(machine, pf) == ["rx-0", "rx-1"]
    machine.ethtool.set("channels", index, {"combined": 6})
    assert _interrupts(machine, pf) == ["management-0", *(f"txrx-{queue}" for queue in range(6))]
    assert len(_receive_queues(machine, pf)) == 6
    _numvfs(machine, pf, 1)
    assert _interrupts(machine, pf) == ["management-0", "rx-1", "txrx-0"]
    machine.ethtool.set("channels", _ifindex(machine, pf), {"combined": 1})
    assert _interrupts(machine, pf) == ["management-0", "rx-0", "tx-0"]
    assert _receive_queues(machine, pf) == ["rx-0"]


def impossible_channels_are_refused(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    index = _ifindex(machine, pf)
    before = machine.ethtool.settings("channels", index)
    assert before.keys() == {"combined"}
    assert errno_of(lambda: machine.ethtool.set("channels", index, {"combined": 9})) == errno.EINVAL
    assert errno_of(lambda: machine.ethtool.set("channels", index, {"combined": 0})) == errno.EINVAL
    assert errno_of(lambda: machine.ethtool.set("channels", index, {"rx": 1})) == errno.EOPNOTSUPP
    assert machine.ethtool.settings("channels", index) == before
    vf = _vf(machine, pf)
    assert machine.ethtool.settings("channels", vf) == {}
    assert errno_of(lambda: machine.ethtool.set("channels", vf, {"combined": 1})) == errno.EOPNOTSUPP


def rings_come_in_multiples_of_8(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    for index in (_ifindex(machine, pf), _vf(machine, pf)):
        machine.ethtool.set("rings", index, {"rx": 1001, "tx": 512})
        assert machine.ethtool.settings("rings", index) == {"rx": Setting(1008, 4096), "tx": Setting(512, 4096)}
        machine.ethtool.set("rings", index, {"rx": 16})
        assert machine.ethtool.settings("rings", index) == {"rx": Setting(64, 4096), "tx": Setting(512, 4096)}
        assert errno_of(lambda index=index: machine.ethtool.set("rings", index, {"tx": 8192})) == errno.EINVAL  # type: ignore[misc]
        assert machine.ethtool.settings("rings", index)["tx"].value == 512
        machine.ethtool.set("rings", index, {"rx": 256, "tx": 256})


def rings_of_a_netdev_last_while_it_is_down(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    index = _ifindex(machine, pf)
    machine.netlink.set_link(index, up=False)
    machine.ethtool.set("rings", index, {"rx": 512})
    machine.netlink.set_link(index, up=True)
    assert machine.ethtool.settings("rings", index)["rx"].value == 512
    machine.ethtool.set("rings", index, {"rx": 256})


def coalescing_has_no_frames_and_does_not_adapt(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    for index in (_ifindex(machine, pf), _vf(machine, pf)):
        machine.ethtool.set("coalescing", index, {"rx_usecs": 100})
        coalescing = machine.ethtool.settings("coalescing", index)
        assert coalescing["rx_usecs"].value == 100
        assert coalescing.keys() <= {"rx_usecs", "tx_usecs"}
        for name, value in (("rx_frames", 8), ("tx_frames", 8), ("adaptive_rx", True)):
            refused = errno_of(lambda i=index, g={name: value}: machine.ethtool.set("coalescing", i, g))  # type: ignore[misc]
            assert refused == errno.EOPNOTSUPP, name
        assert errno_of(lambda index=index: machine.ethtool.set("coalescing", index, {"rx_usecs": 5})) == errno.EINVAL  # type: ignore[misc]
        assert machine.ethtool.settings("coalescing", index)["rx_usecs"].value == 100
        machine.ethtool.set("coalescing", index, {"rx_usecs": 3})


def paired_queues_interrupt_by_what_they_receive(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    machine.ethtool.set("coalescing", _ifindex(machine, pf), {"tx_usecs": 50})
    assert machine.ethtool.settings("coalescing", _ifindex(machine, pf))["tx_usecs"].value == 50
    _numvfs(machine, pf, 1)
    index = _ifindex(machine, pf)
    assert machine.ethtool.settings("coalescing", index)["tx_usecs"].value == 0
    assert errno_of(lambda: machine.ethtool.set("coalescing", index, {"tx_usecs": 50})) == errno.EINVAL


def a_fixed_feature_is_not_supported(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    index = _ifindex(machine, pf)
    for name in ("highdma", "rx-gro-hw"):
        feature = machine.ethtool.settings("features", index)[name]
        assert not feature.changeable
        on = not feature.value
        assert errno_of(lambda n=name, on=on: machine.ethtool.set("features", index, {n: on})) == errno.EOPNOTSUPP  # type: ignore[misc]
    assert errno_of(lambda: machine.ethtool.set("features", index, {"nosuch": True})) == errno.EOPNOTSUPP


def a_feature_goes_off_with_the_one_it_needs_and_comes_back_with_it(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    index = _ifindex(machine, pf)
    machine.ethtool.set("features", index, {"tx-scatter-gather": False})
    segmentation = machine.ethtool.settings("features", index)["tx-tcp-segmentation"]
    assert (segmentation.value, segmentation.requested) == (False, True)
    machine.ethtool.set("features", index, {"tx-scatter-gather": True})
    assert machine.ethtool.settings("features", index)["tx-tcp-segmentation"].value


def a_driver_may_leave_a_feature_unchanged(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    index = _ifindex(machine, pf)
    machine.ethtool.set("features", index, {"tx-vlan-hw-insert": False})
    insertion = machine.ethtool.settings("features", index)["tx-vlan-hw-insert"]
    assert (insertion.value, insertion.requested, insertion.changeable) == (True, False, True)
    machine.ethtool.set("features", index, {"rx-vlan-hw-parse": False})
    assert not machine.ethtool.settings("features", index)["tx-vlan-hw-insert"].value
    machine.ethtool.set("features", index, {"tx-vlan-hw-insert": True})
    machine.ethtool.set("features", index, {"rx-vlan-hw-parse": True})
    assert machine.ethtool.settings("features", index)["tx-vlan-hw-insert"].value


def every_call_for_a_netdev_that_is_gone_is_enodev(machine: Machine, pf: str) -> None:
    for action in (
        lambda: machine.ethtool.settings("channels", 99999),
        lambda: machine.ethtool.settings("rings", 99999),
        lambda: machine.ethtool.settings("coalescing", 99999),
        lambda: machine.ethtool.settings("features", 99999),
        lambda: machine.ethtool.set("channels", 99999, {"combined": 1}),
        lambda: machine.ethtool.set("rings", 99999, {"rx": 512}),
        lambda: machine.ethtool.set("coalescing", 99999, {"rx_usecs": 3}),
        lambda: machine.ethtool.set("features", 99999, {"rx-gro": True}),
    ):
        assert errno_of(action) == errno.ENODEV
