"""Interrupts of PCI functions, and which queue each of them serves."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from functools import lru_cache

from attrs import evolve, frozen

from agent.driver_families import family_of
from agent.hardware.functions import PCI, driver, ifindex, port_netdevs
from agent.hardware.placement import from_mask
from agent.hardware.sysfs import names_in, numbered, parsed, ranges, read_or, whole
from agent.machine import Files, Machine, QueueIrq

MANAGEMENT = "management"
# The role of a queue's interrupt whose name has none.
QUEUE = "queue"
# Those of RDMA's completion vectors, which serve no queue of the netdev.
COMPLETIONS = frozenset({"ceq", "nq"})


@frozen
class Irq:
    """One requested interrupt of a function. ``role`` and ``queue`` identify it, since its number may change.

    ``action``: what the driver calls it; read only of management interrupts. ``linked``: the kernel itself says which queue it
    serves; otherwise its name does. ``managed``: the kernel places it and lets nobody move it, as far as that is known.
    ``of_pod``: the CPUs of the pod that has the function, if the spec has the interrupt go there.
    """

    number: int
    role: str
    queue: int
    affinity: tuple[int, ...]
    action: str = ""
    linked: bool = False
    managed: bool = False
    of_pod: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The interrupt's name in a change, such as ``rx-0`` or ``management-1``."""
        return f"{self.role}-{self.queue}"


def function_irqs(machine: Machine, pci: str) -> tuple[Irq, ...]:
    """The interrupts that a function's driver has requested, by number.

    Which queue an interrupt serves is what the kernel says (:meth:`agent.machine.Netlink.queue_irqs`). Where it says nothing,
    since it is older or the driver does not tell it, the interrupt's name says it.
    """
    files = machine.files
    family = family_of(driver(files, pci))
    requested = []
    for number in numbered(names_in(files, f"{PCI}/{pci}/msi_irqs")):
        action = read_or(files, f"/sys/kernel/irq/{number}/actions", "")
        affinity = ranges(files, f"/proc/irq/{number}/smp_affinity_list")
        if action and affinity:
            requested.append((number, action, _named(family.queue_irqs, action), affinity))
    linked = _linked(machine, pci) if requested else {}
    named = sum(name is not None for _, _, name, _ in requested)
    management = 0
    irqs = []
    queues = set()
    of_role: Counter[str] = Counter()
    for number, action, name, affinity in requested:
        role, queue = MANAGEMENT, management
        if name:
            said, index = name
            served = family.queue(said, of_role[said] if index is None else index, named)
            role, queue = served or (MANAGEMENT, management)
            of_role[said] += 1
        if known := linked.get(number):
            role, queue = _served(known, role)
        # A second interrupt with the name of a queue is the driver's own.
        if role == MANAGEMENT or (role, queue) in queues:
            role, queue = MANAGEMENT, management
            management += 1
        queues.add((role, queue))
        irqs.append(Irq(number, role, queue, affinity, action if role == MANAGEMENT else "", known is not None))
    # The kernel places the interrupts of all queues or of none. Each pass comes here, so only one is looked at.
    of_queue = next((irq.number for irq in irqs if irq.role != MANAGEMENT), None)
    if of_queue is None or not _is_managed(files, of_queue):
        return tuple(irqs)
    return tuple(evolve(irq, managed=irq.role != MANAGEMENT) for irq in irqs)


def _is_managed(files: Files, number: int) -> bool:
    """Whether the driver asked the kernel to place an interrupt (PCI_IRQ_AFFINITY), as txgbe and ngbe do.

    The file has no write bit then (register_irq_proc, kernel/irq/proc.c; Linux 6.12). Before, only a write shows it.
    """
    try:
        return not files.writable(f"/proc/irq/{number}/smp_affinity_list")
    except FileNotFoundError:
        return False


def hint(files: Files, number: int) -> tuple[int, ...]:
    """The CPUs on which the driver wants an interrupt; empty if it has no wish."""
    path = f"/proc/irq/{number}/affinity_hint"
    return tuple(sorted(parsed(from_mask, read_or(files, path, "0"), path)))


def _linked(machine: Machine, pci: str) -> dict[int, QueueIrq]:
    """The interrupts of a function's netdevs of which the kernel knows the queue, by number."""
    indexes = [ifindex(machine.files, name) for name in port_netdevs(machine.files, pci)]
    with suppress(OSError):  # a netdev has gone meanwhile
        return {number: irq for index in indexes if index for number, irq in machine.netlink.queue_irqs(index).items()}
    return {}


def _served(known: QueueIrq, role: str) -> tuple[str, int]:
    """The role and the queue of an interrupt, as the kernel knows them. The role in its name stays, by which it is kept."""
    rx, tx = known.rx, known.tx
    if role == MANAGEMENT:
        role = QUEUE if rx is not None and tx is not None else "tx" if rx is None else "rx"
    return role, rx if rx is not None else tx or 0


@lru_cache(maxsize=32768)
def _named(pattern: re.Pattern[str], action: str) -> tuple[str, int | None] | None:
    """The role and number in the name of a queue's interrupt. The number is None if the name has none.

    Cached: there may be thousands, the same in every pass.
    """
    match = pattern.search(action)
    if match is None:
        return None
    role = (match["role"] or QUEUE).lower()
    text = match.groupdict().get("queue")
    if text is None:
        return role, None
    number = whole(text)
    return None if number is None else (role, number)
