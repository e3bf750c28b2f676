"""NetworkAttachmentDefinitions: macvlans of each rail, and the VFs of each pool, by sriov-cni and by host-device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.kubernetes.manifests.configurations import Pool
from tasks.kubernetes.manifests.device_plugins import Networks, Sriov
from tasks.kubernetes.manifests.selectors import Nodes


def networks(wanted: Networks, sriov: Sriov | None, pools: Sequence[Pool], nodes: Nodes) -> list[dict[str, Any]]:
    """Each network's name, CNI configuration, and the resource of the device that the pod needs for it (or None).

    Multus gives the plugins of a network with a resource the PCI address of the pod's device (deviceID and pciBusID).

    :raises ValueError: two netdevs get networks of the same name.
    """
    mtus: dict[str, int] = {}
    for pf in (pf for node in nodes.values() for pf in node.rails()):
        # An IPoIB netdev takes no macvlans.
        if pf.parent is not None and pf.rdma != "InfiniBand":
            mtus[pf.parent] = min(pf.mtu, mtus.get(pf.parent, pf.mtu))
    made = []
    masters: dict[str, str] = {}
    for name in sorted(mtus):
        if (other := masters.setdefault(macvlan(name), name)) != name:
            raise ValueError(f"networks: {other} and {name} both get the network {macvlan(name)}; rename a netdev")
        plugin = {"type": "macvlan", "master": name, "mode": "bridge", "mtu": mtus[name], "ipam": wanted.addresses()}
        made.append(network(macvlan(name), [plugin], None))
    for pool in pools:
        resource = f"{sriov.resource_prefix}/{pool.name}" if sriov else None
        if not pool.has_netdevs:
            made.append(network(_by_sriov_cni(pool), [{"type": "sriov"}], resource))
            continue
        # rdma-cni moves the RDMA device to the pod, which works in the exclusive mode only (cmd/rdma: ensureRdmaSystemMode).
        rdma = [{"type": "rdma"}] if pool.exclusive else []
        addresses = {"ipam": wanted.addresses()}
        if not pool.infiniband:
            made.append(network(_by_sriov_cni(pool), [{"type": "sriov", **addresses}, *rdma], resource))
        made.append(network(_by_host_device(pool), [{"type": "host-device", **addresses}, *rdma], resource))
    return made


def macvlan(netdev: str) -> str:
    """The name of the network whose netdevs are macvlans on ``netdev``."""
    return _name(f"macvlan-{netdev}")


def of_pool(pool: Pool) -> str:
    """The name of the network whose netdevs are the VFs of a pool with netdevs."""
    return _by_host_device(pool) if pool.infiniband else _by_sriov_cni(pool)


def _by_sriov_cni(pool: Pool) -> str:
    return _name(f"sriov-{pool.name}")


def _by_host_device(pool: Pool) -> str:
    return _name(f"host-device-{pool.name}")


def _name(name: str) -> str:
    return re.sub(r"[^a-z0-9.-]", "-", name.lower()).rstrip("-.")


def network(name: str, plugins: Sequence[Mapping[str, object]], resource: str | None) -> dict[str, Any]:
    """A network's name, CNI configuration and resource."""
    # Several plugins are a chain.
    what = plugins[0] if len(plugins) == 1 else {"plugins": plugins}
    return {
        "name": name,
        "resource": resource,
        "config": json.dumps({"cniVersion": "0.3.1", "name": name, **what}, indent=2),
    }
