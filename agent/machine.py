"""The interface to the machine. ``linux/`` implements it, and so does the fake machine of the tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import frozen

from agent.spec.vf_attributes import with_reported

ARPHRD_INFINIBAND = 32
"""The hardware type of an IPoIB netdev (include/uapi/linux/if_arp.h)."""

IFNAMSIZ = 16
"""A name of this length or more can only be an alternative name."""


@frozen(field_transformer=with_reported)
class VfInfo:
    """The attributes of a VF as its PF reports them (IFLA_VFINFO_LIST), by the names of agent/spec/vf_attributes.

    ``None``: the driver does not report it.
    """

    index: int

    if TYPE_CHECKING:
        # The fields come from the records in agent/spec/vf_attributes.
        def __getattr__(self, name: str) -> Any: ...


@frozen
class Link:
    """One netdev of the host's network namespace.

    ``mac``: the current address; ``permanent_mac``: the hardware's (IFLA_PERM_ADDRESS; empty if none).
    ``carrier`` is False while the link is down. ``mtu`` in bytes, ``txqueuelen`` in packets. ``max_mtu``: the largest that the
    kernel takes (IFLA_MAX_MTU); 0: it knows no limit, as before Linux 4.19. ``member_of``: the kind of its
    master (``bond``, ``team``, ``bridge``, ``vrf``; IFLA_INFO_SLAVE_KIND); empty if it has none. ``xdp``: its driver runs an
    XDP program (IFLA_XDP_ATTACHED); False if only the kernel's core does. ``carrier_downs``: how often it has lost its carrier
    since it was made (IFLA_CARRIER_DOWN_COUNT).
    """

    ifindex: int
    name: str
    mac: str
    permanent_mac: str
    mtu: int
    up: bool
    carrier: bool
    altnames: tuple[str, ...] = ()
    vfs: tuple[VfInfo, ...] = ()
    txqueuelen: int = 1000
    member_of: str = ""
    xdp: bool = False
    carrier_downs: int = 0
    max_mtu: int = 0


@frozen
class QueueIrq:
    """The first receive queue and the first transmit queue that an interrupt serves; None: it serves none of that type."""

    rx: int | None
    tx: int | None


@frozen
class QueueUser:
    """A program to which the kernel gave a queue of a netdev.

    ``how``: ``AF_XDP``, ``io_uring zero copy``, ``devmem TCP``, ``a netkit lease``.
    ``socket``: what a descriptor of its socket leads to (``socket:[4711]``); empty if that is unknown.
    """

    queue: int
    how: str
    socket: str = ""


@frozen
class Route:
    """A unicast route with one next hop. ``destination`` is a network: ``10.0.0.0/16``, ``0.0.0.0/0``.

    ``source``: the address that a packet gets if its sender has not chosen one.
    """

    destination: str
    table: int
    ifindex: int
    gateway: str | None = None
    source: str | None = None


@frozen
class Rule:
    """A rule of policy routing: packets from the address ``source`` are routed by ``table``. The lowest priority is first."""

    source: str
    table: int
    priority: int


@frozen
class Connection:
    """An established TCP connection: the addresses and ports of both ends, IPv4 ones also if they are mapped to IPv6.

    ``ifindex``: the netdev or VRF that its socket is bound to, or 0. ``socket``: what a descriptor of the socket leads to
    (``socket:[4711]``).
    """

    local: str
    local_port: int
    peer: str
    peer_port: int
    ifindex: int
    socket: str


class Attributes(Protocol):
    """The kernel's attribute files, by absolute path. Every method raises OSError with the kernel's errno."""

    def read(self, path: str) -> str:
        """The file's text without the white space at its end."""

    def write(self, path: str, text: str) -> None:
        """Write with one write(2): an attribute takes its whole value at once."""

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; FileNotFoundError if there is none."""

    def target(self, path: str) -> str:
        """The last component of a symbolic link's target."""


class Files(Attributes, Protocol):
    """sysfs, procfs and plain files. Every method raises OSError with the kernel's errno."""

    def replace(self, path: str, text: str) -> None:
        """Replace a plain file atomically: readers see all of the old text or all of the new one."""

    def writable(self, path: str) -> bool:
        """Whether a file has a write bit: sysfs refuses even root to open one without."""

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """At most ``size`` bytes of a file, from ``offset`` on."""

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        """Write all of ``data`` at ``offset`` with one call."""


