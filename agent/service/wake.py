"""Which devices an event concerns, and how soon a pass may follow. An event is only a hint of where to look again."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen

from agent.engine.converge import Pass
from agent.kinds import links, vf_links
from agent.machine import Event
from agent.report.records import HOST
from agent.spec.addresses import FIRST_TABLE
from agent.spec.node import SteeredNetdevs
from agent.spec.sysctl_names import netdevs
from agent.state.scope import Scope, alone, own

BURST = 20
RATE = 100.0
"""Events may cause :data:`BURST` passes without a pause, then :data:`RATE` passes a second. One pass answers all events of a
pause."""


@frozen
class KnownDevices:
    """The devices of the last snapshot, by which an event finds its device.

    ``by_ifindex``: the name in a scope of each netdev's function. ``by_address``: the PF of each function. ``by_table``: the
    name in a scope of each routing table's PF.
    ``incomplete``: a NIC of the spec is missing. Another function may turn out to be it, once it has its driver or its name.
    ``required``: the PFs without which the node is not ready.
    ``steered``: the other netdevs that the spec steers (RPS), by patterns of their names. ``with_sysctls``: the names of the
    netdevs to which sysctls of the spec belong. Both concern the host.
    """

    by_ifindex: Mapping[int, str]
    by_address: Mapping[str, str]
    incomplete: bool = False
    required: frozenset[str] = frozenset()
    steered: tuple[SteeredNetdevs, ...] = ()
    by_table: Mapping[int, str] = field(factory=dict)
    with_sysctls: frozenset[str] = frozenset()


@frozen
class WakeUp:
    """What events mean for the worker.

    ``scope``: what to read again, None for everything. ``doubt``: a required device may have changed, so Ready is unproven.
    """

    scope: Scope
    doubt: bool = False


@define
class Pace:
    """How soon the next pass may come: ``BURST`` at once, then ``RATE`` a second (seconds of a monotonic clock)."""

    _paid_until: float = 0.0

    def pause(self, now: float) -> float:
        """Count a pass; the seconds that it must wait."""
        self._paid_until = max(self._paid_until, now) + 1 / RATE
        return max(0.0, self._paid_until - now - BURST / RATE)


def scope_of(event: Event, known: KnownDevices) -> set[str] | None:
    """The devices that an event concerns, by their names in a scope. Empty: none of the spec's devices; None: every device.

    A netdev is judged by its index, or by its PCI function if it is in another namespace. A new netdev of a wanted function is
    announced by a uevent, too.
    """
    if event.every_device:
        return None
    if event.ifindex in known.by_ifindex:
        return {known.by_ifindex[event.ifindex]}
    if event.ifindex:
        of_host = event.netdev in known.with_sysctls or any(each.matches(event.netdev) for each in known.steered)
        return {HOST} if of_host else set()
    if event.table:
        return {known.by_table[event.table]} if event.table in known.by_table else set()
    if event.netdev_of is not None:
        return {known.by_address[event.netdev_of]} if event.netdev_of in known.by_address else set()
    if event.function in known.by_address:
        return {known.by_address[event.function]}
    if event.physical_function:
        return {event.physical_function}
    return None if event.is_pci or known.incomplete else set()


def known_devices(result: Pass) -> KnownDevices:
    """The netdevs and functions that the pass has read. By these, events are assigned to devices."""
    by_ifindex: dict[int, str] = {}
    by_address = {address: address for address in result.want.nics}
    for kind in (links.NAME, vf_links.NAME):
        for address, functions in result.have[kind].items():
            statuses: Mapping[str, links.LinkStatus] = functions
            by_address |= {status.pci: address for status in statuses.values()}
            by_ifindex |= {status.link.ifindex: alone(target) for target, status in statuses.items() if status.link}
    nics = result.want.nics.items() if result.want.spec.mode == "enforce" else ()
    required = frozenset(address for address, nic in nics if nic.nic.required)
    steered = result.want.spec.rps.netdevs
    by_table = {
        FIRST_TABLE + nic.nic.rail: own(address)
        for address, nic in result.want.nics.items()
        if nic.nic.addresses and nic.nic.rail is not None
    }
    with_sysctls = netdevs(result.want.spec.sysctls)
    return KnownDevices(by_ifindex, by_address, bool(result.want.missing), required, steered, by_table, with_sysctls)
