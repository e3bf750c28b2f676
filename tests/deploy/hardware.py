"""Hardware of nodes, in the lines that the script of tasks/hardware.py prints."""

import json
from typing import Any

from tasks.hardware import Hardware, NodeHardware
from tests.deploy.conftest import Answers, of

INSPECT = of(NodeHardware)
UMAD = {"name": "umad0", "present": True}
UVERBS = {"name": "uverbs0", "present": True}


def rdma(
    name: str, *gids: tuple[int, str, str], transport: str = "RoCE", chars: tuple[Any, ...] = (UVERBS, UMAD)
) -> Any:
    """An RDMA device with one port; GIDs by index, type and address."""
    entries = [{"index": index, "type": kind, "address": address, "netdev": None} for index, kind, address in gids]
    # As the kernel's sysfs has it (link_layer_show): EFA's is unspecified.
    link_layer = {"InfiniBand": "InfiniBand", "unspecified": "Unknown"}.get(transport, "Ethernet")
    port = {"number": 1, "netdev": None, "link_layer": link_layer, "state": "ACTIVE", "gids": entries}
    return {"name": name, "transport": transport, "node_guid": None, "ports": [port], "char_devices": list(chars)}


def function(address: str, ids: str, netdev: str | None = None, *devices: Any, **more: Any) -> dict[str, Any]:
    """A PCI function; ``ids`` as lspci prints them."""
    vendor, device = ids.split(":")
    netdevs = [{"name": netdev, "mtu": 9000, "ifindex": 2}] if netdev else []
    facts = {"address": address, "model": "", "vendor": vendor, "device": device, "driver": "mlx5_core"}
    return {**facts, "netdevs": netdevs, "rdma": list(devices), "index": None, "total_vfs": 0, "vfs": [], **more}


def nic(name: str, function: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The function as a NIC of the spec, with its VFs."""
    return {**function, "nic": name, **more}


def nics(*functions: Any) -> list[dict[str, Any]]:
    """The NICs of the spec of a node with these functions."""
    return [{"name": each["nic"], "select": {"pci": each["address"]}} for each in functions if each.get("nic")]


def printed(*functions: Any, rdma_cm: bool = True, others: tuple[str, ...] = ()) -> list[str]:
    """The output of the script; ``others``: more lines of it."""
    netdevs = [f"netdev {each['name']}" for f in functions for each in f["netdevs"]]
    inspection = {"functions": list(functions), "other_rdma": [], "rdma_cm": rdma_cm}
    return [
        "module ib_uverbs",
        "module rdma_ucm",
        "netdev eth0",
        *netdevs,
        "route 100 eth0",
        *others,
        "inspection",
        json.dumps(inspection),
    ]


def has(*functions: Any, **more: Any) -> Answers:
    """The node's answer."""
    return {INSPECT: printed(*functions, **more)}


def hardware(*functions: Any, **more: Any) -> Hardware:
    """The hardware as the tasks parse it."""
    fact = NodeHardware().process(printed(*functions, **more))
    assert fact is not None
    return fact


V2 = (3, "RoCE v2", "10.0.0.1")
VF = function("0000:21:00.1", "15b3:101c", "ens1f0v0", rdma("mlx5_2", V2), index=0)
CONNECTX = function(
    "0000:21:00.0", "15b3:101b", "ens1f0", rdma("mlx5_0", (0, "RoCE v1", "fe80::1"), V2), total_vfs=8, vfs=[VF]
)
SECOND = function("0000:41:00.0", "15b3:101b", "ens2f0", rdma("mlx5_1", V2))
ERDMA = function("0000:00:06.0", "1ded:107f", None, rdma("erdma_0", transport="iWARP", chars=(UVERBS,)), driver="erdma")
EFA = function(
    "0000:a3:00.0", "1d0f:efa2", None, rdma("rdmap163s0", transport="unspecified", chars=(UVERBS,)), driver="efa"
)
VIRTIO = function("0000:00:05.0", "1af4:1000", "ens5", driver="virtio-pci")
GPUS = tuple(f"gpu 0000:{bus:02x}:00.0 nvidia" for bus in range(0x50, 0x58))
RAIL0, RAIL1 = nic("rail0", CONNECTX), nic("rail1", SECOND)
PLAIN = function("0000:21:00.2", "8086:10ca", "ens3f0v0", index=0, driver="igbvf")
PASSED = function("0000:21:00.4", "8086:10ca", None, index=1, driver="vfio-pci")
INTEL = nic("fabric0", function("0000:61:00.0", "8086:10c9", "ens3f0", driver="igb", total_vfs=7, vfs=[PASSED, PLAIN]))
IB_VF = function("0000:42:00.1", "15b3:101c", "ib0v0", rdma("mlx5_3", transport="InfiniBand"), index=0)
IB = nic("rail2", function("0000:42:00.0", "15b3:101b", "ib0", rdma("mlx5_2", transport="InfiniBand"), vfs=[IB_VF]))
SELECTED = {
    **{"rdma": "hca", "aliyun.accelerator/erdma": "true", "nvidia.com/gpu.present": "true"},
    "feature.node.kubernetes.io/network-sriov.configured": "true",
}
"""The labels by which the DaemonSets of the device plugins select nodes."""
