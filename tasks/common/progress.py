"""Prints during a deploy for how long each host has been in an operation, and records the times for `trackbed fleet report`.

pyinfra 3.10 shows which hosts are in an operation, but no times. It calls these methods only if it waits for all hosts at each
operation, which is its default.
"""

from __future__ import annotations

import atexit
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping

import gevent
from gevent.event import Event
from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State

from agent.report.printable import printable
from fleet.last_deploy import LastDeploy, Operation, default_path, write
from tasks.common.connection import deploys_itself

REDRAWN = 0.5
"""Seconds after which the line on a terminal is drawn again."""

BEAT = 30.0
"""Seconds between two lines about an operation if the output is not a terminal."""

INDENT = 4
"""Columns by which pyinfra indents what it prints about an operation."""

SHORT = 1.0
"""Seconds. An operation that was shorter on every host gets no line."""

RECORDED = 1.0
"""Seconds of the deploy between two records, each of which waits for the disk. The last one is written when it ends."""

SLOWEST = 3
"""How many of the slowest hosts, or operations, are named at the end."""


class Progress(BaseStateCallback):
    """Records when each host begins and ends an operation, and prints it. pyinfra calls the public methods."""

    def __init__(self) -> None:
        self._wanted = os.environ.get("PYINFRA_PROGRESS") != "off"
        self._hosts = 0
        self._place = ""
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._operations: dict[str, float] = {}
        self._ended = Event()
        self._began_all = time.time()
        self._noted: list[Operation] = []
        self._recorded = time.monotonic()
        self._hosts_took: Counter[str] = Counter()

    def operation_start(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        """An operation begins on all hosts."""
        self._began, self._took, self._ended = {}, {}, Event()
        self._hosts = sum(1 for _ in state.inventory.get_active_hosts())
        order = state.get_op_order()  # type: ignore[no-untyped-call]
        self._place = f"operation {order.index(op_hash) + 1} of {len(order)}: "
        if self._wanted and sys.stderr.isatty():
            # This line replaces pyinfra's own.
            os.environ["PYINFRA_PROGRESS"] = "off"
            gevent.spawn(self._draw, self._ended)
        elif self._wanted:
            gevent.spawn(self._beat, self._ended)

    def operation_host_start(self, state: State, host: Host, op_hash: str) -> None:  # type: ignore[override]
        """A host begins an operation, or skips it: then no other call follows."""
        if op_hash in state.ops[host]:
            self._began[host.name] = time.monotonic()

    def operation_host_success(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0
    ) -> None:
        """A host has ended an operation."""
        self._end(host)

    def operation_host_error(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        """A host has failed in an operation."""
        self._end(host)

    def operation_end(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        """All hosts have ended an operation."""
        self._ended.set()
        longest = max(self._took.values(), default=0.0)
        name = ", ".join(state.get_op_meta(op_hash).names)
        self._operations[name] = self._operations.get(name, 0.0) + longest
        if longest >= SHORT:
            logger.info(f"took {slowest(self._took)}")
        # In pull mode each node deploys itself, and is no control host on which somebody looks for this.
        if self._took and not all(deploys_itself(host) for host in state.inventory):
            self._note(name)
        if op_hash == state.get_op_order()[-1]:  # type: ignore[no-untyped-call]
            logger.info(
                f"operations took {slowest(self._operations)}, all together {say(sum(self._operations.values()))}"
            )

    def _end(self, host: Host) -> None:
        began = self._began.pop(host.name, None)
        if began is not None:
            self._took[host.name] = time.monotonic() - began

    def _note(self, name: str) -> None:
        slowest_host, longest = _longest_first(self._took)[0]
        middle = statistics.median(self._took.values())
        self._noted.append(Operation(name, len(self._took), longest, middle, slowest_host))
        self._hosts_took.update(self._took)
        if len(self._noted) == 1:
            # pyinfra calls nothing if a deploy fails or is stopped.
            atexit.register(self._record)
        if time.monotonic() - self._recorded >= RECORDED:
            self._record()

    def _record(self) -> None:
        self._recorded = time.monotonic()
        files = tuple(word for word in sys.argv[1:] if word.endswith(".py"))
        deploy = LastDeploy(files, self._began_all, time.time(), tuple(self._noted), dict(self._hosts_took))
        try:
            write(default_path(), deploy)
        except OSError as error:
            logger.warning(
                f"{default_path()} cannot be written: {error.strerror}; `trackbed fleet report` lacks this deploy"
            )

    def _running(self) -> str:
        now = time.monotonic()
        times = {host: now - began for host, began in self._began.items()}
        width = shutil.get_terminal_size().columns - INDENT - 1 - len(self._place)
        return self._place + running(times, len(self._took), self._hosts, width)

    def _draw(self, ended: Event) -> None:
        while not ended.wait(REDRAWN):
            sys.stderr.write(f"{' ' * INDENT}{self._running()}\r")
            sys.stderr.flush()
            # This stays in the buffer, so that whatever is printed next clears the line first (as pyinfra does it).
            sys.stderr.write("\033[K")

    def _beat(self, ended: Event) -> None:
        while not ended.wait(BEAT):
            logger.info(self._running())


def running(hosts: Mapping[str, float], done: int, total: int, width: int) -> str:
    """A line about an operation: the hosts that are in it, each with its time, the longest first.

    :param done: how many of the ``total`` hosts have ended the operation.
    :param width: columns. Hosts that do not fit are counted, not named.
    """
    named = [f"{printable(host)} {say(seconds)}" for host, seconds in _longest_first(hosts)]
    text = f"{done} of {total} hosts done"
    for number, name in enumerate(named):
        left = len(named) - number - 1
        longer = f"{text}{'; ' if number == 0 else ', '}{name}"
        if len(longer) + (len(f" and {left} more") if left else 0) > width:
            return f"{text} and {left + 1} more" if number else text
        text = longer
    return text


def slowest(times: Mapping[str, float]) -> str:
    """The longest of these times with their names, and how many times there are."""
    named = [f"{printable(name)} {say(seconds)}" for name, seconds in _longest_first(times)[:SLOWEST]]
    return ", ".join(named) + (f" (the slowest of {len(times)})" if len(times) > SLOWEST else "")


def _longest_first(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: (-item[1], item[0]))


def say(seconds: float) -> str:
    """A duration in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"
