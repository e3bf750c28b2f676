"""Where interrupts go when numbers and CPUs change, on the simulated kernel."""

import errno
import os
from collections.abc import Callable

import pytest
from attrs import evolve

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import converge
from agent.engine.dry_run import dry_run
from agent.engine.retry import Failures
from agent.hardware.functions import targets
from agent.hardware.interrupts import MANAGEMENT, function_irqs
from agent.kinds.irq_placement import placement
from agent.kinds.irqs import PLACED
from agent.machine import Machine
from agent.report.records import Change
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from agent.state.scope import own
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import applied, condition, nic, rail0, settle, spec_of
from tests.sim.refusing import refusing
from tests.sim.seams import seen
from tests.sim.two_nics import MAC0, MAC1, NAME0, NAME1, PF0, PF1, two_nics


@pytest.fixture
def kernel() -> Kernel:
    return two_nics(cpus=8)


ONE = rail0()


def spec(count: int = 5, **more: object) -> NodeSpec:
    nics = [{"name": f"rail{number}", "select": {"pci": pci}} for number, pci in enumerate((PF0, PF1))]
    return spec_of(*[{**nic, "vfs": {"count": count}} for nic in nics], **more)


def cpus_of(kernel: Kernel) -> list[str]:
    """The CPUs of each of PF0's interrupts, by its number: drivers give several the same name."""
    numbers = sorted(kernel.files.names(f"/sys/bus/pci/devices/{PF0}/msi_irqs"), key=int)
    return [kernel.files.read(f"/proc/irq/{number}/smp_affinity_list") for number in numbers]


@pytest.mark.parametrize(
    "control", [f"i40e-{PF0}:fdir-TxRx-0", f"ice-{PF0}:ctrl-TxRx-0", "enp33s0-TxRx-0"], ids=["i40e", "ice", "twice"]
)
def test_an_interrupt_of_the_driver_itself_is_no_queue_s(kernel: Kernel, control: str) -> None:
    kernel.set_driver(PF0, "ice")
    settle(kernel, ONE)
    kernel.interrupts.request_all(PF0, [control])
    assert is_ready(settle(kernel, ONE).conditions)
    assert not dry_run(kernel.machine(), ONE).changes


