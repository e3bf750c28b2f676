"""A real fleet's shape: eight GPU nodes with ConnectX RoCE rails, four eRDMA instances. Not run on such hardware.

The names of the lists are pyinfra's groups; their values are in group_data/, one file a group.
"""

# Where a Node's name is not the name that the control host connects to, the host says so: node_name.
connectx_roce = [(f"gpu-{n:02}.example.net", {"node_name": f"gpu-{n:02}"}) for n in range(1, 9)]

# Managed Kubernetes on Alibaba Cloud names its Nodes by region and address.
erdma = [(f"10.0.1.{n}", {"node_name": f"cn-hangzhou.10.0.1.{n}"}) for n in range(11, 15)]

# Where no disruption is wanted outside of a maintenance window: plan everything, flap nothing.
careful = (["gpu-07.example.net", "gpu-08.example.net"], {"disruption": {"allow": "none"}})
