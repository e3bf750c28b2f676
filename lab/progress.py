"""Says what is being done, how far it is and how long it took."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

# Often enough that nobody thinks it hangs, seldom enough for a CI log.
BEAT_S = 10.0


def say(text: str) -> None:
    """One line for a person, on standard error: standard output is for results."""
    click.echo(text, err=True)


@contextmanager
def step(what: str, usual_s: float = 0) -> Iterator[None]:
    """Announce a step, report its age while it runs and its duration at the end."""
    began = time.monotonic()
    ended = threading.Event()
    usual = f" (usually {usual_s:.0f} s)" if usual_s else ""

    def beat() -> None:
        while not ended.wait(BEAT_S):
            say(f"    {what}: {time.monotonic() - began:.0f} s so far{usual}")

    say(f"==> {what}{usual}")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    say(f"    {what}: done in {time.monotonic() - began:.1f} s")
