"""Walks the whole way on a machine of the zoo, and writes down what each step shows.

The steps: `inspect`; the inventory of `inspect --as-inventory`, whose plan is empty; the same with VFs, planned and made true;
a reload of the first NIC's driver; a VF that a pod takes and returns; then what the deploy renders from the machine: nccl.conf,
and the configurations of the device plugins with their networks.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.dry_run import dry_run
from agent.hardware.functions import vf_addresses
from agent.report.records import Change, to_plain
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec, from_mapping
from cli import topology
from cli.as_inventory import derive_inventory
from cli.inspection import Inspection, NetworkFunction, inspect, render
from tasks import hardware, nccl
from tasks.hardware import Hardware, NodeHardware
from tasks.kubernetes.manifests.device_plugins import DevicePlugins, Networks
from tasks.kubernetes.manifests.discovered import discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.scripts import sh
from tests.sim.machine_file import PCI, SimMachine, load
from tests.stand_ins import program, text_file

HERE = Path(__file__).parent
HOST = "server-01"
WIDTH = 120
VFS = 2
"""How many VFs each NIC gets."""
LABELS = {
    "rdma": "hca",
    "aliyun.accelerator/erdma": "true",
    "nvidia.com/gpu.present": "true",
    "feature.node.kubernetes.io/network-sriov.configured": "true",
}


def machines() -> list[Path]:
    """The files of all machines."""
    return sorted(HERE.glob("*.yaml"))


def result(file: Path, folder: Path) -> str:
    """The text that stands beside a machine's file. ``folder``: for the files that the deploy's scripts read."""
    machine = load(file)
    return "\n".join(f"=== {title}\n\n{text.rstrip()}\n" for title, text in _steps(machine, folder))


def _steps(machine: SimMachine, folder: Path) -> Iterator[tuple[str, str]]:
    kernel = machine.kernel
    yield "trackbed inspect", render(inspect(kernel.machine()), WIDTH)
    starter = derive_inventory(kernel.machine(), HOST, HOST, ())
    yield "trackbed inspect --as-inventory", starter.text
    data = _data(starter.text)
    spec = from_mapping({"node_name": HOST, **data})
    yield "its plan, and a pass", "\n".join([*starter.remaining, *_settled(machine, spec)])
    wanted = _with_vfs(data)
    planned = dry_run(kernel.machine(), wanted)
    yield "the plan with VFs and placed interrupts", "\n".join([*_grouped(planned.changes), *planned.errors])
    yield "a pass", "\n".join(_settled(machine, wanted))
    yield "the functions then", "\n".join(_short(inspect(kernel.machine(), wanted)))
    lines = (line for line, _ in topology.render(topology.arrange(kernel.machine(), wanted), WIDTH))
    yield (
        "trackbed topology, without the CPUs",
        "\n".join(line for line in lines if not line.lstrip().startswith("CPU ")),
    )
    yield from _disturbed(machine, wanted)
    yield from _deployed(machine, wanted, folder)


def _data(text: str) -> dict[str, Any]:
    """The data of the inventory's only group."""
    scope: dict[str, Any] = {}
    exec(text, scope)  # noqa: S102  what pyinfra does with an inventory
    ((_, data),) = [group for name, group in scope.items() if not name.startswith("_")]
    return dict(data)


def _with_vfs(data: Mapping[str, Any]) -> NodeSpec:
    """The inventory's data with VFs for each NIC that can have some, and interrupts where Trackbed places them."""
    nics = [{**nic, **({"vfs": {"count": VFS}} if "vfs" in nic else {})} for nic in data.get("nics", [])]
    kept = {key: value for key, value in data.items() if key not in ("nics", "irqs", "rps", "xps")}
    return from_mapping({"node_name": HOST, **kept, "nics": nics})


