"""Receives events also during a pass, and tells the supervisor since when an event about a required device waits.

A pass may wait for seconds in the kernel, for a lock that another program holds while it changes the device. Without this
module, the report would say Ready all that time.
"""

from __future__ import annotations

import os
import select
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from attrs import define, field

from agent.report.activity import ANSWERED_WITHIN, Activity
from agent.service.wake import KnownDevices, WakeUp, Watch

DELAY = 0.02
"""Seconds that the thread waits before it takes an event. The pass stands still while the thread works, since both need the
interpreter's lock. Most passes end within this time, and take the event themselves: often their own write caused it."""


@define(eq=False)
class Listener:
    """Receives the events of ``watch``. During a pass a thread takes them; at other times the thread sleeps.

    ``poke`` wakes the supervisor, which looks at ``activity`` :data:`ANSWERED_WITHIN` seconds later. ``_since``: when the first
    event about a required device came that no pass has answered yet; 0: there is none. ``_kept_since``: the same, of the events
    that the thread has taken and the pass has not.
    """

    _watch: Watch
    _activity: Activity
    _poke: Callable[[], None]
    _known: KnownDevices = field(factory=lambda: KnownDevices({}, {}), init=False)
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
        for descriptor in self._watch.sources():
            self._sockets.register(descriptor, select.EPOLLIN)
        self._gate.register(self._sockets.fileno(), 0)
        self._gate.register(self._end, select.EPOLLIN)
        start_new_thread(self._listen, ())

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._end, 1)

    @contextmanager
    def in_pass(self, known: KnownDevices) -> Iterator[None]:
        """The thread takes events meanwhile, since the caller reads the devices."""
        with self._lock:
            self._known, self._in_pass = known, True
            self._open()
        try:
            yield
        finally:
            with self._lock:
                self._in_pass = False
                self._gate.modify(self._sockets.fileno(), 0)

    def wait(self, known: KnownDevices, timeout: float, ends: bool = True) -> WakeUp:
        """As :meth:`Watch.wait`, with the events that the thread has taken. If an error ended the thread, raises that."""
        if self._fault is not None:
            raise self._fault
        with self._lock:
            wake = self._watch.wait(known, timeout, ends)
            self._kept_since = 0.0
            self._note(wake, time.monotonic())
        return wake

    def gather(self, known: KnownDevices) -> WakeUp:
        """As :meth:`Watch.gather`."""
        with self._lock:
            wake = self._watch.gather(known)
            self._kept_since = 0.0
            self._note(wake, time.monotonic())
        return wake

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
                ready = {descriptor for descriptor, _ in self._sockets.poll(0)}
                wake = self._watch.keep(self._known, ready)
                if wake.doubt:
                    # A later event of this pass could add nothing.
                    self._kept_since = came
                else:
                    self._open()
                self._note(wake, came)
