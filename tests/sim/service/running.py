"""The messages of a worker on the simulated kernel, and the events of that kernel."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

from attrs import define, field

from agent.machine import Event, EventSource
from agent.report.history import read as read_history
from agent.report.records import Report, from_plain
from agent.service.activity import View
from tests.sim.passes import nic
from tests.sim.readiness import Node
from tests.sim.two_nics import PF0, PF1

STUCK = "/sys/module/ib_core/srcversion"
"""A file that one probe reads, and nothing else."""


@define
class Out:
    """The worker's messages; an empty one once it has ended. ``said``: all of them, also those that are no report."""

    lines: Queue[dict[str, Any]] = field(factory=Queue)
    said: list[dict[str, Any]] = field(factory=list)

    def write(self, text: str) -> None:
        self.said.append(json.loads(text))
        self.lines.put(self.said[-1])

    def flush(self) -> None:
        pass

    def until(self, holds: Callable[[Report], bool]) -> Report:
        """The next report for which ``holds`` is true."""
        while True:
            line = self.lines.get(timeout=120)
            assert line, "the worker has ended"
            if not line.keys() & {"serving", "checking"}:
                report = from_plain(line, Report)
                if holds(report):
                    return report

    def ready(self) -> Out:
        """The same, once a report has said Ready."""
        self.until(lambda report: report.ready)
        return self


Worker = Callable[[str], Out]
"""Starts the worker with a spec."""
Reload = Callable[[str], None]
"""Gives the worker another spec."""


@define
class Announced:
    """What the kernel announces, when a test says so: both the subscription and its one source."""

    descriptor: int = field(factory=lambda: os.eventfd(0, os.EFD_NONBLOCK))
    waiting: list[Event] = field(factory=list)
    lost: bool = False

    def subscribe(self) -> list[EventSource]:
        return [self]

    def announce(self, event: Event) -> None:
        self.waiting.append(event)
        os.eventfd_write(self.descriptor, 1)

    def fileno(self) -> int:
        return self.descriptor

    def receive(self) -> tuple[list[Event], bool]:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        taken, lost = self.waiting, self.lost
        self.waiting, self.lost = [], False
        return taken, lost


@define
class Endless:
    """A source that always has an event."""

    descriptor: int
    event: Event

    def subscribe(self) -> list[EventSource]:
        return [self]

    def fileno(self) -> int:
        return self.descriptor

    def receive(self) -> tuple[list[Event], bool]:
        return [self.event], False


def triggers(folder: Path) -> list[str]:
    """Why each pass that changed something was run."""
    return [entry.trigger for entry in read_history(folder)]


def sleeps(view: View) -> bool | None:
    """True if the worker makes no call within 0.3 s; else None."""
    before = view.last()
    time.sleep(0.3)
    return view.last() == before or None


def lower_mtu(node: Node, announced: Announced) -> None:
    """Another program sets the MTU of the first NIC, and the kernel announces that."""
    index = node.kernel.netdev(PF0).ifindex
    node.kernel.netlink.set_link(index, mtu=1500)
    announced.announce(Event(ifindex=index))


def disturb(node: Node, announced: Announced, function: str) -> None:
    """Let events of a NIC come one after the other."""
    node.kernel.events = Endless(announced.descriptor, Event(ifindex=node.kernel.netdev(function).ifindex))
    os.eventfd_write(announced.descriptor, 1)


def one(mtu: int, **more: object) -> str:
    return json.dumps({"node_name": "n1", "nics": [nic("a", PF0, mtu=mtu, **more)]})


def both(mtu: int) -> str:
    """Both NICs, the second with the same MTU in each such spec."""
    nics = [nic(name, pf, mtu=each) for name, pf, each in (("a", PF0, mtu), ("b", PF1, 9000))]
    return json.dumps({"node_name": "n1", "nics": nics})
