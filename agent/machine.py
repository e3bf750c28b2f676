"""The seam: what the agent needs of a machine. ``linux/`` implements it; the tests' fake does too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from attrs import frozen


@frozen
class VfInfo:
    """What a PF says of one of its VFs (IFLA_VFINFO_LIST); ``None`` where its driver reports nothing.

    Rates in Mbit/s, 0 is none. Of a driver that knows nothing of ``link_state``, rates or ``vlan_protocol`` the kernel tells
    these defaults (rtnl_fill_vfinfo, net/core/rtnetlink.c).
    """

    index: int
    mac: str
    vlan: int
    trust: bool | None
    spoofchk: bool | None
    qos: int = 0
    vlan_protocol: str = "802.1Q"
    link_state: str = "auto"
    min_tx_rate: int = 0
    max_tx_rate: int = 0
    rss_query: bool | None = None
    node_guid: str | None = None
    port_guid: str | None = None


@frozen
class Link:
    """One netdev of the host's network namespace.

    ``mac`` is the current address, ``permanent_mac`` the one it was made with (IFLA_PERM_ADDRESS; empty if none).
    ``carrier`` is False while the link is down. ``mtu`` in bytes, ``txqueuelen`` in packets.
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


class Attributes(Protocol):
    """What the kernel shows as files, by absolute path. Every method raises OSError as the kernel does."""

    def read(self, path: str) -> str:
        """The file's text without the white space at its end."""
        ...

    def write(self, path: str, text: str) -> None:
        """One write(2), as kernel attributes want it."""
        ...

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; FileNotFoundError if there is none."""
        ...

    def target(self, path: str) -> str:
        """The last component of where a symbolic link points."""
        ...


class Files(Attributes, Protocol):
    """sysfs, procfs and plain files. Every method raises OSError as the kernel does."""

    def replace(self, path: str, text: str) -> None:
        """Make a plain file of our own anew: readers see the old one or the new one, whole."""
        ...

    def writable(self, path: str) -> bool:
        """Whether a file has a write bit: sysfs refuses even root to open one without."""
        ...

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """At most ``size`` bytes of a file, from ``offset`` on."""
        ...

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        """One write of all of ``data`` at ``offset``."""
        ...


class Netlink(Protocol):
    """rtnetlink in the host's network namespace. Errors are OSError with the kernel's errno."""

    def links(self) -> list[Link]:
        """Every netdev, without VF information."""
        ...

    def link(self, name: str) -> Link | None:
        """One netdev by its name, or an alternative one, with its VFs; None if it is not there."""
        ...

    def set_link(
        self, ifindex: int, *, mtu: int | None = None, up: bool | None = None, txqueuelen: int | None = None
    ) -> None:
        """Change the given values of a netdev."""
        ...

    def add_altname(self, ifindex: int, name: str) -> None:
        """Give a netdev one more alternative name; EEXIST if any netdev of the namespace has it."""
        ...

    def remove_altname(self, ifindex: int, name: str) -> None:
        """Take one of its alternative names from a netdev; ENOENT or EINVAL if it has none such."""
        ...

    def rename(self, ifindex: int, name: str) -> None:
        """Give a netdev another name, its own alternative one if need be; before Linux 6.2 EBUSY while it is up."""
        ...

    def set_vf(
        self,
        ifindex: int,
        index: int,
        *,
        mac: str | None = None,
        vlan: int | None = None,
        trust: bool | None = None,
        spoofchk: bool | None = None,
        qos: int | None = None,
        vlan_protocol: str | None = None,
        link_state: str | None = None,
        min_tx_rate: int | None = None,
        max_tx_rate: int | None = None,
        rss_query: bool | None = None,
        node_guid: str | None = None,
        port_guid: str | None = None,
    ) -> None:
        """Change the given values of VF ``index`` through its PF.

        The kernel takes ``vlan``, ``qos`` and ``vlan_protocol`` as one, and the two rates: the rest of what is given in part
        becomes 0 (802.1Q).
        """
        ...

    def gateway_ifindexes(self) -> frozenset[int]:
        """The netdevs that carry a default route or one through a gateway (any table, IPv4 and IPv6)."""
        ...

    def route_ifindex(self, address: str) -> int | None:
        """The netdev through which an IP address is reached; None if it is not."""
        ...

    def addresses(self) -> dict[int, tuple[str, ...]]:
        """The IP addresses with their prefix length (``10.0.0.1/24``) of every netdev, by ifindex."""
        ...


class Processes(Protocol):
    """The processes of the node."""

    def running(self) -> frozenset[str]:
        """The command names (`comm`) of what runs now."""
        ...

    def holders(self, paths: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
        """The processes (``ib_write_bw (pid 4711)``) that hold each of the given device nodes open; without any, left out."""
        ...

    def memlock(self, names: frozenset[str]) -> Mapping[str, int]:
        """The lowest soft limit of locked memory (bytes, -1 is none) of the processes of each of these names that run."""
        ...

    def arguments(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The command line of each process of this name."""
        ...

    def hang_up(self, name: str) -> None:
        """Send SIGHUP to each process of this name."""
        ...


