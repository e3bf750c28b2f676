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

kernel_modules = ["ib_uverbs", "erdma", "rdma_ucm"]
# false: the iWARP port; GPU and CPU instances in different modes cannot talk to each other.
kernel_module_options = {"erdma": {"compat_mode": False}}
