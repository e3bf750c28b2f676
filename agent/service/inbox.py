"""What wakes the worker: events, commands and requests; and since when an event about a required device waits.

A pass may wait for seconds in the kernel, for a lock that another program holds while it changes the device. So events are
received also during a pass. Otherwise the report would say Ready all that time.
"""

from __future__ import annotations

import os
import select
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from attrs import define, field

from agent.engine.readiness import Readiness
from agent.machine import EventSource
from agent.report.activity import ANSWERED_WITHIN, Activity
from agent.service.wake import Heard, KnownDevices, Pace, WakeUp
from agent.state.scope import Scope

DELAY = 0.02
"""Seconds that the thread waits before it takes an event. The pass stands still while the thread works, since both need the
interpreter's lock. Most passes end within this time, and take the event themselves: often their own write caused it."""


@define(eq=False)
class Inbox:
    """Waits for whatever the worker must react to. During a pass a thread takes the events; at other times the thread sleeps.

    ``events``: the subscribed sources. Subscribe first and read the devices afterwards, so that no event is missed.
    ``poke`` wakes the supervisor, which looks at ``activity`` :data:`ANSWERED_WITHIN` seconds later.
    ``control``: a descriptor to which the supervisor writes ``reload`` lines; its end stops the worker.
    ``readiness``: ends a wait when readings of its probes have ended.
    ``apply_socket``: a descriptor that becomes readable when a client connects.

    ``known``: the devices that the last pass has read. Commands stay here until the loop carries them out: ``reload`` (read the
    spec's file again), ``retry_spec`` (somebody asks for that, so a spec that failed before is tried again), ``request`` (a
    client of the apply socket waits) and ``stop`` (end the worker).
    ``_since``: when the first event about a required device came that no pass has answered yet; 0: there is none.
    ``_kept_since``: the same, of the events that the thread has taken and the pass has not.
    """

    _events: Sequence[EventSource]
    _activity: Activity
    _poke: Callable[[], None]
    _control: int | None = None
    _readiness: Readiness | None = None
    _apply_socket: int | None = None
    known: KnownDevices = field(factory=lambda: KnownDevices({}, {}), init=False)
    reload: bool = field(default=False, init=False)
    retry_spec: bool = field(default=False, init=False)
    request: bool = field(default=False, init=False)
    stop: bool = field(default=False, init=False)
    _sources: dict[int, Heard] = field(init=False)
    _pace: Pace = field(factory=Pace, init=False)
    _poll: select.poll = field(factory=select.poll, init=False)
    _commands: select.poll = field(factory=select.poll, init=False)
    _lock: Lock = field(factory=Lock, init=False)
    _kept_since: float = field(default=0.0, init=False)
    _since: float = field(default=0.0, init=False)
    _poked: float = field(default=-ANSWERED_WITHIN, init=False)
    _in_pass: bool = field(default=False, init=False)
    _sockets: select.epoll = field(factory=select.epoll, init=False)
    _gate: select.epoll = field(factory=select.epoll, init=False)
    _end: int = field(factory=lambda: os.eventfd(0, os.EFD_CLOEXEC), init=False)
    _fault: Exception | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._sources = {source.fileno(): Heard(source) for source in self._events}
        probes = self._readiness.fileno() if self._readiness else None
        for descriptor in (*self._sources, self._control, probes, self._apply_socket):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        if self._control is not None:
            self._commands.register(self._control, select.POLLIN | select.POLLHUP)
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
            came, reloads = self._received(timeout, ends)
            self._kept_since = 0.0
            self._note(came, time.monotonic())
        return None if reloads else came.scope

    def gather(self) -> Scope:
        """Wait until the pace allows the next pass, which is at once except in a storm of events. A command ends the wait.

        :returns: what to read again for what has happened meanwhile.
        """
        scope: Scope = frozenset()
        now = time.monotonic()
        until = now + self._pace.pause(now)
        while now < until and not (self.has_command() or self.stop):
            self._commands.poll((until - now) * 1000)
            more = self.wait(0.0, ends=False)
            scope = None if scope is None or more is None else scope | more
            now = time.monotonic()
        return scope

    def has_command(self) -> bool:
        """Whether there is something to do before the next pass."""
        return self.reload or self.request

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

    def _received(self, timeout: float, ends: bool) -> tuple[WakeUp, bool]:
        """What the events mean that have come or come now, and whether a command says to read the spec again."""
        came = WakeUp(frozenset())
        for source in self._sources.values():
            if source.kept or source.lost:
                came = came.joined(source.taken(self.known))
        if came.scope != frozenset():
            timeout = 0.0
        if self._readiness and timeout > 0.0:
            self._readiness.go_on()
        reloads = False
        for descriptor, _ in self._poll.poll(max(0, int(timeout * 1000))):
            if descriptor == self._control:
                reloads = bool(os.read(descriptor, 4096))
                self.stop = self.stop or not reloads
            elif descriptor == self._apply_socket:
                self.request = True
            elif self._readiness and descriptor == self._readiness.fileno():
                self._readiness.drain()
            else:
                self._sources[descriptor].receive()
                came = came.joined(self._sources[descriptor].taken(self.known))
        if reloads:
            self.reload = self.retry_spec = True
        # A reading of everything is newer than all of these events.
        if came.scope is None or (ends and not came.scope):
            for source in self._sources.values():
                source.forget()
        return came, reloads

    def _note(self, wake: WakeUp, came: float) -> None:
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
        try:
            self._listen_until_end()
        except Exception as error:  # of a socket, or of an event that cannot be decoded
            self._fault = error

    def _listen_until_end(self) -> None:
        end = select.poll()
        end.register(self._end, select.POLLIN)
        while all(descriptor != self._end for descriptor, _ in self._gate.poll()):
            came = time.monotonic()
            if end.poll(DELAY * 1000):
                return
            with self._lock:
                if not self._in_pass:
                    continue
                wake = self._kept()
                if wake.doubt:
                    # A later event of this pass could add nothing.
                    self._kept_since = came
                else:
                    self._open()
                self._note(wake, came)

    def _kept(self) -> WakeUp:
        """Take the events that wait now, and keep them for the next :meth:`wait`, when more devices may be known.

        The sources without an event are not asked: each system call delays the pass that runs.
        """
        wake = WakeUp(frozenset())
        for descriptor, _ in self._sockets.poll(0):
            source = self._sources[descriptor]
            wake = wake.joined(source.judged(self.known, source.receive()))
        return wake
