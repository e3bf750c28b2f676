"""The VF attributes that igb accepts, and how it refuses the others; vfio-pci; the names of VFs that are made again."""

import errno
from typing import Any

from agent.hardware.functions import PCI, driver, netdev, vf_addresses
from agent.machine import Machine, VfInfo
from tests.contract.asking import errno_of, soon
from tests.contract.cases.sriov import _autoprobe, _link, _one_vf, _probe


def _set(machine: Machine, pf: str, **given: Any) -> int | None:
    return errno_of(lambda: machine.netlink.set_vf(_link(machine, pf).ifindex, 0, **given))


def _reported(machine: Machine, pf: str) -> VfInfo:
    return _link(machine, pf).vfs[0]


def vlan_and_priority_are_one_attribute(machine: Machine, pf: str) -> None:
    _one_vf(machine, pf)
    assert _set(machine, pf, vlan=100, qos=3) is None
    assert (_reported(machine, pf).vlan, _reported(machine, pf).qos) == (100, 3)
    assert _set(machine, pf, vlan=200) is None
    assert (_reported(machine, pf).vlan, _reported(machine, pf).qos) == (200, 0)
    assert _set(machine, pf, vlan=0) is None
    assert (_reported(machine, pf).vlan, _reported(machine, pf).qos) == (0, 0)


def only_802_1q_is_accepted(machine: Machine, pf: str) -> None:
    _one_vf(machine, pf)
    assert _set(machine, pf, vlan=100, vlan_protocol="802.1ad") == errno.EPROTONOSUPPORT
    assert _reported(machine, pf).vlan == 0
    assert _reported(machine, pf).vlan_protocol == "802.1Q"
    assert _set(machine, pf, vlan=100, vlan_protocol="802.1Q") is None


def max_tx_rate_is_limited_by_the_link_s_speed_and_min_tx_rate_is_refused(machine: Machine, pf: str) -> None:
    _one_vf(machine, pf)
    soon(lambda: _link(machine, pf).carrier or None, "carrier of the PF")
    assert _set(machine, pf, max_tx_rate=100) is None
    assert (_reported(machine, pf).min_tx_rate, _reported(machine, pf).max_tx_rate) == (0, 100)
    assert _set(machine, pf, max_tx_rate=100, min_tx_rate=10) == errno.EINVAL
    assert _set(machine, pf, max_tx_rate=10000) == errno.EINVAL
    assert _reported(machine, pf).max_tx_rate == 100
    assert _set(machine, pf, max_tx_rate=0) is None
    assert _reported(machine, pf).max_tx_rate == 0


def a_rate_needs_the_pf_up(machine: Machine, pf: str) -> None:
    _one_vf(machine, pf)
    machine.netlink.set_link(_link(machine, pf).ifindex, up=False)
    assert _set(machine, pf, max_tx_rate=100) == errno.EINVAL


def what_igb_has_no_operation_for_is_eopnotsupp(machine: Machine, pf: str) -> None:
    _one_vf(machine, pf)
    for given in (
        {"link_state": "enable"},
        {"rss_query": True},
        {"node_guid": "00:11:22:33:44:55:66:77"},
        {"port_guid": "00:11:22:33:44:55:66:77"},
    ):
        assert _set(machine, pf, **given) == errno.EOPNOTSUPP, given
    reported = _reported(machine, pf)
    assert reported.link_state == "auto"
    assert (reported.rss_query, reported.node_guid, reported.port_guid) == (None, None, None)


def a_txqueuelen_and_an_altname_are_reported(machine: Machine, pf: str) -> None:
    _one_vf(machine, pf)
    index = _link(machine, pf).ifindex
    machine.netlink.set_link(index, txqueuelen=5000)
    assert _link(machine, pf).txqueuelen == 5000
    machine.netlink.set_link(index, txqueuelen=1000)
    if "contract0" not in _link(machine, pf).altnames:
        machine.netlink.add_altname(index, "contract0")
    assert "contract0" in _link(machine, pf).altnames
    link = machine.netlink.link("contract0")
    assert link is not None
    assert link.ifindex == index
    other = _link(machine, vf_addresses(machine.files, pf)[0]).ifindex
    assert errno_of(lambda: machine.netlink.add_altname(other, "contract0")) == errno.EEXIST
    assert errno_of(lambda: machine.netlink.remove_altname(other, "contract0")) == errno.EINVAL
    machine.netlink.remove_altname(index, "contract0")
    assert "contract0" not in _link(machine, pf).altnames
    assert errno_of(lambda: machine.netlink.remove_altname(index, "contract0")) == errno.ENOENT


def a_pf_s_mtu_is_lowered_below_its_vfs(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    machine.netlink.set_link(_link(machine, pf).ifindex, mtu=9000)
    machine.netlink.set_link(_link(machine, vf).ifindex, mtu=9000)
    machine.netlink.set_link(_link(machine, pf).ifindex, mtu=1500)
    assert _link(machine, pf).mtu == 1500
    assert _link(machine, vf).mtu == 9000


def a_netdev_is_renamed_to_its_own_altname(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    link = _link(machine, vf)
    machine.netlink.rename(link.ifindex, "contract1")
    assert netdev(machine.files, vf) == "contract1"
    # udev may be the first to give it.
    assert errno_of(lambda: machine.netlink.add_altname(link.ifindex, link.name)) in (None, errno.EEXIST)
    assert link.name in _link(machine, vf).altnames
    assert errno_of(lambda: machine.netlink.rename(link.ifindex, _link(machine, pf).name)) == errno.EEXIST
    machine.netlink.rename(link.ifindex, link.name)
    assert _link(machine, vf).name == link.name


def a_vf_with_an_override_is_bound_to_it_even_without_autoprobe(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    if "vfio-pci" not in machine.files.names("/sys/bus/pci/drivers"):
        return
    assert machine.files.read(f"{PCI}/{vf}/driver_override") == "(null)"
    machine.files.write(f"{PCI}/{vf}/driver_override", "vfio-pci")
    assert driver(machine.files, vf) == "igbvf"
    _autoprobe(machine, pf, False)
    machine.files.write(f"{PCI}/{vf}/driver/unbind", vf)
    _probe(machine, vf)
    assert driver(machine.files, vf) == "vfio-pci"
    assert netdev(machine.files, vf) is None
    machine.files.write(f"{PCI}/{vf}/driver_override", "\n")
    assert machine.files.read(f"{PCI}/{vf}/driver_override") == "(null)"
    machine.files.write(f"{PCI}/{vf}/driver/unbind", vf)
    _probe(machine, vf)
    assert driver(machine.files, vf) is None
    _autoprobe(machine, pf, True)
    _probe(machine, vf)
    assert driver(machine.files, vf) == "igbvf"


def an_override_that_no_driver_has_leaves_the_vf_unbound(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    machine.files.write(f"{PCI}/{vf}/driver_override", "no-such-driver")
    machine.files.write(f"{PCI}/{vf}/driver/unbind", vf)
    _probe(machine, vf)
    assert driver(machine.files, vf) is None
    machine.files.write(f"{PCI}/{vf}/driver_override", "\n")
