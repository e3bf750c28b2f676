"""One NIC of a spec: its function, its VFs, and their settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from attrs import Attribute, evolve, field, fields, frozen

from agent.spec.addresses import MOST_RAILS, Address
from agent.spec.ranges import parse_ranges
from agent.spec.selector import INDEX, NIC_NAME, Selector, name_of, netdev_name, nic_name
from agent.spec.validators import Each, Matches, OneOf, Within, cpu_list, vf_list
from agent.spec.vf_attributes import of_one_vf, ordered, with_wanted

DisruptionLevel = Literal["none", "rebind", "link-flap", "vf-reset", "reboot"]
LinkState = Literal["up", "down"]
VfDriver = Literal["netdevice", "vfio-pci"]
Owner = Literal["user", "trackbed"]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = get_args(Day)
LinkLayer = Literal["Ethernet", "InfiniBand"]
GidType = Literal["RoCE v2", "RoCE v1", "IB"]
IpFamily = Literal["IPv4", "IPv6"]
RoceVersion = Literal["RoCE v2", "RoCE v1"]
Trust = Literal["pcp", "dscp"]

TIME = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]")
READ_REQUESTS = (128, 256, 512, 1024, 2048, 4096)
# A name, or the pattern of the names of an entry with `select.each`.
NAMES = re.compile(rf"{NIC_NAME.pattern}|[A-Za-z0-9][A-Za-z0-9_.-]{{0,99}}\{{index\}}[A-Za-z0-9_.-]{{0,19}}")
PKEY = re.compile(r"0x[0-9a-f]{4}")


def _priorities(_: object, attribute: Attribute[Any], value: str | None) -> None:
    if value is None:
        return
    cpu_list(_, attribute, value)
    if any(priority > 7 for priority in parse_ranges(value)):
        raise ValueError(f"{attribute.name}: {value} is out of range; priorities go from 0 to 7")


def _pkey(key: str) -> None:
    if not int(key, 16) & 0x7FFF:
        raise ValueError(f"{key} is not a partition key; give another, such as 0x8001")


_READ_REQUEST = OneOf(READ_REQUESTS, "bytes", f"is not one of {', '.join(map(str, READ_REQUESTS))} bytes")
_MTU = Within(68, 65535, "bytes")
_TXQUEUELEN = Within(1, 2**31 - 1, "packets")
_PKEY = Matches(PKEY, "write it as 0x8001, in lower case", _pkey)
_TOS = Within(0, 255, "(DSCP << 2, and the ECN bits)")


_COUNT = Within(1, 65535, "channels")
_DESCRIPTORS = Within(1, 65536, "descriptors")
_USECS = Within(0, 65535, "microseconds")
_FRAMES = Within(0, 65535, "frames")
MOST_NAPI = 2**31 - 1
_NSECS = Within(0, MOST_NAPI, "nanoseconds")


@frozen
class Channels:
    """How many channels (queues with an interrupt) a netdev has, as `ethtool -L` sets them; ``None`` leaves a number alone.

    A netdev has either ``combined`` channels or ``rx`` and ``tx`` ones.
    """

    rx: int | None = field(default=None, validator=_COUNT)
    tx: int | None = field(default=None, validator=_COUNT)
    combined: int | None = field(default=None, validator=_COUNT)

    def __attrs_post_init__(self) -> None:
        for name in ("rx", "tx"):
            if self.combined is not None and getattr(self, name) is not None:
                raise ValueError(f"combined and {name}: a combined channel does both; keep one of them")


@frozen
class Rings:
    """The sizes of a netdev's queues in descriptors, as `ethtool -G` sets them; ``None`` leaves a size alone."""

    rx: int | None = field(default=None, validator=_DESCRIPTORS)
    tx: int | None = field(default=None, validator=_DESCRIPTORS)


@frozen
class Coalescing:
    """When a netdev interrupts, as `ethtool -C` sets it; ``None`` leaves a value alone.

    It interrupts ``*_usecs`` microseconds after a frame or after ``*_frames`` frames, whichever is first. With ``adaptive_rx``
    or ``adaptive_tx`` the driver chooses.
    """

    adaptive_rx: bool | None = None
    adaptive_tx: bool | None = None
    rx_usecs: int | None = field(default=None, validator=_USECS)
    rx_frames: int | None = field(default=None, validator=_FRAMES)
    tx_usecs: int | None = field(default=None, validator=_USECS)
    tx_frames: int | None = field(default=None, validator=_FRAMES)


