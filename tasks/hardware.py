"""A node's hardware: its PCI network functions, RDMA devices and GPUs.

It is read from `trackbed inspect --json` on the node, and from sysfs and procfs. Operations may depend on it. Deploy code may
not, since it runs before the operations that make VFs and RDMA devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal, Protocol, TypeVar

import cattrs
from attrs import evolve, frozen
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.node import NodeSpec
from tasks import node_spec
from tasks.common import prefetch
from tasks.common.commands import Commands, script
from tasks.common.data import host_data, this_host
from tasks.common.facts import FactBase
from tasks.common.status import COMMAND, NodeStatus
from tasks.drivers.gpu_driver import modules as gpu
from tasks.readiness import MARGIN, TIMEOUT

UNKNOWN = "the node's hardware is unknown, since `trackbed inspect --json` printed nothing; see what failed before this"

MELLANOX = "15b3"
DEPENDENT_KEYS = ("labels", "nccl", "device_plugins")
"""The inventory's keys whose tasks read the hardware."""

ERDMA = ("1ded", "107f")
"""The PCI vendor and device ID of Alibaba's eRDMA."""


@frozen
class GidEntry:
    """An entry of a port's GID table; ``type`` and ``address`` as the kernel prints them."""

    index: int
    type: str
    address: str


@frozen
class Port:
    """A port of an RDMA device. ``link_layer``: Ethernet or InfiniBand. ``netdev``: the one that it serves."""

    number: int
    link_layer: str | None
    gids: tuple[GidEntry, ...] = ()
    netdev: str | None = None


@frozen
class CharDevice:
    """A character device of an RDMA device. ``present``: it is in /dev/infiniband, where device plugins look."""

    name: str
    present: bool


@frozen
class RdmaDevice:
    """An RDMA device. ``transport``: RoCE, InfiniBand or iWARP."""

    name: str
    transport: str | None
    ports: tuple[Port, ...] = ()
    char_devices: tuple[CharDevice, ...] = ()

    def offers(self, kind: Literal["uverbs", "umad"]) -> bool:
        """Whether it has a character device of this kind in /dev/infiniband."""
        return any(each.present and each.name.startswith(kind) for each in self.char_devices)


@frozen
class Netdev:
    """A netdev of a function, in the host's network namespace. ``mtu`` in bytes.

    ``master``: the netdev that it is a member of, and ``member_of`` the kind of it, as `trackbed inspect` has them.
    """

    name: str
    mtu: int
    master: str | None = None
    member_of: str = ""


