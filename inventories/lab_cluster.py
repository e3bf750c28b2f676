"""The lab's virtual machines as nodes of its Kubernetes cluster. `make lab-cluster` deploys them."""

from typing import Any

from inventories.lab import virtual as _nodes
from lab import instance as _instance
from lab.cluster import manifests as _manifests
from lab.cluster.commands import plane_of as _plane_of
from lab.cluster.commands import rendered as _rendered

_lab = _instance.named()
_plane = _plane_of(_lab)


def _data(data: dict[str, Any]) -> dict[str, Any]:
    return {
        **data,
        # The VFs' RDMA devices are emulated in software. A device plugin needs their three character devices all the same.
        "kernel_modules": ["igbvf", "ib_uverbs", "ib_umad", "rdma_ucm"],
        "nics": [{**nic, "rdma": {"pf": False, "vfs": True}} for nic in data["nics"]],
        "device_plugins": _manifests.wanted(_rendered(_lab)),
        "kubernetes": {
            "server": _plane.node_url,
            "ca_file": str(_plane.authority.pair.certificate),
            "kubeconfig": str(_plane.admin),
            "required_resources": [_manifests.RESOURCE],
        },
    }


# The group `lab` reads group_data/lab.py; this file's name makes it read group_data/lab_cluster.py, too.
lab = [(_name, _data(_host_data)) for _name, _host_data in _nodes]
