"""An example of a fleet: GPU nodes with ConnectX RoCE rails, eRDMA instances, and SR-IOV nodes. Not run on such hardware.

pyinfra makes each list a group; beside the hosts there may be data of the group. More data of a group is in group_data/, in a
file of the same name.
"""

# The API servers, and on the control host the certificate authority of each.
_OWN_CLUSTER = {"server": "https://10.0.0.1:6443", "ca_file": "~/.config/trackbed/own-cluster.pem"}
_MANAGED_CLUSTER = {"server": "https://10.0.1.1:6443", "ca_file": "~/.config/trackbed/managed-cluster.pem"}

# node_name: the Node's name, where it is not the name that the control host connects to. node_number: the host's part of its
# rails' addresses.
_gpu_nodes = [(f"gpu-{n:02}.example.net", {"node_name": f"gpu-{n:02}", "node_number": n}) for n in range(1, 9)]
_spark_nodes = [(f"spark-{n:02}.example.net", {"node_name": f"spark-{n:02}"}) for n in range(1, 5)]
# Managed Kubernetes on Alibaba Cloud names its Nodes by region and address.
_gpu_instances = [(f"10.0.1.{n}", {"node_name": f"cn-hangzhou.10.0.1.{n}"}) for n in range(11, 15)]
_cpu_instances = [(f"10.0.1.{n}", {"node_name": f"cn-hangzhou.10.0.1.{n}"}) for n in range(21, 25)]

# Pods are admitted once the resources that they request are allocatable.
connectx_roce = (
    _gpu_nodes,
    {"kubernetes": {**_OWN_CLUSTER, "required_resources": ["rdma/hca", "sriov/vf_rdma", "nvidia.com/gpu"]}},
)
bare_metal_sriov = (_spark_nodes, {"kubernetes": {**_OWN_CLUSTER, "required_resources": ["sriov/vf_rdma"]}})
erdma = (_gpu_instances, {"kubernetes": {**_MANAGED_CLUSTER, "required_resources": ["rdma/hca", "nvidia.com/gpu"]}})
erdma_cpu = (_cpu_instances, {"kubernetes": {**_MANAGED_CLUSTER, "required_resources": ["rdma/hca"]}})

# The nodes of a cluster share the manifests of its device plugins.
own_cluster = [name for name, _ in _gpu_nodes + _spark_nodes]
managed_cluster = [name for name, _ in _gpu_instances + _cpu_instances]

# Hosts where nothing may be disrupted outside a maintenance window, by the agent or by a deploy: disruptive changes, reloads of
# drivers and reboots are planned and deferred.
careful = (
    ["gpu-07.example.net", "gpu-08.example.net"],
    {
        "disruption": {
            "allow": "none",
            "windows": [{"start": "22:00", "end": "04:30", "days": ["Sat"], "allow": "reboot"}],
        }
    },
)
