"""The virtual machines of lab/: two Intel 82576 ports each, as QEMU's igb emulates them."""

# No RDMA hardware here, so no RDMA modules; the PF's driver is loaded by udev, the VFs' by us, to have it in any case.
kernel_modules = ["igbvf"]

# A virtual machine under emulation is slow.
ready_timeout = 180

_FEATURE = "feature.node.kubernetes.io"
labels = {
    "capabilities": ["rdma", f"{_FEATURE}/network-rdma.capable", f"{_FEATURE}/network-sriov.capable"],
    "policy": {"gpu-use-type": "exclusive"},
    "writers": {f"{_FEATURE}/network-sriov.capable": "nfd"},
}
nccl = {"network_type": 1}

# sshd, since perftest and MPI start through it; the others are for the tests that install them.
limits = {"daemons": ["ssh", "containerd", "docker"]}
