"""Pairs of pods that can move data over RDMA.

A queue pair needs a GID, which an address of a netdev in the pod's network namespace makes. So a pod is on the host's network,
or it has a netdev of its own by a network annotation: a macvlan on a rail, or a VF.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from tasks.common.templates import render
from tasks.kubernetes.manifests.configurations import Pool
from tasks.kubernetes.manifests.device_plugins import DevicePlugins
from tasks.kubernetes.manifests.networks import macvlan, of_pool
from tasks.kubernetes.manifests.node_labels import selected
from tasks.kubernetes.manifests.selectors import Nodes

NAMES = ("rdma-test", "erdma-test", "macvlan-test", "sriov-test", "sriov-ib-test")


@frozen
class Pair:
    """Two pods that each request one ``resource``. ``network``: their annotation; None: they are on the host's network."""

    name: str
    resource: str
    node_selector: Mapping[str, str]
    network: str | None = None


def test_pods(wanted: DevicePlugins, nodes: Nodes, pools: Sequence[Pool]) -> dict[str, str]:
    """The pods' files. They are not in the kustomization, since they are created only for a test."""
    if wanted.test_pods is None:
        return {}
    return {
        f"{pair.name}-pods.yaml": render(
            "manifests/test-pods.yaml.j2",
            pods=pair.name,
            resource=pair.resource,
            node_selector=pair.node_selector,
            network=pair.network,
            settings=wanted.test_pods,
        )
        for pair in _pairs(wanted, nodes, pools)
    }


def _pairs(wanted: DevicePlugins, nodes: Nodes, pools: Sequence[Pool]) -> Iterator[Pair]:
    shared, erdma, sriov, networks = wanted.shared_rdma, wanted.erdma, wanted.sriov, wanted.networks
    served = selected(nodes, shared.node_selector) if shared else {}
    if shared and any(node.hcas() for node in served.values()):
        yield Pair("rdma-test", shared.resource, shared.node_selector)
        if networks and (rail := _rail(served)):
            yield Pair("macvlan-test", shared.resource, shared.node_selector, f"{networks.namespace}/{macvlan(rail)}")
    if erdma and any(node.erdma for node in nodes.values()):
        yield Pair("erdma-test", erdma.resource, erdma.node_selector)
    for pool in pools if sriov and networks else ():
        if sriov and networks and pool.is_rdma:
            resource = f"{sriov.resource_prefix}/{pool.name}"
            name = "sriov-ib-test" if pool.infiniband else "sriov-test"
            yield Pair(name, resource, sriov.node_selector, f"{networks.namespace}/{of_pool(pool)}")


def _rail(nodes: Nodes) -> str | None:
    """The netdev of a rail, or its bond, on as many nodes as possible, since the pods may be on any two.

    Only of PFs with a RoCE device: the GIDs of a macvlan are those of the device of its PF, and IPoIB has no macvlans.
    """
    parents = (pf.parent for node in nodes.values() for pf in node.rails() if pf.rdma == "RoCE")
    counts = Counter(parent for parent in parents if parent is not None)
    return min(counts, key=lambda name: (-counts[name], name or ""), default=None)