class System(Protocol):
    """What only a library or a system call tells."""

    def installed_srcversion(self, module: str) -> str | None:
        """The ``srcversion`` in the module's file that modprobe would load; None if there is no file, or none is in it."""
        ...

    def clock_synchronised(self) -> bool:
        """Whether something keeps the clock right; OSError if that cannot be told."""
        ...


class Kubelet(Protocol):
    """The node's kubelet, if it has one."""

    def allocations(self) -> Mapping[str, tuple[str, ...]]:
        """The pods (``namespace/name``) that each device was given to.

        A device is a PCI address, or else what its device plugin calls it: an RDMA device, a subfunction.

        :raises OSError: there is a kubelet, and it does not answer.
        """
        ...

    def started(self) -> float:
        """When it was started last (seconds since the epoch); 0: there is none."""
        ...


@frozen
class Quantity:
    """A number of channels, or a ring's size, and the most that the device can have."""

    value: int
    maximum: int


@frozen
class Feature:
    """A netdev's feature: whether it is on, whether that was asked for, and whether it can be changed at all."""

    on: bool
    requested: bool
    changeable: bool


class Ethtool(Protocol):
    """What ethtool reads and sets, of netdevs in the host's network namespace.

    What a driver does not have is left out of what is read, and EOPNOTSUPP when it is set. Other errors are the kernel's,
    with its reason; ENODEV: the netdev is gone.
    """

    def channels(self, ifindex: int) -> Mapping[str, Quantity]:
        """The numbers of channels: ``rx``, ``tx``, ``combined``."""
        ...

    def set_channels(self, ifindex: int, given: Mapping[str, int]) -> None:
        """Set the given numbers in one step."""
        ...

    def rings(self, ifindex: int) -> Mapping[str, Quantity]:
        """The rings' sizes in descriptors: ``rx``, ``tx``."""
        ...

    def set_rings(self, ifindex: int, given: Mapping[str, int]) -> None:
        """Set the given sizes in one step."""
        ...

    def coalescing(self, ifindex: int) -> Mapping[str, int | bool]:
        """``adaptive_rx`` and ``adaptive_tx``; ``rx_usecs``, ``rx_frames``, ``tx_usecs``, ``tx_frames``."""
        ...

    def set_coalescing(self, ifindex: int, given: Mapping[str, int | bool]) -> None:
        """Set the given values in one step."""
        ...

    def features(self, ifindex: int) -> Mapping[str, Feature]:
        """Every feature that this kernel knows, by its name."""
        ...

    def set_feature(self, ifindex: int, name: str, on: bool) -> None:
        """Ask for a feature to be on or off. What it depends on may keep the kernel from that: then it stays as it is."""
        ...


@frozen
class Namespace:
    """A network namespace: its inode, and a path that leads to it. It holds nothing open."""

    inode: int
    path: str


class Namespaces(Protocol):
    """The network namespaces beside the host's, which netdevs may have been moved to."""

    def holding(self, functions: Collection[str]) -> dict[str, Namespace]:
        """Where the netdevs of those of these PCI functions are that another namespace has."""
        ...

    def files(self, namespace: Namespace) -> AbstractContextManager[Attributes]:
        """The sysfs of that namespace, under the usual paths, within a `with` block: each time anew, since what is read of a
        namespace that is gone by now may look like success. OSError if it is gone already.
        """
        ...


