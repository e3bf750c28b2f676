"""What was read of the machine in one pass, and the reading of what every kind needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from agent.hardware.functions import Function, discover
from agent.hardware.topology import Topology, read_topology
from agent.machine import Machine
from agent.state.scope import Scope


@frozen
class Snapshot:
    """The machine as observed: each kind's state by device (a PF's PCI address, or ``host``).

    ``processes``: the command names of what runs.
    """

    functions: tuple[Function, ...]
    topology: Topology
    processes: frozenset[str] = frozenset()
    states: Mapping[str, Mapping[str, Any]] = field(factory=dict)

    def __getitem__(self, kind: str) -> Mapping[str, Any]:
        return self.states.get(kind, {})

    def merged(self, kind: str, scope: Scope, state: Mapping[str, Any]) -> Snapshot:
        """With the ``state`` of a kind that was read for ``scope``; a device that is wholly in scope and not in it is gone."""
        if scope is None:
            return evolve(self, states={**self.states, kind: state})
        before = self[kind]
        if not state and before.keys().isdisjoint(scope):
            return self
        kept = {device: found for device, found in before.items() if device not in scope}
        read = {device: _joined(kept.get(device), found) for device, found in state.items()}
        return evolve(self, states={**self.states, kind: {**kept, **read}})

    def without(self, address: str, why: str) -> Snapshot:
        """With nothing of a device that cannot be read, but that, and ``why``."""
        functions = (evolve(each, unreadable=why) if each.address == address else each for each in self.functions)
        states = {
            kind: {device: state for device, state in of_kind.items() if device != address}
            for kind, of_kind in self.states.items()
        }
        return evolve(self, functions=tuple(functions), states=states)


def _joined(before: Any, found: Any) -> Any:
    """Functions that were read of a device, with those that were not."""
    if isinstance(before, Mapping) and isinstance(found, Mapping):
        return {**before, **found}
    return found


def read_basis(machine: Machine, serials: bool = False) -> Snapshot:
    """What only a full reading looks at, before any kind was observed; ``serials``: a selector asks for serial numbers."""
    return Snapshot(discover(machine, serials), read_topology(machine), machine.processes.running())
