"""Removes Trackbed from a node, and restores the state from before its first deploy."""

from agent.spec.node import NodeSpec
from tasks import kubernetes, nccl, node_spec, pull, removal
from tasks.host import boot, irqbalance, kernel_modules, limits, network_managers
from tasks.kubernetes import kubelet, labels

name = node_spec.read().node_name
removal.clear_keys()
# First: while the values are restored, the timer would deploy the node again.
pull.serve()
removal.withdraw_spec(node_name=name)
empty: NodeSpec = removal.empty_spec(name)
kubelet.gate()
nccl.configure()
labels.publish()
kubernetes.configure(spec=empty)
# As in a deploy, before the boot: the initramfs has the modules' options, too.
kernel_modules.set_options()
kernel_modules.configure()
boot.configure(spec=empty)
network_managers.ignore_vfs(spec=empty)
irqbalance.policy(empty.irqs.irqbalance)
limits.lift()
removal.remove_all()
