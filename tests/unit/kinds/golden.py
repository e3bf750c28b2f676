"""Golden files of plans: what the planner makes of a spec and a machine, as files that a reader can compare.

Each folder of tests/unit/kinds/goldens is one case: `spec.json` is the spec, `observed.json` says what the machine is like, and
`plan.json` is what `trackbed plan --json` prints of them. After a change of the planner write them anew, and read the
difference before you commit it:

    .venv/bin/python -m tests.unit.kinds.golden
    git diff tests/unit/kinds/goldens

The keys of `observed.json`, in the order in which they are applied to the simulated machine; all but `nics` may be left out:

- `cpus`: how many it has, on two NUMA nodes; 4 if not given.
- `nics`: its NICs, each with `pci`, `netdev`, `mac` and `numa_node`; they behave as an Intel 82576 (igb).
- `rdma`: RDMA devices, each with `function`, `name` and `netdev`. `pfc`: priorities with priority flow control, by netdev.
- `follows`: a spec that the agent has already made true.
- `vf_attributes`: what somebody has since set through the PF, by target. `vf_netdevs`: VFs' netdevs that came back from a pod,
  with the name that they had there.
- `pods`: who was given a VF by the kubelet.
- `files`: texts of sysfs and /proc.
"""

import json
from pathlib import Path
from typing import Any

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.dry_run import dry_run
from agent.hardware.functions import pci_of
from agent.machine import DcbState
from agent.report.records import to_plain
from agent.spec.node import from_mapping, parse
from tests.sim.kernel import Kernel

FOLDER = Path(__file__).parent / "goldens"


def cases() -> list[Path]:
    """The folders of all cases."""
    return sorted(path for path in FOLDER.iterdir() if path.is_dir())


def plan_text(case: Path) -> str:
    """The text that `plan.json` of a case should have."""
    kernel = machine(json.loads((case / "observed.json").read_text()))
    kernel.writes.clear()
    planned = dry_run(kernel.machine(), parse((case / "spec.json").read_text(), f"{case.name}/spec.json"))
    assert kernel.writes == []
    document = {"changes": to_plain(planned.changes), "errors": list(planned.errors)}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def machine(observed: dict[str, Any]) -> Kernel:
    """The simulated machine that `observed.json` describes."""
    kernel = Kernel(cpus=observed.get("cpus", 4))
    for nic in observed["nics"]:
        kernel.add_nic(nic["pci"], nic["netdev"], nic["mac"], node=nic["numa_node"])
    for device in observed.get("rdma", ()):
        kernel.rdma.add(device["function"], device["name"], device["netdev"])
    for netdev, priorities in observed.get("pfc", {}).items():
        kernel.rdma.dcb[netdev] = DcbState(frozenset(priorities))
    if "follows" in observed:
        converge(kernel.machine(), Goal(from_mapping(observed["follows"])), Memory(lambda: 0.0))
    for target, given in observed.get("vf_attributes", {}).items():
        address, _, index = target.partition("#")
        kernel.netlink.set_vf(kernel.netdev(address).ifindex, int(index), **given)
    for target, name in observed.get("vf_netdevs", {}).items():
        kernel.move_away(pci_of(kernel.files, target))
        kernel.come_back(pci_of(kernel.files, target), name)
    for target, pod in observed.get("pods", {}).items():
        kernel.host.allocated[pci_of(kernel.files, target)] = (pod,)
    for path, text in observed.get("files", {}).items():
        kernel.tree.put(path, text)
    return kernel


if __name__ == "__main__":
    for folder in cases():
        (folder / "plan.json").write_text(plan_text(folder))
