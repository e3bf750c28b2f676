"""Link events by the thousand from this machine's own kernel, in a network namespace of their own."""

import json
import subprocess
import sys
from typing import Any

import pytest

from agent.service.wake import BURST, RATE

pytestmark = pytest.mark.slow

EVENTS = 10_000

LISTEN = f"""
import json, resource, socket, subprocess, sys, time
from agent.linux.events import LinuxEvents
from agent.service.activity import Activity
from agent.service.inbox import Inbox
from agent.service.wake import KnownDevices

def flap(name, events):
    lines = "".join(f"link set dev {{name}} mtu {{1400 + i % 2}}\\n" for i in range(events))
    storm = subprocess.Popen(["ip", "-batch", "-"], stdin=subprocess.PIPE, text=True)
    storm.stdin.write(lines)
    storm.stdin.close()
    return storm

def listen(storm):
    wakes, scopes, began = 0, set(), time.monotonic()
    more = True
    while more or storm.poll() is None:
        found = [inbox.wait(0.2)]
        more = found[0] != frozenset()
        if more:
            found.append(inbox.gather())
        wakes += more
        scopes |= {{"everything"}} if None in found else frozenset().union(*found)
    return wakes, sorted(scopes), time.monotonic() - began

subprocess.run(["ip", "link", "add", "ours", "type", "veth", "peer", "name", "theirs"], check=True)
inbox = Inbox(LinuxEvents().subscribe(), Activity.at(None), lambda: None)
inbox.known = KnownDevices({{socket.if_nametoindex("ours"): "0000:21:00.0"}}, {{}})
while inbox.wait(0.2) != frozenset():
    pass
if sys.argv[1] == "overrun":
    flap("ours", {3 * EVENTS}).wait()
    lost = inbox.wait(0.2) is None
    while inbox.wait(0.2) != frozenset():
        pass
    flap("ours", 1).wait()
    print(json.dumps([lost, sorted(inbox.wait(1.0))]))
else:
    before = resource.getrusage(resource.RUSAGE_SELF)
    counts = listen(flap(sys.argv[1], {EVENTS}))
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps([*counts, cpu]))
"""


def listen(what: str) -> Any:
    command = ["unshare", "--net", sys.executable, "-c", LISTEN, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr:
        pytest.skip("no network namespace can be made here")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_events_of_a_wanted_netdev_wake_at_a_bounded_rate() -> None:
    wakes, scopes, seconds, _ = listen("ours")
    assert scopes == ["0000:21:00.0"]
    assert 1 <= wakes <= BURST + RATE * seconds + 1


def test_events_of_another_netdev_wake_nobody() -> None:
    wakes, scopes, _, _ = listen("theirs")
    assert (wakes, scopes) == (0, [])


def test_after_an_overrun_everything_is_read_and_the_watch_goes_on() -> None:
    assert listen("overrun") == [True, ["0000:21:00.0"]]
