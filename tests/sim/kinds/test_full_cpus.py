"""CPUs run out of interrupt vectors, and get some back: each queue finds a CPU if one has a vector."""

import errno
import random
from collections import Counter
from copy import copy
from typing import Any

import pytest
from attrs import define, evolve, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.retry import LAST_RETRY, Failures
from agent.hardware.functions import targets
from agent.hardware.interrupts import MANAGEMENT
from agent.kinds import irq_placement, irqs
from agent.kinds.irqs import PLACED, TOO_MANY
from agent.machine import Machine
from agent.report.verdict import is_ready
from agent.spec.node import from_mapping
from agent.spec.ranges import parse_ranges
from tests.sim.kernel import Fault, Kernel
from tests.sim.kinds.test_placement import spec
from tests.sim.passes import nic, settle, undone
from tests.sim.refusing import refusing
from tests.sim.two_nics import MAC0, MAC1, NAME0, NAME1, PF0, PF1, two_nics

NICS = (PF0, PF1)


@define
class Node:
    """A machine with two NICs, and an agent whose passes follow one another slowly enough for each to try all again."""

    chance: random.Random
    kernel: Kernel = field(init=False)
    excluded: str = field(init=False)
    vfs: int = field(init=False)
    roomy: int = field(init=False)
    failures: Failures = field(factory=Failures)
    now: float = 0.0

    def __attrs_post_init__(self) -> None:
        nodes = self.chance.choice((1, 2))
        cpus = nodes * self.chance.randint(1, 4)
        self.kernel = Kernel(cpus=cpus, nodes=nodes, vf_queues=self.chance.randint(1, 3))
        self.kernel.add_nic(PF0, NAME0, MAC0, node=0)
        self.kernel.add_nic(PF1, NAME1, MAC1, node=self.chance.randint(-1, nodes - 1))
        self.excluded = self.chance.choice(("", "0", f"{cpus - 1}"))
        self.vfs = self.chance.randint(0, 4)
        # Interrupts are requested on any CPU, so one always has room: a driver whose request fails has no queues.
        self.roomy = self.chance.randrange(cpus)

    def goal(self) -> Goal:
        nics: list[dict[str, Any]] = [
            nic(f"rail{number}", pci, vfs={"count": self.vfs}) for number, pci in enumerate(NICS)
        ]
        given = {"node_name": "n1", "nics": nics, "irqs": {"irqbalance": "untouched", "exclude_cpus": self.excluded}}
        return Goal(from_mapping(given))

    def look(self) -> Pass:
        self.now += LAST_RETRY + 1
        return converge(self.kernel.machine(), self.goal(), Memory(lambda: self.now, self.failures))

    def happen(self) -> None:
        """CPUs run out of vectors or get some back, go off or on; a VF goes to a pod and returns; others move interrupts."""
        interrupts = self.kernel.interrupts
        cpus = range(interrupts.cpus)
        match self.chance.choice(("vectors", "online", "pod", "moved", "moved", "vfs", "vfs")):
            case "vectors":
                limited = {cpu for cpu in cpus if cpu != self.roomy and self.chance.random() < 0.9}
                interrupts.vectors = {
                    cpu: list(interrupts.serving.values()).count(cpu) + self.chance.choice((0, 0, 0, 1, 2))
                    for cpu in limited
                }
            case "online":
                off = {cpu for cpu in cpus if cpu != self.roomy and self.chance.random() < 0.3}
                interrupts.set_online(",".join(str(cpu) for cpu in cpus if cpu not in off))
            case "pod" if self.vfs:
                vf = self.chance.choice(list(targets(self.kernel.files, PF0).values())[1:])
                name = self.kernel.netdev(vf).name
                self.kernel.move_away(vf)
                self.kernel.interrupts.free(vf)
                self.look()
                self.kernel.come_back(vf, name)
            case "moved":
                for number in sorted(interrupts.serving):
                    if self.chance.random() < 0.3 and interrupts.free_vectors(self.roomy) > 0:
                        self.kernel.files.write(f"/proc/irq/{number}/smp_affinity_list", str(self.roomy))
            case _:
                self.vfs = self.chance.randint(0, 7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_each_queue_finds_a_cpu_if_one_has_a_vector(seed: int) -> None:
    node = Node(random.Random(seed))  # noqa: S311  the same machines each time
    node.look()
    for _ in range(10):
        node.happen()
        for _ in range(node.kernel.cpus + 3):
            result = node.look()
        left = undone(result, irqs.NAME)
        later = [outcome.change for outcome in undone(node.look(), irqs.NAME)]
        assert later == [outcome.change for outcome in left], "it is not sent from one to another"
        local = irq_placement.pools(result.want, result.have)
        for outcome in left:
            assert "interrupt vector left" in outcome.error
            assert outcome.error.endswith(irqs.TOO_MANY)
            cpus = local[outcome.change.device]
            assert all(node.kernel.interrupts.free_vectors(cpu) <= 0 for cpu in cpus), outcome
            assert set(parse_ranges(str(outcome.change.after))) <= set(cpus)
        if not left:
            assert not dry_run(node.kernel.machine(), node.goal().spec).changes
        known = set(parse_ranges(node.kernel.tree.files.get(irqs.FULL, "")))
        for address, functions in result.have[irqs.NAME].items():
            for irq in (irq for of_target in functions.values() for irq in of_target) if address in local else ():
                pinned = irq.role == MANAGEMENT or len(irq.affinity) == 1 or known.issuperset(local[address])
                assert pinned or left, irq


@pytest.fixture
def kernel() -> Kernel:
    return two_nics(cpus=8)


def without_vectors(cpu: str) -> Fault:
    """A fault: a CPU is full. x86 has about 200 vectors a CPU: the write says ENOSPC, and changes nothing."""
    return refusing(errno.ENOSPC, f"smp_affinity_list {cpu}")


def after_four_passes(machine: Machine) -> Pass:
    """The last of four passes with one memory, a second apart."""
    failures, time = Failures(), iter(range(1000))
    for _ in range(4):
        last = converge(machine, Goal(spec()), Memory(lambda: float(next(time)), failures))
    return last


def test_a_full_cpu_that_was_offline_serves_queues_again(kernel: Kernel) -> None:
    """Its interrupts go elsewhere when it goes offline, so it comes back with all of its vectors."""
    settle(kernel, spec())
    before = kernel.interrupts.affinities()
    kernel.reload_driver(PF0)
    taken = list(kernel.interrupts.serving.values()).count(2)
    kernel.interrupts.vectors[2] = taken
    failures, time = Failures(), iter(range(1000))

    def follow() -> None:
        for _ in range(6):
            converge(kernel.machine(), Goal(spec()), Memory(lambda: float(next(time)), failures))

    follow()
    assert "2" not in {cpus for (pci, _), cpus in kernel.interrupts.affinities().items() if pci == PF0}
    kernel.interrupts.vectors.clear()
    follow()
    assert kernel.files.read("/run/trackbed/full-cpus") == "2", "each try would make the node unready"
    kernel.interrupts.set_online("0-1,3-7")
    follow()
    kernel.interrupts.set_online("0-7")
    follow()
    assert kernel.files.read("/run/trackbed/full-cpus") == ""
    assert kernel.interrupts.affinities() == before


def test_a_full_cpu_that_cannot_be_recorded_is_in_the_message(kernel: Kernel) -> None:
    full, unwritable = without_vectors("2"), refusing(errno.ENOSPC, "replace")
    kernel.fault = lambda *write: full(*write) or unwritable(*write)
    last = settle(kernel, spec())
    errors = [outcome.error for outcome in last.outcomes if outcome.result == "failed"]
    assert errors
    assert all("CPU 2 " in error and "/run/trackbed/full-cpus cannot be" in error for error in errors)


def test_a_record_of_full_cpus_that_is_damaged_ends_no_pass(kernel: Kernel) -> None:
    kernel.tree.put("/run/trackbed/full-cpus", "1-x")
    assert is_ready(settle(kernel, spec()).conditions)
    assert set(kernel.interrupts.affinities().values()) != {"0-7"}


def test_a_queue_stays_on_a_cpu_that_becomes_full(kernel: Kernel) -> None:
    settle(kernel, spec())
    before = kernel.interrupts.affinities()
    machine = kernel.machine()
    numbers = kernel.files.names(f"/sys/bus/pci/devices/{PF0}/msi_irqs")
    irq = next(number for number in numbers if "-" in kernel.files.read(f"/sys/kernel/irq/{number}/actions"))
    home = kernel.files.read(f"/proc/irq/{irq}/smp_affinity_list")
    kernel.files.write(f"/proc/irq/{irq}/smp_affinity_list", "3" if home != "3" else "1")
    kernel.fault = without_vectors(home)
    last = after_four_passes(machine)
    assert not last.outcomes
    there = {key for key, cpus in before.items() if cpus == home}
    after = kernel.interrupts.affinities()
    assert {key for key in there if after[key] != home} == {(PF0, kernel.files.read(f"/sys/kernel/irq/{irq}/actions"))}


@pytest.mark.parametrize("room", range(4))
def test_a_queue_moves_as_a_whole_if_its_second_interrupt_gets_no_vector(kernel: Kernel, room: int) -> None:
    """A VF's queue has two: the last vector of its CPU may be taken by the first of them."""

    def full() -> bool:
        there = [path for path, cpus in kernel.tree.files.items() if path.endswith("smp_affinity_list") and cpus == "2"]
        return len(there) >= room

    kernel.fault = refusing(errno.ENOSPC, "smp_affinity_list 2", when=full)
    machine = kernel.machine()
    last = after_four_passes(machine)
    assert not last.outcomes
    assert any(where.endswith("smp_affinity_list") and value == "2" for where, value in kernel.writes)
    assert list(kernel.interrupts.affinities().values()).count("2") <= room
    assert not dry_run(machine, spec()).changes
    another_process = evolve(machine, files=copy(kernel.files))
    assert not dry_run(another_process, spec()).changes


def test_a_queue_on_a_full_cpu_is_never_sent_to_another_full_one(kernel: Kernel) -> None:
    """Two CPUs are full, and one of them serves a queue: others have all vectors free."""
    kernel.interrupts.vectors = {1: 2, 2: 2}
    machine = kernel.machine()
    last = after_four_passes(machine)
    assert is_ready(last.conditions)
    assert kernel.files.read("/run/trackbed/full-cpus") == "1-2"
    assert not dry_run(machine, spec()).changes


def test_if_all_cpus_are_full_interrupts_wait_for_the_first_vector(kernel: Kernel) -> None:
    kernel.interrupts.vectors = dict.fromkeys(range(4), 2)
    failures, time = Failures(), iter(range(0, 100000, 400))
    machine = kernel.machine()
    for _ in range(8):
        last = converge(machine, Goal(spec(3)), Memory(lambda: float(next(time)), failures))
    served = {number for number, cpu in kernel.interrupts.serving.items() if cpu < 4}
    waiting = [outcome for outcome in last.outcomes if outcome.result == "failed"]
    assert len(served) == 8
    assert waiting
    assert {outcome.change.after for outcome in waiting} == {"0-3"}
    error = f"ENOSPC: no CPU of 0-3 has an interrupt vector left; {TOO_MANY}"
    assert {outcome.error for outcome in waiting} == {error}
    kernel.interrupts.vectors[3] = 100
    assert is_ready(converge(machine, Goal(spec(3)), Memory(lambda: float(next(time)), failures)).conditions)


def test_a_full_cpu_keeps_no_more_than_its_share_of_the_queues(kernel: Kernel) -> None:
    settle(kernel, spec())
    numbers = [
        number
        for function in targets(kernel.files, PF0).values()
        for number in kernel.files.names(f"/sys/bus/pci/devices/{function}/msi_irqs")
        if "-" in kernel.files.read(f"/sys/kernel/irq/{number}/actions")
    ]
    for number in numbers:
        kernel.files.write(f"/proc/irq/{number}/smp_affinity_list", "1")
    kernel.files.replace("/run/trackbed/full-cpus", "1")
    kernel.files.replace(PLACED, "{}")
    settle(kernel, spec())
    placed = [
        cpus for (function, name), cpus in kernel.interrupts.affinities().items() if "-" in name and int(cpus) < 4
    ]
    # Of seven queues a CPU serves two at most. Each VF's queue has two interrupts.
    assert sorted(set(placed)) == ["0", "1", "2", "3"]
    assert max(Counter(placed).values()) <= 4
