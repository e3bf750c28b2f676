"""Makes the node's spec from the inventory, shows the node's own plan for it, and writes it to the node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyinfra
from attrs import define, field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from pyinfra.facts.files import FileContents

from agent.documents import LARGEST_REPORT, load
from agent.report.diff import summary
from agent.report.printable import printable
from agent.report.records import Change, Disruption, changes_from_plain
from agent.spec.node import NodeSpec, SpecError, from_mapping, to_json
from agent.spec.ranges import format_ranges, parse_ranges
from agent.spec.strict import MOST_FAULTS
from tasks.agent import BASE, folder
from tasks.common.archive import ROOT
from tasks.common.commands import Commands, refuse, warn
from tasks.common.data import SPEC_KEYS, host_data, unknown_keys, wrong_arguments, wrong_values
from tasks.common.facts import FactBase
from tasks.common.status import SPEC
from tasks.common.texts import replace
from tasks.packages import INTERPRETERS, NodePython

# Version 1.0.0 wrote the previous spec into the second file.
LEFTOVERS = (SPEC, f"{SPEC}.previous")


def node_spec(data: Mapping[str, object], host_name: str) -> NodeSpec:
    """Make the node's spec from a host's data.

    :raises DeployError: one line for each fault, naming host, key and remedy.
    """
    faults = [*unknown_keys(data, host_name), *wrong_arguments(data, host_name), *wrong_values(data, host_name)]
    values = {key: data[key] for key in SPEC_KEYS if data.get(key) is not None}
    try:
        spec = from_mapping({"node_name": host_name, **values}, host_name)
    except SpecError as error:
        faults += error.faults
    if faults:
        raise DeployError("\n".join(faults))
    return spec


def read() -> NodeSpec:
    """The current host's spec. Bad data stops the deploy here, before any node is changed.

    :raises DeployError: the data of this host are wrong; also names the faults of all other hosts that are deployed. Or pyinfra
        has not read config.py, as in another folder than the checkout.
    """
    if pyinfra.is_cli and not hasattr(State.init, "__wrapped__"):
        raise DeployError(
            f"pyinfra has not read {ROOT / 'config.py'}: run it in {ROOT}, and give the inventory by its path, as "
            "~/fleet/inventories/prod.py"
        )
    try:
        return node_spec(host_data(), host.name)
    except DeployError:
        deployed = (each for each in host.state.inventory if host.state.is_host_in_limit(each))
        raise DeployError("\n".join(_faults(deployed)[:MOST_FAULTS])) from None


def _faults(hosts: Iterable[Host]) -> list[str]:
    """What is wrong with the hosts' data. A fault that several hosts share, as from their group, is named once."""
    names: dict[str, list[str]] = {}
    for each in hosts:
        try:
            node_spec(each.data.dict(), each.name)  # type: ignore[no-untyped-call]
        except DeployError as error:
            for line in str(error).splitlines():
                names.setdefault(line.removeprefix(each.name), []).append(each.name)
    return [
        f"{having[0]}{fault}" + (f" (on {len(having)} hosts)" if len(having) > 1 else "")
        for fault, having in names.items()
    ]


@frozen
class Plan:
    """What an agent would change for a spec.

    ``version``: the version of the agent that made the plan. ``understood``: the agent could read the spec, so errors are the
    node's.
    """

    version: str
    changes: tuple[Change, ...] = ()
    errors: tuple[str, ...] = ()
    understood: bool = field(default=False, eq=False)

    def blockers(self) -> list[str]:
        """Why the spec cannot be applied: the errors, and the changes that are impossible; each once."""
        stuck = (change for change in self.changes if change.blocker)
        return list(
            dict.fromkeys([*self.errors, *(f"{change}: {change.blocker}; {change.remedy}" for change in stuck)])
        )


# Uses the staged version, or else the current one. Prints the exit code last.
_PLAN = """
python=$1 agent=$2
if [ ! -e "$agent" ]; then agent=$(readlink -f "$3") && [ -e "$agent" ] || exit 0; fi
basename "$agent"
code=0
"$python" -I "$agent" plan --spec - --json 2>&1 || code=$?
echo
echo "$code"
"""


class NodePlan(FactBase[Plan | None]):
    """The node's plan for a spec on standard input; None: the node has no agent."""

    def command(self, version: str, python: str) -> StringCommand:
        """Run `trackbed plan`, of the given version if it is staged."""
        return self.script(_PLAN, python, folder(version), f"{BASE}/current")

    def process(self, output: list[str]) -> Plan | None:
        """Parse the version, the plan, and the exit code (0: no changes, 1: an error, 2: changes)."""
        version, *printed, code = output
        document = _document(printed)
        if document is None or code not in ("0", "1", "2"):
            text = "\n".join(line for line in printed if line)
            return Plan(version, errors=(f"agent {version} could not plan (exit code {code}): {text}",))
        try:
            errors = tuple(map(str, document["errors"]))
            return Plan(version, changes_from_plain(document["changes"]), errors, bool(document.get("spec_hash")))
        except Exception as error:  # cattrs raises exception groups
            return Plan(version, errors=(f"the plan of agent {version} cannot be read: {error!r}",))


