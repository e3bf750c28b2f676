"""The state of the machine as one pass has read it, and the part of it that every kind needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen

from agent.hardware.functions import NOTHING, Asked, Function, discover
from agent.hardware.load import Load, read_load
from agent.hardware.topology import Topology, read_topology
from agent.machine import Machine
from agent.spec.nic import Nic
from agent.spec.node import NodeSpec
from agent.state.scope import Scope
from agent.state.wanted import WantedNic, asked, resolve

T = TypeVar("T")


@define
class Memo:
    """Results that several kinds compute from the same input, kept so that each is computed once.

    A snapshot shares it with the snapshots that were made from it. It never changes a result: a kept one is used only if its
    input is equal.
    """

    _results: dict[str, tuple[tuple[object, ...], Any]] = field(factory=dict)

    def get(self, name: str, made_from: tuple[object, ...], compute: Callable[[], T]) -> T:
        """The last result under this name, if it was made from equal values; else the result of ``compute``."""
        last = self._results.get(name)
        result: T = compute() if last is None or last[0] != made_from else last[1]
        # Keep the newer of two equal values: the next pass compares with it, and comparing an object with itself is quick.
        self._results[name] = made_from, result
        return result


@frozen
class Snapshot:
    """The state of the machine: each kind's state by device (a PF's PCI address, or ``host``).

    ``processes``: the command names of the running processes. ``nics``: the NICs whose state was read, by the PCI address of
    their functions. How much is read of a NIC depends on what the spec sets for it. ``flapped``: the PFs whose links the
    changes of this pass may have taken down. ``load``: what the CPUs did, if interrupts follow the load.
    """

    functions: tuple[Function, ...]
    topology: Topology
    processes: frozenset[str] = frozenset()
    states: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    memo: Memo = field(factory=Memo, eq=False, repr=False)
    nics: Mapping[str, Nic] = field(factory=dict)
    flapped: frozenset[str] = frozenset()
    load: Load = field(factory=Load)

    def __getitem__(self, kind: str) -> Mapping[str, Any]:
        return self.states.get(kind, {})

    def merged(self, kind: str, scope: Scope, state: Mapping[str, Any]) -> Snapshot:
        """With the ``state`` of a kind that was read for ``scope``. A device in ``scope`` that ``state`` lacks is gone."""
        if scope is None:
            return self._with(kind, state)
        before = self[kind]
        if not state and before.keys().isdisjoint(scope):
            return self
        kept = {device: value for device, value in before.items() if device not in scope}
        read = {device: _joined(kept.get(device), value) for device, value in state.items()}
        return self._with(kind, {**kept, **read})

    def _with(self, kind: str, state: Mapping[str, Any]) -> Snapshot:
        # Not evolve(), which is slow: a pass calls this fifty times.
        states = {**self.states, kind: state}
        return Snapshot(self.functions, self.topology, self.processes, states, self.memo, self.nics, load=self.load)

    def without(self, address: str, why: str) -> Snapshot:
        """Without the state of a device that cannot be read; ``why`` stands in its function."""
        functions = (evolve(each, unreadable=why) if each.address == address else each for each in self.functions)
        states = {
            kind: {device: state for device, state in of_kind.items() if device != address}
            for kind, of_kind in self.states.items()
        }
        return evolve(self, functions=tuple(functions), states=states)


def _joined(before: Any, now: Any) -> Any:
    """A device's state after a part of it was read again. Functions that were not read keep their state."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return {**before, **now}
    return now


def read_basis(machine: Machine, asked: Asked = NOTHING, last: Snapshot | None = None) -> Snapshot:
    """Read the functions, CPUs, processes and, if it is asked for, the load, as each full reading begins.

    :param last: the snapshot of the pass before. Its memo and load are kept, and what cannot change of its functions.
    """
    memo = Memo() if last is None else last.memo
    topology = read_topology(machine) if last is None else read_topology(machine, last.topology.owners)
    functions = discover(machine, asked if last is None else evolve(asked, known=last.functions))
    before = Load() if last is None else last.load
    load = read_load(machine.files, before) if asked.load else Load()
    return Snapshot(functions, topology, machine.processes.running(), memo=memo, load=load)


def nics_now(machine: Machine, spec: NodeSpec) -> Mapping[str, WantedNic]:
    """The NICs of a spec that this machine has now, by the PCI address of their functions."""
    return resolve(spec, discover(machine, asked(spec))).nics


def nic_names(machine: Machine, spec: NodeSpec) -> dict[str, str]:
    """The names of these NICs, as the spec gives them."""
    return {address: wanted.nic.name for address, wanted in nics_now(machine, spec).items()}
