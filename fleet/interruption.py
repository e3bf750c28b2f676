"""Turns what ends a command early into a request to stop, so that the command can end or undo what it has begun, and say so.

A command ends early by Ctrl-C, by SIGTERM (kill, systemd), by SIGHUP (a closed terminal), or by an output that cannot be
written, such as a pipe whose reader has ended.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Event, Thread

import click
from attrs import field, frozen

from agent.report.printable import printable

INTERRUPTED = 130
"""Exit code of a command that was asked to stop, and did not do all that it should."""

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


@frozen
class Interruption:
    """``stop``: set once the command is asked to stop."""

    stop: Event = field(factory=Event)
    # One signal's handler may interrupt another's, which then holds an Event's lock. SimpleQueue.put() is reentrant.
    _reasons: SimpleQueue[str] = field(factory=SimpleQueue)

    def say(self, line: str, err: bool = False) -> bool:
        """Print a line, from any thread; False: the output cannot be written, which asks the command to stop."""
        try:
            click.echo(printable(line), err=err)
        except OSError as error:
            # Discard what is said from now on: Python would try to write the line again at its end, and exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())
            self._reasons.put(f"standard {'error' if err else 'output'} cannot be written: {error.strerror}")
            return False
        return True


def _watch_reader(reasons: SimpleQueue[str], ended: int) -> None:
    """Ask the command to stop if nobody reads its output any more. It may have nothing to print for hours.

    For a pipe without a reader, and a terminal that was closed, the kernel sets POLLERR or POLLHUP (poll(2)).
    """
    output = select.poll()
    output.register(ended, 0)
    with suppress(OSError, ValueError, AttributeError):  # there may be no output
        output.register(sys.stdout.fileno(), 0)
    if ended not in dict(output.poll()):
        reasons.put("standard output cannot be written: nobody reads it")


@contextmanager
def interruptible(first: str) -> Iterator[Interruption]:
    """Within it, a signal sets ``stop`` and says so, however many arrive; nothing is raised.

    :param first: what the command still does before it ends.
    """
    made = Interruption()

    def follow() -> None:
        for reason in iter(made._reasons.get, ""):
            made.stop.set()
            made.say(f"trackbed: {reason}: stopping; {first}", err=True)

    follower = Thread(target=follow, name="interruption", daemon=True)
    follower.start()
    ended, end = os.pipe()
    watcher = Thread(target=_watch_reader, args=(made._reasons, ended), name="output", daemon=True)
    watcher.start()
    # nohup has SIGHUP ignored, and a shell has a background job ignore Ctrl-C.
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, name in _SIGNALS.items():
        if kept[number] != signal.SIG_IGN:
            signal.signal(number, lambda *_, name=name: made._reasons.put(name))
    try:
        yield made
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        os.close(end)
        watcher.join()
        os.close(ended)
        made._reasons.put("")
        follower.join()
