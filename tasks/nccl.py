"""Writes /etc/nccl.conf: the netdev and the RDMA devices that NCCL uses on this node.

Each process that uses NCCL reads the file when it starts; environment variables override it. On instances of Alibaba Cloud's
series the names are fixed: `eth0`, and RDMA devices that begin with `mlx5`. On other nodes they follow from the hardware of the
spec's NICs: a storage card of the same kind is left out. The series are from vendor documents; not run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from ipaddress import ip_address
from typing import Literal, get_args

from attrs import field, frozen
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.validators import Matches, Within
from tasks.common.commands import Commands, refuse, script, warn
from tasks.common.data import Key, host_data, record
from tasks.common.templates import render
from tasks.common.texts import MARK, Texts, replace
from tasks.hardware import UNKNOWN, Hardware, InspectedFunction, RdmaDevice, here, is_erdma, shared

PATH = "/etc/nccl.conf"
PREVIOUS = f"{PATH}.previous"
"""Keeps a file that was there before, for example in a vendor's image."""

TEMPLATE = "nccl.conf.j2"

NetworkType = Literal[1, 2]
Name = Literal["GU8TF", "GU8TEF", "GX8SF", "P16EN"]
ComputeClass = Literal["gpu-hpn"]
Debug = Literal["VERSION", "WARN", "INFO", "TRACE"]
Layout = Literal["rails", "single-switch", "rail-optimized"]

LinkLayer = Literal["InfiniBand", "Ethernet"]
LINK_LAYERS: tuple[LinkLayer, ...] = get_args(LinkLayer)

CROSS_NIC: dict[Layout, int] = {"rails": 0, "single-switch": 1, "rail-optimized": 2}
"""NCCL_CROSS_NIC: whether a ring may enter a node by one NIC and leave it by another (NCCL's documentation)."""


@frozen
class Series:
    """A series of GPUs: its type of network, and how many GPUs a whole machine has."""

    network_type: NetworkType
    gpus: int


SERIES: dict[Name, Series] = {
    "GU8TF": Series(1, 8),
    "GU8TEF": Series(1, 8),
    "GX8SF": Series(1, 8),
    "P16EN": Series(2, 16),
}
COMPUTE_CLASSES: dict[ComputeClass, tuple[int, ...]] = {"gpu-hpn": (1, 2, 4, 8, 16)}
"""The numbers of GPUs that an instance of a compute class may have: an instance may be a part of a machine."""

CLOUD_INTERFACE = "eth0"
CLOUD_HCAS = "mlx5"

# The most bytes of a value that NCCL reads (src/misc/param.cc).
LONGEST = 1023

_interface_name = Matches(re.compile(r"[^\s/:=,]{1,15}"), "give a netdev's name, as `ip link` prints it")
_file = Matches(re.compile(r"/[^\s#]+"), "give the path of your provider's file, as '/opt/topo.xml'")
_list_of_hcas = Matches(
    re.compile(rf"(?!.{{{LONGEST + 1}}})[=^]?[A-Za-z0-9_.-]+(:\d+)?(,[A-Za-z0-9_.-]+(:\d+)?)*"),
    f"give names of RDMA devices, as 'mlx5' or '=mlx5_0,mlx5_1', at most {LONGEST} characters",
)


@frozen
class Nccl:
    """The inventory's key.

    ``network_type``: 1 is RDMA, 2 is sockets only; ``series`` implies it. ``compute_class``: the instance may have fewer GPUs
    than a machine of its series. ``interface`` (NCCL_SOCKET_IFNAME) and ``hcas`` (NCCL_IB_HCA) follow from the hardware if they
    are not given. ``gid_index`` (NCCL_IB_GID_INDEX): NCCL 2.21 and later choose it themselves, for each port. ``layout``: how
    the NICs of a node are connected (NCCL_CROSS_NIC). ``topology``: a provider's topology file on the node (NCCL_TOPO_FILE).
    """

    network_type: NetworkType | None = None
    series: Name | None = None
    compute_class: ComputeClass | None = None
    interface: str | None = field(default=None, validator=_interface_name)
    hcas: str | None = field(default=None, validator=_list_of_hcas)
    gid_index: int | None = field(default=None, validator=Within(0, 255, "as an index"))
    debug: Debug = "INFO"
    layout: Layout | None = None
    topology: str | None = field(default=None, validator=_file)

    def __attrs_post_init__(self) -> None:
        if self.series is None and self.network_type is None:
            raise ValueError(f"give network_type (1: RDMA, 2: sockets only), or series, one of {', '.join(SERIES)}")
        if self.series and self.network_type not in (None, SERIES[self.series].network_type):
            raise ValueError(
                f"network_type: {self.series} has type {SERIES[self.series].network_type}; remove network_type"
            )
        if self.kind == 2 and (self.hcas is not None or self.gid_index is not None):
            raise ValueError(
                "hcas and gid_index have no effect on a network of type 2, where NCCL uses no RDMA; remove them"
            )

    @property
    def kind(self) -> NetworkType:
        """The type of network, from ``series`` or ``network_type``."""
        return SERIES[self.series].network_type if self.series else self.network_type or 1

    @property
    def names_are_fixed(self) -> bool:
        """Whether it is an instance of Alibaba Cloud's, where the names of netdev and RDMA devices are known."""
        return self.series is not None or self.compute_class is not None

    def counts(self) -> tuple[int, ...]:
        """The numbers of GPUs that such an instance may have; none: any."""
        most = SERIES[self.series].gpus if self.series else None
        if self.compute_class:
            return tuple(count for count in COMPUTE_CLASSES[self.compute_class] if most is None or count <= most)
        return () if most is None else (most,)

    def wrong_count(self, gpus: int) -> str | None:
        """What is wrong with this number of GPUs."""
        counts = self.counts()
        if not counts or gpus in counts:
            return None
        key, name = ("compute_class", self.compute_class) if self.compute_class else ("series", self.series)
        last = f" or {counts[-1]}" if len(counts) > 1 else f"{counts[-1]}"
        return f"{key}: an instance of {name} has {', '.join(map(str, counts[:-1]))}{last} GPUs"


