"""The virtual machines of lab/ as nodes of its Kubernetes cluster, as `make lab-cluster` deploys them."""

from typing import Any

from inventories.lab import virtual as _nodes
from lab import instance as _instance
from lab.cluster import manifests as _manifests
from lab.cluster.commands import plane_of as _plane_of

_plane = _plane_of(_instance.named())


def _data(data: dict[str, Any]) -> dict[str, Any]:
    return {
        **data,
        # The VFs' RDMA devices are software, and real to a device plugin: it asks for all three character devices.
        "kernel_modules": ["igbvf", "ib_uverbs", "ib_umad", "rdma_ucm"],
        "nics": [{**nic, "rdma": {"pf": False, "vfs": True}} for nic in data["nics"]],
        "kubernetes": {
            "server": _plane.node_url,
            "ca_file": str(_plane.authority.pair.certificate),
            "kubeconfig": str(_plane.admin),
            "required_resources": [_manifests.RESOURCE],
        },
    }


# A group: by its name it has group_data/lab.py, by this file's name group_data/lab_cluster.py.
lab = [(_name, _data(_given)) for _name, _given in _nodes]
