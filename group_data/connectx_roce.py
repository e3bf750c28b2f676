"""GPU servers with eight ConnectX-7 rails for RoCE. Written from vendor documents; not run on such hardware.

The PCI addresses are those of NVIDIA's DGX H100, from its user guide. `lspci -D -d 15b3:` prints those of your servers.
"""

_RAILS = (
    "0000:18:00.0",
    "0000:40:00.0",
    "0000:4f:00.0",
    "0000:5e:00.0",
    "0000:9a:00.0",
    "0000:c0:00.0",
    "0000:ce:00.0",
    "0000:dc:00.0",
)
_FEATURE = "feature.node.kubernetes.io"

# --- Drivers ----------------------------------------------------------------------------------------------------

# DKMS needs the running kernel's headers to build the drivers.
kernel = {"hold": True}
ofed = {
    "doca": {
        "version": "3.2.1-044501",
        # Replace it: `gpg --show-keys GPG-KEY-Mellanox.pub` prints it. The deploy refuses a key with another fingerprint.
        "fingerprint": "0000000000000000000000000000000000000000",
    }
}
# The GPUs of a DGX H100 reach each other through NVSwitches.
gpu_driver = {"version": "580.95.05", "fabric_manager": True}
# Part of NVIDIA's driver; it needs the ib_core of DOCA-OFED.
peer_memory = {"method": "nvidia_peermem"}
gpus = {"count": 8, "peer_memory": True}
container_engine = {"name": "containerd"}
container_runtime = {"engines": ["containerd"]}
limits: dict[str, object] = {}

# A new kernel, or a driver in use, needs a reboot: on Saturday nights one node, then up to a quarter of them at the same time,
# until two have failed. At other times the deploy names the nodes that need one.
reboot = {"policy": "allow", "at_once": "25%", "stop_at": 2}
disruption = {"windows": [{"start": "22:00", "end": "04:30", "days": ["Sat"], "allow": "reboot"}]}

# --- NICs -------------------------------------------------------------------------------------------------------

nics = [
    {
        "name": f"rail{index}",
        # Address and PCI ID: the agent refuses to configure another card in this slot.
        "select": {"pci": address, "vendor": "15b3", "device": "1021"},
        # RoCE's largest MTU of 4096 needs frames of 4200 bytes; the switches of the fabric carry 9000.
        "mtu": 9000,
        # Each rail is a network of its own, 10.100.0.0/16 to 10.107.0.0/16. A RoCE v2 GID of an IPv4 address needs the address.
        "rail": index,
        "addresses": [{"network": "10.10{rail}.0.0/16"}],
        "vfs": {"count": 8, "defaults": {"trust": True, "spoofchk": False}},
        "rdma": {"link_layer": "Ethernet", "rate": 400, "gid_type": "RoCE v2", "gid_ipv4": True},
        # RDMA is DSCP 26, so priority 3: lossless, with congestion notification. The switches need the same setting.
        "roce": {"trust": "dscp", "pfc": "3", "ecn": "3", "cm_tos": 106, "traffic_class": 106},
    }
    for index, address in enumerate(_RAILS)
]

# Two CPUs of each socket are for system services: the agent places no interrupts there.
irqs = {"exclude_cpus": "0-1,56-57"}

# --- The fabric test: deploys/fabric.py ------------------------------------------------------------------------

# An example, nine tenths of the NICs' rate. It was not measured: give what your fabric is to reach. A lower result is bad, even
# if all NICs are as slow.
fabric_floors = {"ib_write_bw": 360}

# --- Jobs -------------------------------------------------------------------------------------------------------

nccl = {"network_type": 1, "layout": "rail-optimized"}

# The admission policy lists them: examples/own-cluster. If NFD runs, switch off its network-sriov labels.
labels = {
    "capabilities": [
        "rdma",
        "nvidia.com/gpu.present",
        *(f"{_FEATURE}/network-{each}" for each in ("rdma.capable", "sriov.capable", "sriov.configured")),
    ],
    "policy": {"gpu-use-type": "exclusive"},
    "resources": {"rdma": "rdma/hca"},
}
