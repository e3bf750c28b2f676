"""What wakes the worker: events, commands and requests. An event is only a hint of where to look again."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from attrs import define, evolve, field, frozen

from agent.engine.readiness import Readiness
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
    """What woke the worker, and what it must read again.

    ``scope``: what to read again, None for everything. ``reload``: read the spec's file again. ``stop``: end the worker.
    ``asked``: a client of the apply socket waits. ``doubt``: a required device may have changed, so Ready is unproven.
    """

    scope: Scope
    reload: bool = False
    stop: bool = False
    asked: bool = False
    doubt: bool = False

    def joined(self, other: WakeUp) -> WakeUp:
        """Both wake-ups as one."""
        scope = None if self.scope is None or other.scope is None else self.scope | other.scope
        flags = (self.reload or other.reload, self.stop or other.stop, self.asked or other.asked)
        return WakeUp(scope, *flags, self.doubt or other.doubt)


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


class Watch:
    """Waits for whatever the worker must react to.

    ``events``: the subscribed sources. Subscribe first and read the devices afterwards, so that no event is missed.
    ``control``: a descriptor to which the supervisor writes ``reload`` lines; its end stops the worker.
    ``readiness``: ends a wait when readings of its probes have ended.
    ``apply_socket``: a descriptor that becomes readable when a client connects.
    """

    def __init__(
        self,
        events: Sequence[EventSource],
        control: int | None,
        readiness: Readiness | None = None,
        apply_socket: int | None = None,
    ) -> None:
        self._sources = {source.fileno(): Heard(source) for source in events}
        self._control = control
        self._readiness = readiness
        self._apply_socket = apply_socket
        self._pace = Pace()
        self._poll, self._commands = select.poll(), select.poll()
        probes = readiness.fileno() if readiness else None
        for descriptor in (*self._sources, control, probes, apply_socket):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        if control is not None:
            self._commands.register(control, select.POLLIN | select.POLLHUP)

    def wait(self, known: KnownDevices, timeout: float, ends: bool = True) -> WakeUp:
        """Sleep until something happens, or ``timeout`` seconds are over. The scope is empty if no wanted device is concerned.

        :param known: the devices that the last pass has read.
        :param ends: if the scope is empty, no reading follows. Then ``known`` is as new as the events, and they can be
            forgotten. Before a reading they are kept: it may find that a netdev or a table is of a wanted device.
        """
        reload = stop = asked = False
        heard = WakeUp(frozenset())
        for source in self._sources.values():
            if source.kept or source.lost:
                heard = heard.joined(source.taken(known))
        if heard.scope != frozenset():
            timeout = 0.0
        if self._readiness and timeout > 0.0:
            self._readiness.go_on()
        for descriptor, _ in self._poll.poll(max(0, int(timeout * 1000))):
            if descriptor == self._control:
                text = os.read(descriptor, 4096)
                reload, stop = bool(text), not text
            elif descriptor == self._apply_socket:
                asked = True
            elif self._readiness and descriptor == self._readiness.fileno():
                self._readiness.drain()
            else:
                self._sources[descriptor].receive()
                heard = heard.joined(self._sources[descriptor].taken(known))
        # A reading of everything is newer than all of these events.
        if heard.scope is None or (ends and not heard.scope):
            for source in self._sources.values():
                source.forget()
        return evolve(heard, scope=None if reload else heard.scope, reload=reload, stop=stop, asked=asked)

    def sources(self) -> Iterable[int]:
        """The descriptors by which events come."""
        return self._sources

    def keep(self, known: KnownDevices, ready: Collection[int]) -> WakeUp:
        """Take the events that wait now, and keep them for the next :meth:`wait`, which may know more devices.

        :param ready: the descriptors that have events. The others are not asked: each system call delays the pass that runs.
        """
        heard = WakeUp(frozenset())
        for source in (self._sources[descriptor] for descriptor in ready):
            heard = heard.joined(source.judged(known, source.receive()))
        return heard

    def gather(self, known: KnownDevices) -> WakeUp:
        """Wait until the pace allows the next pass, which is at once except in a storm of events. A command ends the wait.

        :returns: what has happened meanwhile.
        """
        wake = WakeUp(frozenset())
        now = time.monotonic()
        until = now + self._pace.pause(now)
        while now < until and not (wake.reload or wake.stop or wake.asked):
            self._commands.poll((until - now) * 1000)
            wake = wake.joined(self.wait(known, 0.0, ends=False))
            now = time.monotonic()
        return wake
