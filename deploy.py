"""Deploys a node: the tasks in their order. Each line is one file of tasks/."""

from agent.spec.node import spec_hash
from tasks import (
    addresses,
    agent,
    firmware,
    hardware,
    kubernetes,
    nccl,
    node_spec,
    original_state,
    packages,
    pull,
    readiness,
    reboot_policy,
)
from tasks.containers import container_engine, container_runtime
from tasks.drivers import erdma, gpu_driver, ofed, peer_memory
from tasks.host import boot, irqbalance, kernel, kernel_modules, limits, network_managers
from tasks.kubernetes import kubelet, labels, manifests, nics, reporter

spec = node_spec.read()
addresses.check(spec)
original_state.record()
packages.base(spec=spec)
kernel_modules.set_options()
kernel.pin()
ofed.install()
erdma.install()
gpu_driver.install()
peer_memory.configure()
container_engine.install()
container_runtime.configure()
limits.lift()
kernel_modules.configure()
irqbalance.policy(spec.irqs.irqbalance, spec.mode)
network_managers.ignore_vfs(spec=spec)
boot.configure(spec=spec)
firmware.configure()
reboot_policy.by_policy()
version = agent.release()
agent.stage(version=version)
node_spec.deliver(spec=spec, version=version)
agent.activate(version=version, spec_hash=spec_hash(spec))
nics.maintain(spec=spec, version=version)
hardware.settle(version=version, spec_hash=spec_hash(spec))
labels.publish()
nccl.configure()
manifests.render()
kubernetes.configure(spec=spec)
reporter.serve(version=version)
kubelet.gate()
pull.serve()
readiness.wait(version=version, spec_hash=spec_hash(spec))
reboot_policy.return_to_service()
