"""The parent: it vouches for the node in the report, talks to systemd, and replaces a worker that died or hangs.

It touches neither sysfs nor rtnetlink, so that no driver can hang it.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from attrs import define, evolve, field, frozen

from agent.documents import LARGEST_REPORT, read
from agent.report.activity import ANSWERED_WITHIN, Step, View
from agent.report.records import Condition, Report, passes_first, report_from_json, report_to_json
from agent.runtime import notify, uptime, write_atomically

HEARTBEAT = 30.0
"""Seconds between two heartbeats: half of the unit's WatchdogSec, as sd_watchdog_enabled(3) recommends."""

FIRST_RESPAWN = 0.5
LAST_RESPAWN = 30.0

KILL_WAIT = 1.0
"""Seconds after SIGKILL within which a process is gone, unless it waits in the kernel for what may never come."""

LAST_RETRY = 3600.0
"""The longest time, in seconds, that a device which hung is left alone, once nothing hangs in it any more."""

READABLE = 0o644
"""The mode of what the reporter and operators who are not root read."""

CHECKING = "Checking"
"""The reason of a Ready that was taken back because an event waits for its reading."""

REPORT = "report.json"
FIRST_PASS = "first-pass"  # noqa: S105  the name of a file


@define
class Publisher:
    """Keeps the report file. ``generation`` grows with every change of what is said, also over restarts in one boot."""

    folder: Path
    boot_id: str
    agent_version: str
    _last: Report = field(init=False)

    def __attrs_post_init__(self) -> None:
        starting = Condition("Converged", "Unknown", "Starting", "the agent has not looked at the devices yet")
        self._last = Report("", "", self.boot_id, self.agent_version, False, False, conditions=(starting,))
        try:
            before = report_from_json(read(self.folder / REPORT, LARGEST_REPORT))
        except (OSError, ValueError):
            before = None
        if before is not None and before.boot_id == self.boot_id:
            self._last = evolve(self._last, generation=before.generation + 1)
        self._write()

    def found(self, body: dict[str, Any]) -> None:
        """Publish what the worker found."""
        stamped = {"boot_id": self.boot_id, "agent_version": self.agent_version, **body}
        self._publish(report_from_json(json.dumps(stamped)))
        if passes_first(self._last.conditions) and not (self.folder / FIRST_PASS).exists():
            write_atomically(self.folder / FIRST_PASS, self.boot_id + "\n", READABLE)
            print("the node is verified, for the first time in this boot", file=sys.stderr)  # noqa: T201  the journal

    def unattended(self, reason: str, message: str) -> None:
        """Nobody looks at the devices now: what was true may no longer be."""
        others = tuple(c for c in self._last.conditions if c.type != "WorkerAlive")
        lost = Condition("WorkerAlive", "False", reason, message)
        self._publish(evolve(self._last, ready=False, conditions=(*others, lost)))

    @property
    def ready(self) -> bool:
        """What the report says now."""
        return self._last.ready

    def checking(self, message: str) -> None:
        """A required device may have changed, and its reading has not come back: what was true may no longer be."""
        others = tuple(c for c in self._last.conditions if c.type != "Converged")
        check = Condition("Converged", "Unknown", CHECKING, message)
        self._publish(evolve(self._last, ready=False, conditions=(check, *others)))

    def vouch(self) -> None:
        """Renew the heartbeat."""
        self._write()

    def _publish(self, report: Report) -> None:
        if _unstamped(report) != _unstamped(self._last):
            self._last = evolve(report, generation=self._last.generation + 1, time=time.time())
            self._write()

    def _write(self) -> None:
        self._last = evolve(self._last, heartbeat=time.time(), uptime=uptime())
        write_atomically(self.folder / REPORT, report_to_json(self._last), READABLE)


def _unstamped(report: Report) -> Report:
    return evolve(report, generation=0, time=0.0, heartbeat=0.0, uptime=0.0)


