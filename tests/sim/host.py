"""The parts of the simulated machine beside its kernel: processes, the modules' files, the clock, the kubelet."""

import errno
from collections.abc import Callable, Collection

from attrs import define, field

from tests.sim.tree import error


@define(eq=False)
class SimHost:
    """The present state. ``asked`` is called at each question; ``hung_up`` lists the processes that were sent SIGHUP.

    ``open``: who holds a device node; ``affinities``: the CPUs of each kernel thread, by its number; ``installed``: a module's
    srcversion on disk; ``disciplined``: whether the clock is synchronised, None: nobody says; ``allocated``: the kubelet's pods
    by device; ``exclusive``: the CPUs that these pods have for themselves.
    """

    processes: set[str] = field(factory=set)
    open: dict[str, tuple[str, ...]] = field(factory=dict)
    command_lines: dict[str, tuple[str, ...]] = field(factory=dict)
    affinities: dict[int, tuple[int, ...]] = field(factory=dict)
    locked_memory: dict[str, int] = field(factory=dict)
    hung_up: list[str] = field(factory=list)
    installed: dict[str, str] = field(factory=dict)
    disciplined: bool | None = True
    allocated: dict[str, tuple[str, ...]] = field(factory=dict)
    exclusive: dict[str, frozenset[int]] = field(factory=dict)
    kubelet_error: OSError | None = None
    kubelet_started: float = 0.0
    asked: Callable[[], None] = lambda: None

    # --- Processes ----------------------------------------------------------------------------------------

    def running(self) -> frozenset[str]:
        return frozenset(self.processes)

    def holders(self, paths: frozenset[str]) -> dict[str, tuple[str, ...]]:
        return {path: holders for path, holders in self.open.items() if path in paths}

    def arguments(self, name: str) -> tuple[tuple[str, ...], ...]:
        return (self.command_lines.get(name, (name,)),) if name in self.processes else ()

    def hang_up(self, name: str) -> None:
        self.hung_up.append(name)

    def memlock(self, names: frozenset[str]) -> dict[str, int]:
        return {name: limit for name, limit in self.locked_memory.items() if name in names}

    def affinity(self, pid: int) -> tuple[int, ...]:
        if pid not in self.affinities:
            raise error(errno.ESRCH, str(pid))
        return self.affinities[pid]

    def set_affinity(self, pid: int, cpus: Collection[int]) -> None:
        self.affinity(pid)
        self.affinities[pid] = tuple(sorted(cpus))

    # --- System -------------------------------------------------------------------------------------------

    def installed_srcversion(self, module: str) -> str | None:
        return self.installed.get(module)

    def clock_synchronised(self) -> bool:
        if self.disciplined is None:
            raise error(errno.ECONNREFUSED, "timedated")
        return self.disciplined

    # --- Kubelet ------------------------------------------------------------------------------------------

    def allocations(self) -> dict[str, tuple[str, ...]]:
        self.asked()
        if self.kubelet_error is not None:
            raise self.kubelet_error
        return self.allocated

    def cpus(self) -> dict[str, frozenset[int]]:
        """A device without an entry in ``exclusive`` is that of a pod without CPUs of its own."""
        return {device: self.exclusive.get(device, frozenset()) for device in self.allocations()}

    def started(self) -> float:
        return self.kubelet_started
