"""The facts of a node that the manifests depend on. The folder's nodes/HOST.json keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import cattrs
from attrs import evolve, field, frozen

from agent.documents import LARGEST_REPORT, load, read
from agent.spec.node import NodeSpec
from tasks.hardware import Hardware, InspectedFunction, Netdev, is_erdma, shared

VFIO = "vfio-pci"

# k8s-rdma-shared-dev-plugin takes no device without rdma_cm, umad and uverbs (pkg/resources/rdma_device_spec.go of v1.5.3), and
# only these two have umad. Empty: the transport is not known.
SHARED = ("RoCE", "InfiniBand", "")


@frozen
class SeenFunction:
    """A PCI function of a node, physical or a VF.

    ``vendor`` and ``device``: as lspci prints them. ``netdev``: the first one, since the plugins look at no other; ``mtu`` in
    bytes. ``rdma``: the transport of its RDMA device (RoCE, InfiniBand, iWARP, or empty if it is unknown); None: it has no such
    device. ``nic``: the NIC of the spec that it belongs to; None: it belongs to none. ``index``: the number of a VF; ``pf``:
    the netdev of its PF. ``master`` and ``member_of``: those of ``netdev``.
    """

    address: str
    vendor: str
    device: str
    driver: str | None = None
    netdev: str | None = None
    mtu: int = 0
    rdma: str | None = None
    nic: str | None = None
    index: int | None = None
    pf: str | None = None
    master: str | None = None
    member_of: str = ""

    @property
    def parent(self) -> str | None:
        """The netdev that pods' macvlans can be on: its own, or its bond; None: on none.

        A master but a VRF takes over what its members receive, and the kernel then refuses a macvlan on one of them (EBUSY of
        netdev_rx_handler_register, net/core/dev.c).
        """
        if self.master is None or self.member_of == "vrf":
            return self.netdev
        return self.master if self.member_of in ("bond", "team") else None

    @property
    def has_rdma(self) -> bool:
        """Whether it has an RDMA device, here or in the network namespace of a pod."""
        return self.rdma is not None


@frozen
class Discovered:
    """A node: its functions ordered by address, each followed by its VFs, and the text of its nccl.conf.

    ``labels``: those that the reporter publishes. ``exclusive``: the spec wants each RDMA device in one network namespace only
    (``rdma.netns_mode``).
    """

    functions: tuple[SeenFunction, ...] = ()
    erdma: bool = False
    gpus: bool = False
    labels: Mapping[str, str] = field(factory=dict)
    nccl: str = ""
    exclusive: bool = False

    def hcas(self) -> tuple[SeenFunction, ...]:
        """The functions whose RDMA devices pods share: iWARP's and EFA's are not for the plugin."""
        return shared(each for each in self.functions if each.rdma in SHARED)

    def vfs(self) -> tuple[SeenFunction, ...]:
        """The VFs of the spec's NICs that have a driver, and a PF by whose netdev a plugin can select them."""
        return tuple(each for each in self.functions if each.nic and each.index is not None and each.driver and each.pf)

    def rails(self) -> tuple[SeenFunction, ...]:
        """The PFs of the spec's NICs that have a netdev, and an RDMA device or a VF with one."""
        with_rdma = {each.nic for each in self.functions if each.has_rdma and not is_erdma(each)}
        return tuple(
            each for each in self.functions if each.index is None and each.nic in with_rdma - {None} and each.netdev
        )


def discover(hardware: Hardware, spec: NodeSpec, labels: Mapping[str, str], nccl: str = "") -> Discovered:
    """Take the facts that the manifests depend on from a node's hardware, its spec and its labels."""
    functions = sorted(hardware.with_nics_of(spec).functions, key=lambda function: function.address)
    erdma = any(is_erdma(function) for function in functions)
    exclusive = spec.rdma.netns_mode == "exclusive"
    seen = tuple(each for function in functions for each in _seen(function))
    return Discovered(seen, erdma, bool(hardware.gpus), labels, nccl, exclusive)


_NO_NETDEV = Netdev("", 0)


def _netdev(function: InspectedFunction) -> str | None:
    return function.netdevs[0].name if function.netdevs else None


def _seen(function: InspectedFunction, pf: str | None = None) -> Iterator[SeenFunction]:
    netdev = next(iter(function.netdevs), _NO_NETDEV)
    yield SeenFunction(
        function.address,
        function.vendor,
        function.device,
        function.driver,
        _netdev(function),
        netdev.mtu,
        (function.rdma[0].transport or "") if function.rdma else None,
        function.nic,
        function.index,
        pf,
        netdev.master,
        netdev.member_of,
    )
    vfs = sorted(function.vfs, key=lambda vf: vf.index or 0)
    # While a pod has a VF, the VF's netdev and RDMA device are in the pod's network namespace and cannot be seen from here.
    # Such a VF is assumed to have the RDMA device that the others have.
    usual = next((vf.rdma for vf in vfs if vf.netdevs), function.rdma)
    for vf in vfs:
        taken = vf.driver not in (None, VFIO) and not vf.netdevs and not vf.rdma
        yield from _seen(evolve(vf, rdma=usual if taken else vf.rdma), _netdev(function))


_converter = cattrs.Converter(forbid_extra_keys=True)


def to_text(node: Discovered) -> str:
    """The text of the node's file."""
    return json.dumps(_converter.unstructure(node), indent=2) + "\n"


def read_nodes(paths: Mapping[str, Path]) -> dict[str, Discovered]:
    """The nodes, from their files. ``paths``: by host name.

    :raises ValueError: a file cannot be read; the text names each such file, its fault, and the remedy.
    """
    nodes: dict[str, Discovered] = {}
    faults = []
    for name, path in paths.items():
        try:
            nodes[name] = _structured(load(read(path, LARGEST_REPORT), LARGEST_REPORT))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            faults.append(f"{path}: {reason}; remove the file and deploy {name}, which writes it anew")
    if faults:
        raise ValueError("\n".join(faults))
    return nodes


def _structured(document: object) -> Discovered:
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    try:
        return _converter.structure(document, Discovered)
    except cattrs.BaseValidationError as error:
        raise ValueError("; ".join(cattrs.transform_error(error))) from None
