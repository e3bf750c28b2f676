"""Writes /etc/nccl.conf: the netdev and the RDMA devices that NCCL uses on this node.

Each process that uses NCCL reads the file when it starts; environment variables override it. On instances of Alibaba Cloud's
series the names are fixed: `eth0`, and RDMA devices that begin with `mlx5`. On other nodes they follow from the hardware. The
series are from vendor documents; not run.
"""

from __future__ import annotations

import re
from typing import Literal

from attrs import frozen
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, host_data, record
from tasks.common.templates import render
from tasks.common.texts import MARK, Texts, place
from tasks.hardware import UNKNOWN, Hardware, NodeHardware

PATH = "/etc/nccl.conf"
PREVIOUS = f"{PATH}.previous"
"""Keeps a file that was there before, for example in a vendor's image."""

TEMPLATE = "nccl.conf.j2"

NetworkType = Literal[1, 2]
Name = Literal["GU8TF", "GU8TEF", "GX8SF", "P16EN", "gpu-hpn"]
Debug = Literal["VERSION", "WARN", "INFO", "TRACE"]


@frozen
class Series:
    """A series of instances: its type of network, and how many GPUs its instances have."""

    network_type: NetworkType
    gpus: range


SERIES: dict[Name, Series] = {
    "GU8TF": Series(1, range(8, 9)),
    "GU8TEF": Series(1, range(8, 9)),
    "GX8SF": Series(1, range(8, 9)),
    "P16EN": Series(2, range(16, 17)),
    "gpu-hpn": Series(2, range(1, 17)),
}
CLOUD_INTERFACE = "eth0"
CLOUD_HCAS = "mlx5"

_INTERFACE = re.compile(r"[^\s/:=,]{1,15}")
_HCAS = re.compile(r"[=^]?[A-Za-z0-9_.-]+(:\d+)?(,[A-Za-z0-9_.-]+(:\d+)?)*")

# The most bytes of a value that NCCL reads (src/misc/param.cc).
LONGEST = 1023


@frozen
class Nccl:
    """The inventory's key.

    ``network_type``: 1 is RDMA, 2 is sockets only; ``series`` implies it. The others follow from the hardware if they are not
    given: ``interface`` (NCCL_SOCKET_IFNAME), ``hcas`` (NCCL_IB_HCA), ``gid_index`` (NCCL_IB_GID_INDEX).
    """

    network_type: NetworkType | None = None
    series: Name | None = None
    interface: str | None = None
    hcas: str | None = None
    gid_index: int | None = None
    debug: Debug = "INFO"

    def __attrs_post_init__(self) -> None:
        faults = [*self._type(), *self._values()]
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def kind(self) -> NetworkType:
        """The type of network, from ``series`` or ``network_type``."""
        return SERIES[self.series].network_type if self.series else self.network_type or 1

    def _type(self) -> list[str]:
        if self.series is None and self.network_type is None:
            return [f"give network_type (1: RDMA, 2: sockets only), or series, one of {', '.join(SERIES)}"]
        if self.series and self.network_type not in (None, SERIES[self.series].network_type):
            return [f"network_type: {self.series} has type {SERIES[self.series].network_type}; remove network_type"]
        if self.kind == 2 and (self.hcas is not None or self.gid_index is not None):
            return ["hcas and gid_index have no effect on a network of type 2, where NCCL uses no RDMA; remove them"]
        return []

    def _values(self) -> list[str]:
        faults = []
        if self.interface is not None and not _INTERFACE.fullmatch(self.interface):
            faults.append(f"interface: {self.interface!r} is not a netdev's name; give it as `ip link` prints it")
        if self.hcas is not None and (not _HCAS.fullmatch(self.hcas) or len(self.hcas) > LONGEST):
            faults.append(
                f"hcas: {self.hcas!r} is not a list of RDMA devices; give names, as 'mlx5' or '=mlx5_0,mlx5_1'"
            )
        if self.gid_index is not None and not 0 <= self.gid_index <= 255:
            faults.append(f"gid_index: {self.gid_index} is out of range; give 0 to 255")
        return faults


NCCL = Key[Nccl | None]("nccl", None, record(Nccl))
KEYS = (NCCL,)


