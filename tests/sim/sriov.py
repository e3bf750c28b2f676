"""SR-IOV of the simulated NICs: their VFs, what a PF grants each of them, and how igb and igbvf react."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from agent.machine import Link, VfInfo
from tests.sim.drivers import DRIVERS
from tests.sim.tree import error

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

PCI = "/sys/bus/pci/devices"

# What igb reports of a new VF, where it is not what the kernel reports of any.
_NEW_VF = {"mac": "00:00:00:00:00:00", "trust": False, "spoofchk": True}


def _having(vf: VfInfo, **values: Any) -> VfInfo:
    return evolve(vf, **values)


def _address(physical: str, index: int) -> str:
    bus, _, own = physical.rpartition(":")
    # The VFs of the second function of a card are between those of the first one; those of two more are before them.
    first = 0x08 if own[-1] in "23" else 0x10
    return f"{bus}:{first + index // 4:02x}.{index % 4 * 2 + int(own[-1]) % 2}"


def index_of(vf: str) -> int:
    """The number of a VF by its address."""
    device, _, number = vf.rpartition(":")[2].partition(".")
    return (int(device, 16) - (0x10 if int(device, 16) >= 0x10 else 0x08)) * 4 + int(number) // 2


def path_name(function: str) -> str:
    """The name by a function's address, as udev makes it (ID_NET_NAME_PATH)."""
    bus, device, number = (int(part, 16) for part in re.split("[:.]", function)[1:])
    return f"enp{bus}s{device}f{number}"


def vf_name(physical: str, index: int) -> str:
    """The name that udev gives the netdev of a VF: without the name of its PF's port."""
    return f"{re.sub(r'np[0-9]+$', '', physical)}v{index}"


