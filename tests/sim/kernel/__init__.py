"""The seam's one fake: a machine with igb-like NICs that reacts to what is written, as the real kernel was seen to."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping

from attrs import define, evolve, field

from agent.machine import Connection, Events, EventSource, Link, Machine, QueueIrq, QueueUser, VfInfo
from tests.sim import config_space, hugepages, variables
from tests.sim.carriers import Carriers
from tests.sim.drivers import DRIVERS
from tests.sim.ethtool import SimEthtool
from tests.sim.host import SimHost
from tests.sim.interrupts import Interrupts
from tests.sim.kernel.files import SimFiles
from tests.sim.kernel.netlink import SimNetlink
from tests.sim.namespaces import SimNamespaces, inside
from tests.sim.napi import Napis
from tests.sim.rdma import Subsystem
from tests.sim.routing import SETTINGS, Routing
from tests.sim.sriov import Sriov
from tests.sim.tree import Tree, error
from tests.sim.udev import Udev

PCI = "/sys/bus/pci/devices"
NET = "/sys/class/net"
Fault = Callable[[str, str, str], OSError | None]


class Hang(BaseException):
    """Stands for a call that never returns. No code of the agent catches it."""


def no_fault(operation: str, where: str, value: str) -> OSError | None:
    return None


class NoEvents:
    def subscribe(self) -> list[EventSource]:
        return []


@define
class Netdev:
    """``port``: its phys_port_name, by which a representor is known. ``dev_port``: which port of its function it is."""

    function: str
    link: Link
    port: str = ""
    dev_port: int = 0


@define(eq=False)
class Kernel:
    """The tree of files, and the netdevs, VFs and interrupts behind it.

    ``fault`` may refuse any write; ``writes`` records them. ``read_only``: files without a write bit. ``uppers_elsewhere``:
    the netdevs of other namespaces on top of a netdev, by its name. ``config``: the configuration spaces, by their files.
    ``pipes``: files that are read from real named pipes at these paths, so that a read without a writer hangs; ``piped``
    records these reads. ``unreadable``: files that give EIO. ``locked_down``: files that the kernel refuses also to root
    (EPERM). ``disconnected``: files of a lost connection (ENOTCONN). ``read_in_part`` records which files were read by
    offset. ``renames_running``: a netdev that is up can be renamed (since Linux 6.2). ``made``: the netdevs that the driver
    of a function makes, where it is not just one: those of two ports, and representors.
    ``sockets``: those of TCP, each with its state. ``linked``: of functions whose driver tells the kernel, the queues of each
    interrupt in their order. ``queue_users``: who has queues of a function for itself. ``hanging``: how many calls the driver
    of a function still returns from, if it is about to hang. ``partition_mtu``: what the subnet manager lets IPoIB have.
    """

    cpus: int = 4
    nodes: int = 2
    vf_queues: int = 1
    fault: Fault = no_fault
    writes: list[tuple[str, str]] = field(factory=list)
    routed: set[str] = field(factory=set)
    uppers_elsewhere: dict[str, tuple[str, ...]] = field(factory=dict)
    ip: dict[str, tuple[str, ...]] = field(factory=dict)
    servers: dict[str, str] = field(factory=dict)
    sockets: list[tuple[Connection, str]] = field(factory=list)
    tree: Tree = field(factory=Tree)
    host: SimHost = field(factory=SimHost)
    ethtool: SimEthtool = field(init=False)
    read_only: set[str] = field(factory=set)
    memory: hugepages.Memory = field(factory=hugepages.Memory)
    config: dict[str, bytearray] = field(factory=dict)
    pipes: dict[str, str] = field(factory=dict)
    piped: list[str] = field(factory=list)
    unreadable: set[str] = field(factory=set)
    locked_down: set[str] = field(factory=set)
    disconnected: set[str] = field(factory=set)
    read_in_part: list[str] = field(factory=list)
    namespaces: set[str] = field(factory=set)
    hides_namespaces: bool = False
    opened: list[str] = field(factory=list)
    events: Events = field(factory=NoEvents)
    netdevs: dict[str, Netdev] = field(factory=dict)
    renames_running: bool = False
    hanging: dict[str, int] = field(factory=dict)
    linked: dict[str, tuple[QueueIrq | None, ...]] = field(factory=dict)
    queue_users: dict[str, tuple[QueueUser, ...]] = field(factory=dict)
    made: dict[str, list[Netdev]] = field(factory=dict)
    partition_mtu: int = 4092
    _by_ifindex: dict[int, str] = field(factory=dict)
    _away: dict[str, Netdev] = field(factory=dict)
    next_ifindex: int = 2
    interrupts: Interrupts = field(init=False)
    napi: Napis = field(init=False)
    sriov: Sriov = field(init=False)
    carriers: Carriers = field(init=False)
    udev: Udev = field(init=False)
    rdma: Subsystem = field(init=False)
    routing: Routing = field(init=False)
    files: SimFiles = field(init=False)
    netlink: SimNetlink = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.files = SimFiles(self)
        self.netlink = SimNetlink(self)
        self.ethtool = SimEthtool(self)
        self.napi = Napis(self)
        self.rdma = Subsystem(self)
        self.routing = Routing(self)
        self.sriov = Sriov(self)
        self.carriers = Carriers(self)
        self.udev = Udev(self)
        self.interrupts = Interrupts(self.tree, self.cpus, self.nodes)
        self.interrupts.boot()
        self.tree.put("/proc/sys/net/core/rps_sock_flow_entries", "0")
        self.tree.folder(PCI)
        hugepages.boot(self)
        variables.boot(self)
        self.tree.put("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999")
        self.tree.put("/sys/module/ib_core/parameters/netns_mode", "Y")
        self.read_only.add("/sys/module/ib_core/parameters/netns_mode")
        self.tree.folder("/sys/bus/pci/drivers/igb")
        self.tree.folder("/sys/bus/pci/drivers/igbvf")

    @classmethod
    def with_files(cls, files: Mapping[str, str]) -> Kernel:
        """A machine without NICs, with these texts of files by their paths."""
        made = cls()
        for path, text in files.items():
            made.tree.put(path, text)
        return made

    def machine(self) -> Machine:
        return Machine(
            files=self.files,
            netlink=self.netlink,
            processes=self.host,
            ethtool=self.ethtool,
            kubelet=self.host,
            system=self.host,
            dcb=self.rdma,
            rdma=self.rdma,
            namespaces=SimNamespaces(self),
            events=self.events,
        )

    # --- changes that a test makes --------------------------------------------------------------------

    def connect(self, local: str, peer: str, holder: str = "", *, state: str = "ESTABLISHED", bound: int = 0) -> None:
        """A TCP socket; its ends as ``10.0.0.5:22`` and ``fd00::5:22``. ``holder``: a process, else the kernel has it."""
        (own, _, own_port), (other, _, other_port) = local.rpartition(":"), peer.rpartition(":")
        socket = f"socket:[{4000 + len(self.sockets)}]"
        self.sockets.append((Connection(own, int(own_port), other, int(other_port), bound, socket), state))
        if holder:
            self.host.open[socket] = (holder,)

    def add_nic(
        self,
        address: str,
        name: str,
        mac: str,
        node: int = 0,
        total_vfs: int = 7,
        driver: str = "igb",
        ids: tuple[str, str, str] = ("020000", "8086", "10c9"),
    ) -> None:
        """A NIC; ``ids``: its class, vendor and device. ``name`` is empty if its driver makes no netdev of its own."""
        path = f"{PCI}/{address}"
        kind, vendor, device = (f"0x{each}" for each in ids)
        for file, text in (
            ("class", kind),
            ("vendor", vendor),
            ("device", device),
            ("numa_node", str(node)),
            ("sriov_totalvfs", str(total_vfs)),
            ("sriov_numvfs", "0"),
            ("sriov_drivers_autoprobe", "1"),
            ("current_link_width", "16"),
            ("max_link_width", "16"),
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("max_link_speed", "32.0 GT/s PCIe"),
        ):
            self.tree.put(f"{path}/{file}", text)
        self.tree.folder(f"{path}/net")
        self.config[f"{path}/config"] = config_space.made()
        self.sriov.add(address)
        if driver in DRIVERS:
            self.sriov.able.add(address)
        self.udev.pf_names[address] = name
        self.bind(address, name, mac, driver)

    def add_erdma(self, address: str, node: int = 0) -> None:
        """A function without a netdev of its own."""
        for file, text in (("class", "0x020000"), ("vendor", "0x1ded"), ("device", "0x107f"), ("numa_node", str(node))):
            self.tree.put(f"{PCI}/{address}/{file}", text)
        self.set_driver(address, "erdma")
        for number, action in ((90, f"erdma-common@pci:{address}"), (91, f"erdma-ceq0@pci:{address}")):
            self.interrupts.request(address, number, action)

    def vfs(self, function: str) -> tuple[VfInfo, ...]:
        """A PF's VFs as the PF reports them."""
        return self.sriov.of(function)

    def add_virtual(self, name: str, queues: int = 1) -> None:
        """ip link add NAME type veth: a netdev without a PCI function."""
        self.tree.put(f"{NET}/{name}/ifindex", str(self.next_ifindex))
        self.next_ifindex += 1
        for queue in range(queues):
            self.tree.put(f"{NET}/{name}/queues/rx-{queue}/rps_cpus", "0")

    def remove_virtual(self, name: str) -> None:
        self.tree.remove(f"{NET}/{name}")

    def remove_nic(self, address: str) -> None:
        """PCI hot removal, its VFs included."""
        self.sriov.set_count(address, 0)
        self.unbind(address)
        self.sriov.remove(address)
        self.tree.remove(f"{PCI}/{address}")
        del self.config[f"{PCI}/{address}/config"]
        self.config.pop(f"{PCI}/{address}/vpd", None)

    def reload_driver(self, address: str) -> None:
        """modprobe -r igb; modprobe igb."""
        link = self.netdev(address) if self.has_netdev(address) else None
        driver = self.driver(address)
        if self.sriov.count(address):
            self.sriov.set_count(address, 0)
        self.unbind(address)
        self.sriov.add(address)
        self.bind(address, link.name if link else "", link.permanent_mac if link else "", driver)

    def load_vfio(self) -> None:
        """modprobe vfio-pci."""
        self.tree.folder("/sys/bus/pci/drivers/vfio-pci")

    def without_iommu(self, function: str) -> None:
        self.tree.remove(f"{PCI}/{function}/iommu_group")

    def give_serials(self, function: str, config: bytes, vpd: bytes) -> None:
        self.config[f"{PCI}/{function}/config"] = bytearray(config)
        self.config[f"{PCI}/{function}/vpd"] = bytearray(vpd)

    def has_netdev(self, function: str) -> bool:
        return any(netdev.function == function for netdev in self.netdevs.values())

    def netdev(self, function: str) -> Link:
        return next(netdev.link for netdev in self.netdevs.values() if netdev.function == function)

    def enslave(self, function: str, master: str, kind: str) -> None:
        """`ip link set NETDEV master MASTER`, which is a netdev of this kind."""
        netdev = next(netdev for netdev in self.netdevs.values() if netdev.function == function)
        netdev.link = evolve(netdev.link, member_of=kind)
        folder = f"{NET}/{netdev.link.name}"
        self.tree.link(f"{folder}/master", f"../../../../virtual/net/{master}")
        self.tree.put(f"{folder}/upper_{master}/ifindex", "99")

    def move_away(self, function: str, namespace: str = "pod") -> None:
        """The netdev goes to another network namespace, and is called eth1 there."""
        self.namespaces.add(namespace)
        link = self.netdev(function)
        self._away[function] = self.netdevs.pop(link.name)
        self.routing.gone(link.ifindex, link.name)
        for path in [path for path in self.tree.files if path.startswith(f"{NET}/{link.name}/")]:
            self.tree.put(inside(namespace, path.replace(f"/{link.name}/", "/eth1/")), self.tree.files[path])
        self.tree.folder(inside(namespace, f"{PCI}/{function}/net/eth1"))
        self.tree.remove(f"{NET}/{link.name}")
        self.tree.remove(f"{PCI}/{function}/net/{link.name}")
        self.udev.forget(link)

    def lose_netdev(self, function: str) -> None:
        """Its driver gives the netdev up and stays bound, as mlx5's does when the firmware dies."""
        bound = self.driver(function)
        self.unbind(function)
        self.set_driver(function, bound)

    def lose_away(self, function: str) -> None:
        """The pod's namespace ends, and its netdev is nowhere: the driver has given it up."""
        self.namespaces.clear()
        del self._away[function]

    def come_back(self, function: str, name: str) -> None:
        """The pod's namespace ends: the netdev is back, down, with its name from there, or dev<ifindex> if that is in use."""
        netdev = self._away.pop(function)
        if self.named(name):
            name = f"dev{netdev.link.ifindex}"
        self.interrupts.free(function)
        netdev.link = evolve(netdev.link, name=name, up=False)
        self.appear(netdev)

    # --- for the other parts -----------------------------------------------------------

    def refuse(self, operation: str, where: str, value: str) -> None:
        self.writes.append((where, value))
        if (refused := self.fault(operation, where, value)) is not None:
            raise refused

    def written(self, ifindex: int, operation: str, value: str) -> Netdev:
        """A netdev that is written to; the fault may have been that it went."""
        self.refuse(operation, self.by_ifindex(ifindex).link.name, value)
        return self.by_ifindex(ifindex)

    # --- netdevs ----------------------------------------------------------------------------

    def enter(self, function: str) -> None:
        """The kernel calls a function's driver."""
        if function in self.hanging:
            if not self.hanging[function]:
                raise Hang(function)
            self.hanging[function] -= 1

    def by_ifindex(self, ifindex: int) -> Netdev:
        name = self._by_ifindex.get(ifindex, "")
        if name not in self.netdevs or self.netdevs[name].link.ifindex != ifindex:
            self._by_ifindex = {each.link.ifindex: name for name, each in self.netdevs.items()}
            name = self._by_ifindex.get(ifindex, "")
        if name not in self.netdevs:
            raise error(errno.ENODEV, str(ifindex))
        netdev = self.netdevs[name]
        self.enter(netdev.function)
        return netdev

    def driver(self, function: str) -> str:
        return self.tree.links.get(f"{PCI}/{function}/driver", "").rpartition("/")[2]

    def set_driver(self, function: str, driver: str) -> None:
        """Another driver has the function. Its netdevs and RDMA devices stay."""
        self.tree.link(f"{PCI}/{function}/driver", f"../../../../bus/pci/drivers/{driver}")

    def bind(self, function: str, name: str, mac: str, driver: str = "igb") -> None:
        self.set_driver(function, driver)
        self.tree.folder(f"/sys/bus/pci/drivers/{driver}")
        own = [Netdev(function, Link(0, name, mac, mac, 1500, False, False))] if name else []
        netdevs = self.made.get(function, own)
        for each in netdevs:
            self.register(function, each.link, each.port, each.dev_port)
        if not netdevs and driver in DRIVERS and not self.sriov.only_for_vfs(function):
            self.interrupts.request_all(function, DRIVERS[driver].irqs("", function, self.vf_queues))
        self.rdma.probed(function, name)

    def register(self, function: str, link: Link, port: str = "", dev_port: int = 0) -> None:
        """A driver creates a netdev."""
        self.next_ifindex += 1
        # igb_probe, and IPOIB_CM_MTU of ipoib.h.
        most = link.max_mtu or (65520 if len(link.mac) > 17 else 9216)
        link = evolve(link, ifindex=self.next_ifindex - 1, carrier_downs=0, max_mtu=most)
        self.appear(Netdev(function, link, port, dev_port))

    def appear(self, netdev: Netdev) -> None:
        """A netdev comes into the host's network namespace under its name, and udev looks at it."""
        link = netdev.link
        self.netdevs[link.name] = netdev
        self.tree.put(f"{NET}/{link.name}/address", link.mac)
        self.tree.put(f"{NET}/{link.name}/addr_assign_type", "0" if link.mac == link.permanent_mac else "3")
        self.tree.put(f"{NET}/{link.name}/ifindex", str(link.ifindex))
        self.tree.put(f"{NET}/{link.name}/uevent", "")
        self.tree.put(f"{NET}/{link.name}/type", "32" if len(link.mac) > 17 else "1")
        self.tree.put(f"{NET}/{link.name}/dev_port", str(netdev.dev_port))
        self.napi.appear(link.name)
        if netdev.port:
            self.tree.put(f"{NET}/{link.name}/phys_port_name", netdev.port)
        self.tree.link(f"{NET}/{link.name}/device", f"../../../{netdev.function}")
        self.tree.folder(f"{NET}/{link.name}/device/net")
        self.ethtool.make_queues(netdev)
        self.routing.conf(link.name, dict.fromkeys(SETTINGS, "0"))
        self.tree.folder(f"{PCI}/{netdev.function}/net/{link.name}")
        self.udev.tell(link)
        self.rdma.bound(netdev.function, link.name)

    def named(self, name: str) -> bool:
        return any(name in (netdev.link.name, *netdev.link.altnames) for netdev in self.netdevs.values())

    def unbind(self, function: str) -> None:
        self.rdma.unbound(function)
        self.tree.unlink(f"{PCI}/{function}/driver")
        self.interrupts.free(function)
        for name, netdev in list(self.netdevs.items()):
            if netdev.function == function:
                self.sriov.link_goes_down(function, netdev.link)
                del self.netdevs[name]
                self.routing.gone(netdev.link.ifindex, name)
                self.tree.remove(f"{NET}/{name}")
                self.tree.remove(f"{PCI}/{function}/net/{name}")
                self.udev.forget(netdev.link)