@frozen
class Limits:
    """Seconds that one call of the worker into the kernel may take, and that a device which hung is left alone at first.

    A write may wait for a device's firmware: some need minutes to make their VFs. Each time that the device hangs again
    doubles ``retry``, up to :data:`LAST_RETRY`.
    """

    read: float = 30.0
    write: float = 300.0
    retry: float = 60.0


@define
class _Worker:
    process: subprocess.Popen[bytes]
    started: float
    view: View
    unread: bytes = b""

    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None  # noqa: S101  PIPE was asked for
        return self.process.stdout

    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None  # noqa: S101  PIPE was asked for
        return self.process.stdin


@define
class _Hung:
    """A device that a call to did not return; the device ``""`` stands for what concerns none, or all.

    ``abandoned``: the processes that not even SIGKILL ended, since they wait in the kernel.
    """

    times: int = 0
    avoided: bool = False
    retry_at: float = 0.0
    abandoned: list[subprocess.Popen[bytes]] = field(factory=list)

    def is_over(self, now: float) -> bool:
        """Whether the device may be tried again."""
        return self.avoided and now >= self.retry_at and all(process.poll() is not None for process in self.abandoned)


def supervise(command: list[str], publisher: Publisher, limits: Limits = Limits()) -> None:
    """Run until SIGTERM or SIGINT. SIGHUP has the worker read the spec again.

    :param command: the worker's; it is given ``--activity FD`` and an ``--avoid ADDRESS`` for each device that hung.
    """
    _Supervisor(command, publisher, limits).run()