@frozen
class InspectedFunction:
    """A PCI function for networks.

    ``vendor`` and ``device``: four hexadecimal digits; ``index``: the number of a VF; ``nic``: the name of the NIC of the
    node's spec whose function it is, or of which it is a VF; ``nvlink_bridge``: it is no NIC, but for the fabric manager.
    """

    address: str
    vendor: str
    device: str
    driver: str | None
    netdevs: tuple[Netdev, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    index: int | None = None
    total_vfs: int = 0
    vfs: tuple[InspectedFunction, ...] = ()
    nic: str | None = None
    nvlink_bridge: bool = False

    @property
    def has_rdma(self) -> bool:
        """Whether it has an RDMA device."""
        return bool(self.rdma)


class _Function(Protocol):
    """The properties of a function that :func:`shared` reads. :class:`InspectedFunction` explains them."""

    @property
    def vendor(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def index(self) -> int | None: ...
    @property
    def nic(self) -> str | None: ...
    @property
    def has_rdma(self) -> bool: ...


Candidate = TypeVar("Candidate", bound=_Function)


def is_erdma(function: _Function) -> bool:
    """Whether it is an Elastic RDMA interface of Alibaba Cloud, by PCI ID."""
    return (function.vendor, function.device) == ERDMA


def shared(functions: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The functions of the spec's NICs whose RDMA devices are for processes on the node, and for pods that share devices.

    These are the physical functions with an RDMA device. If only VFs have RDMA devices, these are the VFs. eRDMA is left
    out: it has a device plugin of its own.
    """
    with_rdma = [each for each in functions if each.nic is not None and each.has_rdma and not is_erdma(each)]
    return tuple([each for each in with_rdma if each.index is None] or with_rdma)


@frozen
class Gpu:
    """A GPU of NVIDIA, by PCI vendor and class. ``driver``: the kernel driver that has it, or none."""

    address: str
    driver: str | None


@frozen
class Hardware:
    """A node's hardware, its loaded ``modules``, all its ``netdevs``, and ``route``: the netdev of its default route.

    That is the one of IPv4, if there is one. ``addressed``: the netdevs with an address that other nodes may reach; empty if
    that is unknown.
    """

    functions: tuple[InspectedFunction, ...]
    other_rdma: tuple[RdmaDevice, ...] = ()
    rdma_cm: bool = False
    gpus: tuple[Gpu, ...] = ()
    modules: frozenset[str] = frozenset()
    netdevs: tuple[str, ...] = ()
    route: str | None = None
    addressed: frozenset[str] = frozenset()

    def all_functions(self) -> tuple[InspectedFunction, ...]:
        """All physical functions in the order of their PCI addresses, each followed by its VFs."""
        return tuple(each for function in self.functions for each in (function, *function.vfs))

    def with_nics_of(self, spec: NodeSpec) -> Hardware:
        """The hardware with the spec's NICs marked; if the spec has none, every function but NVLink bridges is a NIC."""
        return evolve(self, functions=tuple(_meant(function, not spec.nics) for function in self.functions))


def _meant(function: InspectedFunction, all_are: bool) -> InspectedFunction:
    name = function.netdevs[0].name if function.netdevs else function.address
    nic = name if all_are and not function.nvlink_bridge else function.nic
    return evolve(function, nic=nic, vfs=tuple(evolve(vf, nic=nic) for vf in function.vfs))


def here() -> Hardware | None:
    """The current host's hardware, with the NICs of its spec; None: the node has no agent yet."""
    hardware: Hardware | None = host.get_fact(NodeHardware)
    return None if hardware is None else hardware.with_nics_of(node_spec.read())


_converter = cattrs.Converter()
_converter.register_structure_hook(int, lambda value, _: int(value))

_HARDWARE = (
    gpu.GPUS
    + """
[ -x "$1" ] || exit 0
# udev renames netdevs and RDMA devices a moment after they appear, as during the first pass of a boot.
udevadm settle --timeout=30 2>/dev/null || true
nvidia_gpus "$2" | sed 's/^/gpu /'
cat "$2/proc/modules" 2>/dev/null | while read -r name _; do echo "module $name"; done
for n in "$2"/sys/class/net/*; do if [ -e "$n" ]; then echo "netdev ${n##*/}"; fi; done
# Of 0.0.0.0/0 only, and not 0.0.0.0/1, as some VPNs make it. A route that rejects has * instead of a netdev, or lo (IPv6).
cat "$2/proc/net/route" 2>/dev/null | while read -r name to _ _ _ _ metric mask _; do
  case "$name $to $mask" in "* "*) ;; *" 00000000 00000000") echo "route $metric $name" ;; esac
done
cat "$2/proc/net/ipv6_route" 2>/dev/null | while read -r to bits _ _ _ metric _ _ _ name; do
  case "$to $bits $name" in *" lo") ;; "00000000000000000000000000000000 00 "*) echo "route6 $((0x$metric)) $name" ;; esac
done
ip -o addr show scope global 2>/dev/null | while read -r _ name _; do if [ "$name" != lo ]; then echo "address $name"; fi; done
echo inspection
"$1" inspect --json
"""
)


class NodeHardware(FactBase[Hardware | None]):
    """The node's hardware; None: the node has no agent yet."""

    shell = _HARDWARE
    words = (COMMAND,)

    def process(self, output: list[str]) -> Hardware | None:
        """Parse lines of a word and its values, then the JSON of `trackbed inspect`."""
        if "inspection" not in output:
            return None
        at = output.index("inspection")
        lines = [line.split() for line in output[:at]]
        inspection = json.loads("\n".join(output[at + 1 :]))
        addressed = frozenset(line[1] for line in lines if line[0] == "address")
        routes = sorted((line[0], int(line[1]), line[2]) for line in lines if line[0].startswith("route"))
        return Hardware(
            _converter.structure(inspection["functions"], tuple[InspectedFunction, ...]),
            _converter.structure(inspection["other_rdma"], tuple[RdmaDevice, ...]),
            inspection["rdma_cm"],
            tuple(Gpu(line[1], line[2] if line[2:] else None) for line in lines if line[0] == "gpu"),
            frozenset(line[1] for line in lines if line[0] == "module"),
            tuple(line[1] for line in lines if line[0] == "netdev"),
            next((name for *_, name in routes if name in addressed), routes[0][2] if routes else None),
            addressed,
        )


# If the node does not become ready in time, the deploy goes on with the hardware that it has; the last task says why it is
# not ready.
_SETTLE = '"$1" wait --hash "$2" --timeout "$3" >/dev/null 2>&1 || true'


def settle(version: str, spec_hash: str) -> None:
    """Wait until the agent has applied the spec, or its time is up, if a later task reads the hardware."""
    if all(host_data().get(key) is None for key in DEPENDENT_KEYS):
        return
    timeout = TIMEOUT.here()
    wait(name="Hardware settled", version=version, spec_hash=spec_hash, timeout=timeout, _timeout=timeout + MARGIN)


@operation()
def wait(version: str, spec_hash: str, timeout: int) -> Commands:
    """Wait on the node, unless it is ready with this spec and this agent."""
    status = host.get_fact(NodeStatus)
    if status and status.is_ready_by(version, spec_hash):
        # What was prefetched may be from before the node was ready, when its VFs did not all exist.
        recent = status.report.uptime - status.report.since < prefetch.USABLE_S
        if recent and (known := prefetch.of(this_host())):
            known.drop_answers()
        host.noop("the node's hardware has settled")
        return
    yield script(_SETTLE, COMMAND, spec_hash, str(timeout))
