"""Interrupts follow the load (``irqs.follow_load``) on the simulated kernel."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.engine.context import SILENT, Callbacks
from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.hardware.interrupts import MANAGEMENT, function_irqs
from agent.hardware.load import MOST
from agent.kinds.irqs import PLACED
from agent.report.records import Report
from agent.report.verdict import is_ready
from agent.service.pass_log import PassRecords
from agent.spec.node import NodeSpec
from tests.sim.interrupts import LOAD
from tests.sim.kernel import Kernel
from tests.sim.kinds.test_cpu_owners import give
from tests.sim.passes import nic, settle, spec_of
from tests.sim.refusing import refusing
from tests.sim.two_nics import PF0, PF1, two_nics

VFS = 5


@pytest.fixture
def kernel() -> Kernel:
    """The queues of a PF and of its VFs share the four CPUs of its NUMA node: 0-3 and 4-7."""
    return two_nics(cpus=8)


def spec(follow_load: bool = True, **more: object) -> NodeSpec:
    nics = [nic(f"rail{at}", pci, vfs={"count": VFS}) for at, pci in enumerate((PF0, PF1))]
    return spec_of(*nics, irqs={"follow_load": follow_load}, **more)


def crowded(kernel: Kernel) -> tuple[int, list[str]]:
    """A CPU that serves queues of several functions of PF0, and these functions."""
    functions = [PF0, *(kernel.files.target(f"/sys/bus/pci/devices/{PF0}/virtfn{vf}") for vf in range(VFS))]
    by_cpu: dict[int, list[str]] = {}
    for function in functions:
        by_cpu.setdefault(cpu_of(kernel, function), []).append(function)
    return max(sorted(by_cpu.items()), key=lambda each: len(each[1]))


def numbers(kernel: Kernel, function: str) -> list[int]:
    """The interrupts of a function's first queue."""
    irqs = function_irqs(kernel.machine(), function)
    return [irq.number for irq in irqs if irq.role != MANAGEMENT and irq.queue == 0]


def cpu_of(kernel: Kernel, function: str) -> int:
    """The CPU that serves a function's first queue, its receive and transmit interrupts alike."""
    (cpu,) = {kernel.files.read(f"/proc/irq/{each}/smp_affinity_list") for each in numbers(kernel, function)}
    return int(cpu)


def minute(
    kernel: Kernel,
    last: Pass,
    shares: Mapping[str, float],
    wanted: NodeSpec | None = None,
    callbacks: Callbacks = SILENT,
) -> Pass:
    """A minute goes by, in which each function's first queue takes a share of its CPU, and then a pass."""
    kernel.interrupts.pass_time(60, {numbers(kernel, function)[0]: share for function, share in shares.items()})
    return settle(kernel, wanted or spec(), last, callbacks=callbacks)


def test_a_queue_leaves_a_busy_cpu_and_that_is_no_drift(kernel: Kernel, tmp_path: Path) -> None:
    records, announced = PassRecords.kept(tmp_path, tmp_path), list[object]()

    def record(result: Pass) -> None:
        records.note(Report("n1", "h", "b", "v", True, True, outcomes=result.outcomes), "resync", 0.1, result)
        records.write()

    last = settle(kernel, spec())
    record(last)
    cpu, (one, other, *_) = crowded(kernel)
    shares = {one: 0.5, other: 0.4}
    last = minute(kernel, last, shares, callbacks=Callbacks(announce=announced.append))
    record(last)
    assert {cpu_of(kernel, one), cpu_of(kernel, other)} > {cpu}
    moves = [outcome.change for outcome in last.outcomes if outcome.change.kind == "irqs"]
    assert {change.note for change in moves} == {f"CPU {cpu} is busy with packets"}
    # The masks of packet steering follow.
    assert {(outcome.change.kind, outcome.result) for outcome in last.outcomes} == {
        ("irqs", "applied"),
        ("rps", "applied"),
    }
    assert (is_ready(last.conditions), last.as_wanted, announced) == (True, True, [])
    # From now on both CPUs can do their work.
    placed = cpu_of(kernel, one), cpu_of(kernel, other)
    for _ in range(5):
        last = minute(kernel, last, shares)
        record(last)
        assert last.outcomes == ()
    assert (cpu_of(kernel, one), cpu_of(kernel, other)) == placed
    assert records.drift.counts.repairs.total() == 0
    # Another program's write is drift, and is undone.
    kernel.files.write(f"/proc/irq/{numbers(kernel, one)[0]}/smp_affinity_list", str(cpu ^ 1))
    last = minute(kernel, last, shares)
    record(last)
    assert (cpu_of(kernel, one), cpu_of(kernel, other)) == placed
    assert records.drift.counts.repairs["irqs"] == 1