def text(wanted: Nccl, hardware: Hardware) -> str:
    """The file for a node with this hardware.

    :raises ValueError: the hardware lacks something; with the remedy.
    """
    if wanted.series and len(hardware.gpus) not in SERIES[wanted.series].gpus:
        raise ValueError(
            f"series: an instance of {wanted.series} has {_counts(SERIES[wanted.series].gpus)} GPUs, this node has "
            f"{len(hardware.gpus)}; correct series"
        )
    values = {"network_type": wanted.kind, "interface": _interface(wanted, hardware), "debug": wanted.debug}
    if wanted.kind == 2:
        # NCCL_IB_HCA is present and empty, so that a value from elsewhere does not enable RDMA.
        return render(TEMPLATE, **values, hcas="", gid_index=None)
    if wanted.series:
        return render(TEMPLATE, **values, hcas=wanted.hcas or CLOUD_HCAS, gid_index=wanted.gid_index)
    index = gid_index(hardware) if wanted.gid_index is None else wanted.gid_index
    return render(TEMPLATE, **values, hcas=wanted.hcas or _hcas(hardware), gid_index=index)


def _counts(gpus: range) -> str:
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]} to {gpus[-1]}"


def _interface(wanted: Nccl, hardware: Hardware) -> str:
    name = wanted.interface or (CLOUD_INTERFACE if wanted.series else hardware.route)
    if name is None:
        raise ValueError("interface: the node has no default route to take it from; give interface")
    if name not in hardware.netdevs:
        raise ValueError(
            f"interface: the node has no netdev {name}; it has {', '.join(hardware.netdevs)}; give interface"
        )
    return name


def _hcas(hardware: Hardware) -> str:
    names = [device.name for function in hardware.hcas() for device in function.rdma]
    if not names:
        raise ValueError(
            "network_type: the node has no RDMA device; see `trackbed inspect` and `trackbed doctor`, or give network_type 2"
        )
    # '=' makes the names match exactly, not as prefixes. dict.fromkeys, since with RoCE LAG two functions have one device.
    listed = "=" + ",".join(dict.fromkeys(names))
    if len(listed) > LONGEST:
        raise ValueError(f"hcas: {len(names)} RDMA devices make more than {LONGEST} characters; give hcas, as 'mlx5'")
    return listed


def gid_index(hardware: Hardware) -> int | None:
    """The index of the RoCE v2 GID of an IPv4 address, if it is the same on all ports: NCCL uses one index for all of them.

    None: NCCL 2.21 and later find the index themselves.
    """
    indexes = set()
    for function in hardware.hcas():
        for device in function.rdma:
            for port in device.ports:
                v2 = [gid.index for gid in port.gids if gid.type == "RoCE v2" and ":" not in gid.address]
                if device.transport == "RoCE" and v2:
                    indexes.add(min(v2))
    return indexes.pop() if len(indexes) == 1 else None


def configure() -> None:
    """Write the file; without the key `nccl`, remove a file of Trackbed's.

    :raises DeployError: the inventory's number of GPUs does not fit the series.
    """
    wanted = NCCL.here()
    gpus = host_data().get("gpus")
    count = gpus.get("count") if isinstance(gpus, dict) else None
    if wanted and wanted.series and isinstance(count, int) and count not in SERIES[wanted.series].gpus:
        raise DeployError(
            f"{host.name}.{NCCL.name}.series: an instance of {wanted.series} has {_counts(SERIES[wanted.series].gpus)} GPUs, "
            f"and gpus.count is {count}; correct one of the two"
        )
    write(name="NCCL", wanted=wanted)


@operation()
def write(wanted: Nccl | None) -> Commands:
    """Write the file if it differs. Another's file is kept as PREVIOUS, and restored when Trackbed's is removed."""
    files = host.get_fact(Texts, paths=(PATH, PREVIOUS))
    have = files.get(PATH, "")
    want = ""
    if wanted is not None:
        hardware = host.get_fact(NodeHardware)
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
        yield script('cp -p "$1" "$2"', PATH, PREVIOUS)
    yield from place(PATH, have, want)
