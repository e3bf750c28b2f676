"""CPU instances of Alibaba Cloud with eRDMA. Written from vendor documents; not run on such an instance."""

from group_data import erdma as _gpu_instances

kernel = _gpu_instances.kernel
kernel_modules = _gpu_instances.kernel_modules
limits = _gpu_instances.limits

# Programs on these instances (Spark, SMC-R) connect by the RDMA CM: the standard mode, iWARP. Instances in different modes
# cannot communicate.
erdma = {**_gpu_instances.erdma, "compat_mode": False}

nics = [{"name": "erdma0", "select": {"vendor": "1ded", "device": "107f"}, "rdma": {}}]

labels = {
    "capabilities": ["aliyun.accelerator/erdma", "feature.node.kubernetes.io/network-rdma.capable"],
    "policy": {"workload": "spark"},
}
