"""The order of things, and nothing else."""

from agent.spec import spec_hash
from tasks import agent, gate, irqbalance, kernel_modules, network_managers, node_spec, packages, reporter

spec = node_spec.read()
packages.base()
kernel_modules.configure()
irqbalance.policy(spec.irqs.irqbalance, spec.mode)
network_managers.keep_off_vfs(spec=spec)
version = agent.release()
agent.stage(version=version)
node_spec.deliver(spec=spec, version=version)
agent.activate(version=version, spec_hash=spec_hash(spec))
reporter.serve(version=version)
gate.ready(version=version, spec_hash=spec_hash(spec))
