"""The turns of hosts, when what runs a host is killed."""

from collections.abc import Iterator

import gevent
import pytest
from gevent import Timeout
from gevent.event import Event

from tasks.common.turns import Turns


def operation(turns: Turns, name: str) -> Iterator[str]:
    """As an operation has its turn."""
    if turns.take(name) == "never":
        return
    succeeded = False
    try:
        yield "reboot"
        succeeded = True
    finally:
        turns.end(name, succeeded)


def run(turns: Turns, name: str, had: list[str], goes_on: Event) -> None:
    for _ in operation(turns, name):
        had.append(name)
        goes_on.wait()


@pytest.mark.parametrize("killed", ["has its turn", "waits"])
def test_a_host_whose_greenlet_is_killed_leaves_nothing_taken(killed: str) -> None:
    turns, had = Turns(3, at_once=2, stop_at=3), list[str]()
    stuck, free = Event(), Event()
    first = gevent.spawn(run, turns, "a", had, stuck)
    second = gevent.spawn(run, turns, "b", had, free)
    third = gevent.spawn(run, turns, "c", had, free)
    free.set()
    gevent.sleep(0)
    assert had == ["a"]
    if killed == "waits":
        second.kill()
        stuck.set()
    else:
        first.kill()
    with Timeout(30):
        gevent.joinall([first, second, third])
    # Whatever was killed in its turn counts as failed.
    assert (had, turns.done, turns.failed) == (
        (["a", "c"], 2, []) if killed == "waits" else (["a", "b", "c"], 2, ["a"])
    )