def test_a_new_worker_starts_from_what_stands(kernel: Kernel) -> None:
    last = settle(kernel, spec())
    _, (one, other, *_) = crowded(kernel)
    minute(kernel, last, {one: 0.5, other: 0.4})
    placed = cpu_of(kernel, one), cpu_of(kernel, other)
    assert dry_run(kernel.machine(), spec()).changes == ()
    assert settle(kernel, spec()).outcomes == ()
    assert (cpu_of(kernel, one), cpu_of(kernel, other)) == placed
    # Without the key each queue returns to where all CPUs serve equally many.
    last = settle(kernel, spec(follow_load=False))
    assert last.as_wanted
    assert cpu_of(kernel, one) == cpu_of(kernel, other)


def test_without_the_key_nothing_is_read_and_nothing_moves(kernel: Kernel) -> None:
    kernel.unreadable = set(LOAD)
    last = settle(kernel, spec(follow_load=False))
    _, (one, other, *_) = crowded(kernel)
    for _ in range(3):
        last = minute(kernel, last, {one: 0.6, other: 0.4}, spec(follow_load=False))
        assert last.outcomes == ()
    with pytest.raises(OSError, match="Input/output error"):
        settle(kernel, spec())


def test_no_queue_moves_to_the_cpu_of_a_pod_or_of_another_numa_node(kernel: Kernel) -> None:
    last = settle(kernel, spec())
    cpu, (one, other, *_) = crowded(kernel)
    free = min({0, 1, 2, 3} - {cpu})
    give(kernel, {"pod": ",".join(str(each) for each in range(4) if each not in (cpu, free))})
    last = settle(kernel, spec(), last)
    for _ in range(4):
        last = minute(kernel, last, {one: 0.5, other: 0.4})
        assert {cpu_of(kernel, one), cpu_of(kernel, other)} <= {cpu, free}
    assert {cpu_of(kernel, one), cpu_of(kernel, other)} == {cpu, free}


def test_a_busy_cpu_whose_others_all_belong_to_pods_keeps_its_queues(kernel: Kernel) -> None:
    last = settle(kernel, spec())
    cpu, (one, other, *_) = crowded(kernel)
    give(kernel, {"pod": ",".join(str(each) for each in range(4) if each != cpu)})
    last = settle(kernel, spec(), last)
    for _ in range(4):
        last = minute(kernel, last, {one: 0.5, other: 0.4})
        assert last.outcomes == ()


def test_a_cpu_that_leaves_packets_for_later_gives_queues_away_sooner(kernel: Kernel) -> None:
    last = settle(kernel, spec())
    cpu, (one, other, *_) = crowded(kernel)
    shares = {one: 0.2, other: 0.2}
    last = minute(kernel, last, shares)
    assert last.outcomes == ()
    kernel.interrupts.squeezed[cpu] += 1000
    minute(kernel, last, shares)
    assert cpu_of(kernel, one) != cpu_of(kernel, other)


def test_a_move_that_the_kernel_refuses_costs_no_readiness(kernel: Kernel) -> None:
    last = settle(kernel, spec())
    cpu, (one, other, *_) = crowded(kernel)
    kernel.fault = refusing(errno.ENOMEM, "smp_affinity_list")
    for _ in range(3):
        last = minute(kernel, last, {one: 0.5, other: 0.4})
        assert is_ready(last.conditions)
    assert cpu_of(kernel, one) == cpu_of(kernel, other) == cpu


def test_at_most_so_many_queues_move_in_a_pass(kernel: Kernel) -> None:
    last = settle(kernel, spec())
    _, functions = crowded(kernel)
    shares = dict.fromkeys(functions, 0.9)
    before = json.loads(kernel.files.read(PLACED))
    minute(kernel, last, shares)
    after = json.loads(kernel.files.read(PLACED))
    moved = [
        (target, queue) for target in after for queue in after[target] if before[target][queue] != after[target][queue]
    ]
    assert 0 < len(moved) <= MOST