@define
class _Supervisor:
    command: list[str]
    publisher: Publisher
    limits: Limits
    selector: selectors.BaseSelector = field(factory=selectors.DefaultSelector)
    worker: _Worker | None = None
    respawn_wait: float = FIRST_RESPAWN
    respawn_at: float = 0.0
    hung: dict[str, _Hung] = field(factory=dict)
    look_at: float = math.inf

    def run(self) -> None:
        wake = self._hear_signals()
        # A shorter limit than the heartbeat's interval could pass unseen.
        beat = min(HEARTBEAT, self.limits.read)
        next_beat = time.monotonic() + beat
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self.publisher.vouch()
                notify("WATCHDOG=1")
                next_beat = now + beat
            self._judge_step(now)
            self._judge_wait(now)
            self._try_again(now)
            if self.worker is None and now >= self.respawn_at:
                self._spawn()
            for key, _ in self.selector.select(max(0.0, min(next_beat, self._next_deadline()) - time.monotonic())):
                if key.fileobj is not wake:
                    self._listen()
                    continue
                signals = wake.recv(64)
                if signal.SIGTERM in signals or signal.SIGINT in signals:
                    notify("STOPPING=1")
                    self.publisher.unattended("Stopped", "the agent was stopped; start it: systemctl start trackbed")
                    if self.worker is not None:
                        _stop(self.worker)
                    return
                if signal.SIGHUP in signals and self.worker is not None:
                    _reload(self.worker)

    def _hear_signals(self) -> socket.socket:
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.selector.register(wake, selectors.EVENT_READ)
        return wake

    def _next_deadline(self) -> float:
        """When there is something to do although nobody says anything. A worker that waits has no deadline."""
        if self.worker is None:
            return self.respawn_at
        step = self.worker.view.step()
        retries = (hung.retry_at for hung in self.hung.values() if hung.avoided and not hung.abandoned)
        since = self.worker.view.waits() if self.publisher.ready else 0.0
        looks = [self.look_at, *([since + ANSWERED_WITHIN] if since else [])]
        return min([*retries, *looks, *([self._ends(step)] if step else [])], default=math.inf)

    def _ends(self, step: Step) -> float:
        return step.since + (self.limits.write if step.mode == "write" else self.limits.read)

    def _spawn(self) -> None:
        view = View.new()
        avoid = [word for device, hung in sorted(self.hung.items()) if hung.avoided for word in ("--avoid", device)]
        process = subprocess.Popen(
            [*self.command, "--activity", str(view.descriptor), *avoid],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[view.descriptor],
        )
        self.worker = _Worker(process, time.monotonic(), view)
        os.set_blocking(self.worker.output().fileno(), False)
        self.selector.register(self.worker.output(), selectors.EVENT_READ)

    def _release(self, worker: _Worker) -> None:
        """Have nothing more to do with a worker."""
        self.selector.unregister(worker.output())
        for held in (worker.output(), worker.input(), worker.view):
            held.close()
        self.worker = None

    def _listen(self) -> None:
        """Take what the worker says, or take note of its end."""
        worker = self.worker
        if worker is None:
            return
        chunk = worker.output().read(1 << 16)
        if chunk != b"":
            *lines, worker.unread = (worker.unread + (chunk or b"")).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message.pop("serving", False):
                    notify("READY=1")
                elif message.pop("checking", False):
                    self.look_at = time.monotonic() + ANSWERED_WITHIN
                else:
                    self.publisher.found(message)
            return
        status = worker.process.wait()
        self._release(worker)
        self.publisher.unattended("WorkerLost", f"the worker ended with status {status}; it is started again")
        lived = time.monotonic() - worker.started
        self.respawn_wait = FIRST_RESPAWN if lived > LAST_RESPAWN else min(self.respawn_wait * 2, LAST_RESPAWN)
        self.respawn_at = time.monotonic() + self.respawn_wait

    def _judge_step(self, now: float) -> None:
        """Replace a worker whose present call does not return, by one that leaves that device alone."""
        worker = self.worker
        step = worker.view.step() if worker else None
        if worker is None or step is None or now < self._ends(step):
            return
        message = f"{step} has not returned for {now - step.since:.0f} s; the worker is replaced"
        self.publisher.unattended("WorkerStuck", message)
        worker.process.kill()
        hung = self.hung.setdefault(step.device, _Hung())
        # A device that behaved for long starts from the beginning.
        hung.times = 1 if now > hung.retry_at + LAST_RETRY else hung.times + 1
        hung.avoided = bool(step.device)
        hung.retry_at = now + min(self.limits.retry * 2 ** min(hung.times - 1, 16), LAST_RETRY)
        try:
            worker.process.wait(KILL_WAIT)
        except subprocess.TimeoutExpired:
            message += f"; process {worker.process.pid} waits in the kernel and is left there"
            hung.abandoned.append(worker.process)
        print(message, file=sys.stderr)  # noqa: T201  the journal
        self._release(worker)
        # Where no device can be left alone, another worker would most likely hang in the same call. The first that could be
        # killed may just have been slow, on a node that has no CPU left.
        slow = hung.times == 1 and not hung.abandoned
        self.respawn_at = now if step.device or slow else hung.retry_at

    def _judge_wait(self, now: float) -> None:
        """Take Ready back while an event about a required device waits longer for its reading than a quick pass takes."""
        if now >= self.look_at:
            self.look_at = math.inf
        # The clock was read before this memory is; the worker does it the other way round.
        view = self.worker.view if self.worker else None
        since = view.waits() if view else 0.0
        if view and since and self.publisher.ready and now >= since + ANSWERED_WITHIN:
            step = view.step()
            what = f" ({step})" if step else ""
            self.publisher.checking(
                f"a required device may have changed, and reading it takes more than {ANSWERED_WITHIN} s{what}"
            )

    def _try_again(self, now: float) -> None:
        """Replace the worker by one that looks at a device again."""
        over = [device for device, hung in self.hung.items() if hung.is_over(now)]
        for device in over:
            self.hung[device].avoided = False
            self.hung[device].abandoned.clear()
        if not over or self.worker is None:
            return
        self.publisher.unattended("DeviceTried", f"{', '.join(over)} hung before, and is tried again")
        _stop(self.worker)
        self._release(self.worker)
        self.respawn_at = now


def _reload(worker: _Worker) -> None:
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        worker.input().write(b"reload\n")
    except BrokenPipeError:
        print("the worker is gone; the next one reads the spec anyway", file=sys.stderr)  # noqa: T201  the journal
    notify("READY=1")


def _stop(worker: _Worker) -> None:
    worker.input().close()
    try:
        worker.process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        worker.process.kill()
