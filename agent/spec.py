"""NodeSpec: what one node should be, parsed strictly from JSON and written by one serializer."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, Literal, get_args

from attrs import Attribute, field, fields, frozen

from agent.ranges import parse_ranges
from agent.strict import Faults, Strict, unique_keys

DisruptionLevel = Literal["none", "rebind", "link-flap", "vf-reset", "reboot"]
LinkState = Literal["up", "down"]
VlanProtocol = Literal["802.1Q", "802.1ad"]
VfLinkState = Literal["auto", "enable", "disable"]
VfDriver = Literal["netdevice", "vfio-pci"]
IrqbalancePolicy = Literal["disabled", "banned", "untouched"]
Mode = Literal["enforce", "observe"]
Owner = Literal["taker", "trackbed"]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = get_args(Day)
LinkLayer = Literal["Ethernet", "InfiniBand"]
GidType = Literal["RoCE v2", "RoCE v1", "IB"]
RoceVersion = Literal["RoCE v2", "RoCE v1"]
Trust = Literal["pcp", "dscp"]
NetnsMode = Literal["shared", "exclusive"]
ProbeSeverity = Literal["required", "warn", "off"]

PROBES = frozenset(
    {
        *("carrier", "clock", "device_plugins", "error_counters", "gpus", "hung", "irqbalance", "kernel_modules"),
        *("link_flaps", "memlock", "nics", "pcie_link", "rdma_chardevs", "rdma_devices", "rdma_ports"),
    }
)
"""The names of the readiness checks: the modules of ``agent/probes``, which this module cannot import."""

MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
PCI_ID = re.compile(r"[0-9a-f]{4}")
# RFC 1123 subdomain, what the API server takes as a Node's name; an IPv4 address is one as well.
NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d")
SYSCTL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_@:-]*([./][A-Za-z0-9_@:-]+)+")
MODULE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
READ_REQUESTS = (128, 256, 512, 1024, 2048, 4096)
ANY = re.compile(r"[\s\S]*")
NIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
GUID = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){7}")
# What dev_valid_name() takes (net/core/dev.c), in at most ALTIFNAMSIZ - 1 bytes.
ALTNAME = re.compile(r"[^\s/:.]([^\s/:]{0,126})", re.ASCII)


SpecError = Faults


@frozen
class Matches:
    """A text that ``pattern`` describes in full; ``check`` looks closer."""

    pattern: re.Pattern[str]
    remedy: str
    check: Callable[[str], None] | None = None

    def __call__(self, _: object, attribute: Attribute[Any], value: str | None) -> None:
        """Validate a field."""
        if value is None:
            return
        if not self.pattern.fullmatch(value):
            raise ValueError(f"{attribute.name}: {value!r} is not valid; {self.remedy}")
        if self.check is not None:
            try:
                self.check(value)
            except ValueError as error:
                raise ValueError(f"{attribute.name}: {error}") from None


@frozen
class Within:
    """A number from ``low`` to ``high``."""

    low: int
    high: int
    unit: str

    def __call__(self, _: object, attribute: Attribute[Any], value: int | None) -> None:
        """Validate a field."""
        if value is not None and not self.low <= value <= self.high:
            raise ValueError(f"{attribute.name}: {value} is out of range; give {self.low} to {self.high} {self.unit}")


def _matches(pattern: re.Pattern[str], remedy: str) -> Any:
    return Matches(pattern, remedy)


def _within(low: int, high: int, unit: str) -> Any:
    return Within(low, high, unit)


def _power_of_two(_: object, attribute: Attribute[Any], value: int) -> None:
    if value & (value - 1) or not 0 < value <= 1 << 29:
        raise ValueError(f"{attribute.name}: {value} is no power of two up to {1 << 29}; give one, such as 32768")


def _is_unicast(mac: str) -> None:
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise ValueError(f"{mac} is no unicast address; give one whose first octet is even")


def _probe_names(_: object, attribute: Attribute[Any], value: Mapping[str, object]) -> None:
    unknown = [name for name in value if name not in PROBES]
    for name in unknown:
        near = difflib.get_close_matches(name, PROBES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known probes: {', '.join(sorted(PROBES))}"
        raise ValueError(f"{attribute.name}: unknown probe {name!r}; {hint}")


def _date(_: object, attribute: Attribute[Any], value: str) -> None:
    try:
        written = date.fromisoformat(value).isoformat()
    except ValueError:
        written = ""
    if written != value:
        raise ValueError(f"{attribute.name}: {value!r} is no date; write it as 2026-12-31")


def _is_cpu_list(text: str) -> None:
    try:
        parse_ranges(text)
    except ValueError as error:
        raise ValueError(f"{error}; write it as 0-3,8") from None


_unicast_mac = Matches(MAC, "write it as 02:00:5e:10:00:01, in lower case", _is_unicast)
_cpu_list = Matches(ANY, "numbers and ranges: 0-3,8", _is_cpu_list)


def _priorities(_: object, attribute: Attribute[Any], value: str | None) -> None:
    if value is None:
        return
    _cpu_list(_, attribute, value)
    if any(priority > 7 for priority in parse_ranges(value)):
        raise ValueError(f"{attribute.name}: {value} is out of range; priorities go from 0 to 7")


def _altnames(_: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
    for name in value:
        _matches(ALTNAME, "give up to 127 characters, no white space, '/' or ':', and no dot in front")(
            _, attribute, name
        )
    if len(set(value)) != len(value):
        raise ValueError(f"{attribute.name}: a name is given twice; names are unique on a node")


_MTU = _within(68, 65535, "bytes")
_RATE = _within(0, 2**32 - 1, "Mbit/s (0 is none)")
_TXQUEUELEN = _within(1, 2**31 - 1, "packets")
_GUID = _matches(GUID, "write it as 00:11:22:33:44:55:66:77, in lower case")
_TOS = _within(0, 255, "(DSCP << 2, and the ECN bits)")
_PCI_ID = _matches(PCI_ID, "give the four hexadecimal digits that `lspci -n` prints, such as 15b3")


@frozen
class Selector:
    """Which physical function is meant; all the given keys must match, and exactly one function.

    ``mac`` is the permanent address (IFLA_PERM_ADDRESS), not one that was set later. ``serial`` is the PCI device serial
    number as lspci prints it, or the card's serial number in its Vital Product Data; the ports of one card may share it.
    """

    pci: str | None = field(default=None, validator=_matches(PCI_ADDRESS, "write it as 0000:3b:00.0"))
    mac: str | None = field(default=None, validator=_unicast_mac)
    netdev: str | None = None
    vendor: str | None = field(default=None, validator=_PCI_ID)
    device: str | None = field(default=None, validator=_PCI_ID)
    driver: str | None = None
    serial: str | None = None

    def __attrs_post_init__(self) -> None:
        if not any(getattr(self, f.name) for f in fields(Selector)):
            raise ValueError("it selects nothing; give one of pci, mac, netdev, vendor, device, driver, serial")

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(Selector))
        return ", ".join(f"{name}={value}" for name, value in given if value)


_COUNT = _within(0, 65535, "channels")
_DESCRIPTORS = _within(1, 65536, "descriptors")
_USECS = _within(0, 65535, "microseconds")
_FRAMES = _within(0, 65535, "frames")


@frozen
class Channels:
    """How many channels (queues with an interrupt) a netdev has, as `ethtool -L` sets them; ``None`` leaves a number alone.

    A driver has either ``combined`` channels or ``rx`` and ``tx`` ones; a few have both.
    """

    rx: int | None = field(default=None, validator=_COUNT)
    tx: int | None = field(default=None, validator=_COUNT)
    combined: int | None = field(default=None, validator=_COUNT)


@frozen
class Rings:
    """The sizes of a netdev's queues in descriptors, as `ethtool -G` sets them; ``None`` leaves a size alone."""

    rx: int | None = field(default=None, validator=_DESCRIPTORS)
    tx: int | None = field(default=None, validator=_DESCRIPTORS)


