"""The parent process: it keeps the report's heartbeat, talks to systemd, and replaces a worker that died or hangs.

It uses neither sysfs nor rtnetlink, so that no driver can hang it.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import IO

from attrs import define, field, frozen

from agent.documents import load
from agent.report.publisher import Publisher, Unattended
from agent.runtime import doubling, journal, notify, notify_ready
from agent.service.activity import ANSWERED_WITHIN, Step, View
from agent.service.hung_device import HungDevice

HEARTBEAT = 10.0
"""Seconds between two heartbeats: a third of the unit's WatchdogSec."""

FIRST_RESPAWN = 0.5
LAST_RESPAWN = 30.0

REPEATED = 3
"""After this many crashes of workers or passes in a row, the last verified spec replaces a new one."""

CRASHED = "TRACKBED_CRASHED"
"""The environment variable that tells a worker how the workers before it crashed."""

HUNG_WRITES = "TRACKBED_HUNG_WRITES"
"""The environment variable that tells a worker in which writes the workers before it hung: a JSON object, by device."""

LONGEST_LINE = 64 << 20
"""The largest message of the worker, in bytes. The message after the creation of a thousand VFs has four million."""

LEAVE_WAIT = 10.0
"""Seconds until a worker that was asked to end, and makes no call, is killed."""

KILL_WAIT = 1.0
"""Seconds to wait after SIGKILL. A process that is still there by then hangs in the kernel."""


@frozen
class Limits:
    """Seconds that a read or a write may take, and seconds until a device that hung is tried again for the first time.

    A write may wait for a device's firmware: some need minutes to create VFs. Each further hang of the device doubles
    ``retry``, up to an hour. ``silence``: seconds without a call. The worker reads everything again every minute, so one that
    makes no call for longer waits for itself. ``start``: seconds until its first call.
    """

    read: float = 30.0
    write: float = 300.0
    retry: float = 60.0
    silence: float = 90.0
    start: float = 300.0


@define
class _Worker:
    """A worker's process, and what the supervisor knows of it.

    ``leave_by``: when it is killed, if it was asked to end and makes no call. ``at_fault``: what it did wrong.
    ``ready``: whether it has called the node ready.
    """

    process: subprocess.Popen[bytes]
    input: IO[bytes]
    output: IO[bytes]
    started: float
    view: View
    unread: bytearray = field(factory=bytearray)
    leave_by: float = math.inf
    at_fault: str = ""
    ready: bool = False

    def is_leaving(self) -> bool:
        return self.leave_by < math.inf

    def was_well(self, until: float) -> bool:
        """Whether it called the node ready, and ran for :data:`LAST_RESPAWN` seconds.

        A long run alone proves nothing: a spec may crash each worker late.
        """
        return self.ready and until > self.started + LAST_RESPAWN

    def silent_by(self, limits: Limits, last: float) -> float:
        """When it counts as silent if it makes no further call. ``last``: when it made the last one (0: it has made none)."""
        return last + limits.silence if last else self.started + limits.start


def supervise(command: list[str], publisher: Publisher, limits: Limits = Limits()) -> None:
    """Run until SIGTERM or SIGINT. On SIGHUP the worker reads the spec again.

    :param command: starts the worker; ``--activity FD`` and an ``--avoid ADDRESS`` for each device that hung are added.
    """
    _Supervisor(command, publisher, limits).run()