NCCL = Key[Nccl | None]("nccl", None, record(Nccl))


def text(wanted: Nccl, hardware: Hardware) -> str:
    """The file for a node with this hardware.

    :raises ValueError: the hardware lacks something; with the remedy.
    """
    if wrong := wanted.wrong_count(len(hardware.gpus)):
        raise ValueError(f"{wrong}, and this node has {len(hardware.gpus)}; correct {wrong.partition(':')[0]}")
    values: dict[str, object] = {
        "network_type": wanted.kind,
        "interface": _interface(wanted, hardware),
        "debug": wanted.debug,
    }
    values["cross_nic"] = CROSS_NIC[wanted.layout] if wanted.layout else None
    values["topology"] = wanted.topology
    if wanted.kind == 2:
        # NCCL_IB_HCA is present and empty, so that a value from elsewhere does not enable RDMA.
        return render(TEMPLATE, **values, hcas="", gid_index=None)
    if wanted.names_are_fixed:
        return render(TEMPLATE, **values, hcas=wanted.hcas or CLOUD_HCAS, gid_index=wanted.gid_index)
    devices = [(function, device) for function in functions(hardware) for device in function.rdma]
    used = [named for function, device in devices for named in _names(function, device)]
    if wanted.gid_index is not None and wanted.hcas is None:
        _check_index(wanted.gid_index, [device for _, device in devices])
    hcas = wanted.hcas or (_hcas(_of_one_link_layer(used)) if used or not devices else None)
    return render(TEMPLATE, **values, hcas=hcas, gid_index=wanted.gid_index)


def _interface(wanted: Nccl, hardware: Hardware) -> str:
    """The interface as the file has it. With '=' NCCL takes that netdev only, and not eno12 for eno1, too."""
    name = wanted.interface or (CLOUD_INTERFACE if wanted.names_are_fixed else hardware.route)
    if name is None:
        raise ValueError("interface: the node has no default route to take it from; give interface")
    if name not in hardware.netdevs:
        raise ValueError(
            f"interface: the node has no netdev {name}; it has {', '.join(hardware.netdevs)}; give interface"
        )
    if hardware.addressed and name not in hardware.addressed:
        raise ValueError(
            f"interface: the netdev {name} has no address that other nodes may reach, and NCCL's sockets need one; give an "
            f"interface that has: {', '.join(sorted(hardware.addressed))}"
        )
    # The vendor's documents of a series have the name alone.
    return name if wanted.names_are_fixed else f"={name}"


def functions(hardware: Hardware) -> tuple[InspectedFunction, ...]:
    """The functions whose RDMA devices NCCL uses: those of the spec's NICs.

    eRDMA's are taken only where there are no others: NCCL uses one kind at a time.
    """
    erdma = (each for each in hardware.functions if each.nic is not None and is_erdma(each))
    return shared(hardware.all_functions()) or tuple(erdma)


def _check_index(index: int, devices: Iterable[RdmaDevice]) -> None:
    """Refuse an index at which a RoCE port has no GID that other nodes may reach, if it has such GIDs at other indexes."""
    for device in devices:
        for port in device.ports:
            there = [gid.index for gid in port.gids if not ip_address(gid.address).is_link_local]
            if port.link_layer == "Ethernet" and there and index not in there:
                raise ValueError(
                    f"gid_index: port {port.number} of {device.name} has GIDs that other nodes may reach at "
                    f"{', '.join(map(str, there))}, not at {index}; remove gid_index: NCCL 2.21 and later "
                    "choose it for each port"
                )