@frozen
class Napi:
    """When a netdev's NAPI instances poll; ``None`` leaves a value alone. Timeouts are in nanoseconds."""

    defer_hard_irqs: int | None = field(default=None, validator=Within(0, MOST_NAPI, "empty polls"))
    gro_flush_timeout: int | None = field(default=None, validator=_NSECS)
    irq_suspend_timeout: int | None = field(default=None, validator=_NSECS)
    threaded: bool | None = None


Offloads = Mapping[str, bool]
"""Which features of a netdev are on, by the kernel's names for them: those of `ethtool -k` in full."""


@frozen(cache_hash=True, field_transformer=with_wanted)
class VfAttributes:
    """The attributes that the PF sets for its VFs, and the settings of their netdevs; ``None`` leaves a value alone.

    ``vlan`` 0 means untagged. A ``mac`` that is not given is derived from the PF's permanent address and the VF's index, so
    that it is the same after every reload. ``owner`` says who sets the attributes, MTU and name of a VF while a container or a
    virtual machine has it: that container or virtual machine (``user``, the default), or the agent (``trackbed``).

    Rates are in Mbit/s, 0 is none. ``link_state`` is the link that the PF shows to the VF (on InfiniBand the link policy);
    ``auto`` shows the PF's own. GUIDs are InfiniBand's, from vendor documents: not run on such a NIC. A VF whose ``driver`` is
    ``vfio-pci`` has no netdev, so it has neither ``mtu``, ``txqueuelen`` nor ``state``. ``irqs_on_pod_cpus``: while a pod has
    the VF's netdev and CPUs that no other pod may use, these serve its interrupts.
    """

    mtu: int | None = field(default=None, validator=_MTU)
    state: LinkState | None = None
    owner: Owner | None = None
    channels: Channels | None = None
    rings: Rings | None = None
    coalescing: Coalescing | None = None
    # A mapping cannot be hashed. It is still compared.
    offloads: Offloads | None = field(default=None, hash=False)
    napi: Napi | None = None
    txqueuelen: int | None = field(default=None, validator=_TXQUEUELEN)
    driver: VfDriver | None = None
    irqs_on_pod_cpus: bool | None = None

    if TYPE_CHECKING:
        # The fields come from the records in agent/spec/vf_attributes.
        def __getattr__(self, name: str) -> Any: ...

    def having(self, **values: Any) -> VfAttributes:
        """A copy with these values changed."""
        return evolve(self, **values)


@frozen
class VfGroup(VfAttributes):
    """Attributes of some VFs, which override the NIC's defaults. ``index`` is a range such as ``0-3,6``."""

    index: str = field(kw_only=True, validator=vf_list)

    def __attrs_post_init__(self) -> None:
        for name in of_one_vf():
            value = getattr(self, name)
            if value is not None and len(parse_ranges(self.index)) != 1:
                raise ValueError(
                    f"{name}: {value} cannot be given to VFs {self.index}; give one VF an entry of its own"
                )


_VF = fields(VfAttributes)


