"""Alibaba Cloud instances with eRDMA. Written from vendor documents; not run on such an instance.

eRDMA has no SR-IOV: pods share the device through the eRDMA device plugin.
"""

nics = [
    {
        "name": "erdma0",
        # By PCI ID, since names and slots vary from instance to instance.
        "select": {"vendor": "1ded", "device": "107f"},
    }
]

kernel_modules = ["ib_uverbs", "rdma_ucm"]

# DKMS needs the running kernel's headers to build the driver.
kernel = {"hold": True}
# The URL is of a copy in your network, since Alibaba's own answers only inside a VPC. Alibaba publishes the checksum of 1.5.7.
erdma = {
    "source": "installer",
    "installer": {
        "url": "http://mirror.example.net/erdma_installer-1.5.7.tar.gz",
        "sha256": "cb44f4c4aaaabfbd81224c85a9e7889732bda26cc832ff70ecc0559bcc14165c",
    },
    # False: iWARP. Instances in different modes cannot communicate.
    "compat_mode": False,
}
