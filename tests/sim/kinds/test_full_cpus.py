"""Random machines on which CPUs run out of interrupt vectors, and get some back: each queue finds a CPU if one has a vector."""

import random
from typing import Any

import pytest
from attrs import define, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.retry import LAST_RETRY, Failures
from agent.hardware.functions import targets
from agent.hardware.interrupts import MANAGEMENT
from agent.kinds import irqs
from agent.report.records import Outcome
from agent.spec.node import from_mapping
from agent.spec.ranges import parse_ranges
from tests.sim.kernel import Kernel
from tests.sim.two_nics import MAC0, MAC1, NAME0, NAME1, PF0, PF1

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
            {"name": f"rail{number}", "select": {"pci": pci}, "vfs": {"count": self.vfs}}
            for number, pci in enumerate(NICS)
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


def failed(result: Pass) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.change.kind == irqs.NAME and outcome.result != "applied"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_each_queue_finds_a_cpu_if_one_has_a_vector(seed: int) -> None:
    node = Node(random.Random(seed))  # noqa: S311  the same machines each time
    node.look()
    for _ in range(10):
        node.happen()
        for _ in range(node.kernel.cpus + 3):
            result = node.look()
        left = failed(result)
        assert [o.change for o in failed(node.look())] == [o.change for o in left], "it is not sent from one to another"
        local = irqs.pools(result.want, result.have)
        for outcome in left:
            assert "interrupt vector left" in outcome.error
            assert outcome.remedy == irqs.TOO_MANY
            cpus = local[outcome.change.device].cpus
            assert all(node.kernel.interrupts.free_vectors(cpu) <= 0 for cpu in cpus), outcome
            assert set(parse_ranges(str(outcome.change.after))) <= set(cpus)
        if not left:
            assert not dry_run(node.kernel.machine(), node.goal().spec).changes
        known = set(parse_ranges(node.kernel.tree.files.get(irqs.FULL, "")))
        for address, functions in result.have[irqs.NAME].items():
            for irq in (irq for of_target in functions.values() for irq in of_target) if address in local else ():
                pinned = irq.role == MANAGEMENT or len(irq.affinity) == 1 or known.issuperset(local[address].cpus)
                assert pinned or left, irq
