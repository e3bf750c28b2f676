"""The virtual machines of lab/: two Intel 82576 ports each, as QEMU's igb emulates them."""

# The lab has no RDMA hardware, so it needs no RDMA modules. udev loads the PF's driver, this loads the VFs'.
kernel_modules = ["igbvf"]

# An emulated machine is slow.
ready_timeout = 180

_FEATURE = "feature.node.kubernetes.io"
labels = {
    "capabilities": [
        "rdma",
        f"{_FEATURE}/network-rdma.capable",
        f"{_FEATURE}/network-sriov.capable",
        f"{_FEATURE}/network-sriov.configured",
    ],
    "policy": {"gpu-use-type": "exclusive"},
    "writers": {f"{_FEATURE}/network-sriov.capable": "nfd"},
}
nccl = {"network_type": 1}
# Each NIC reaches those of its own name only. Two host CPUs emulate all nodes: messages are small and few, so that what is on
# its way when the time is over arrives soon, also on 30 queue pairs.
fabric = {
    "seconds": 3,
    "size": 4096,
    "messages": 100,
    "collective_size": 65536,
    "grace": 60,
    "across_rails": False,
    "at_once": 1,
}

# ssh, since perftest and MPI start through it. The tests install the others.
limits = {"daemons": ["ssh", "containerd", "docker"]}
