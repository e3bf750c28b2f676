"""DRA: a DeviceClass of the VFs of each rail and one of all of them, and ResourceClaimTemplates for them.

A DeviceClass selects by the attributes that the driver publishes, and knows no nodes. Both drivers publish a VF's PCI address
as `DRIVER/pciAddress`. Of its PF dranet publishes nothing: read in kubernetes-sigs/dranet f258477 (pkg/inventory/db.go) and
k8snetworkplumbingwg/dra-driver-sriov cd9404f (pkg/devicestate/discovery.go).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import groupby
from typing import Any

from tasks.common.templates import render
from tasks.kubernetes.manifests.device_plugins import SRIOV_DRIVER, Dra, Networks
from tasks.kubernetes.manifests.discovered import VFIO, Discovered, SeenFunction
from tasks.kubernetes.manifests.networks import network
from tasks.kubernetes.manifests.selectors import Nodes, called

PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NETWORK = "vf"
LONGEST = 10240
"""Bytes of a CEL expression: CELSelectorExpressionMaxLength of k8s.io/api/resource/v1."""

PAIRS = {
    "dra.net": {"gpu-and-vf": PCIE_ROOT, "gpu-and-vf-numa": "resource.kubernetes.io/numaNode"},
    SRIOV_DRIVER: {"gpu-and-vf": PCIE_ROOT},
}
"""The templates for a GPU and a VF near it: the attribute, which both of their drivers must publish under the same name.

dra-driver-sriov publishes the NUMA node as dra.net/numaNode only. The version of dranet after v1.4.0, and that of NVIDIA's
driver after v0.4.1, have it as Kubernetes does (kubernetes-sigs/dra-driver-nvidia-gpu 9593204: deviceinfo.go).
"""


def device_classes(wanted: Dra, networks: Networks | None, nodes: Nodes) -> str | None:
    """The manifest; None if no node has such a VF.

    :raises ValueError: the driver cannot serve a node, or a class would select other devices; with the reason and the remedy.
    """
    rails: dict[str, set[str]] = {}
    nics: dict[str, str] = {}
    for vf in (vf for node in nodes.values() for vf in _vfs(wanted, node)):
        name = re.sub(r"[^a-z0-9]+", "-", (vf.nic or "").lower()).strip("-")
        if (other := nics.setdefault(name, vf.nic or "")) != vf.nic:
            raise ValueError(f"NICs {other} and {vf.nic} both get the DeviceClass vf-{name}; rename one of them")
        if len(name) > 63:
            raise ValueError(
                f"NIC {vf.nic}: a request of a claim has at most 63 characters; give the NIC a shorter name"
            )
        rails.setdefault(name, set()).add(vf.address)
    for name, addresses in rails.items():
        _check(wanted, nodes, nics[name], addresses)
    if not rails:
        return None
    every = {address for addresses in rails.values() for address in addresses}
    return render(
        "manifests/device-classes.yaml.j2",
        settings=wanted,
        classes={f"vf-{name}": _selector(nics[name], wanted.driver, rails[name], nodes) for name in sorted(rails)}
        | {"vf": _selector("all NICs", wanted.driver, every, nodes)},
        rails=sorted(rails),
        gpus=any(node.gpus for node in nodes.values()),
        pairs=PAIRS[wanted.driver],
        network=_network(wanted, networks, nodes),
        addresses=sorted(every),
    )


def _vfs(wanted: Dra, node: Discovered) -> list[SeenFunction]:
    """The VFs of the spec's NICs that pods may claim: with a netdev. sriov-cni is not for InfiniBand."""
    vfs = [vf for vf in node.vfs() if vf.driver != VFIO]
    return [vf for vf in vfs if wanted.driver != SRIOV_DRIVER or vf.rdma != "InfiniBand"]


def _check(wanted: Dra, nodes: Nodes, nic: str, addresses: Collection[str]) -> None:
    """No node may have another function at an address that a rail's class selects."""
    for name, node in nodes.items():
        ours = {vf.address for vf in _vfs(wanted, node) if vf.nic == nic}
        for function in node.functions:
            if function.address in addresses and function.address not in ours:
                raise ValueError(
                    f"the DeviceClass of NIC {nic} would also select {called(name, function)}: on another host a VF of that "
                    "NIC has its address; give a NIC the same name and use on all hosts of a folder, or give one of the hosts "
                    "a folder of its own"
                )


def _selector(name: str, driver: str, addresses: Collection[str], nodes: Nodes) -> str:
    """A CEL expression for the devices at these addresses.

    It names ranges of text, which are shorter than all addresses. No function of a node is in a range without being wanted.
    """
    known = {function.address for node in nodes.values() for function in node.functions}
    runs = [list(run) for ours, run in groupby(sorted(known), lambda address: address in addresses) if ours]
    ranges = [
        f'address == "{run[0]}"' if len(run) == 1 else f'address >= "{run[0]}" && address <= "{run[-1]}"'
        for run in runs
    ]
    # To read an attribute that a device lacks is an error, which keeps the pod from every node. dranet also publishes netdevs
    # that are no PCI devices.
    expression = (
        f'device.driver == "{driver}" && "pciAddress" in device.attributes["{driver}"] &&\n'
        f'cel.bind(address, device.attributes["{driver}"].pciAddress,\n  ' + " ||\n  ".join(ranges) + ")"
    )
    if len(expression) > LONGEST:
        raise ValueError(
            f"the VFs of {name} have addresses in {len(ranges)} ranges, more than a DeviceClass can name ({LONGEST} bytes); "
            "give hosts that differ folders of their own"
        )
    return expression


def _network(wanted: Dra, networks: Networks | None, nodes: Nodes) -> dict[str, Any] | None:
    """The network of a claimed VF. dranet needs none.

    dra-driver-sriov calls one CNI plugin with it (pkg/cni/cni.go), so rdma-cni cannot move the RDMA device to the pod.
    """
    if wanted.driver != SRIOV_DRIVER:
        return None
    if networks is None:
        raise ValueError(f"{SRIOV_DRIVER} gives a VF to a pod by a NetworkAttachmentDefinition; give networks")
    for name in (name for name, node in nodes.items() if node.exclusive and _vfs(wanted, node)):
        raise ValueError(
            f"{name} has rdma.netns_mode exclusive, in which {SRIOV_DRIVER} leaves a VF's RDMA device outside the pod; give "
            "rdma.netns_mode shared, or the driver dra.net"
        )
    return network(NETWORK, [{"type": "sriov", "ipam": networks.addresses()}], None)
