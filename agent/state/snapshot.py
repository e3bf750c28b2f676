"""What was read of the machine in one pass, and the reading of what every kind needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from agent.hardware.functions import Function, discover
from agent.hardware.placement import Cpu, Topology
from agent.hardware.sysfs import names_or_none, parsed, ranges, read_or
from agent.machine import Machine
from agent.spec.ranges import parse_ranges

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"

Scope = frozenset[str] | None
"""What to read; None is everything. A PF's PCI address means all of its VFs, too; :func:`own` the PF alone, a target one VF."""

OWN = "pf"


def own(address: str) -> str:
    """How a scope names a PF without its VFs."""
    return f"{address}#{OWN}"


def devices(scope: frozenset[str]) -> frozenset[str]:
    """The PFs that a scope names, whole or in part."""
    return frozenset(name.partition("#")[0] for name in scope)


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


def read_topology(machine: Machine) -> Topology:
    """The online CPUs and their NUMA nodes, cores and last-level caches, from sysfs."""
    files = machine.files

    def told(path: str, parse: Callable[[str], tuple[int, ...]] = parse_ranges) -> tuple[int, ...]:
        return parsed(parse, files.read(path), path)

    nodes = [name for name in names_or_none(files, NODE) if name.startswith("node") and name[4:].isdigit()]
    node_of = {id: int(name[4:]) for name in nodes for id in told(f"{NODE}/{name}/cpulist")}
    ids = sorted(int(name[4:]) for name in nodes)
    distances = {
        int(name[4:]): dict(zip(ids, told(f"{NODE}/{name}/distance", _numbers), strict=False)) for name in nodes
    }
    kept_free = ((f"{CPU}/{name}", read_or(files, f"{CPU}/{name}", "")) for name in ("isolated", "nohz_full"))
    # A mask that was never allocated is printed so.
    isolated = [parsed(parse_ranges, text, path) for path, text in kept_free if "(null)" not in text]
    cpus = {}
    for id in told(f"{CPU}/online"):
        # A shared cache never spans sockets; the last index is the last level.
        caches = [name for name in names_or_none(files, f"{CPU}/cpu{id}/cache") if name.startswith("index")]
        core = ranges(files, f"{CPU}/cpu{id}/topology/core_cpus_list")
        llc = ranges(files, f"{CPU}/cpu{id}/cache/{caches[-1]}/shared_cpu_list") if caches else ()
        node = node_of.get(id, 0)
        cpus[id] = Cpu(id, node, core[0] if core else id, llc[0] if llc else node)
    return Topology(cpus, frozenset().union(*isolated), distances)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())
