"""Shows during a deploy what each host does and since when, and records the times of operations for `trackbed fleet report`.

pyinfra 3.10 shows which hosts are not done yet, as far as one line has room for their names, but neither their steps nor times.
"""

from __future__ import annotations

import atexit
import os
import shutil
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from gevent.event import Event
from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State

from agent.report.printable import printable
from fleet.last_deploy import LastDeploy, Operation, default_path, duration, write
from tasks.common.connection import deploys_itself

REDRAWN = 0.5
"""Seconds after which the lines on a terminal are drawn again."""

BEAT = 30.0
"""Seconds between two times that the same lines are printed if the output is not a terminal."""

INDENT = 4
"""Columns by which pyinfra indents what it prints about an operation."""

CONNECTING = "connecting"

SHORT = 1.0
"""Seconds. An operation that was shorter on every host gets no line."""

RECORDED = 1.0
"""Seconds of the deploy between two records, each of which waits for the disk. The last one is written when it ends."""

SLOWEST = 3
"""How many of the slowest hosts, or operations, are named at the end."""


_steps: WeakKeyDictionary[Host, tuple[str, float]] = WeakKeyDictionary()
"""What each host does now, and since when."""

_heads: WeakKeyDictionary[State, str] = WeakKeyDictionary()
"""How far the operation is that runs. pyinfra's own line counts only the hosts that may run at the same time."""


@contextmanager
def step(host: Host, name: str) -> Iterator[None]:
    """While a host does this. If it does this as a part of another step, that one is shown."""
    begun = (name, time.monotonic())
    is_outer = _steps.setdefault(host, begun) is begun
    try:
        yield
    finally:
        if is_outer:
            _steps.pop(host, None)


class Progress(BaseStateCallback):
    """Records when each host begins and ends a step. pyinfra calls the public methods."""

    def __init__(self) -> None:
        self._place = ""
        self._hosts = 0
        self._took: dict[str, float] = {}
        self._operations: dict[str, float] = {}
        self._began_all = time.time()
        self._noted: list[Operation] = []
        self._recorded = time.monotonic()
        self._hosts_took: Counter[str] = Counter()

    def host_before_connect(self, state: State, host: Host) -> None:  # type: ignore[override]
        """A connection is made: the first one, or, after a reboot, as a part of an operation."""
        _steps.setdefault(host, (CONNECTING, time.monotonic()))

    def host_connect(self, state: State, host: Host) -> None:  # type: ignore[override]
        """The host is connected."""
        if _steps.get(host, ("",))[0] == CONNECTING:
            del _steps[host]

    def host_connect_error(self, state: State, host: Host, error: object) -> None:  # type: ignore[override]
        """The host cannot be connected to."""
        self.host_connect(state, host)

    def operation_start(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        """An operation begins on all hosts."""
        self._took = {}
        order = state.get_op_order()  # type: ignore[no-untyped-call]
        self._place = f"operation {order.index(op_hash) + 1} of {len(order)}"
        self._hosts = sum(op_hash in state.ops[host] for host in state.inventory.get_active_hosts())
        self._count(state)

    def operation_host_start(self, state: State, host: Host, op_hash: str) -> None:  # type: ignore[override]
        """A host begins an operation, or skips it: then no other call follows."""
        if op_hash in state.ops[host]:
            _steps[host] = (", ".join(state.get_op_meta(op_hash).names), time.monotonic())

    def operation_host_success(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0
    ) -> None:
        """A host has ended an operation."""
        self._end(state, host)

    def operation_host_error(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        """A host has failed in an operation."""
        self._end(state, host)

    def operation_end(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        """All hosts have ended an operation."""
        _heads.pop(state, None)
        longest = max(self._took.values(), default=0.0)
        name = ", ".join(state.get_op_meta(op_hash).names)
        self._operations[name] = self._operations.get(name, 0.0) + longest
        if longest >= SHORT:
            logger.info(f"took {slowest(self._took)}")
        # A node in pull mode deploys itself: nobody looks for this record on a node.
        if self._took and not all(deploys_itself(host) for host in state.inventory):
            self._note(name)
        if op_hash == state.get_op_order()[-1]:  # type: ignore[no-untyped-call]
            logger.info(
                f"operations took {slowest(self._operations)}, all together {duration(sum(self._operations.values()))}"
            )

    def _end(self, state: State, host: Host) -> None:
        if host in _steps:
            self._took[host.name] = time.monotonic() - _steps.pop(host)[1]
            self._count(state)

    def _count(self, state: State) -> None:
        _heads[state] = f"{self._place}: {len(self._took)} of {self._hosts} hosts done"

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


def showing(_: Callable[..., None]) -> Callable[..., None]:
    """_print_spinner, which pyinfra starts whenever it waits for hosts: shows the steps of the hosts instead of one line."""
    return show


def show(ended: Event, of_pyinfra: deque[str]) -> None:
    """Show what the hosts do until pyinfra no longer waits for them.

    :param of_pyinfra: the last is what pyinfra would show, such as `50% (1/2) - {node2}`.
    """
    if os.environ.get("PYINFRA_PROGRESS") == "off":
        return
    terminal = sys.stderr.isatty()
    while not ended.wait(REDRAWN if terminal else BEAT):
        now, size = time.monotonic(), shutil.get_terminal_size()
        steps = {host.name: (name, now - began) for host, (name, began) in _steps.items()}
        head = next(iter(_heads.values()), of_pyinfra[-1].partition("{")[0].rstrip(" -"))
        # On a terminal, the line above these stays empty, and the cursor stays in it.
        width, height = size.columns - INDENT - 1, size.lines - 1
        lines = shown(steps, head, width, height) if steps else [of_pyinfra[-1][:width]]
        if terminal:
            indented = "".join(f"\n{' ' * INDENT}{line}" for line in lines)
            try:
                sys.stderr.write(f"{indented}\r\033[{len(lines)}A")
            finally:
                # This stays in the buffer, so that what is printed next clears the lines first (pyinfra does so with its line),
                # also after a Ctrl-C, which may come just now.
                sys.stderr.write("\033[J")
        else:
            for line in lines:
                logger.info(line)
    sys.stderr.flush()


def shown(steps: Mapping[str, tuple[str, float]], head: str, width: int, height: int) -> list[str]:
    """The lines that show what hosts do: one a host, the longest first.

    :param steps: the name of each host's step, and for how many seconds the host has been in it.
    :param head: the line above them; empty: none.
    :param width: columns. What is longer is cut.
    :param height: lines. Hosts that do not fit are counted, not named.
    """
    order = _longest_first({host: seconds for host, (_, seconds) in steps.items()})
    room = max(height - bool(head), 1)
    named = order if len(order) <= room else order[: room - 1]
    rows = [(printable(host), duration(seconds), printable(steps[host][0])) for host, seconds in named]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{host:<{widths[0]}}  {time:>{widths[1]}}  {name}" for host, time, name in rows]
    rest = len(order) - len(named)
    return [line[:width] for line in [*([head] if head else []), *lines, *([f"and {rest} more"] if rest else [])]]


def slowest(times: Mapping[str, float]) -> str:
    """The longest of these times with their names, and how many times there are."""
    named = [f"{printable(name)} {duration(seconds)}" for name, seconds in _longest_first(times)[:SLOWEST]]
    return ", ".join(named) + (f" (the slowest of {len(times)})" if len(times) > SLOWEST else "")


def _longest_first(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: (-item[1], item[0]))
