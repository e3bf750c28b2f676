"""Prints which step runs, for how long it has run, and how long it took."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

# Seconds between two lines: often enough to show that nothing hangs, seldom enough for a CI log.
BEAT_S = 10.0


def say(text: str) -> None:
    """Print one line to standard error; standard output is for results."""
    click.echo(text, err=True)


def usually(seconds: float, load: float, cpus: int) -> str:
    """How long a step takes on an idle machine, and whether this machine is busy. Empty if the duration is not known.

    :param load: the average number of tasks that ran or waited to run in the last minute.
    """
    if not seconds:
        return ""
    # A build alone keeps every CPU busy; a higher load comes from other programs.
    busy = f"; this machine is busy: a load of {load:.1f} on {cpus} CPUs" if load > 1.5 * cpus else ""
    return f" (usually {seconds:.0f} s{busy})"


@contextmanager
def step(what: str, usual_s: float = 0) -> Iterator[None]:
    """Print a step's name, for how long it has run while it runs, and its duration at the end."""
    began = time.monotonic()
    ended = threading.Event()

    def usual() -> str:
        return usually(usual_s, os.getloadavg()[0], len(os.sched_getaffinity(0)))

    def beat() -> None:
        while not ended.wait(BEAT_S):
            say(f"    {what}: {time.monotonic() - began:.0f} s so far{usual()}")

    say(f"==> {what}{usual()}")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    say(f"    {what}: done in {time.monotonic() - began:.1f} s")
