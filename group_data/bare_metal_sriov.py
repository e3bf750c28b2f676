"""Servers for Spark and Horovod, with VFs of a ConnectX-6 Dx for containers.

Written from vendor documents; not run on such hardware. A pod that requests sriov/vf_rdma gets a VF of its own, with its netdev
and its RDMA device (examples/horovod.yaml). Executors of Spark are in the node's network (examples/spark.yaml).
"""

_FEATURE = "feature.node.kubernetes.io"

# The distribution's drivers and libraries know this card.
ofed = {"inbox": {}}
limits: dict[str, object] = {}

nics = [
    {
        "name": f"port{function}",
        "select": {"pci": f"0000:3b:00.{function}", "vendor": "15b3", "device": "101d"},
        "mtu": 9000,
        # A container may not pretend to have another's address.
        "vfs": {"count": 16, "defaults": {"trust": False, "spoofchk": True}},
        "rdma": {"vfs": True, "link_layer": "Ethernet", "rate": 100},
    }
    for function in (0, 1)
]

# Shuffles of Spark are TCP: their packets are spread over all CPUs but those for system services.
irqs = {"exclude_cpus": "0-1"}
rps = {"enable": True}

labels = {
    "capabilities": [f"{_FEATURE}/network-{each}" for each in ("rdma.capable", "sriov.capable", "sriov.configured")],
    "policy": {"workload": "spark"},
    "resources": {f"{_FEATURE}/network-sriov.configured": "sriov/vf_rdma"},
}