# By driver, what it calls its interrupts (from its source), and the queue that each serves.
NAMES = {
    "mana": {f"mana_hwc@pci:{PF0}": "", **{f"mana_q{n}@pci:{PF0}": f"q-{n}" for n in range(3)}},
    "mana of Linux 7": {f"mana_hwc@pci:{PF0}": "", **{f"mana_msi{n + 1}@pci:{PF0}": f"q-{n}" for n in range(3)}},
    "gve": {
        f"gve-mgmnt@pci:{PF0}": "",
        **{f"gve-ntfy-blk{n}@pci:{PF0}": queue for n, queue in enumerate(["tx-0", "tx-1", "rx-0", "rx-1"])},
    },
    "gvnic": {"eth%d-mgmnt": "", "eth%d-ntfy-block.0": "tx-0", "eth%d-ntfy-block.1": "rx-0"},
    "sfc": {
        "enp33s0-0": "queue-0",
        "enp33s0-1": "queue-1",
        "enp33s0-xdp-0": "xdp-0",
        "enp33s0-ptp": "",
        "enp33s0-mae": "",
    },
    "sfc_ef100": {"enp33s0-rx-0": "rx-0", "enp33s0-rx-1": "rx-1", "enp33s0-tx-0": "tx-0", "enp33s0-tx-1": "tx-1"},
    "cxgb4": {
        "enp33s0": "",
        "enp33s0-FWeventq": "",
        **{"enp33s0-Rx0": "rx-0", "enp33s0-Rx1": "rx-1", "enp33s0-eorxq0": "", "enp33s0-iw_cxgb40": ""},
    },
    "hinic": {"enp33s0_rxq0": "rxq-0", "enp33s0_txq0": "txq-0", "enp33s0_rxq1": "rxq-1", "hinic_ceq0": ""},
    "hinic3": {"enp33s0_qp0": "qp-0", "enp33s0_qp1": "qp-1", f"hinic3_aeq0@pci:{PF0}": ""},
    "efa": {f"efa-mgmnt@pci:{PF0}": "", f"efa-comp0@pci:{PF0}": "comp-0", f"efa-comp1@pci:{PF0}": "comp-1"},
    "tg3": {"enp33s0": "", "enp33s0-tx-0": "tx-0", "enp33s0-txrx-1": "txrx-1", "enp33s0-rx-2": "rx-2"},
    "cxgb4vf": {"0000:21:00.0-FWeventq": "", "enp33s0-0": "queue-0", "enp33s0-1": "queue-1"},
    "cxgb4 with two ports": {
        "enp33s0f4": "",
        **{"enp33s0f4-Rx0": "rx-0", "enp33s0f4-Rx1": "rx-1", "enp33s0f4d1-Rx0": "rx-2", "enp33s0f4d1-Rx1": "rx-3"},
    },
    "mlx4_core": {f"mlx4-async@pci:{PF0}": "", f"mlx4-17@{PF0}": "queue-0", f"mlx4-18@{PF0}": "queue-1"},
    "mlx4_core of Linux 4.1": {
        **{f"mlx4-comp-0@pci:{PF0}": "comp-0", f"mlx4-comp-1@pci:{PF0}": "comp-1", f"mlx4-async@pci:{PF0}": ""}
    },
    "hfi1": {"hfi1_0": "", "hfi1_0 sdma0": "sdma-0", "hfi1_0 kctxt1": "kctxt-1", "hfi1_0 nd kctxt2": "kctxt-2"},
    # Between the role and the number of their queue there is nothing.
    "ionic": {
        f"ionic-{PF0}-L0-adminq0": "",
        "ionic-enp33s0-L0-hwstamp_rx4": "",
        **{f"ionic-enp33s0-L0-rx{queue}": f"rx-{queue}" for queue in range(4)},
    },
    "ice with irdma": {
        f"ice-{PF0}:misc": "",
        **{"ice-enp33s0-TxRx-0": "txrx-0", f"irdma-{PF0}-AEQ": "", f"irdma-{PF0}-CEQ-0": "ceq-0"},
        **{f"irdma-{PF0}-CEQ-1": "ceq-1", f"irdma-{PF0}-AEQCEQ-0": ""},
    },
    "hns3 with hns_roce": {
        **{
            f"hclge-misc-{PF0}": "",
            f"hns3-{PF0}-TxRx-0": "txrx-0",
            "hns-abn-0": "",
            "hns-aeq-0": "",
            "hns-ceq-0": "ceq-0",
        },
        f"hns-{PF0}-ceq-1": "ceq-1",
    },
    "be2net": {"enp33s0-q0": "q-0", "enp33s0-q1": "q-1", "ocrdma0-0": ""},
}


@pytest.mark.parametrize("named", NAMES)
def test_the_interrupts_of_a_queue_are_recognised_by_their_names(kernel: Kernel, named: str) -> None:
    kernel.set_driver(PF0, named.partition(" ")[0])
    settle(kernel, ONE)
    kernel.interrupts.free(PF0)
    kernel.interrupts.request_all(PF0, NAMES[named])
    changes = dry_run(kernel.machine(), ONE).changes
    planned = {change.field: str(change.after) for change in changes if change.kind == "irqs"}
    queues = {field: cpus for field, cpus in planned.items() if not field.startswith("management-")}
    assert sorted(queues) == sorted(queue for queue in NAMES[named].values() if queue)
    by_number: dict[str, set[str]] = {}
    for field, cpu in queues.items():
        by_number.setdefault(field.rpartition("-")[2], set()).add(cpu)
    cpus = [cpu for served in by_number.values() for cpu in served]
    assert len(cpus) == len(set(cpus)) == len(by_number)


@pytest.mark.parametrize("netdev", ["ens1f0np0", "enp65s0np0", "enp65s0f0np0", "enp193s0f0np0", "enP2p193s0f0np0"])
def test_bnxt_s_interrupts_are_pinned_although_their_names_are_cut_off(kernel: Kernel, netdev: str) -> None:
    """In Linux 6.10 and earlier a name has at most 17 characters: ``enp65s0f0np0-TxRx`` for each queue."""
    settle(kernel, ONE)
    kernel.set_driver(PF0, "bnxt_en")
    kernel.interrupts.free(PF0)
    names = [f"{netdev}-TxRx-{queue}"[:17] for queue in range(12)]
    kernel.interrupts.request_all(PF0, [*names, f"bnxt_re-creq@pci:{PF0}", f"bnxt_re-nq-0@pci:{PF0}"])
    assert is_ready(settle(kernel, ONE).conditions)
    cpus = cpus_of(kernel)
    assert [cpus[:12].count(str(cpu)) for cpu in range(4)] == [3, 3, 3, 3]
    assert (cpus[12], cpus[13]) == ("0-3", cpus[0])
    assert not dry_run(kernel.machine(), ONE).changes


