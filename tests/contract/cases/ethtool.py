"""What ethtool reads and sets of igb (an 82576) and of igbvf."""

import errno
from functools import partial
from typing import Any

from agent.hardware.functions import vf_addresses
from agent.hardware.interrupts import function_irqs
from agent.machine import Group, Machine, Setting
from tests.contract.asking import errno_of
from tests.contract.cases.sriov import _fresh, _link, _numvfs


def _ifindex(machine: Machine, function: str) -> int:
    return _link(machine, function).ifindex


def _vf(machine: Machine, pf: str) -> int:
    _numvfs(machine, pf, 1)
    return _ifindex(machine, vf_addresses(machine.files, pf)[0])


def _refused(machine: Machine, kind: Group, index: int, given: dict[str, Any]) -> int | None:
    return errno_of(lambda: machine.ethtool.set(kind, index, given))


def _combined(machine: Machine, pf: str) -> Setting:
    return machine.ethtool.settings("channels", _ifindex(machine, pf))["combined"]


def _interrupts(machine: Machine, pf: str) -> list[str]:
    return sorted(irq.name for irq in function_irqs(machine, pf))


def _receive_queues(machine: Machine, pf: str) -> list[str]:
    queues = machine.files.names(f"/sys/class/net/{_link(machine, pf).name}/queues")
    return [name for name in queues if name.startswith("rx-")]


def a_pf_has_fewer_channels_while_it_has_vfs_and_they_are_chosen_anew(machine: Machine, pf: str) -> None:
    machine.ethtool.set("channels", _fresh(machine, pf), {"combined": 1})
    assert _combined(machine, pf) == Setting(1, 8)
    _numvfs(machine, pf, 1)
    assert _combined(machine, pf) == Setting(2, 2)
    _numvfs(machine, pf, 0)
    assert _combined(machine, pf) == Setting(4, 8)


def channels_bring_queues_and_interrupts(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
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
    index = _fresh(machine, pf)
    before = machine.ethtool.settings("channels", index)
    assert before.keys() == {"combined"}
    assert _refused(machine, "channels", index, {"combined": 9}) == errno.EINVAL
    assert _refused(machine, "channels", index, {"combined": 0}) == errno.EINVAL
    assert _refused(machine, "channels", index, {"rx": 1}) == errno.EOPNOTSUPP
    assert machine.ethtool.settings("channels", index) == before
    vf = _vf(machine, pf)
    assert machine.ethtool.settings("channels", vf) == {}
    assert _refused(machine, "channels", vf, {"combined": 1}) == errno.EOPNOTSUPP


def rings_come_in_multiples_of_8(machine: Machine, pf: str) -> None:
    for index in (_fresh(machine, pf), _vf(machine, pf)):
        machine.ethtool.set("rings", index, {"rx": 1001, "tx": 512})
        assert machine.ethtool.settings("rings", index) == {"rx": Setting(1008, 4096), "tx": Setting(512, 4096)}
        machine.ethtool.set("rings", index, {"rx": 16})
        assert machine.ethtool.settings("rings", index) == {"rx": Setting(64, 4096), "tx": Setting(512, 4096)}
        assert _refused(machine, "rings", index, {"tx": 8192}) == errno.EINVAL
        assert machine.ethtool.settings("rings", index)["tx"].value == 512
        machine.ethtool.set("rings", index, {"rx": 256, "tx": 256})


def rings_of_a_netdev_last_while_it_is_down(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    machine.netlink.set_link(index, up=False)
    machine.ethtool.set("rings", index, {"rx": 512})
    machine.netlink.set_link(index, up=True)
    assert machine.ethtool.settings("rings", index)["rx"].value == 512
    machine.ethtool.set("rings", index, {"rx": 256})


def coalescing_has_no_frames_and_does_not_adapt(machine: Machine, pf: str) -> None:
    for index in (_fresh(machine, pf), _vf(machine, pf)):
        machine.ethtool.set("coalescing", index, {"rx_usecs": 100})
        coalescing = machine.ethtool.settings("coalescing", index)
        assert coalescing["rx_usecs"].value == 100
        assert coalescing.keys() <= {"rx_usecs", "tx_usecs"}
        for name, value in (("rx_frames", 8), ("tx_frames", 8), ("adaptive_rx", True)):
            assert _refused(machine, "coalescing", index, {name: value}) == errno.EOPNOTSUPP, name
        assert _refused(machine, "coalescing", index, {"rx_usecs": 5}) == errno.EINVAL
        assert machine.ethtool.settings("coalescing", index)["rx_usecs"].value == 100
        machine.ethtool.set("coalescing", index, {"rx_usecs": 3})


def paired_queues_interrupt_by_what_they_receive(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    machine.ethtool.set("coalescing", index, {"tx_usecs": 50})
    assert machine.ethtool.settings("coalescing", index)["tx_usecs"].value == 50
    _numvfs(machine, pf, 1)
    index = _ifindex(machine, pf)
    assert machine.ethtool.settings("coalescing", index)["tx_usecs"].value == 0
    assert _refused(machine, "coalescing", index, {"tx_usecs": 50}) == errno.EINVAL


def a_fixed_feature_is_not_supported(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    for name in ("highdma", "rx-gro-hw"):
        feature = machine.ethtool.settings("features", index)[name]
        assert not feature.changeable
        assert _refused(machine, "features", index, {name: not feature.value}) == errno.EOPNOTSUPP
    assert _refused(machine, "features", index, {"nosuch": True}) == errno.EOPNOTSUPP


def a_feature_goes_off_with_the_one_it_needs_and_comes_back_with_it(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    machine.ethtool.set("features", index, {"tx-scatter-gather": False})
    segmentation = machine.ethtool.settings("features", index)["tx-tcp-segmentation"]
    assert (segmentation.value, segmentation.requested) == (False, True)
    machine.ethtool.set("features", index, {"tx-scatter-gather": True})
    assert machine.ethtool.settings("features", index)["tx-tcp-segmentation"].value


def a_driver_may_leave_a_feature_unchanged(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    machine.ethtool.set("features", index, {"tx-vlan-hw-insert": False})
    insertion = machine.ethtool.settings("features", index)["tx-vlan-hw-insert"]
    assert (insertion.value, insertion.requested, insertion.changeable) == (True, False, True)
    machine.ethtool.set("features", index, {"rx-vlan-hw-parse": False})
    assert not machine.ethtool.settings("features", index)["tx-vlan-hw-insert"].value
    machine.ethtool.set("features", index, {"tx-vlan-hw-insert": True})
    machine.ethtool.set("features", index, {"rx-vlan-hw-parse": True})
    assert machine.ethtool.settings("features", index)["tx-vlan-hw-insert"].value


def every_call_for_a_netdev_that_is_gone_is_enodev(machine: Machine, pf: str) -> None:
    given: dict[Group, dict[str, Any]] = {
        "channels": {"combined": 1},
        "rings": {"rx": 512},
        "coalescing": {"rx_usecs": 3},
        "features": {"rx-gro": True},
    }
    for kind, values in given.items():
        assert errno_of(partial(machine.ethtool.settings, kind, 99999)) == errno.ENODEV
        assert _refused(machine, kind, 99999, values) == errno.ENODEV
