"""An example of a fleet: eight GPU nodes with ConnectX RoCE rails, four eRDMA instances. Not run on such hardware.

pyinfra makes each list a group. The data of a group is in group_data/, in a file of the same name.
"""

# node_name: the Node's name, where it is not the name that the control host connects to.
connectx_roce = [(f"gpu-{n:02}.example.net", {"node_name": f"gpu-{n:02}"}) for n in range(1, 9)]

# Managed Kubernetes on Alibaba Cloud names its Nodes by region and address.
erdma = [(f"10.0.1.{n}", {"node_name": f"cn-hangzhou.10.0.1.{n}"}) for n in range(11, 15)]

# Hosts where nothing may be disrupted outside a maintenance window: disruptive changes are planned and deferred.
careful = (["gpu-07.example.net", "gpu-08.example.net"], {"disruption": {"allow": "none"}})
