"""A cluster of your own, by kubeadm.

`kubectl apply -k examples/own-cluster` comes before the first deploy. After it come `kubectl apply -k
manifests/own-cluster/network-plugins` and `kubectl apply -k manifests/own-cluster`, in this order.
"""

# At boot the kubelet waits until the node is verified.
kubelet = {"policy": "hold"}

device_plugins = {
    "folder": "manifests/own-cluster",
    # rdma/hca is what arena asks for. rdma/rail0 and so on: a job that needs one rail of its own.
    "shared_rdma": {"resource_name": "hca", "rails": True},
    # For pods with a netdev of their own. The switches must carry this subnet between the nodes.
    "networks": {"subnet": "10.56.0.0/16"},
    # They give pods those networks.
    "network_plugins": {"multus": {}, "whereabouts": {}, "sriov_cni": {}},
}