@frozen
class Coalescing:
    """When a netdev interrupts, as `ethtool -C` sets it; ``None`` leaves a value alone.

    At the latest ``*_usecs`` microseconds after a frame, or after ``*_frames`` of them; adaptive: by the driver's own measure.
    """

    adaptive_rx: bool | None = None
    adaptive_tx: bool | None = None
    rx_usecs: int | None = field(default=None, validator=_USECS)
    rx_frames: int | None = field(default=None, validator=_FRAMES)
    tx_usecs: int | None = field(default=None, validator=_USECS)
    tx_frames: int | None = field(default=None, validator=_FRAMES)


Offloads = Mapping[str, bool]
"""Which features of a netdev are on, by the kernel's names for them: those of `ethtool -k` in full."""


@frozen
class VfAttributes:
    """What the PF grants its VFs, and the state of their netdevs; ``None`` leaves a value alone.

    ``vlan`` 0 means untagged. ``mac`` left out is derived from the PF's permanent address and the VF's index,
    so that it is the same after every reload. ``owner``: while a container or a virtual machine has the VF, its attributes,
    MTU and name are theirs (``taker``, the default), or kept as they are here all the same (``trackbed``).

    Rates are in Mbit/s, 0 is none. ``link_state`` is the link as the PF shows it to the VF (on InfiniBand the link policy):
    ``auto`` is the PF's own. GUIDs are InfiniBand's, from vendor documents: not run on such a NIC. A VF whose ``driver`` is
    ``vfio-pci`` has no netdev, hence neither ``mtu``, ``txqueuelen`` nor ``state``.
    """

    mac: str | None = field(default=None, validator=_unicast_mac)
    vlan: int | None = field(default=None, validator=_within(0, 4094, "(0 is untagged)"))
    trust: bool | None = None
    spoofchk: bool | None = None
    mtu: int | None = field(default=None, validator=_MTU)
    state: LinkState | None = None
    owner: Owner | None = None
    channels: Channels | None = None
    rings: Rings | None = None
    coalescing: Coalescing | None = None
    offloads: Offloads | None = None
    qos: int | None = field(default=None, validator=_within(0, 7, "(VLAN priority)"))
    vlan_protocol: VlanProtocol | None = None
    link_state: VfLinkState | None = None
    min_tx_rate: int | None = field(default=None, validator=_RATE)
    max_tx_rate: int | None = field(default=None, validator=_RATE)
    rss_query: bool | None = None
    node_guid: str | None = field(default=None, validator=_GUID)
    port_guid: str | None = field(default=None, validator=_GUID)
    txqueuelen: int | None = field(default=None, validator=_TXQUEUELEN)
    driver: VfDriver | None = None


