"""Alibaba Cloud instances with eRDMA. From vendor documents: not run on such an instance.

eRDMA has no SR-IOV: Pods share the device through the eRDMA device plugin.
"""

nics = [
    {
        "name": "erdma0",
        # Names and slots vary from instance to instance; this is the device's PCI ID.
        "select": {"vendor": "1ded", "device": "107f"},
    }
]

kernel_modules = ["ib_uverbs", "rdma_ucm"]

# DKMS builds the driver for the running kernel, and needs its headers.
kernel = {"hold": True}
# A copy of the vendor's archive in your network (its own address answers inside a VPC alone), with the checksum that Alibaba
# publishes for 1.5.7.
erdma = {
    "source": "installer",
    "installer": {
        "url": "http://mirror.example.net/erdma_installer-1.5.7.tar.gz",
        "sha256": "cb44f4c4aaaabfbd81224c85a9e7889732bda26cc832ff70ecc0559bcc14165c",
    },
    # False: the iWARP port; GPU and CPU instances in different modes cannot talk to each other.
    "compat_mode": False,
}