@define
class _Supervisor:
    """Keeps one writer: the next worker starts when the last one has ended, or hangs in a device that the next one avoids.

    ``deaths``, ``unstarted``: the workers that ended, and the starts that failed, one after the other.
    ``asked``: the worker is still to be told to read the spec again. ``look_at``: when to check whether an event still waits,
    or the worker is still stopped.
    """

    command: list[str]
    publisher: Publisher
    limits: Limits
    selector: selectors.BaseSelector = field(factory=selectors.DefaultSelector)
    worker: _Worker | None = None
    deaths: int = 0
    unstarted: int = 0
    last_death: str = ""
    asked: bool = False
    respawn_at: float = 0.0
    hung: dict[str, HungDevice] = field(factory=dict)
    look_at: float = math.inf

    def run(self) -> None:
        wake = self._hear_signals()
        # The supervisor sees a call only when it wakes, so it wakes at least once within the shortest limit of a call.
        beat = min(HEARTBEAT, self.limits.read)
        next_beat = time.monotonic() + beat
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self.publisher.renew_heartbeat()
                notify("WATCHDOG=1")
                next_beat = now + beat
            self._judge_step(now)
            self._judge_wait(now)
            self._try_again(now)
            if self.worker is None and now >= self.respawn_at and not self._is_barred():
                self._spawn()
            for key, _ in self.selector.select(min(next_beat, self._next_deadline()) - time.monotonic()):
                if key.data is not None:
                    self._listen(key.data)
                elif self._obey(wake.recv(64)):
                    return

    def _obey(self, signals: bytes) -> bool:
        """Act on the signals that have arrived. :returns: whether to end."""
        if signal.SIGTERM in signals or signal.SIGINT in signals:
            notify("STOPPING=1")
            self.publisher.publish_unattended("Stopped", "the agent was stopped; start it: systemctl start trackbed")
            if self.worker is not None:
                _stop(self.worker)
            return True
        if signal.SIGHUP in signals:
            self._reload()
        if signal.SIGCHLD in signals:  # also of a worker that a signal has stopped
            self.look_at = min(self.look_at, time.monotonic() + ANSWERED_WITHIN)
        return False

    def _hear_signals(self) -> socket.socket:
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self.selector.register(wake, selectors.EVENT_READ)
        return wake

    def _next_deadline(self) -> float:
        """When the supervisor must act although nothing has happened."""
        if self.worker is None:
            return math.inf if self._is_barred() else self.respawn_at
        step = self.worker.view.step()
        retries = (hung.retry_at for hung in self.hung.values() if hung.avoided and not hung.is_held())
        ends = self._ends(step) if step else self.worker.silent_by(self.limits, self.worker.view.last())
        return min([self.worker.leave_by, *retries, self.look_at, self._withdrawn_at(self.worker), ends])

    def _ends(self, step: Step) -> float:
        return step.since + (self.limits.write if step.mode == "write" else self.limits.read)

    def _withdrawn_at(self, worker: _Worker) -> float:
        """When Ready is withdrawn, if the event about a required device that waits now still waits then."""
        since = worker.view.waits() if self.publisher.ready else 0.0
        return since + ANSWERED_WITHIN if since else math.inf

    def _is_barred(self) -> bool:
        """Whether a killed worker hangs in a write that names no device: the next worker could not avoid that write."""
        return "" in self.hung and self.hung[""].is_held()

    def _spawn(self) -> None:
        avoid = [word for device, hung in sorted(self.hung.items()) if hung.avoided for word in ("--avoid", device)]
        told = {HUNG_WRITES: json.dumps({device: hung.written for device, hung in self.hung.items() if hung.written})}
        if self.deaths >= REPEATED:
            told[CRASHED] = f"the worker {self.last_death}, {self.deaths} times in a row"
        view = None
        try:
            view = View.new()
            process = subprocess.Popen(
                [*self.command, "--activity", str(view.descriptor), *avoid],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=[view.descriptor],
                env={**os.environ, **told},
            )
        except OSError as error:
            if view is not None:
                view.close()
            # The machine's fault (no memory, no descriptors), and not the spec's: it counts as no worker that crashed.
            self.unstarted += 1
            self.respawn_at = time.monotonic() + doubling(FIRST_RESPAWN, self.unstarted, LAST_RESPAWN)
            message = f"the worker could not be started: {error}; it is started again"
            self.publisher.publish_unattended("WorkerLost", message)
            return
        self.unstarted = 0
        assert process.stdin is not None and process.stdout is not None  # noqa: S101  PIPE was asked for
        self.worker = _Worker(process, process.stdin, process.stdout, time.monotonic(), view)
        os.set_blocking(self.worker.input.fileno(), False)
        self.selector.register(self.worker.output, selectors.EVENT_READ, self.worker)
        self._pass_on(self.worker)

    def _reload(self) -> None:
        """Have the worker read the spec again. If there is no worker now, the next one reads it when it starts."""
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        self.deaths, self.asked = 0, True
        if self.worker is not None and not self.worker.is_leaving():
            self._pass_on(self.worker)
        notify_ready()

    def _pass_on(self, worker: _Worker) -> None:
        if self.asked:
            with suppress(OSError):  # it has ended: the next one reads the spec again
                worker.input.write(b"reload\n")
                self.asked = False

    def _release(self, worker: _Worker) -> None:
        self.selector.unregister(worker.output)
        for held in (worker.output, worker.input, worker.view):
            held.close()
        self.worker = None

    def _listen(self, worker: _Worker) -> None:
        chunk = os.read(worker.output.fileno(), 1 << 16)
        worker.unread += chunk
        if not chunk:
            self._ended(worker)
        elif b"\n" in chunk:
            *lines, worker.unread = worker.unread.split(b"\n")
            for line in lines:
                self._hear(worker, bytes(line))
        elif len(worker.unread) > LONGEST_LINE:
            self._not_understood(worker, f"a line of more than {LONGEST_LINE} bytes")
            worker.unread.clear()

    def _hear(self, worker: _Worker, line: bytes) -> None:
        try:
            message = load(line, LONGEST_LINE)
            if not isinstance(message, dict):
                raise ValueError("it is not a JSON object")
            if "serving" in message:
                notify_ready()
            elif "checking" in message:
                self.look_at = time.monotonic() + ANSWERED_WITHIN
            elif not (worker.is_leaving() and message.get("ready")):
                # A worker that is leaving reads the devices no more, so its Ready may be outdated.
                self.publisher.publish_pass(message)
                worker.ready = worker.ready or self.publisher.ready
        except ValueError as error:
            self._not_understood(worker, f"{line[:80]!r}: {error}")

    def _not_understood(self, worker: _Worker, what: str) -> None:
        """Replace a worker whose message cannot be parsed: the message may have said that the node is not ready."""
        message = f"sent a message that cannot be understood: {what}"
        self._send_away(worker, "WorkerLost", f"the worker {message}; another one takes its place")
        worker.at_fault = message

    def _send_away(self, worker: _Worker, reason: Unattended, message: str) -> None:
        """Ask the worker to end after its pass, so that no write is cut short. The next worker starts after that."""
        journal(message)
        self.publisher.publish_unattended(reason, message)
        if not worker.is_leaving():
            worker.input.close()
            worker.leave_by = time.monotonic() + LEAVE_WAIT

    def _ended(self, worker: _Worker) -> None:
        """Handle the end of the worker's standard output: a worker keeps it open until it exits."""
        now = time.monotonic()
        try:
            status = worker.process.wait(KILL_WAIT)
        except subprocess.TimeoutExpired:
            self._replace(
                worker, worker.view.step(), "the worker closed its standard output and goes on; it is replaced", now
            )
            return
        self._release(worker)
        if worker.is_leaving() and not worker.at_fault:
            self.respawn_at = now
        else:
            self._lost(worker.at_fault or f"ended with status {status}", worker.was_well(now))

    def _lost(self, why: str, was_well: bool = False) -> None:
        self._count_death(why, was_well)
        self.publisher.publish_unattended("WorkerLost", f"the worker {why}; it is started again")

    def _count_death(self, why: str, was_well: bool) -> None:
        """Count a death. Each one in a row doubles the wait before the next start; a worker that was well ends the row."""
        self.deaths = 1 if was_well else self.deaths + 1
        self.last_death = why
        self.respawn_at = time.monotonic() + doubling(FIRST_RESPAWN, self.deaths, LAST_RESPAWN)

    def _judge_step(self, now: float) -> None:
        """Replace a worker whose call does not return, or that should end and does not."""
        worker = self.worker
        if worker is None:
            return
        step = worker.view.step()
        if step is None:
            last = worker.view.last()
            if now >= worker.leave_by:
                self._replace(worker, None, f"the worker did not end within {LEAVE_WAIT:.0f} s; it is replaced", now)
            elif now >= worker.silent_by(self.limits, last):
                silence = f"made no call for {now - (last or worker.started):.0f} s"
                self._replace(worker, None, f"the worker has {silence}; it is replaced", now)
                self._count_death(silence, worker.was_well(last or worker.started))
            return
        if worker.is_leaving():
            worker.leave_by = now + LEAVE_WAIT
        if now >= self._ends(step):
            message = f"{step} has not returned for {now - step.since:.0f} s; the worker is replaced"
            self._replace(worker, step, message, now)

    def _replace(self, worker: _Worker, step: Step | None, message: str, now: float) -> None:
        """Kill a worker; the next one avoids the device of its call."""
        journal(message)
        self.publisher.publish_unattended("WorkerStuck", message)
        worker.process.kill()
        held = None
        try:
            worker.process.wait(KILL_WAIT)
        except subprocess.TimeoutExpired:
            held = worker.process
            journal(f"process {held.pid} waits in the kernel and is left there")
            # The slow call may have returned by now. Then a later call is the one that hangs.
            step = worker.view.step() or step
        self._release(worker)
        self.respawn_at = now
        if step is not None:
            self._leave_alone(step, held, now)

    def _leave_alone(self, step: Step, held: subprocess.Popen[bytes] | None, now: float) -> None:
        hung = self.hung.setdefault(step.device, HungDevice())
        hung.again(self.limits.retry, now)
        hung.avoided = bool(step.device)
        hung.written = f"{step} did not return" if step.mode == "write" else ""
        # A process killed in a read of no single device is harmless once the read returns, so nothing waits for it.
        if held is not None and (step.device or step.mode == "write"):
            hung.abandoned.append(held)
        # If no device can be avoided, another worker would probably hang in the same call, so it starts later. The first time,
        # if the worker could be killed, it may just have been slow on a busy node: the next one starts at once.
        slow = hung.times == 1 and held is None
        self.respawn_at = now if step.device or slow else hung.retry_at

    def _judge_wait(self, now: float) -> None:
        """Withdraw Ready if an event about a required device has waited longer than a quick pass takes.

        A worker that a signal has stopped takes no events, so nobody would know that one waits: another one takes its place.
        """
        if now >= self.look_at:
            self.look_at = math.inf
            if self.worker is not None and _is_stopped(self.worker):
                self._replace(self.worker, None, "a signal has stopped the worker; it is replaced", now)
        if self.worker is not None and now >= self._withdrawn_at(self.worker):
            step = self.worker.view.step()
            what = f" ({step})" if step else ""
            self.publisher.publish_checking(
                f"a required device may have changed, and reading it takes more than {ANSWERED_WITHIN} s{what}"
            )

    def _try_again(self, now: float) -> None:
        """Let a new worker try the devices that hung before. It starts after the present one has finished its pass."""
        due = [device for device, hung in self.hung.items() if hung.is_over(now)]
        for device in due:
            self.hung[device].avoided = False
            self.hung[device].abandoned.clear()
        if due and self.worker is not None:
            self._send_away(self.worker, "DeviceTried", f"{', '.join(due)} hung before, and is tried again")


def _is_stopped(worker: _Worker) -> bool:
    """Whether a signal has stopped the worker, and none has it go on."""
    return os.waitid(os.P_PID, worker.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def _stop(worker: _Worker) -> None:
    """End the worker. This process holds the lock until it has ended, so that no other process writes at the same time."""
    worker.input.close()
    worker.process.stdin = None  # else communicate() flushes it, although it is closed
    try:
        # Its last messages are read, too. A worker that waits for room in the pipe would be killed before it records its pass.
        worker.process.communicate(timeout=LEAVE_WAIT)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()