@frozen
class VfGroup(VfAttributes):
    """Attributes of some VFs: ``index`` is a range such as ``0-3,6``; they stand above the NIC's defaults."""

    index: str = field(kw_only=True, validator=_cpu_list)

    def __attrs_post_init__(self) -> None:
        for name in _OF_ONE:
            value = getattr(self, name)
            if value is not None and len(parse_ranges(self.index)) != 1:
                raise ValueError(
                    f"{name}: {value} cannot be given to VFs {self.index}; give one VF an entry of its own"
                )


_VF = fields(VfAttributes)
# Addresses: no two VFs share one.
_OF_ONE = ("mac", "node_guid", "port_guid")


def _first(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


@frozen
class Vfs:
    """How many VFs a PF has, and what they are: ``defaults`` for all, ``groups`` for some.

    ``derive_macs`` false leaves the addresses of VFs that are given none alone.
    """

    count: int = field(validator=_within(0, 4096, "VFs"))
    defaults: VfAttributes = VfAttributes()
    groups: tuple[VfGroup, ...] = ()
    derive_macs: bool = True

    def __attrs_post_init__(self) -> None:
        for name in _OF_ONE:
            if getattr(self.defaults, name) is not None:
                raise ValueError(
                    f"defaults.{name}: one address cannot serve all VFs; give it in a group with one index"
                )
        claimed: dict[int, str] = {}
        for group in self.groups:
            for index in parse_ranges(group.index):
                if index >= self.count:
                    raise ValueError(f"groups: index {group.index} is beyond count {self.count}; raise count")
                if index in claimed:
                    raise ValueError(f"groups: VF {index} is in {claimed[index]} and {group.index}; keep one")
                claimed[index] = group.index
            _agree(f"groups: {group.index}", self._merged(group))
        if len(claimed) < self.count:
            _agree("defaults", self.defaults)

    def attributes(self, index: int) -> VfAttributes:
        """What VF ``index`` should have: its group's values above the defaults."""
        for group in self.groups:
            if index in parse_ranges(group.index):
                return self._merged(group)
        return self.defaults

    def _merged(self, group: VfGroup) -> VfAttributes:
        merged = {f.name: _first(getattr(group, f.name), getattr(self.defaults, f.name)) for f in _VF}
        return VfAttributes(**merged)


def _agree(where: str, vf: VfAttributes) -> None:
    """Values that make sense only together: a group may give what the defaults lack, so this is asked of both merged."""
    for name in ("qos", "vlan_protocol"):
        if getattr(vf, name) is not None and vf.vlan is None:
            raise ValueError(f"{where}: {name} needs vlan, which is not given; give it, too")
    if vf.min_tx_rate and vf.max_tx_rate is None:
        raise ValueError(f"{where}: min_tx_rate needs max_tx_rate, which is not given; give it, too (0 is none)")
    if vf.min_tx_rate and vf.max_tx_rate and vf.min_tx_rate > vf.max_tx_rate:
        raise ValueError(f"{where}: min_tx_rate {vf.min_tx_rate} is above max_tx_rate {vf.max_tx_rate}; lower it")


@frozen
class Window:
    """A time in which more is allowed: from ``start`` to ``end`` (UTC), on ``days``, or every day if none is given.

    A window that ends before it starts goes past midnight.
    """

    start: str = field(validator=_matches(TIME, "write it as 22:00"))
    end: str = field(validator=_matches(TIME, "write it as 04:30"))
    allow: DisruptionLevel
    days: tuple[Day, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.start == self.end:
            raise ValueError(f"start and end are both {self.start}; give an end that differs")

    def __str__(self) -> str:
        days = f"{','.join(self.days)} " if self.days else ""
        return f"{days}{self.start}-{self.end} UTC ({self.allow})"


@frozen
class DisruptionPolicy:
    """The most that the agent may do by itself to a device that nobody uses.

    ``force``: also to one that somebody uses. ``windows`` allow more at certain times.
    """

    allow: DisruptionLevel = "vf-reset"
    force: bool = False
    windows: tuple[Window, ...] = ()


def _read_request(_: object, attribute: Attribute[Any], value: int | None) -> None:
    if value is not None and value not in READ_REQUESTS:
        raise ValueError(f"{attribute.name}: {value} is not one of {', '.join(map(str, READ_REQUESTS))} bytes")


@frozen
class RdmaDevices:
    """Which RDMA devices a NIC must have for the node to be ready, each with an ACTIVE port.

    ``pf``: the physical function has one; ``vfs``: each VF has. ``rate`` is the least, in Gbit/s. ``gid_type``: each port
    has a GID of it; ``gid_ipv4``: one made from an IPv4 address.
    """

    pf: bool = True
    vfs: bool = False
    link_layer: LinkLayer | None = None
    rate: int | None = field(default=None, validator=_within(1, 3200, "Gbit/s"))
    gid_type: GidType | None = None
    gid_ipv4: bool = False

    def __attrs_post_init__(self) -> None:
        if not (self.pf or self.vfs):
            raise ValueError("it asks for no device; give pf or vfs, or leave rdma out")
        if self.gid_ipv4 and self.gid_type in (None, "IB"):
            raise ValueError('gid_ipv4: only a RoCE GID is made from an IPv4 address; give gid_type "RoCE v2" as well')
        ethernet = None if self.gid_type is None else self.gid_type != "IB"
        if self.link_layer and ethernet is not None and ethernet != (self.link_layer == "Ethernet"):
            raise ValueError(
                f"gid_type: a port whose link layer is {self.link_layer} has no GID of type {self.gid_type}"
            )


@frozen
class Roce:
    """RoCE quality of service of a NIC; what is not given is left alone.

    ``pfc`` and ``ecn`` are the priorities with priority flow control and with congestion notification, as ``3`` or ``3-4``;
    the empty text is none. ``cm_tos`` and ``cm_mode`` are the rdma_cm's defaults for connections, ``traffic_class`` is
    what queue pairs get whatever the application asks for. Both numbers are octets of IP's ToS: 106 is DSCP 26 and ECT(0).
    """

    trust: Trust | None = None
    pfc: str | None = field(default=None, validator=_priorities)
    ecn: str | None = field(default=None, validator=_priorities)
    cm_tos: int | None = field(default=None, validator=_TOS)
    cm_mode: RoceVersion | None = None
    traffic_class: int | None = field(default=None, validator=_TOS)


@frozen
class Nic:
    """One fabric NIC: a physical function and its VFs. ``disruption`` stands in the place of the node's.

    ``max_read_request`` is the PCIe one (MRRS), in bytes.
    ``altnames`` are added to the alternative names of the PF's netdev; none is taken away. ``txqueuelen`` in packets.
    """

    name: str = field(validator=_matches(NIC_NAME, "use letters, digits, '-', '_' and '.'"))
    select: Selector
    required: bool = True
    mtu: int | None = field(default=None, validator=_MTU)
    state: LinkState = "up"
    channels: Channels | None = None
    rings: Rings | None = None
    coalescing: Coalescing | None = None
    offloads: Offloads | None = None
    vfs: Vfs | None = None
    disruption: DisruptionPolicy | None = None
    max_read_request: int | None = field(default=None, validator=_read_request)
    altnames: tuple[str, ...] = field(default=(), validator=_altnames)
    txqueuelen: int | None = field(default=None, validator=_TXQUEUELEN)
    rdma: RdmaDevices | None = None
    roce: Roce | None = None


@frozen
class Irqs:
    """Interrupt placement of the fabric NICs. ``exclude_cpus`` are kept free of them."""

    pin: bool = True
    exclude_cpus: str = field(default="", validator=_cpu_list)
    irqbalance: IrqbalancePolicy = "disabled"


@frozen
class Rps:
    """Receive packet steering: on only where a netdev has fewer queues than its CPUs."""

    enable: bool = True


HUGEPAGE_SIZE = re.compile(r"[1-9][0-9]*[KMG]")
HUGEPAGE_UNITS = {"K": 1, "M": 1024, "G": 1024 * 1024}


@frozen
class HugepagePool:
    """Huge pages of one ``size`` (such as 2M or 1G): ``count`` of them on a NUMA node, or over all nodes if that is None."""

    size: str = field(validator=_matches(HUGEPAGE_SIZE, "write it as 2M or 1G"))
    count: int = field(validator=_within(0, 1 << 30, "pages"))
    numa_node: int | None = field(default=None, validator=_within(0, 1023, "NUMA nodes"))

    @property
    def kilobytes(self) -> int:
        """A page's size in KiB."""
        return int(self.size[:-1]) * HUGEPAGE_UNITS[self.size[-1]]

    @property
    def name(self) -> str:
        """What changes call the pool: ``2M``, ``1G node1``."""
        return self.size if self.numa_node is None else f"{self.size} node{self.numa_node}"

    @classmethod
    def named(cls, name: str, count: int) -> HugepagePool:
        """The pool that :attr:`name` is of."""
        size, _, node = name.partition(" node")
        return cls(size, count, int(node) if node else None)


@frozen
class Gpus:
    """The GPUs that the node must have. ``peer_memory``: RDMA devices must be able to reach their memory."""

    count: int = field(validator=_within(1, 64, "GPUs"))
    peer_memory: bool = False


@frozen
class ProbePolicy:
    """How one readiness check is taken; ``None`` leaves it as the check's own default.

    ``fail_after`` failures within the last ``of`` checks make its condition False. A check that has not come back ``deadline``
    seconds after its beginning is Unknown.
    """

    severity: ProbeSeverity | None = None
    fail_after: int | None = field(default=None, validator=_within(1, 100, "failures"))
    of: int | None = field(default=None, validator=_within(1, 100, "checks"))
    deadline: int | None = field(default=None, validator=_within(1, 600, "seconds"))

    def __attrs_post_init__(self) -> None:
        if self.of is not None and self.of < (self.fail_after or 1):
            raise ValueError(f"of: {self.of} checks cannot hold {self.fail_after} failures; raise of to fail_after")


@frozen
class Silence:
    """A check that only warns until the end of the day ``until`` (UTC), and why."""

    until: str = field(validator=_date)
    reason: str

    def __attrs_post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("reason: it is empty; say why, for whoever reads the report")


@frozen
class Readiness:
    """What the node's readiness is judged by, by the name of the check (:data:`PROBES`)."""

    probes: Mapping[str, ProbePolicy] = field(factory=dict, validator=_probe_names)
    silenced: Mapping[str, Silence] = field(factory=dict, validator=_probe_names)


def _one_line(place: str, value: str) -> None:
    if not value.strip() or len(value.splitlines()) != 1:
        raise ValueError(f"{place}: {value!r} is no value; give one line of text")


def _sysctls(_: object, attribute: Attribute[Any], value: Mapping[str, str]) -> None:
    for name, given in value.items():
        if not SYSCTL.fullmatch(name) or ".." in name.replace("/", "."):
            raise ValueError(f"{attribute.name}: {name!r} is no sysctl; write it as sysctl -a prints it")
        _one_line(f"{attribute.name}.{name}", given)


def _module_parameters(_: object, attribute: Attribute[Any], value: Mapping[str, Mapping[str, str]]) -> None:
    for module, parameters in value.items():
        for name, given in parameters.items():
            if not MODULE_NAME.fullmatch(module) or not MODULE_NAME.fullmatch(name):
                raise ValueError(f"{attribute.name}: {module}.{name} is no module and parameter; see modinfo(8)")
            _one_line(f"{attribute.name}.{module}.{name}", given)
        if len({name.replace("-", "_") for name in parameters}) != len(parameters):
            raise ValueError(f"{attribute.name}.{module}: - and _ are the same in names; keep one")
    if len({module.replace("-", "_") for module in value}) != len(value):
        raise ValueError(f"{attribute.name}: - and _ are the same in modules' names; keep one")


def _hugepages(_: object, attribute: Attribute[Any], value: tuple[HugepagePool, ...]) -> None:
    pools = [(pool.kilobytes, pool.numa_node) for pool in value]
    for pool, (size, node) in zip(value, pools, strict=True):
        if pools.count((size, node)) > 1:
            raise ValueError(f"{attribute.name}: {pool.name} is given twice; keep one")
        if node is not None and (size, None) in pools:
            raise ValueError(f"{attribute.name}: {pool.size} is given for all nodes and for node {node}; keep either")


@frozen
class Rfs:
    """Receive flow steering: to the CPU where the application reads. ``entries``: flows of the whole node.

    ``isolated``: also where that may be a CPU that the kernel was told to keep free (isolcpus, nohz_full).
    """

    enable: bool = False
    # rps_sock_flow_sysctl() takes up to 1 << 29, and rounds up to a power of two.
    entries: int = field(default=32768, validator=_power_of_two)
    isolated: bool = False


@frozen
class Xps:
    """Transmit packet steering: each CPU sends through one queue, the one whose interrupt is nearest."""

    enable: bool = True


@frozen
class Rdma:
    """The node's RDMA subsystem.

    ``at_least``: how many of the NICs that have ``rdma`` must be as said there; all that are required if it is not given.
    """

    netns_mode: NetnsMode | None = None
    at_least: int | None = field(default=None, validator=_within(1, 64, "NICs"))


@frozen
class NodeSpec:
    """The whole of one node. ``node_name`` is the name of its Kubernetes Node, which may be an IP address.

    ``mode`` observe reports the plan and never writes; no condition is required of the node then.
    """

    node_name: str = field(validator=_matches(NODE_NAME, "give the Node's name: lower case, digits, '-' and '.'"))
    nics: tuple[Nic, ...] = ()
    irqs: Irqs = Irqs()
    rps: Rps = Rps()
    rfs: Rfs = Rfs()
    xps: Xps = Xps()
    rdma: Rdma = Rdma()
    disruption: DisruptionPolicy = DisruptionPolicy()
    readiness: Readiness = field(factory=Readiness)
    sysctls: Mapping[str, str] = field(factory=dict, validator=_sysctls)
    module_parameters: Mapping[str, Mapping[str, str]] = field(factory=dict, validator=_module_parameters)
    hugepages: tuple[HugepagePool, ...] = field(default=(), validator=_hugepages)
    gpus: Gpus | None = None
    mode: Mode = "enforce"

    def __attrs_post_init__(self) -> None:
        names = [nic.name for nic in self.nics]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"nics: the name {name} is given twice; names are unique on a node")
        altnames = [name for nic in self.nics for name in nic.altnames]
        for name in altnames:
            if altnames.count(name) > 1:
                raise ValueError(f"nics: the altname {name} is given to two NICs; names are unique on a node")
        expecting = sum(nic.rdma is not None for nic in self.nics)
        if self.rdma.at_least is not None and self.rdma.at_least > expecting:
            raise ValueError(f"rdma.at_least: {self.rdma.at_least} is more than the {expecting} NICs that have rdma")


_strict = Strict(NodeSpec)


def parse(text: str, where: str = "spec") -> NodeSpec:
    """Parse one node's spec.

    :param text: a JSON object.
    :param where: what the errors call the document: a file's name or a host.
    :raises SpecError: with every fault found, each naming its place.
    """
    try:
        document = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise SpecError([f"{where}: not valid JSON: {error}"]) from None
    return from_mapping(document, where)


def from_mapping(document: object, where: str = "spec") -> NodeSpec:
    """Make a NodeSpec of plain data (dicts, lists, scalars), as strictly as :func:`parse`."""
    return _strict.structure(document, NodeSpec, where)


def to_json(spec: NodeSpec) -> str:
    """The spec's one written form: sorted keys, defaults left out, a newline at the end."""
    return json.dumps(_strict.plain(spec), indent=2, sort_keys=True) + "\n"


def spec_hash(spec: NodeSpec) -> str:
    """What identifies a spec in reports: the first 16 hexadecimal digits of its written form's SHA-256."""
    return hashlib.sha256(to_json(spec).encode()).hexdigest()[:16]