def _settled(machine: SimMachine, spec: NodeSpec) -> Iterator[str]:
    """What a pass changes by kind, what it could not change, and the conditions that are not True."""
    kernel = machine.kernel
    done = converge(kernel.machine(), Goal(spec), Memory(lambda: 0.0))
    counts: dict[str, int] = {}
    for outcome in done.outcomes:
        counts[outcome.change.kind] = counts.get(outcome.change.kind, 0) + (outcome.result == "applied")
    yield "applied: " + (", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "nothing")
    for outcome in done.outcomes:
        if outcome.result != "applied":
            yield f"{outcome.result}: {outcome.change}: {outcome.error}"
    for each in done.conditions:
        if each.status != "True":
            yield f"{each.type} {each.status} {each.reason}: {each.message}"
    yield "Ready" if is_ready(done.conditions) else "not Ready"
    left = dry_run(kernel.machine(), spec)
    yield from (f"left: {line}" for line in (*map(str, left.changes), *left.errors))


def _grouped(changes: Sequence[Change]) -> Iterator[str]:
    """The changes: those of one kind and target on one line, with all targets of which it says the same."""
    of_target: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        more = f" ({change.disruption.name.lower()})" if change.disruption else ""
        more += f" affects {', '.join(change.affected)}" if change.affected else ""
        more += f" blocked: {change.blocker}" if change.blocker else ""
        text = f"{change.field} {_value(change.before)} -> {_value(change.after)}{more}"
        of_target.setdefault((change.kind, change.target), []).append(text)
    alike: dict[tuple[str, str], list[str]] = {}
    for (kind, target), texts in of_target.items():
        # Masks are long, and follow from where the interrupts are.
        said = f"{len(texts)} queues" if kind in ("rps", "xps") else "; ".join(texts)
        alike.setdefault((kind, said), []).append(target)
    return (f"{kind} {', '.join(targets)}: {said}" for (kind, said), targets in alike.items())


def _value(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | None) else str(value)


def _short(inspection: Inspection) -> Iterator[str]:
    """One line a function."""
    for function in inspection.functions:
        for each in (function, *function.vfs):
            yield _line(each)


def _line(function: NetworkFunction) -> str:
    names = [f"{netdev.name} {netdev.mac}{'' if netdev.up else ' down'}" for netdev in function.netdevs]
    devices = [f"{device.name} {device.transport} {device.node_guid}" for device in function.rdma]
    queues = [f"{irq.queue} {irq.affinity}" for irq in function.interrupts if function.nic]
    indent = "" if function.index is None else "  "
    facts = [function.driver or "no driver", f"NIC {function.nic}" if function.nic else "no NIC", *names, *devices]
    return f"{indent}{function.address} {'; '.join([*facts, ', '.join(queues) or 'no interrupts'])}"


def _disturbed(machine: SimMachine, spec: NodeSpec) -> Iterator[tuple[str, str]]:
    """The driver of a NIC is loaded again; a pod takes a VF, and returns it."""
    kernel = machine.kernel
    nics = [each for each in inspect(kernel.machine(), spec).functions if each.nic]
    if not nics:
        return
    first = next((each for each in nics if each.vfs), nics[0])
    before = list(_short(inspect(kernel.machine(), spec)))
    machine.reload_driver(first.address)
    lines = [f"of {first.address}", *_settled(machine, spec)]
    after = list(_short(inspect(kernel.machine(), spec)))
    lines += [f"now: {line}" for line in after if line not in before]
    yield "a reload of the driver", "\n".join(lines)
    vfs = vf_addresses(kernel.files, first.address)
    if not vfs or not kernel.has_netdev(vfs[0]):
        return
    vf, name = vfs[0], kernel.netdev(vfs[0]).name
    kernel.host.allocated[vf] = ("default/pod",)
    kernel.move_away(vf)
    lines = [f"{vf}, {name}", *_settled(machine, spec), "returned as eth1"]
    del kernel.host.allocated[vf]
    kernel.come_back(vf, "eth1")
    lines += [*_settled(machine, spec), f"the netdev is {kernel.netdev(vf).name}"]
    yield "a VF in a pod", "\n".join(lines)


# --- what the deploy makes of it -----------------------------------------------------------------------------


def _deployed(machine: SimMachine, spec: NodeSpec, folder: Path) -> Iterator[tuple[str, str]]:
    facts = _hardware(machine, spec, folder).with_nics_of(spec)
    with_rdma = any(function.rdma for function in nccl.functions(facts))
    conf = _or_refusal(lambda: nccl.text(nccl.Nccl(network_type=1 if with_rdma else 2), facts))
    yield "/etc/nccl.conf", conf
    wanted = DevicePlugins(folder="manifests", networks=Networks("10.56.0.0/16"), test_pods=None)
    node = discover(facts, spec, LABELS, conf)
    yield "manifests", _or_refusal(lambda: "\n".join(_manifests(manifests(wanted, {HOST: node}))))


def _or_refusal(made: Any) -> str:
    try:
        return str(made())
    except ValueError as error:
        return f"refused: {error}"


def _manifests(texts: Mapping[str, str]) -> Iterator[str]:
    """The parts of the manifests that depend on the machine: configurations of plugins, and networks."""
    yield f"files: {', '.join(sorted(texts))}"
    for name, text in sorted(texts.items()):
        for document in yaml.safe_load_all(text):
            if document.get("kind") == "ConfigMap" and not name.startswith("nccl"):
                for content in document["data"].values():
                    yield f"{name}: {json.dumps(json.loads(content))}"
            if document.get("kind") == "NetworkAttachmentDefinition":
                resource = document["metadata"].get("annotations", {}).get("k8s.v1.cni.cncf.io/resourceName")
                yield f"{name}: {json.dumps(json.loads(document['spec']['config']))} {resource or 'without a resource'}"


def _hardware(machine: SimMachine, spec: NodeSpec, root: Path) -> Hardware:
    """What the deploy's scripts read of the machine, whose files are put below ``root``."""
    _export(machine, root)
    (root / "inspection.json").write_text(json.dumps(to_plain(inspect(machine.kernel.machine(), spec))))
    command, bin = root / "trackbed", root / "bin"
    program(command, f'[ "$*" = "inspect --json" ] && cat {root}/inspection.json')
    program(bin / "ip")
    read = NodeHardware().process(sh(hardware._HARDWARE, command, root, PATH=f"{bin}:{os.environ['PATH']}"))
    assert read is not None
    return read


def _export(machine: SimMachine, root: Path) -> None:
    """Write the files that the deploy's scripts read."""
    tree = machine.kernel.tree
    for address in tree.names(PCI):
        folder = root / f"{PCI}/{address}"[1:]
        folder.mkdir(parents=True)
        for name in ("class", "vendor"):
            (folder / name).write_text(f"{tree.files[f'{PCI}/{address}/{name}']}\n")
        if bound := machine.kernel.driver(address):
            (folder / "driver").symlink_to(bound)
    for name in tree.folders.get("/sys/class/net", ()):
        (root / "sys/class/net" / name).mkdir(parents=True)
    route = machine.facts.get("route")
    text_file(root / "proc/net/route", f"{route}\t00000000\t0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n" if route else "")
