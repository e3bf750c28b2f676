"""The parent: it vouches for the node in the report, talks to systemd, and replaces a worker that died.

It touches neither sysfs nor rtnetlink, so that no driver can hang it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from agent.change import Condition, Report, passes_first, report_from_json, report_to_json

HEARTBEAT = 20.0
"""Seconds between two heartbeats; a third of the unit's WatchdogSec."""

FIRST_RESPAWN = 0.5
LAST_RESPAWN = 30.0

REPORT = "report.json"
FIRST_PASS = "first-pass"  # noqa: S105  the name of a file


def notify(message: str) -> None:
    """Tell systemd (sd_notify(3)); nothing outside of a unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as made:
            made.connect("\0" + address[1:] if address.startswith("@") else address)
            made.send(message.encode())


def boot_id() -> str:
    """The kernel's identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Seconds since the boot, those of a suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old or the new text, and a power cut leaves one of them."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


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
            before = report_from_json((self.folder / REPORT).read_text())
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
            write_atomically(self.folder / FIRST_PASS, self.boot_id + "\n")

    def unattended(self, reason: str, message: str) -> None:
        """Nobody looks at the devices now: what was true may no longer be."""
        others = tuple(c for c in self._last.conditions if c.type != "WorkerAlive")
        lost = Condition("WorkerAlive", "False", reason, message)
        self._publish(evolve(self._last, ready=False, conditions=(*others, lost)))

    def vouch(self) -> None:
        """Renew the heartbeat."""
        self._write()

    def _publish(self, report: Report) -> None:
        if _unstamped(report) != _unstamped(self._last):
            self._last = evolve(report, generation=self._last.generation + 1, time=time.time())
            self._write()

    def _write(self) -> None:
        self._last = evolve(self._last, heartbeat=time.time(), uptime=uptime())
        write_atomically(self.folder / REPORT, report_to_json(self._last))


def _unstamped(report: Report) -> Report:
    return evolve(report, generation=0, time=0.0, heartbeat=0.0, uptime=0.0)


@define
class _Worker:
    process: subprocess.Popen[bytes]
    started: float
    unread: bytes = b""


def supervise(command: list[str], publisher: Publisher) -> None:
    """Run until SIGTERM or SIGINT. SIGHUP has the worker read the spec again."""
    selector = selectors.DefaultSelector()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    selector.register(wake, selectors.EVENT_READ)

    respawn_wait = FIRST_RESPAWN
    worker: _Worker | None = _spawn(command, selector)
    respawn_at = 0.0
    next_beat = time.monotonic() + HEARTBEAT
    while True:
        now = time.monotonic()
        if now >= next_beat:
            publisher.vouch()
            notify("WATCHDOG=1")
            next_beat = now + HEARTBEAT
        if worker is None and now >= respawn_at:
            worker = _spawn(command, selector)
        deadline = next_beat if worker is not None else min(next_beat, respawn_at)
        for key, _ in selector.select(max(0.0, deadline - now)):
            if key.fileobj is wake:
                signals = wake.recv(64)
                if signal.SIGTERM in signals or signal.SIGINT in signals:
                    notify("STOPPING=1")
                    publisher.unattended("Stopped", "the agent was stopped; start it: systemctl start trackbed")
                    _stop(worker)
                    return
                if signal.SIGHUP in signals and worker is not None:
                    _reload(worker)
            elif worker is not None and not _listen(worker, publisher):
                selector.unregister(key.fileobj)
                status = worker.process.wait()
                publisher.unattended("WorkerLost", f"the worker ended with status {status}; it is started again")
                lived = time.monotonic() - worker.started
                respawn_wait = FIRST_RESPAWN if lived > LAST_RESPAWN else min(respawn_wait * 2, LAST_RESPAWN)
                respawn_at = time.monotonic() + respawn_wait
                worker = None


def _spawn(command: list[str], selector: selectors.BaseSelector) -> _Worker:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None  # noqa: S101  PIPE was asked for
    os.set_blocking(process.stdout.fileno(), False)
    selector.register(process.stdout, selectors.EVENT_READ)
    return _Worker(process, time.monotonic())


def _reload(worker: _Worker) -> None:
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    assert worker.process.stdin is not None  # noqa: S101  PIPE was asked for
    try:
        worker.process.stdin.write(b"reload\n")
    except BrokenPipeError:
        print("the worker is gone; the next one reads the spec anyway", file=sys.stderr)  # noqa: T201  the journal
    notify("READY=1")


def _stop(worker: _Worker | None) -> None:
    if worker is not None:
        assert worker.process.stdin is not None  # noqa: S101  PIPE was asked for
        worker.process.stdin.close()
        try:
            worker.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def _listen(worker: _Worker, publisher: Publisher) -> bool:
    """Take what the worker says; False once it has closed its output."""
    assert worker.process.stdout is not None  # noqa: S101  PIPE was asked for
    chunk = worker.process.stdout.read(1 << 16)
    if chunk == b"":
        return False
    *lines, worker.unread = (worker.unread + (chunk or b"")).split(b"\n")
    for line in lines:
        message = json.loads(line)
        if message.pop("serving", False):
            notify("READY=1")
        else:
            publisher.found(message)
    return True