class Details(Protocol):
    """What nothing is decided by and `inspect` shows; ``None`` and empty where it is not told."""

    def firmware(self, netdev: str) -> str | None:
        """The firmware's version, as the driver tells it."""
        ...

    def vpd(self, address: str) -> bytes:
        """A PCI function's Vital Product Data."""
        ...


@frozen
class DcbState:
    """What a netdev tells by Data Center Bridging (802.1Qaz): the priorities with PFC, and the priority of each DSCP.

    A netdev that has entries for DSCPs trusts the DSCP of a packet, otherwise the priority in its VLAN tag (PCP).
    """

    pfc: frozenset[int]
    dscp: Mapping[int, int]


class Dcb(Protocol):
    """Data Center Bridging of netdevs by name. OSError(EOPNOTSUPP) where the driver has none."""

    def state(self, netdev: str) -> DcbState | None:
        """What the netdev tells; None if its driver tells nothing, or it is gone."""
        ...

    def set_pfc(self, netdev: str, priorities: frozenset[int]) -> None:
        """Turn PFC on for these priorities, off for the others."""
        ...

    def add_dscp(self, netdev: str, priorities: Mapping[int, int]) -> None:
        """Give DSCPs their priority."""
        ...

    def remove_dscp(self, netdev: str, priorities: Mapping[int, int]) -> None:
        """Take entries of :attr:`DcbState.dscp` away."""
        ...


@frozen
class CmDefaults:
    """What the rdma_cm gives the connections of a RoCE port: ``tos`` an octet, ``mode`` ``RoCE v1`` or ``RoCE v2``."""

    tos: int
    mode: str


class Rdma(Protocol):
    """What of the RDMA subsystem is not in sysfs."""

    def netns_mode(self) -> str | None:
        """``shared``: every network namespace sees all RDMA devices; ``exclusive``: its own. None: no RDMA subsystem."""
        ...

    def set_netns_mode(self, mode: str) -> None:
        """Change it; EBUSY while there is another network namespace than the first."""
        ...

    def cm_defaults(self, device: str, port: int) -> CmDefaults | None:
        """The rdma_cm's defaults of a port; None where it cannot tell them: not loaded, no configfs, no such device."""
        ...

    def set_cm_defaults(self, device: str, port: int, *, tos: int | None = None, mode: str | None = None) -> None:
        """Change the given defaults; those who are connected keep theirs."""
        ...


@frozen(kw_only=True)
class Event:
    """Something that happened to a device, as far as it tells where to look again; its content is thrown away.

    ``ifindex``: of a netdev of this namespace. ``netdev_of``: the PCI function of a netdev in another namespace; empty if it is
    not told. ``function``: the PCI function that something happened to, or below; ``physical_function``: its PF, if it is a VF;
    ``is_pci``: to the function itself. ``every_device``: it may concern all of them.
    """

    ifindex: int = 0
    netdev_of: str | None = None
    function: str = ""
    physical_function: str = ""
    is_pci: bool = False
    every_device: bool = False


class EventSource(Protocol):
    """One subscription."""

    def fileno(self) -> int:
        """A descriptor that is readable while events wait."""
        ...

    def receive(self) -> tuple[list[Event], bool]:
        """Take the events that wait, and whether others were lost since the last call. It never blocks."""
        ...


class Events(Protocol):
    """What the kernel announces."""

    def subscribe(self) -> Sequence[EventSource]:
        """Subscribe: whatever happens from now on is seen."""
        ...


@frozen(kw_only=True)
class Machine:
    """Everything the agent touches. ``hung``: the PCI addresses of devices left alone, since a call to one never returned."""

    files: Files
    netlink: Netlink
    processes: Processes
    ethtool: Ethtool
    details: Details
    kubelet: Kubelet
    system: System
    dcb: Dcb
    rdma: Rdma
    namespaces: Namespaces
    events: Events
    hung: frozenset[str] = frozenset()