# Families that give all interrupts the same name. In the order of their numbers, the queue that each serves.
SAME_NAME = {
    "mana": ("mana_intr", ["", "queue-0", "queue-1", "queue-2"]),
    "ice": ("CEQ", ["ceq-0", "ceq-1", "ceq-2", "ceq-3"]),
    "atlantic": ("enp33s0", ["queue-0", "queue-1", "queue-2", "queue-3"]),
}


@pytest.mark.parametrize("driver", SAME_NAME)
def test_the_queues_of_interrupts_with_the_same_name_are_numbered_in_their_order(kernel: Kernel, driver: str) -> None:
    name, served = SAME_NAME[driver]
    settle(kernel, spec(0))
    kernel.set_driver(PF0, driver)
    kernel.interrupts.free(PF0)
    kernel.interrupts.request_all(PF0, [name] * len(served))
    changes = [change for change in dry_run(kernel.machine(), spec(0)).changes if change.kind == "irqs"]
    queues = {change.field: str(change.after) for change in changes if not change.field.startswith("management-")}
    assert sorted(queues) == [queue for queue in served if queue]
    assert len(set(queues.values())) == len(queues)
    settle(kernel, spec(0))
    assert cpus_of(kernel) == [queues.get(queue, "0-3") for queue in served]


def test_renumbered_interrupts_move_nothing(kernel: Kernel) -> None:
    settle(kernel, spec())
    before = kernel.interrupts.affinities()
    kernel.interrupts.renumber()
    assert kernel.interrupts.affinities() == before
    assert not dry_run(kernel.machine(), spec()).changes


def test_a_cpu_off_and_on_again_gets_its_interrupts_back(kernel: Kernel) -> None:
    settle(kernel, spec())
    before = kernel.interrupts.affinities()
    kernel.interrupts.set_online("0-1,3-7")
    settle(kernel, spec())
    meanwhile = kernel.interrupts.affinities()
    assert "2" not in meanwhile.values()
    queues = {key for key, cpus in before.items() if "-" in key[1]}
    assert {key for key in queues if meanwhile[key] != before[key]} == {key for key in queues if before[key] == "2"}
    kernel.interrupts.set_online("0-7")
    settle(kernel, spec())
    assert kernel.interrupts.affinities() == before


def test_a_queue_that_makes_room_when_a_cpu_goes_offline_says_so() -> None:
    """The second NIC's node is unknown, so its queues may go to any CPU, and leave those that the first one's must have."""
    kernel = Kernel(cpus=8)
    kernel.add_nic(PF0, NAME0, MAC0, node=0)
    kernel.add_nic(PF1, NAME1, MAC1, node=-1)
    nics = (("rail0", PF0, 3), ("rail1", PF1, 7))
    wanted = spec_of(*(nic(name, pci, vfs={"count": count}) for name, pci, count in nics))

    def notes() -> dict[str, str]:
        """Why queues move, by where they are now."""
        changes = [change for change in dry_run(kernel.machine(), wanted).changes if change.kind == "irqs"]
        return {str(change.before): change.note for change in changes if not change.field.startswith("management-")}

    settle(kernel, wanted)
    kernel.interrupts.set_online("0,2-7")
    moving = notes()
    assert moving.pop("0,2-7") == "CPU 1 went offline"
    assert set(moving.values()) == {"it makes room, since CPU 1 went offline"}, moving
    said = [str(outcome.change) for outcome in settle(kernel, wanted).outcomes]
    assert any(text.endswith(", since CPU 1 went offline)") for text in said), said
    kernel.interrupts.set_online("0-7")
    assert {note.partition(",")[0] for note in notes().values()} == {"placed again"}
    settle(kernel, wanted)
    swap_two(kernel)
    assert set(notes().values()) == {""}


