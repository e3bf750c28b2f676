"""Which devices an event concerns, and how soon a pass may follow. An event is only a hint of where to look again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, field, frozen

from agent.machine import Event, EventSource
from agent.report.records import HOST
from agent.spec.node import SteeredNetdevs
from agent.state.scope import Scope, devices

MOST_KEPT = 10_000
"""Events that are kept until they are judged again; beyond that they count as lost."""

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

    def joined(self, other: WakeUp) -> WakeUp:
        """Both wake-ups as one."""
        scope = None if self.scope is None or other.scope is None else self.scope | other.scope
        return WakeUp(scope, self.doubt or other.doubt)


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
        of_host = event.netdev in known.with_sysctls or any(netdevs.matches(event.netdev) for netdevs in known.steered)
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


@define(eq=False)
class Heard:
    """The events that were taken from a source, and may still be judged. ``lost``: there were more, which are lost.

    ``kept``: each event with what was read again for it. A netdev is known by its index, and it may get another one during a
    pass. So the tables of the pass before may not know an event's netdev, or take it for another one, and each event is judged
    again by the tables of the pass that has just ended.
    """

    source: EventSource
    kept: dict[Event, frozenset[str]] = field(factory=dict)
    lost: bool = False

    def receive(self) -> list[Event]:
        """Take and return what waits in the source."""
        events, lost = self.source.receive()
        # What was read for an equal event was read before this one.
        self.kept |= dict.fromkeys(events, frozenset[str]())
        self.lost = self.lost or lost
        if len(self.kept) > MOST_KEPT:
            self.kept.clear()
            self.lost = True
        return events

    def judged(self, known: KnownDevices, events: Iterable[Event]) -> WakeUp:
        """What events mean, without what was read for them already. If some were lost, any device may have changed."""
        return self._wake_up(known, {event: scope_of(event, known) for event in events})

    def taken(self, known: KnownDevices) -> WakeUp:
        """As :meth:`judged`, of all events. The caller reads again what they name."""
        scopes = {event: scope_of(event, known) for event in self.kept}
        wake = self._wake_up(known, scopes)
        self.kept = {event: read.union(scopes[event] or ()) for event, read in self.kept.items()}
        return wake

    def _wake_up(self, known: KnownDevices, scopes: Mapping[Event, set[str] | None]) -> WakeUp:
        named = {
            name for event, scope in scopes.items() for name in (scope or set()) - self.kept.get(event, frozenset())
        }
        doubt = bool(known.required) if self.lost else not known.required.isdisjoint(devices(frozenset(named)))
        everything = self.lost or None in scopes.values()
        return WakeUp(None if everything else frozenset(named), doubt=doubt)

    def forget(self) -> None:
        """Forget all events."""
        self.kept.clear()
        self.lost = False
