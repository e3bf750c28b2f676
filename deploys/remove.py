"""Give a node back as it was before Trackbed."""

from agent.spec.node import NodeSpec
from tasks import (
    boot,
    irqbalance,
    kernel_modules,
    kubelet,
    kubernetes,
    labels,
    limits,
    nccl,
    network_managers,
    node_spec,
    pull,
    removal,
)

name = node_spec.read().node_name
removal.withdraw_spec(node_name=name)
removal.nothing_given()
nothing: NodeSpec = removal.empty(name)
pull.serve()
kubelet.gate()
nccl.configure()
labels.publish()
kubernetes.configure(spec=nothing)
boot.configure(spec=nothing)
network_managers.keep_off_vfs(spec=nothing)
irqbalance.policy(nothing.irqs.irqbalance)
kernel_modules.configure()
limits.lift()
removal.everything()