def planned(spec: NodeSpec, version: str) -> Plan | None:
    """For an operation: the plan of the node's agent, of this version if it is staged; None: the node has no agent."""
    python = host.get_fact(NodePython) or INTERPRETERS[0]
    plan: Plan | None = host.get_fact(NodePlan, version=version, python=python, _stdin=to_json(spec))
    return plan


def _document(printed: list[str]) -> dict[str, Any] | None:
    """The line with the JSON object. A library may have printed warnings before it."""
    for line in printed:
        if line.startswith("{"):
            try:
                return dict(load(line, LARGEST_REPORT))
            except ValueError:
                return None
    return None


@define
class PlanPrinter:
    """Prints a host's plan once, although the operation reads it in both of pyinfra's phases."""

    _printed: tuple[Plan | None, ...] = ()

    def print_once(self, plan: Plan | None, version: str, spec: NodeSpec) -> None:
        """Print the plan, one line for each change, unless it was the last one printed."""
        if self._printed != (plan,):
            self._printed = (plan,)
            for line in _lines(plan, version, spec):
                host.log(printable(f"plan: {line}"))


def _lines(plan: Plan | None, version: str, spec: NodeSpec) -> list[str]:
    if plan is None:
        return ["unknown until the agent is on the node", *_defaults(spec)]
    lines = [_describe(change) for change in plan.changes]
    if plan.version != version:
        lines.insert(0, f"made by agent {plan.version}, which is on the node")
    if plan.changes:
        lines.append(summary(plan.changes))
    elif plan.version == version and not plan.errors:
        lines.append("nothing to change")
    return lines


def _defaults(spec: NodeSpec) -> list[str]:
    """What the spec's defaults change on a fresh node: an operator who gave only NICs does not expect it."""
    if not spec.nics or spec.mode == "observe":
        return []
    done = {
        "irqbalance is stopped (irqs.irqbalance)": spec.irqs.irqbalance == "disabled",
        "the NICs' interrupts are pinned (irqs.pin)": spec.irqs.pin,
        "RPS is turned on for NICs with fewer queues than CPUs (rps.enable)": spec.rps.enable,
    }
    said = ", ".join(what for what, is_done in done.items() if is_done)
    return [f"beside the NICs: {said}"] if said else []


def _describe(change: Change) -> str:
    notes = [] if change.disruption is Disruption.NONE else [f"[{change.disruption}]"]
    notes += [f"disturbs {', '.join(change.affected)}"] if change.affected else []
    return "  ".join([str(change), *notes])


def _repeated_priorities(spec: NodeSpec) -> list[str]:
    """Warnings of priorities that are written as for mlnx_qos. There `0,0,0,1,0,0,0,0` means priority 3."""
    given = (
        (f"nics[{number}].roce.{key}", getattr(nic.roce, key) or "")
        for number, nic in enumerate(spec.nics)
        if nic.roce
        for key in ("pfc", "ecn")
    )
    return [
        f"{place}: {text!r} names the priorities {format_ranges(parse_ranges(text))}; if that is meant, name each once "
        "(mlnx_qos has a 0 or 1 for each priority, this list has their numbers)"
        for place, text in given
        if len(set(parts := text.split(","))) < len(parts)
    ]


@deploy("Spec")
def deliver(spec: NodeSpec, version: str) -> None:
    """Show what the spec changes on the node, and write it. The agent reads it when it is activated or reloaded."""
    for warning in _repeated_priorities(spec):
        warn(host, warning)
    write(name="Plan and write", spec=spec, version=version, printer=PlanPrinter())


# The reporter, another user, reads this folder. An earlier deploy may have made it with another umask.
_READABLE = 'chmod 755 "${1%/*}"\n'


@operation()
def write(spec: NodeSpec, version: str, printer: PlanPrinter) -> Commands:
    """Write the spec if it differs, unless the node's plan says that it cannot be applied and the agent should apply it."""
    text = to_json(spec)
    same = host.get_fact(FileContents, path=SPEC) == text.splitlines()
    executing = host.state.is_executing
    if executing and same:
        host.noop("the node has this spec")
        return
    plan = planned(spec, version)
    printer.print_once(plan, version, spec)
    if same:
        return
    if executing:
        if plan is None:
            yield refuse(f"the node has no agent to make a plan, so {SPEC} was not written; deploy again")
            return
        # In mode observe the agent writes nothing, and reports these blockers.
        if plan.blockers() and not (spec.mode == "observe" and plan.understood):
            yield refuse("\n".join([*plan.blockers(), f"{SPEC} was not written"]))
            return
    elif plan is not None:
        # Only a warning here: an earlier operation of this deploy may remove the blocker, for instance by loading a driver.
        prefix = "cannot be applied" if plan.version == version else "refused by the older agent"
        for blocker in plan.blockers():
            warn(host, f"plan: {prefix}: {blocker}")
    yield from replace({}, {SPEC: text}, _READABLE, SPEC)
