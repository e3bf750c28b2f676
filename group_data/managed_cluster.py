"""A managed cluster of Alibaba Cloud, ACK. Not run there.

`kubectl apply -k examples/own-cluster` comes before the first deploy, `kubectl apply -k manifests/managed-cluster` after it.
"""

# At boot the kubelet waits until the node is verified.
kubelet = {"policy": "hold"}

device_plugins = {"folder": "manifests/managed-cluster"}
