"""What wakes the worker: events, commands and requests; and since when an event about a required device waits.

A pass may wait for seconds in the kernel, for a lock that another program holds while it changes the device. So events are
received also during a pass. Otherwise the report would say Ready all that time.
"""

from __future__ import annotations

import os
import select
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from attrs import define, field

from agent.engine.readiness import Probes
from agent.machine import Event, EventSource
from agent.service.activity import ANSWERED_WITHIN, Activity
from agent.service.wake import KnownDevices, Pace, WakeUp, scope_of
from agent.state.scope import NOTHING, Scope, devices, joined

DELAY = 0.02
"""Seconds that the thread waits before it takes an event. The pass stands still while the thread works, since both need the
interpreter's lock. Most passes end within this time, and take the event themselves: often their own write caused it."""

MOST_KEPT = 10_000
"""Events that are kept until they are judged again; beyond that they count as lost."""


@define(eq=False)
class Inbox:
    """Waits for whatever the worker must react to. During a pass a thread takes the events; at other times the thread sleeps.

    ``events``: the subscribed sources. Subscribe first and read the devices afterwards, so that no event is missed.
    ``poke`` wakes the supervisor, which looks at ``activity`` :data:`ANSWERED_WITHIN` seconds later.
    ``control``: a descriptor to which the supervisor writes ``reload`` lines; its end stops the worker.
    ``probes``: end a wait when readings of theirs have ended.
    ``apply_socket``: a descriptor that becomes readable when a client connects.

    ``known``: the devices that the last pass has read. Commands stay here until the loop carries them out: ``reload`` (read the
    spec's file again), ``retry_spec`` (somebody asks for that, so a spec that failed before is tried again), ``request`` (a
    client of the apply socket waits) and ``stop`` (end the worker).
    ``_kept``: each event that may still be judged, with what was read again for it; ``_lost``: there were more, which are lost.
    A netdev is known by its index, and it may get another one during a pass. So the tables of the pass before may not know an
    event's netdev, or take it for another one, and each event is judged again by the tables of the pass that has just ended.
    ``_since``: when the first event about a required device came that no pass has answered yet; 0: there is none.
    ``_kept_since``: the same, of the events that the thread has taken and the pass has not.
    """

    events: Sequence[EventSource]
    _activity: Activity
    _poke: Callable[[], None]
    _control: int | None = None
    _probes: Probes | None = None
    _apply_socket: int | None = None
    known: KnownDevices = field(factory=lambda: KnownDevices({}, {}), init=False)
    reload: bool = field(default=False, init=False)
    retry_spec: bool = field(default=False, init=False)
    request: bool = field(default=False, init=False)
    stop: bool = field(default=False, init=False)
    _kept: dict[Event, frozenset[str]] = field(factory=dict, init=False)
    _lost: bool = field(default=False, init=False)
    _kept_since: float = field(default=0.0, init=False)
    _since: float = field(default=0.0, init=False)
    _poked: float = field(default=-ANSWERED_WITHIN, init=False)
    _pace: Pace = field(factory=Pace, init=False)
    _lock: Lock = field(factory=Lock, init=False)
    _in_pass: bool = field(default=False, init=False)
    _sources: dict[int, EventSource] = field(init=False)
    _poll: select.poll = field(factory=select.poll, init=False)
    _sockets: select.epoll = field(factory=select.epoll, init=False)
    _gate: select.epoll = field(factory=select.epoll, init=False)
    _end: int = field(factory=lambda: os.eventfd(0, os.EFD_CLOEXEC), init=False)
    _fault: Exception | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._sources = {source.fileno(): source for source in self.events}
        readings = self._probes.fileno() if self._probes else None
        for descriptor in (*self._sources, self._control, readings, self._apply_socket):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        for descriptor in self._sources:
            self._sockets.register(descriptor, select.EPOLLIN)
        self._gate.register(self._sockets.fileno(), 0)
        self._gate.register(self._end, select.EPOLLIN)
        start_new_thread(self._listen, ())

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._end, 1)

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """The thread takes events meanwhile, since the caller reads the devices."""
        with self._lock:
            self._in_pass = True
            self._open()
        try:
            yield
        finally:
            with self._lock:
                self._in_pass = False
                self._gate.modify(self._sockets.fileno(), 0)

    def wait(self, timeout: float, ends: bool = True) -> Scope:
        """Sleep until something happens, or ``timeout`` seconds are over. If an error ended the thread, raises that.

        :param ends: if no wanted device is concerned, no reading follows. Then ``known`` is as new as the events, and they can
            be forgotten. Before a reading they are kept: it may find that a netdev or a table is of a wanted device.
        :returns: what to read again; empty if no wanted device is concerned.
        """
        if self._fault is not None:
            raise self._fault
        self._activity.idle()
        with self._lock:
            if self._judged(self._scopes(self._kept)).scope != NOTHING:
                timeout = 0.0
            elif self._probes and timeout > 0.0:
                self._probes.go_on()
            reloads = False
            for descriptor, _ in self._poll.poll(max(0, int(timeout * 1000))):
                if descriptor in self._sources:
                    self._keep(descriptor)
                elif descriptor == self._control:
                    reloads = bool(os.read(descriptor, 4096))
                    self.stop = self.stop or not reloads
                elif descriptor == self._apply_socket:
                    self.request = True
                elif self._probes:
                    self._probes.drain()
            if reloads:
                self.reload = self.retry_spec = True
            scopes = self._scopes(self._kept)
            wake = self._judged(scopes)
            # A reading of everything is newer than all of these events.
            if wake.scope is None or (ends and not wake.scope):
                self._kept, self._lost = {}, False
            else:
                self._kept = {event: read.union(scopes[event] or ()) for event, read in self._kept.items()}
            self._kept_since = 0.0
            self._note(wake, time.monotonic())
        return None if reloads else wake.scope

    def gather(self) -> Scope:
        """Wait until the pace allows the next pass, which is at once except in a storm of events. A command ends the wait.

        :returns: what to read again for what has happened meanwhile.
        """
        scope: Scope = NOTHING
        commands = select.poll()
        if self._control is not None:
            commands.register(self._control, select.POLLIN)
        now = time.monotonic()
        until = now + self._pace.pause(now)
        while now < until and not self.has_command():
            commands.poll((until - now) * 1000)
            scope = joined(scope, self.wait(0.0, ends=False))
            now = time.monotonic()
        return scope

    def has_command(self) -> bool:
        """Whether there is something to do before the next pass."""
        return self.reload or self.request or self.stop

    def overdue(self) -> bool:
        """Whether an event about a required device has waited so long that the node must not be called ready."""
        return 0.0 < self._since <= time.monotonic() - ANSWERED_WITHIN

    def answered(self) -> bool:
        """Note that the events that :meth:`wait` has returned are answered: by a pass, or since they concern no wanted device.

        Those that the thread has kept still wait.

        :returns: whether the supervisor may have withdrawn Ready meanwhile. Then the last result must be sent again.
        """
        with self._lock:
            since, self._since = self._since, self._kept_since
            self._activity.waits(self._since)
        # The supervisor reads its clock and then the memory. It may do so a moment after this clock is read and before it sees
        # what was written: a CPU may read the clock before its write has reached the other CPUs. So sending again begins
        # earlier, by far more than a write takes. To send a result that the supervisor has already changes nothing.
        return 0.0 < since <= time.monotonic() - ANSWERED_WITHIN / 2

    def _keep(self, descriptor: int) -> list[Event]:
        events, lost = self._sources[descriptor].receive()
        # What was read for an equal event was read before this one.
        self._kept |= dict.fromkeys(events, NOTHING)
        self._lost = self._lost or lost
        if len(self._kept) > MOST_KEPT:
            self._kept, self._lost = {}, True
        return events

    def _scopes(self, events: Iterable[Event]) -> Mapping[Event, set[str] | None]:
        return {event: scope_of(event, self.known) for event in events}

    def _judged(self, scopes: Mapping[Event, set[str] | None]) -> WakeUp:
        """What events mean, without what was read for them already. If some were lost, any device may have changed."""
        named = frozenset(
            name for event, scope in scopes.items() for name in (scope or set()) - self._kept.get(event, NOTHING)
        )
        doubt = bool(self.known.required) if self._lost else not self.known.required.isdisjoint(devices(named))
        return WakeUp(None if self._lost or None in scopes.values() else named, doubt)

    def _note(self, wake: WakeUp, came: float) -> None:
        """Note since when an event about a required device waits, and have the supervisor look."""
        if not wake.doubt or self._since:
            return
        self._since = came
        self._activity.waits(came)
        if (now := time.monotonic()) >= self._poked + ANSWERED_WITHIN:
            # Once it is woken, the supervisor goes on looking as long as an event waits.
            self._poked = now
            self._poke()

    def _open(self) -> None:
        """Wake the thread at the next event, once."""
        self._gate.modify(self._sockets.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def _listen(self) -> None:
        """In the thread: during a pass, keep the events for the next :meth:`wait`, when more devices may be known."""
        end = select.poll()
        end.register(self._end, select.POLLIN)
        try:
            while all(descriptor != self._end for descriptor, _ in self._gate.poll()):
                came = time.monotonic()
                if end.poll(DELAY * 1000):
                    return
                with self._lock:
                    if self._in_pass:
                        self._take(came)
        except Exception as error:  # of a socket, or of an event that cannot be decoded
            self._fault = error

    def _take(self, came: float) -> None:
        # The sources without an event are not asked: each system call delays the pass that runs.
        events = [event for descriptor, _ in self._sockets.poll(0) for event in self._keep(descriptor)]
        wake = self._judged(self._scopes(events))
        if wake.doubt:
            # A later event of this pass could add nothing.
            self._kept_since = came
        else:
            self._open()
        self._note(wake, came)