class Netlink(Protocol):
    """rtnetlink in the host's network namespace. Errors are OSError with the kernel's errno."""

    def link(self, name: str) -> Link | None:
        """A netdev by its name or an alternative name, with its VFs; None if there is none."""

    def set_link(
        self, ifindex: int, *, mtu: int | None = None, up: bool | None = None, txqueuelen: int | None = None
    ) -> None:
        """Change the given values of a netdev."""

    def queue_irqs(self, ifindex: int) -> Mapping[int, QueueIrq]:
        """The interrupts that serve queues of a netdev, by number; empty if the kernel or the driver does not tell."""

    def queue_users(self, ifindex: int) -> tuple[QueueUser, ...]:
        """The programs to which the kernel gave queues of a netdev, if it tells; ENODEV if the netdev is gone."""

    def napis(self, ifindex: int) -> Mapping[int, Mapping[str, int]]:
        """The settings of each NAPI instance of a netdev, by its ID; none while it is down. ENODEV if the netdev is gone.

        ``defer_hard_irqs``, ``gro_flush_timeout``, ``irq_suspend_timeout``, ``threaded``, as far as the kernel has them; and
        ``irq``, its interrupt's number, if the driver tells it, and ``pid``, its thread, if it has one.
        """

    def set_napi(self, napi: int, given: Mapping[str, int]) -> None:
        """Change the given settings of an instance; ENOENT if it is gone."""

    def add_altname(self, ifindex: int, name: str) -> None:
        """Add an alternative name to a netdev; EEXIST if a netdev of the namespace has that name."""

    def remove_altname(self, ifindex: int, name: str) -> None:
        """Remove an alternative name from a netdev; ENOENT or EINVAL if it does not have it."""

    def rename(self, ifindex: int, name: str) -> None:
        """Rename a netdev, also to one of its alternative names. Before Linux 6.2: EBUSY while it is up."""

    def set_vf(self, ifindex: int, index: int, **given: Any) -> None:
        """Change the given attributes of VF ``index`` through its PF, by the names of agent/spec/vf_attributes.

        The kernel sets ``vlan``, ``qos`` and ``vlan_protocol`` together, and the two rates together. If one value of such a
        group is given, the others are set, too: those that are not given become 0 (the protocol 802.1Q).
        """

    def gateway_ifindexes(self, without: Collection[int] = ()) -> frozenset[int]:
        """The netdevs that carry a default route or one through a gateway (IPv4 and IPv6), in any table but ``without``."""

    def uppers_elsewhere(self) -> dict[int, tuple[str, ...]]:
        """The macvlans, ipvlans and VLANs of other network namespaces, by the ifindex of the netdev here below them."""

    def route_ifindex(self, address: str, source: str | None = None) -> int | None:
        """The netdev through which an IP address is reached, from an own address ``source``; None if it is unreachable."""

    def connections(self) -> tuple[Connection, ...]:
        """The established TCP connections, also those of the kernel itself and those whose ends are both here."""

    def addresses(self, duplicate: bool = False) -> dict[int, tuple[str, ...]]:
        """The IP addresses with their prefix length (``10.0.0.1/24``) of every netdev, by ifindex.

        :param duplicate: those that the kernel does not use, since another node has them (``dadfailed``, only IPv6). False: the
            others.
        """

    def add_address(self, ifindex: int, address: str) -> None:
        """Add an address with its prefix length to a netdev; EEXIST if it has it. It is usable at once: no DAD for IPv6."""

    def remove_address(self, ifindex: int, address: str) -> None:
        """Remove an address from a netdev; EADDRNOTAVAIL if it does not have it."""

    def routes(self, tables: Collection[int]) -> tuple[Route, ...]:
        """The unicast routes with one next hop in these tables."""

    def add_route(self, route: Route) -> None:
        """Add a route, or replace the one to the same destination; ENETDOWN while the netdev is down."""

    def remove_route(self, route: Route) -> None:
        """Remove a route; ESRCH if it is not there."""

    def rules(self) -> tuple[Rule, ...]:
        """The rules whose only condition is the source address."""

    def add_rule(self, rule: Rule) -> None:
        """Add a rule; EEXIST if it is there."""

    def remove_rule(self, rule: Rule) -> None:
        """Remove a rule; ENOENT if it is not there."""