def _names(function: InspectedFunction, device: RdmaDevice) -> list[tuple[LinkLayer, str]]:
    """What NCCL_IB_HCA has for a device, by link layer: its name means all of its ports.

    If the function has a netdev for each of several ports (ConnectX-3), only the first one is the NIC's. NCCL's own transport
    ignores ports of other link layers (net_ib/init.cc of NCCL): NCCL uses AWS's EFA by the plugin aws-ofi-nccl, which does not
    read NCCL_IB_HCA.
    """
    several = len(function.netdevs) > 1 and len(device.ports) > 1
    own = [port for port in device.ports if several and port.netdev == function.netdevs[0].name]
    ports = [(layer, port.number) for port in own or device.ports for layer in LINK_LAYERS if port.link_layer == layer]
    layers = {layer for layer, _ in ports}
    if own or len(layers) > 1:
        return [(layer, f"{device.name}:{number}") for layer, number in ports]
    return [(layer, device.name) for layer in layers]


def _of_one_link_layer(named: Collection[tuple[LinkLayer, str]]) -> list[str]:
    """The names of the link layer that most have.

    NCCL leaves none out by itself, and fails where it connects an InfiniBand port with one of RoCE (net_ib/connect.cc).
    """
    # dict.fromkeys, since with RoCE LAG two functions have one device.
    of = {layer: [name for each, name in dict.fromkeys(named) if each == layer] for layer in LINK_LAYERS}
    first, second = sorted(of.values(), key=len, reverse=True)
    if named and len(first) == len(second):
        counted = " and ".join(f"{layer} ({', '.join(names)})" for layer, names in of.items())
        raise ValueError(
            f"hcas: the NICs of the spec have equally many ports of {counted}; NCCL can use only one kind; give hcas"
        )
    return first


def _hcas(names: Collection[str]) -> str:
    if not names:
        raise ValueError(
            "network_type: the NICs of the spec have no RDMA device; see `trackbed inspect` and `trackbed doctor`, "
            "or give network_type 2; if they are in pods, give hcas"
        )
    # '=' makes the names match exactly, not as prefixes.
    listed = "=" + ",".join(names)
    if len(listed) > LONGEST:
        raise ValueError(f"hcas: {len(names)} RDMA devices make more than {LONGEST} characters; give hcas, as 'mlx5'")
    return listed


def configure() -> None:
    """Write the file; without the key `nccl`, remove a file of Trackbed's.

    :raises DeployError: the inventory's number of GPUs does not fit the series or the compute class.
    """
    wanted = NCCL.here()
    gpus = host_data().get("gpus")
    count = gpus.get("count") if isinstance(gpus, dict) else None
    if wanted and isinstance(count, int) and (wrong := wanted.wrong_count(count)):
        raise DeployError(f"{host.name}.{NCCL.name}.{wrong}, and gpus.count is {count}; correct one of the two")
    if wanted and wanted.topology is None:
        _warn_of_topology(host.get_fact(Texts, paths=(PATH, PREVIOUS)).get(PATH, ""))
    write(name="NCCL", wanted=wanted)


def _warn_of_topology(before: str) -> None:
    """A provider's image names a topology where the instance does not show it; without it NCCL is slow and says nothing."""
    lost = re.search(r"^NCCL_TOPO_FILE=(.*)$", before, re.MULTILINE)
    if lost and not before.startswith(MARK):
        warn(
            host,
            f"nccl: the {PATH} that is replaced has NCCL_TOPO_FILE={lost[1]}; if it describes this instance, "
            f"give nccl.topology {lost[1]!r}",
        )


@operation()
def write(wanted: Nccl | None) -> Commands:
    """Write the file if it differs. Another's file is kept as PREVIOUS, and restored when Trackbed's is removed."""
    files = host.get_fact(Texts, paths=(PATH, PREVIOUS))
    have = files.get(PATH, "")
    want = ""
    if wanted is not None:
        hardware = here()
        if hardware is None:
            yield refuse(UNKNOWN)
            return
        try:
            want = text(wanted, hardware)
        except ValueError as error:
            yield refuse(f"nccl.{error}")
            return
    elif not have.startswith(MARK):
        host.noop(f"{PATH} is not Trackbed's")
        return
    if have == want:
        host.noop(f"{PATH} is up to date")
        return
    if not want and PREVIOUS in files:
        yield script('mv -T "$1" "$2"', PREVIOUS, PATH)
        return
    if have and not have.startswith(MARK):
        # No copy: after a power cut that could be empty, and the file itself replaced.
        yield script('ln -f "$1" "$2"', PATH, PREVIOUS)
    yield from replace({PATH: have}, {PATH: want})
