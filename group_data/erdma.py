"""GPU instances of Alibaba Cloud with eRDMA. Written from vendor documents; not run on such an instance.

eRDMA has no SR-IOV: pods share the devices through the eRDMA device plugin.
"""

_ERDMA = "aliyun.accelerator/erdma"

# DKMS needs the running kernel's headers to build the driver.
kernel = {"hold": True}
# The URL is of a copy in your network, since Alibaba's own answers only inside a VPC. Alibaba publishes the checksum of 1.5.7.
erdma = {
    "source": "installer",
    "installer": {
        "url": "http://mirror.example.net/erdma_installer-1.5.7.tar.gz",
        "sha256": "cb44f4c4aaaabfbd81224c85a9e7889732bda26cc832ff70ecc0559bcc14165c",
    },
    # NCCL exchanges the numbers of queue pairs by itself (out of band). eRDMA supports that only in its RoCE-compatible mode.
    "compat_mode": True,
}
kernel_modules = ["ib_uverbs", "rdma_ucm"]
gpus = {"count": 8}
container_runtime = {"engines": ["containerd"]}
limits: dict[str, object] = {}

nics = [
    {
        # By PCI ID, since names and slots vary from instance to instance, and one type of instance has one, another two.
        "name": "erdma{index}",
        "select": {"vendor": "1ded", "device": "107f", "each": True, "min": 1, "max": 2},
        "rdma": {},
    }
]
# A second port may stay DOWN, as in the vendor's own example.
rdma = {"at_least": 1}

nccl = {"network_type": 1}
labels = {
    "capabilities": [_ERDMA, "nvidia.com/gpu.present", "feature.node.kubernetes.io/network-rdma.capable"],
    "policy": {"gpu-use-type": "exclusive"},
}