def swap_two(kernel: Kernel) -> None:
    """Exchange the CPUs of two queues: the loads stay as they are, as when irqbalance has moved interrupts for a while."""
    served: dict[str, str] = {}
    for number in kernel.files.names(f"/sys/bus/pci/devices/{PF0}/msi_irqs"):
        if "-" in kernel.files.read(f"/sys/kernel/irq/{number}/actions"):
            served.setdefault(kernel.files.read(f"/proc/irq/{number}/smp_affinity_list"), number)
    (one, first), (other, second), *_ = sorted(served.items())
    kernel.files.write(f"/proc/irq/{first}/smp_affinity_list", other)
    kernel.files.write(f"/proc/irq/{second}/smp_affinity_list", one)


def test_the_first_placement_of_a_boot_does_not_depend_on_where_interrupts_were(kernel: Kernel) -> None:
    settle(kernel, spec())
    other = two_nics(cpus=8)
    settle(other, spec())
    other.files.replace(PLACED, "")
    swap_two(other)
    settle(other, spec())
    assert other.interrupts.affinities() == kernel.interrupts.affinities()


@pytest.mark.parametrize("index", range(5))
def test_a_pod_that_starts_moves_no_interrupt_of_another_device(kernel: Kernel, index: int) -> None:
    settle(kernel, spec())
    before = kernel.interrupts.affinities()
    vf = targets(kernel.files, PF0)[f"{PF0}#{index}"]
    # Linux takes the netdev down when it moves it, and the driver then frees the interrupts.
    kernel.move_away(vf)
    kernel.interrupts.free(vf)
    settle(kernel, spec())
    assert kernel.interrupts.affinities() == {key: cpus for key, cpus in before.items() if key[0] != vf}
    kernel.come_back(vf, "eth9")
    settle(kernel, spec())
    assert kernel.interrupts.affinities() == before


def hangs(kernel: Kernel) -> Machine:
    return evolve(kernel.machine(), hung=frozenset({PF0}))


def cannot_be_read(kernel: Kernel) -> Machine:
    def fail(what: str, where: str) -> None:
        if (what, where) == ("netlink.link", NAME0):
            raise OSError(errno.EIO, os.strerror(errno.EIO), where)

    return seen(kernel.machine(), fail)


def has_no_driver(kernel: Kernel) -> Machine:
    kernel.unbind(PF0)
    return kernel.machine()


def is_removed(kernel: Kernel) -> Machine:
    kernel.remove_nic(PF0)
    return kernel.machine()


@pytest.mark.parametrize("selector", [{"pci": PF0}, {"netdev": NAME0}], ids=["pci", "netdev"])
@pytest.mark.parametrize("away", [hangs, cannot_be_read, has_no_driver, is_removed])
def test_a_nic_that_is_missing_moves_no_interrupt_of_another(
    away: Callable[[Kernel], Machine], selector: dict[str, str]
) -> None:
    kernel = Kernel(cpus=8, nodes=1)
    kernel.add_nic(PF0, NAME0, MAC0)
    kernel.add_nic(PF1, NAME1, MAC1)
    few = {"channels": {"combined": 2}}
    other = nic("rail1", PF1, **few)
    both = spec_of({"name": "rail0", "select": selector, "required": False, **few}, other)
    settle(kernel, both)
    before = kernel.interrupts.affinities()
    machine, announced = away(kernel), list[Change]()
    for _ in range(2):
        assert is_ready(settle(machine, both, callbacks=Callbacks(announce=announced.append)).conditions)
    assert kernel.interrupts.affinities(PF1).items() <= before.items()
    assert not announced
    if away is is_removed:
        kernel.add_nic(PF0, NAME0, MAC0)
    elif away is has_no_driver:
        kernel.bind(PF0, NAME0, MAC0)
    settle(kernel, both)
    assert kernel.interrupts.affinities() == before
    # If the NIC leaves the spec, its CPUs are free, also while an entry of the spec lacks another one.
    settle(kernel, spec_of(other, nic("none", "0000:61:00.0", required=False)))
    alone = Kernel(cpus=8, nodes=1)
    alone.add_nic(PF1, NAME1, MAC1)
    settle(alone, spec_of(other))
    assert kernel.interrupts.affinities(PF1) == alone.interrupts.affinities(PF1)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"a": 1}', f'{{"{PF0}": {{"0": "x", "1": 99, "2": [1]}}}}', "[" * 100000]
)
def test_a_damaged_placement_is_computed_again(kernel: Kernel, content: str) -> None:
    settle(kernel, spec())
    good = kernel.files.read(PLACED)
    before = kernel.interrupts.affinities()
    kernel.files.replace(PLACED, content)
    assert not applied(settle(kernel, spec()))
    assert (kernel.interrupts.affinities(), kernel.files.read(PLACED)) == (before, good)