@define
class Sriov:
    """The VFs of each PF, as the PF reports them.

    ``able``: PFs whose driver accepts every attribute of a VF, as mlx5 and ice nearly do; the others behave as igb.
    ``resetting``: VFs that their PF does not report now. ``room``: how many VFs a PF makes at most, whatever is written.
    ``late``: the attributes that the drivers of ``able`` PFs set only when :meth:`catch_up` is called. ``vf_devices``: the
    PCI device ID of a PF's VFs. ``unready``: PFs for whose VFs the driver's probe fails.
    """

    kernel: Kernel
    able: set[str] = field(factory=set)
    resetting: set[tuple[str, int]] = field(factory=set)
    room: dict[str, int] = field(factory=dict)
    unready: set[str] = field(factory=set)
    late: set[str] = field(factory=set)
    vf_devices: dict[str, str] = field(factory=dict)
    _pending: list[tuple[str, int, str, Any]] = field(factory=list)
    _vfs: dict[str, dict[int, VfInfo]] = field(factory=dict)

    def add(self, physical: str) -> None:
        """Add a PF, without VFs."""
        self._vfs[physical] = {}

    def remove(self, physical: str) -> None:
        """A PF is gone."""
        del self._vfs[physical]

    def physical(self, function: str) -> str | None:
        """The PF of a VF; None for any other function."""
        link = self.kernel.tree.links.get(f"{PCI}/{function}/physfn")
        return None if link is None else link.rpartition("/")[2]

    def only_for_vfs(self, physical: str) -> bool:
        """A PF of a Chelsio card that has a netdev only while it has VFs, to configure them (cxgb4_iov_configure)."""
        tree, path = self.kernel.tree, f"{PCI}/{physical}"
        driver = tree.links.get(f"{path}/driver", "")
        return driver.endswith("/cxgb4") and tree.files.get(f"{path}/sriov_totalvfs", "0") != "0"

    def of(self, physical: str) -> tuple[VfInfo, ...]:
        """A PF's VFs as it reports them."""
        vfs = sorted(self._vfs.get(physical, {}).items())
        return tuple(vf for index, vf in vfs if (physical, index) not in self.resetting)

    def granted(self, vf: str) -> VfInfo:
        """What its PF grants a VF."""
        return next(granted for granted in self.of(self.physical(vf) or "") if granted.index == index_of(vf))

    def is_vf(self, function: str) -> bool:
        return self.physical(function) is not None

    def count(self, physical: str) -> int:
        return len(self._vfs[physical])

    def link_state(self, vf: str) -> str:
        """Which link its PF shows a VF."""
        physical = self.physical(vf)
        assert physical is not None
        return str(self._vfs[physical][index_of(vf)].link_state)

    def set_count(self, physical: str, count: int) -> None:
        tree, path = self.kernel.tree, f"{PCI}/{physical}"
        now = len(self._vfs[physical])
        if count > int(tree.files[f"{path}/sriov_totalvfs"]):
            raise error(errno.ERANGE, path)
        if self.kernel.driver(physical) in ("", "vfio-pci"):
            # The driver has no sriov_configure, or refuses it (vfio_pci_sriov_configure without enable_sriov).
            raise error(errno.ENOENT, path)
        if now and count and now != count:
            raise error(errno.EBUSY, path)
        count = min(count, self.room.get(physical, count))
        if self.only_for_vfs(physical) and not now and count:
            self.kernel.register(physical, Link(0, f"mgmtpf1,{physical[-1]}", "", "", 0, False, False))
        if not count:
            self._pending = [each for each in self._pending if each[0] != physical]
            for index in list(self._vfs[physical]):
                vf = _address(physical, index)
                self.kernel.unbind(vf)
                tree.remove(f"{PCI}/{vf}")
                tree.unlink(f"{path}/virtfn{index}")
                del self._vfs[physical][index]
        for index in range(now, count):
            vf = _address(physical, index)
            self._vfs[physical][index] = VfInfo(index, **_NEW_VF)
            tree.put(f"{PCI}/{vf}/class", tree.files[f"{path}/class"])
            tree.put(f"{PCI}/{vf}/numa_node", tree.files[f"{path}/numa_node"])
            if physical in self.vf_devices:
                tree.put(f"{PCI}/{vf}/vendor", tree.files[f"{path}/vendor"])
                tree.put(f"{PCI}/{vf}/device", f"0x{self.vf_devices[physical]}")
            tree.folder(f"{PCI}/{vf}/net")
            tree.put(f"{PCI}/{vf}/driver_override", "(null)")
            tree.link(f"{PCI}/{vf}/iommu_group", f"../../../../kernel/iommu_groups/{vf[8:].replace('.', '')}")
            tree.link(f"{PCI}/{vf}/physfn", f"../{physical}")
            tree.link(f"{path}/virtfn{index}", f"../{vf}")
            if tree.files[f"{path}/sriov_drivers_autoprobe"] == "1":
                self.probe(vf)
        if self.only_for_vfs(physical) and not count:
            self.kernel.lose_netdev(physical)
        tree.files[f"{path}/sriov_numvfs"] = str(count)
        if now != count and self.kernel.has_netdev(physical):
            self.kernel.ethtool.vfs_changed(self.kernel.netdev(physical).ifindex)

    def probe(self, vf: str) -> None:
        """A driver is sought for a VF."""
        tree, physical = self.kernel.tree, self.physical(vf)
        if f"{PCI}/{vf}" not in tree.folders:
            raise error(errno.ENODEV, vf)
        assert physical is not None
        override = tree.files[f"{PCI}/{vf}/driver_override"]
        if f"{PCI}/{vf}/driver" in tree.links:
            return
        bound = self.kernel.driver(physical)
        driver = DRIVERS[bound].vf if bound in DRIVERS else "igbvf"
        if override not in ("(null)", driver):
            # An override is served even while autoprobe is off (pci_device_can_probe).
            if f"/sys/bus/pci/drivers/{override}" in tree.folders and f"{PCI}/{vf}/iommu_group" in tree.links:
                tree.link(f"{PCI}/{vf}/driver", f"../../../../bus/pci/drivers/{override}")
                tree.remove(f"{PCI}/{vf}/net")
            return
        if physical in self.unready:
            return  # the kernel tells who asked for a driver nothing of that (__device_attach_driver, drivers/base/dd.c)
        if override == "(null)" and tree.files[f"{PCI}/{physical}/sriov_drivers_autoprobe"] != "1":
            return
        index = index_of(vf)
        given = self._vfs[physical][index].mac
        above = self.kernel.netdev(physical)
        # While the PF is down, the driver of the VF (igbvf) gets no answer from it, and chooses a random address.
        heard = given != _NEW_VF["mac"] and (above.up or driver != "igbvf")
        number = self.kernel.next_ifindex
        mac = given if heard else f"06:00:00:00:{number >> 8:02x}:{number & 255:02x}"
        if len(above.mac) > len(mac):
            # An IPoIB netdev has its port's GUID in its address.
            mac = f"{above.mac[:36]}{self._vfs[physical][index].port_guid or f'02:00:{mac}'}"
        # A netdev that is only for VFs gives them no name: udev takes that of the function then.
        named = path_name(physical) if self.only_for_vfs(physical) else above.name
        self.kernel.bind(vf, vf_name(named, index), mac, driver)

    def set(self, physical: str, link: Link, index: int, **given: Any) -> None:
        """The PF with this link is told attributes of a VF."""
        vfs = self._vfs.get(physical)
        if vfs is None:
            raise error(errno.EOPNOTSUPP, link.name)
        if index not in vfs:
            raise error(errno.EINVAL, link.name)
        given = {name: value for name, value in given.items() if value is not None}
        for together, defaults in (
            ({"vlan", "qos", "vlan_protocol"}, {"vlan": 0, "qos": 0, "vlan_protocol": "802.1Q"}),
            ({"min_tx_rate", "max_tx_rate"}, {"min_tx_rate": 0, "max_tx_rate": 0}),
        ):
            if together & given.keys():
                given = {**defaults, **given}
        rates = {"min_tx_rate": 0, "max_tx_rate": 0} | given
        if 0 < int(str(rates["max_tx_rate"])) < int(str(rates["min_tx_rate"])):
            raise error(errno.EINVAL, link.name)
        if physical not in self.able:
            _refuse_as_igb(link, given)
        else:
            # A request does not overtake an earlier one.
            self._pending = [each for each in self._pending if each[:2] != (physical, index) or each[2] not in given]
            self._pending += [(physical, index, name, given.pop(name)) for name in self.late & given.keys()]
        if physical in self.able and not given.get("vlan", vfs[index].vlan) and not given.get("qos", vfs[index].qos):
            # Without a VLAN there is no protocol (ice_set_vf_port_vlan in ice_sriov.c; mlx5 as reported to nmstate, 2486).
            given["vlan_protocol"] = "802.1Q"
        vfs[index] = _having(vfs[index], **given)

    def catch_up(self) -> None:
        """What was set late takes effect."""
        for physical, index, name, value in self._pending:
            if index in self._vfs.get(physical, {}):
                self._vfs[physical][index] = _having(self._vfs[physical][index], **{name: value})
        self._pending.clear()

    def link_goes_down(self, vf: str, link: Link) -> None:
        """When its link goes down, igbvf sets its old address again, and igb accepts this from a trusted VF."""
        physical = self.physical(vf)
        if physical in self._vfs and link.up:
            vfs, index = self._vfs[physical], index_of(vf)
            if vfs[index].trust:
                vfs[index] = _having(vfs[index], mac=link.mac)


def _refuse_as_igb(link: Link, given: dict[str, object]) -> None:
    """What drivers/net/ethernet/intel/igb answers (seen on 6.1)."""
    if {"link_state", "rss_query", "node_guid", "port_guid"} & given.keys():
        raise error(errno.EOPNOTSUPP, link.name)
    if given.get("vlan_protocol", "802.1Q") != "802.1Q":
        raise error(errno.EPROTONOSUPPORT, link.name)
    fastest = 1000 if link.up else -1
    if given.get("min_tx_rate") or int(str(given.get("max_tx_rate", fastest))) > fastest:
        raise error(errno.EINVAL, link.name)
