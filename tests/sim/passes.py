"""A spec of some NICs, and a pass of the agent on a simulated kernel."""

from typing import Any

from agent.engine.context import SILENT, Callbacks, Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.machine import Machine
from agent.report.records import Condition, Outcome, Report
from agent.spec.node import NodeSpec, from_mapping
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from tests.sim.kernel import Kernel
from tests.sim.two_nics import PF0


def spec_of(*nics: object, **more: object) -> NodeSpec:
    return from_mapping({"node_name": "n1", "nics": list(nics), **more})


def nic(name: str, pci: str, **more: object) -> dict[str, Any]:
    """A NIC of a spec."""
    return {"name": name, "select": {"pci": pci}, **more}


def rail0(**more: object) -> NodeSpec:
    """A spec of one NIC, the first one of two_nics()."""
    return spec_of(nic("rail0", PF0, **more))


def settle(
    on: Kernel | Machine,
    wanted: NodeSpec,
    last: Pass | Snapshot | None = None,
    scope: Scope = None,
    callbacks: Callbacks = SILENT,
    *,
    now: float = 0.0,
    failures: Failures | None = None,
    originals: Originals | None = None,
    **goal: Any,
) -> Pass:
    """A pass that follows ``last``. ``goal``: the other fields of its goal."""
    machine = on.machine() if isinstance(on, Kernel) else on
    memory = Memory(lambda: now, failures or Failures(), originals or Originals())
    have = last.have if isinstance(last, Pass) else last
    return converge(machine, Goal(wanted, **goal), memory, have, scope, callbacks)


def again(kernel: Kernel, wanted: NodeSpec, last: Pass | None = None, **more: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """What another pass writes, and its outcomes."""
    kernel.writes.clear()
    outcomes = settle(kernel, wanted, last, **more).outcomes
    return kernel.writes, outcomes


def condition(result: Pass | Report, type: str) -> Condition:
    """The one condition of this type."""
    (found,) = (each for each in result.conditions if each.type == type)
    return found


def undone(result: Pass, kind: str = "") -> list[Outcome]:
    """What a pass has left undone, of a kind or at all."""
    return [each for each in result.outcomes if each.result != "applied" and kind in ("", each.change.kind)]


def applied(result: Pass) -> int:
    """How many changes a pass has made."""
    return sum(outcome.result == "applied" for outcome in result.outcomes)