def test_a_placement_that_cannot_be_written_does_not_end_the_pass(kernel: Kernel) -> None:
    kernel.fault = refusing(errno.ENOSPC, "replace")
    assert settle(kernel, spec()).as_wanted
    kernel.fault = no_fault
    settle(kernel, spec())
    before = kernel.interrupts.affinities()
    swap_two(kernel)
    settle(kernel, spec())
    assert kernel.interrupts.affinities() == before


def test_a_drifted_mtu_is_put_back_without_placing_all_interrupts_anew(kernel: Kernel) -> None:
    goal = Goal(rail0(mtu=9000))
    converge(kernel.machine(), goal, Memory(lambda: 0.0))  # it records the placement, which the next pass reads
    settled = converge(kernel.machine(), goal, Memory(lambda: 0.0))
    placed = placement(settled.want, settled.have)
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=1500)
    repaired = converge(kernel.machine(), goal, Memory(lambda: 0.0), settled.have, frozenset({own(PF0)}))
    assert applied(repaired) == 1
    assert placement(repaired.want, repaired.have) is placed


def test_where_interrupts_are_not_placed_no_placement_is_stored(kernel: Kernel) -> None:
    """RPS depends on where the interrupts are, and irqbalance may have them anywhere."""
    unpinned = spec_of(nic("a", PF0), irqs={"pin": False}, rps={"enable": True})
    for _ in range(2):
        assert settle(kernel, unpinned).as_wanted
    assert PLACED not in kernel.tree.files


def test_interrupts_that_the_kernel_places_are_left_there_and_the_node_is_ready(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.interrupts.manage(PF0)
    before = {path: kernel.files.read(path) for path in kernel.interrupts.managed}
    kernel.writes.clear()
    result = settle(kernel, spec())
    assert is_ready(result.conditions)
    assert {path: kernel.files.read(path) for path in before} == before
    assert not kernel.interrupts.managed.intersection(path for path, _ in kernel.writes)
    said = condition(result, "QueueInterrupts")
    assert said.reason == "PlacedByKernel"
    assert said.message.endswith(f": {len(kernel.interrupts.managed)} of {PF0}")
    # RPS and XPS follow the CPUs that the queues have.
    placed = {queue: cpu for (target, queue), cpu in placement(result.want, result.have).cpus.items() if target == PF0}
    queues = [irq for irq in function_irqs(kernel.machine(), PF0) if irq.role != MANAGEMENT]
    assert placed == {str(irq.queue): irq.affinity[0] for irq in queues}


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EIO])
def test_on_older_kernels_each_interrupt_that_the_kernel_places_is_tried_once(kernel: Kernel, refusal: int) -> None:
    tried: list[str] = []

    def fault(operation: str, where: str, value: str) -> OSError | None:
        if not where.startswith("/proc/irq"):
            return None
        tried.append(where)
        return OSError(refusal, os.strerror(refusal), where)

    settle(kernel, spec())
    (queue,) = [irq for irq in function_irqs(kernel.machine(), PF1) if irq.name == "txrx-0"]
    kernel.tree.put(f"/proc/irq/{queue.number}/smp_affinity_list", "0-7")
    kernel.fault = fault
    failures, time = Failures(), iter(range(0, 100000, 10))
    last = converge(kernel.machine(), Goal(spec()), Memory(lambda: float(next(time)), failures))
    (refused,) = last.outcomes
    assert (refused.result, refused.change.field) == ("failed", "txrx-0")
    assert refused.error.startswith("the kernel places this interrupt itself")
    kernel.reload_driver(PF0)
    for _ in range(3):
        last = converge(kernel.machine(), Goal(spec()), Memory(lambda: float(next(time)), failures))
    assert is_ready(last.conditions)
    assert len(tried) == len(set(tried))
    assert not dry_run(kernel.machine(), spec()).changes