@frozen
class Vfs:
    """How many VFs a PF has, and their attributes: ``defaults`` for all, ``groups`` for some.

    If ``derive_macs`` is false, the agent leaves the address of a VF without ``mac`` alone. If ``derive_guids`` is false, it
    leaves the GUIDs of an InfiniBand VF without them alone.
    """

    count: int = field(validator=Within(0, 4096, "VFs"))
    defaults: VfAttributes = VfAttributes()
    groups: tuple[VfGroup, ...] = ()
    derive_macs: bool = True
    derive_guids: bool = True

    def __attrs_post_init__(self) -> None:
        for name in of_one_vf():
            if getattr(self.defaults, name) is not None:
                raise ValueError(
                    f"defaults.{name}: one address cannot serve all VFs; give it in a group with one index"
                )
        claimed: dict[int, int] = {}
        for position, group in enumerate(self.groups):
            place = f"groups[{position}]"
            for index in parse_ranges(group.index):
                if index >= self.count:
                    raise ValueError(f"{place}.index: index {group.index} is beyond count {self.count}; raise count")
                if index in claimed:
                    other = claimed[index]
                    raise ValueError(
                        f"groups[{other}].index and {place}.index: VF {index} is in {self.groups[other].index} and "
                        f"{group.index}; keep one"
                    )
                claimed[index] = position
            _agree(place, self._merged(group))
        if len(claimed) < self.count:
            _agree("defaults", self.defaults)

    def attributes(self, index: int) -> VfAttributes:
        """What VF ``index`` should have: the defaults, overridden by its group."""
        for group in self.groups:
            if index in parse_ranges(group.index):
                return self._merged(group)
        return self.defaults

    def _merged(self, group: VfGroup) -> VfAttributes:
        given = {f.name: value for f in _VF if (value := getattr(group, f.name)) is not None}
        return self.defaults.having(**given)


def _agree(where: str, vf: VfAttributes) -> None:
    """Check values that depend on each other. ``vf`` is a group merged with the defaults: each may lack what the other has."""
    for attribute in ordered():
        if fault := attribute.check(vf):
            raise ValueError(f"{where}: {fault}")


@frozen
class Window:
    """A time in which more is allowed: from ``start`` to ``end`` (UTC), on ``days``, or every day if none is given.

    A window whose ``end`` is before its ``start`` ends on the next day.
    """

    start: str = field(validator=Matches(TIME, "write it as 22:00"))
    end: str = field(validator=Matches(TIME, "write it as 04:30"))
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
    """The most disruptive changes that the agent may make by itself to a device that nobody uses.

    ``force``: it may make them to a device in use as well. ``windows`` allow more at certain times.
    """

    allow: DisruptionLevel = "vf-reset"
    force: bool = False
    windows: tuple[Window, ...] = ()


@frozen
class RdmaDevices:
    """Which RDMA devices a NIC must have for the node to be ready, each with an ACTIVE port.

    ``pf``: the physical function has one; ``vfs``: each VF has one. ``rate`` is the lowest rate of a port, in Gbit/s.
    ``gid_type``: each port has a GID of this type; ``gid_ipv4``: one that is made from an IPv4 address; ``gid_ipv6``: one that
    is made from an IPv6 address.
    ``pkeys``: the partition keys that each InfiniBand port has, as ``0x8001``; bit 15 is full membership.
    """

    pf: bool = True
    vfs: bool = False
    link_layer: LinkLayer | None = None
    rate: int | None = field(default=None, validator=Within(1, 3200, "Gbit/s"))
    gid_type: GidType | None = None
    gid_ipv4: bool = False
    gid_ipv6: bool = False
    pkeys: tuple[str, ...] = field(default=(), validator=Each(_PKEY, "a key"))

    def __attrs_post_init__(self) -> None:
        if not (self.pf or self.vfs):
            raise ValueError("it asks for no device; give pf or vfs, or leave rdma out")
        for family in self.gid_families if self.gid_type in (None, "IB") else ():
            key = f"gid_{family.lower()}"
            raise ValueError(
                f'{key}: only a RoCE GID is made from an {family} address; give gid_type "RoCE v2" as well'
            )
        if self.pkeys and (self.link_layer == "Ethernet" or self.gid_type not in (None, "IB")):
            raise ValueError("pkeys: only InfiniBand ports have partition keys of their own; remove pkeys")
        ethernet = None if self.gid_type is None else self.gid_type != "IB"
        if self.link_layer and ethernet is not None and ethernet != (self.link_layer == "Ethernet"):
            raise ValueError(
                f"gid_type: a port whose link layer is {self.link_layer} has no GID of type {self.gid_type}"
            )

    @property
    def gid_families(self) -> tuple[IpFamily, ...]:
        """The families of which each port has a GID; none: any will do."""
        given: tuple[tuple[IpFamily, bool], ...] = (("IPv4", self.gid_ipv4), ("IPv6", self.gid_ipv6))
        return tuple(family for family, wanted in given if wanted)


