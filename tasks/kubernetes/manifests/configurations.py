"""The configurations of the device plugins that have selectors: which resources they make of the NICs of the nodes' specs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from agent.spec.ranges import parse_ranges
from tasks.kubernetes.manifests import selectors
from tasks.kubernetes.manifests.device_plugins import RESOURCE_NAME, SharedRdma, Sriov
from tasks.kubernetes.manifests.discovered import VFIO, Discovered, SeenFunction
from tasks.kubernetes.manifests.selectors import Chosen, Nodes


def shared_rdma(wanted: SharedRdma, nodes: Nodes) -> dict[str, Any]:
    """The configuration of k8s-rdma-shared-dev-plugin; empty if no NIC has an RDMA device.

    :raises ValueError: the plugin cannot select these NICs alone; with the reason and the remedy.
    """
    chosen = {name: node.hcas() for name, node in nodes.items()}
    if not any(chosen.values()):
        return {}
    for name in (name for name, node in nodes.items() if chosen[name] and node.exclusive):
        # pkg/resources/resources_manager.go: ValidateRdmaSystemMode.
        raise ValueError(
            f"{name} has rdma.netns_mode exclusive, and k8s-rdma-shared-dev-plugin does not start in that mode; give "
            "rdma.netns_mode shared, or None as shared_rdma, and VFs to pods (sriov)"
        )
    resources = {wanted.resource_name: chosen} | (_rails(wanted, chosen) if wanted.rails else {})
    return {
        "periodicUpdateInterval": wanted.periodic_update_interval,
        "configList": [
            {
                "resourceName": name,
                "resourcePrefix": wanted.resource_prefix,
                "rdmaHcaMax": wanted.rdma_hca_max,
                "selectors": selectors.shared_rdma(nodes, functions),
            }
            for name, functions in resources.items()
        ],
    }


def _rails(wanted: SharedRdma, chosen: Chosen) -> dict[str, Chosen]:
    """The functions of each NIC, by the name of its resource: the NIC's name, as far as the plugin allows its characters."""
    nics: dict[str, str] = {}
    for nic in sorted({function.nic or "" for functions in chosen.values() for function in functions}):
        name = re.sub(r"[^a-zA-Z0-9_]", "_", nic)
        other = wanted.resource_name if name == wanted.resource_name else nics.get(name)
        if other is not None:
            raise ValueError(
                f"rails: NIC {nic} and {other} would both be {wanted.resource_prefix}/{name}; rename one of them"
            )
        if not RESOURCE_NAME.fullmatch(name):
            raise ValueError(
                f"rails: NIC {nic} would be {wanted.resource_prefix}/{name}, which Kubernetes refuses; give it a shorter name, "
                "with a letter or a digit at its end"
            )
        nics[name] = nic
    return {
        name: {node: [each for each in functions if each.nic == nic] for node, functions in chosen.items()}
        for name, nic in nics.items()
    }


_VFIO, _ROCE, _INFINIBAND = "_vfio", "_rdma", "_ib"


@frozen
class Pool:
    """A resource of sriov-network-device-plugin. ``exclusive``: its VFs' RDMA devices are in one network namespace each.

    ``infiniband``: its VFs are on InfiniBand, which sriov-cni is not for.
    """

    name: str
    selectors: Mapping[str, Any]
    exclusive: bool = False
    infiniband: bool = False

    def plain(self) -> dict[str, Any]:
        """The pool as the plugin's configuration has it."""
        return {"resourceName": self.name, "selectors": self.selectors}

    @property
    def is_rdma(self) -> bool:
        """Whether its VFs have RDMA devices."""
        return bool(self.selectors.get("isRdma"))

    @property
    def has_netdevs(self) -> bool:
        """Whether its VFs have netdevs: not if they are bound to vfio-pci."""
        return bool(self.selectors["drivers"] != [VFIO])


def sriov(wanted: Sriov, nodes: Nodes) -> list[Pool]:
    """The pools of sriov-network-device-plugin: VFs without an RDMA device, with one, on InfiniBand, and bound to vfio-pci.

    :raises ValueError: the plugin cannot select these VFs alone; with the reason and the remedy.
    """
    kinds: dict[str, dict[str, list[SeenFunction]]] = {}
    for name, node in nodes.items():
        for vf in pooled(wanted, node):
            kinds.setdefault(_suffix(vf), {}).setdefault(name, []).append(vf)
    pools = []
    for suffix in sorted(kinds):
        rdma = suffix in (_ROCE, _INFINIBAND)
        pools.append(
            Pool(
                f"{wanted.resource_name}{suffix}",
                selectors.sriov(nodes, kinds[suffix], rdma),
                rdma and _exclusive({name: nodes[name] for name in kinds[suffix]}),
                suffix == _INFINIBAND,
            )
        )
    return pools


def _exclusive(nodes: Nodes) -> bool:
    modes = {node.exclusive: name for name, node in nodes.items()}
    if len(modes) > 1:
        raise ValueError(
            f"{modes[True]} has rdma.netns_mode exclusive and {modes[False]} has not, but one network is for the VFs of both; "
            "give both the same mode, or folders of their own"
        )
    return True in modes


def pooled(wanted: Sriov, node: Discovered) -> list[SeenFunction]:
    """The VFs of a node that the plugin allocates."""
    only = set(parse_ranges(wanted.vfs)) if wanted.vfs else None
    return [vf for vf in node.vfs() if only is None or vf.index in only]


def _suffix(vf: SeenFunction) -> str:
    if vf.driver == VFIO:
        return _VFIO
    if vf.rdma is None:
        return ""
    return _INFINIBAND if vf.rdma == "InfiniBand" else _ROCE