class Processes(Protocol):
    """The processes of the node."""

    def running(self) -> frozenset[str]:
        """The names (`comm`) of all processes."""

    def holders(self, paths: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
        """The processes (``ib_write_bw (pid 4711)``) that hold each device node open. A node that nobody holds is left out."""

    def memlock(self, names: frozenset[str]) -> Mapping[str, int]:
        """The lowest soft limit of locked memory (bytes, -1: unlimited) among the running processes of each name."""

    def arguments(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The command line of each process of this name."""

    def hang_up(self, name: str) -> None:
        """Send SIGHUP to each process of this name."""

    def affinity(self, pid: int) -> tuple[int, ...]:
        """The CPUs on which a thread may run, in rising order; ESRCH: it has ended."""

    def set_affinity(self, pid: int, cpus: Collection[int]) -> None:
        """Have a thread run on these CPUs only; ESRCH: it has ended; EINVAL: none of them is online."""


class System(Protocol):
    """Facts that only a library or another service has."""

    def installed_srcversion(self, module: str) -> str | None:
        """The ``srcversion`` of the module's file that modprobe would load; None if there is no file, or it has none."""

    def clock_synchronised(self) -> bool:
        """Whether the clock is synchronised; OSError if that is unknown."""


class Kubelet(Protocol):
    """The node's kubelet, if it has one."""

    def allocations(self) -> Mapping[str, tuple[str, ...]]:
        """The pods (``namespace/name``) to which each device is allocated.

        A device is a PCI address or, where its device plugin uses another name, that name (of an RDMA device or a subfunction).

        :raises OSError: there is a kubelet, and it does not answer.
        """

    def cpus(self) -> Mapping[str, frozenset[int]]:
        """The CPUs that only the pods have to which each device of :meth:`allocations` is allocated.

        :raises OSError: there is a kubelet, and it does not answer.
        """

    def started(self) -> float:
        """When it was last started (seconds since the epoch); 0: there is no kubelet."""


@frozen
class Setting:
    """A setting as the device reports it; ``value`` None: the device does not have it, or it is ``unreadable`` for a reason.
    A text: its parts have different values.

    ``maximum``: the largest value that the device takes, if it has one. ``requested``: what was asked for, where a driver may
    keep another value. ``changeable``: whether anybody can change it.
    """

    value: int | bool | str | None
    maximum: int | None = None
    requested: bool | None = None
    changeable: bool = True
    unreadable: str = ""


Group = Literal["channels", "rings", "coalescing", "features"]
"""Groups of ethtool's settings: ``channels`` (``rx``, ``tx``, ``combined``), ``rings`` (``rx``, ``tx``, in descriptors),
``coalescing`` (``adaptive_rx``, ``rx_usecs``, ``rx_frames``; the same of ``tx``), and ``features``, by the kernel's names."""


class Ethtool(Protocol):
    """The settings of ethtool, for netdevs in the host's network namespace.

    A setting that the driver does not support is missing when read, and setting it raises EOPNOTSUPP. Other errors are the
    kernel's, with its message. ENODEV: the netdev is gone.
    """

    def settings(self, group: Group, ifindex: int) -> Mapping[str, Setting]:
        """The settings of a group, by name."""

    def set(self, group: Group, ifindex: int, given: Mapping[str, int | bool]) -> None:
        """Set the given values in one step. A feature that another one forbids is left unchanged by the kernel."""

    def firmware(self, netdev: str) -> str | None:
        """The firmware's version as the driver reports it; None if that is unknown."""


@frozen
class Namespace:
    """A network namespace: its inode and a path to it. The record keeps no file open."""

    inode: int
    path: str


class Namespaces(Protocol):
    """The other network namespaces, to which netdevs may have been moved."""

    def searchable(self) -> bool:
        """Whether the netdevs of other namespaces can be read at all (Linux 5.2 or later, as root)."""

    def holding(self, functions: Collection[str]) -> dict[str, Namespace]:
        """The namespace of each of these PCI functions whose netdev is in another one."""

    def files(self, namespace: Namespace) -> AbstractContextManager[Attributes]:
        """The sysfs of that namespace, under the usual paths, for a `with` block. OSError: the namespace is gone.

        It must not be kept longer: reading the sysfs of a namespace that has gone may look like success.
        """


@frozen
class DcbState:
    """The Data Center Bridging (802.1Qaz) of a netdev: the priorities with PFC, and its entries for DSCPs.

    ``dscp``: pairs of a DSCP and a priority. The kernel keeps several entries for one DSCP if their priorities differ
    (dcb_ieee_setapp, net/dcb/dcbnl.c). If a netdev has entries, it trusts the DSCP of a packet, otherwise the priority in its
    VLAN tag (PCP).
    """

    pfc: frozenset[int]
    dscp: frozenset[tuple[int, int]] = frozenset()


class Dcb(Protocol):
    """Data Center Bridging of netdevs by name. OSError(EOPNOTSUPP) where the driver has none."""

    def state(self, netdev: str) -> DcbState | None:
        """The state; None if the driver has no DCB, or the netdev is gone."""

    def set_pfc(self, netdev: str, priorities: frozenset[int]) -> None:
        """Turn PFC on for these priorities and off for the others."""

    def add_dscp(self, netdev: str, entries: frozenset[tuple[int, int]]) -> None:
        """Add entries to :attr:`DcbState.dscp`."""

    def remove_dscp(self, netdev: str, entries: frozenset[tuple[int, int]]) -> None:
        """Remove entries of :attr:`DcbState.dscp`."""


@frozen
class QueuePair:
    """A queue pair that the kernel itself has: for storage, for IPoIB, for management datagrams.

    ``module``: the kernel module that has it (``nvme_rdma``). ``type``: ``RC`` and ``UC`` are connected with one peer, ``UD``,
    ``GSI`` and others with none. ``peer``: the IP address of the peer, if the rdma_cm made the connection by addresses.
    """

    module: str
    type: str
    peer: str = ""


@frozen
class CmDefaults:
    """The rdma_cm's defaults for connections of a RoCE port: ``tos`` is an octet, ``mode`` is ``RoCE v1`` or ``RoCE v2``."""

    tos: int
    mode: str


class Rdma(Protocol):
    """The settings of the RDMA subsystem that are not in sysfs."""

    def netns_mode(self) -> str | None:
        """``shared``: every network namespace sees all RDMA devices; ``exclusive``: its own. None: no RDMA subsystem."""

    def set_netns_mode(self, mode: str) -> None:
        """Change it; EBUSY while there is another network namespace than the first."""

    def queue_pairs(self, device: str) -> tuple[QueuePair, ...]:
        """The kernel's own queue pairs on an RDMA device; none if the device is gone."""

    def cm_defaults(self, device: str, port: int) -> CmDefaults | None:
        """The rdma_cm's defaults of a port; None if it is not loaded, there is no configfs, or no such device."""

    def set_cm_defaults(self, device: str, port: int, *, tos: int | None = None, mode: str | None = None) -> None:
        """Change the given defaults. Existing connections keep theirs."""


@frozen(kw_only=True)
class Event:
    """Says which device something happened to, so that it is read again. What happened is not kept.

    ``ifindex``: of a netdev of this namespace; ``netdev``: its name, if the event has it. ``netdev_of``: the PCI function of a
    netdev in another namespace; empty if the event does not have it. ``function``: the PCI function that something happened
    to, or below; ``physical_function``: its PF, if it is a VF; ``is_pci``: to the function itself. ``every_device``: it may
    concern all of them. ``table``: a routing table that lost a route, or a rule that selects it.
    """

    ifindex: int = 0
    netdev: str = ""
    table: int = 0
    netdev_of: str | None = None
    function: str = ""
    physical_function: str = ""
    is_pci: bool = False
    every_device: bool = False


class EventSource(Protocol):
    """One subscription."""

    def fileno(self) -> int:
        """A descriptor that is readable while events wait."""

    def receive(self) -> tuple[list[Event], bool]:
        """The events that wait, and whether others were lost since the last call. It never blocks."""


class Events(Protocol):
    """What the kernel announces."""

    def subscribe(self) -> Sequence[EventSource]:
        """Subscribe: whatever happens from now on is seen."""


@frozen(kw_only=True)
class Machine:
    """All of the machine that the agent uses. ``hung``: PCI addresses of devices that are avoided since a call hung."""

    files: Files
    netlink: Netlink
    processes: Processes
    ethtool: Ethtool
    kubelet: Kubelet
    system: System
    dcb: Dcb
    rdma: Rdma
    namespaces: Namespaces
    events: Events
    hung: frozenset[str] = frozenset()