@frozen
class Roce:
    """RoCE quality of service of a NIC; what is not given is left alone.

    ``pfc`` and ``ecn`` are the priorities with priority flow control and with congestion notification, as ``3`` or ``3-4``;
    the empty text is none. ``cm_tos`` and ``cm_mode`` are the rdma_cm's defaults for connections. ``traffic_class`` is set on
    all queue pairs, whatever the application asks for. Both numbers are octets of IP's ToS: 106 is DSCP 26 and ECT(0).
    """

    trust: Trust | None = None
    pfc: str | None = field(default=None, validator=_priorities)
    ecn: str | None = field(default=None, validator=_priorities)
    cm_tos: int | None = field(default=None, validator=_TOS)
    cm_mode: RoceVersion | None = None
    traffic_class: int | None = field(default=None, validator=_TOS)


@frozen
class Nic:
    """One fabric NIC: a physical function and its VFs. ``disruption`` replaces the node's.

    With ``select.each`` each function that matches is a NIC, and ``{index}`` in ``name`` and ``altnames`` is its number.
    ``max_read_request`` is PCIe's (MRRS), in bytes.
    ``altnames`` are added to the alternative names of the PF's netdev; its other ones stay. ``txqueuelen`` is in packets.
    ``rail``: its number, from which its ``addresses`` and its routing table are derived; with ``select.each`` the number of the
    first NIC.
    """

    name: str = field(validator=Matches(NAMES, f"{nic_name.remedy}, and with select.each {INDEX} once"))
    select: Selector
    required: bool = True
    mtu: int | None = field(default=None, validator=_MTU)
    state: LinkState = "up"
    channels: Channels | None = None
    rings: Rings | None = None
    coalescing: Coalescing | None = None
    offloads: Offloads | None = None
    napi: Napi | None = None
    vfs: Vfs | None = None
    disruption: DisruptionPolicy | None = None
    max_read_request: int | None = field(default=None, validator=_READ_REQUEST)
    altnames: tuple[str, ...] = field(default=(), validator=Each(netdev_name))
    txqueuelen: int | None = field(default=None, validator=_TXQUEUELEN)
    rdma: RdmaDevices | None = None
    roce: Roce | None = None
    rail: int | None = field(default=None, validator=Within(0, MOST_RAILS - 1, "(the number of the rail)"))
    addresses: tuple[Address, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.select.each:
            if INDEX in self.name:
                raise ValueError(f"name: {INDEX} has a value only with select.each; give that, or another name")
            return
        for key, name in (("name", self.name), *((f"altnames[{i}]", name) for i, name in enumerate(self.altnames))):
            if INDEX not in name:
                raise ValueError(
                    f"{key}: {name} would be the name of each of several NICs; put {INDEX} in, as rail{INDEX}"
                )
        if self.rail is not None:
            self._check_rails(self.rail + self.select.most - 1)
        for position, group in enumerate(self.vfs.groups if self.vfs else ()):
            for key in of_one_vf():
                if getattr(group, key) is not None:
                    raise ValueError(
                        f"vfs.groups[{position}].{key}: one address cannot serve VFs of several NICs (select.each); "
                        "give that NIC an entry of its own"
                    )

    def _check_rails(self, last: int) -> None:
        if self.select.least != self.select.most:
            raise ValueError(
                "rail: give select.min and select.max, and the same number: without one NIC, the next would have its addresses"
            )
        if last >= MOST_RAILS:
            raise ValueError(f"rail: {self.select.most} NICs from {self.rail} on go to rail {last}; lower rail")

    def member(self, index: int, pci: str) -> Nic:
        """An entry for NIC ``index`` of an entry with ``select.each``; ``pci`` is the address of its function."""
        altnames = tuple(name_of(name, index) for name in self.altnames)
        select, rail = self.select.of_one(pci), None if self.rail is None else self.rail + index
        return evolve(self, name=name_of(self.name, index), altnames=altnames, select=select, rail=rail)

    def rails(self) -> range:
        """The numbers of its rails: none or one, or with ``select.each`` one for each NIC."""
        return range(0) if self.rail is None else range(self.rail, self.rail + self.select.most)
