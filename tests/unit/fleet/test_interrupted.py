"""Commands of `trackbed fleet` that are stopped early, against a small API server whose one pod a node is never evicted."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from cattrs import unstructure

from agent.report import names
from fleet.maintenance_record import Record
from tests.http_server import Request, serving
from tests.unit.fleet.nodes_api import Cluster
from tests.unit.fleet.test_fleet import ROOT, node
from tests.unit.fleet.test_kubeconfig import kubeconfig
from tests.unit.fleet.test_maintenance import pod

NODES = ("a", "b")
TRACKBED = (sys.executable, "-m", "cli", "fleet")
Step = Callable[[str, Any], bool]


@define
class Running:
    """Commands that run against such a cluster.

    ``received``: is told each request before it is carried out. ``unanswered``: which requests get no answer. ``begun``: the
    command that sends requests has been started.
    """

    cluster: Cluster
    kubeconfig: Path
    received: Callable[[str, Any], None] = lambda what, body: None
    unanswered: Step = lambda what, body: False
    started: list[subprocess.Popen[str]] = field(factory=list)
    begun: threading.Event = field(factory=threading.Event)

    def signal(self, number: signal.Signals) -> None:
        self.started[-1].send_signal(number)

    def answer(self, request: Request) -> tuple[int, Any] | None:
        self.begun.wait(60)
        what, body = f"{request.method} {request.path}", json.loads(request.body or "null")
        self.received(what, body)
        dropped = self.unanswered(what, body)
        answer = self.cluster.answer(request.method, request.path, body)
        return None if dropped else answer


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Running]:
    cluster = Cluster({name: node(name).to_dict() for name in NODES}, [pod("job").to_dict()], evicts=False)
    made = Running(cluster, tmp_path)
    with serving(made.answer) as url:
        made.kubeconfig = kubeconfig(tmp_path, url)
        yield made
        for each in made.started:
            each.kill()


def start(commands: Running, before: Sequence[str] = (), nodes: Sequence[str] = NODES) -> subprocess.Popen[str]:
    """Start to maintain nodes, two at once."""
    inventory = commands.kubeconfig.with_name("fleet.py")
    inventory.write_text(f"hosts = {list(NODES)!r}\n")
    return run(commands, [*before, *TRACKBED, "maintain", *nodes, "--at-once", "2", "--inventory", str(inventory)])


def run(commands: Running, words: list[str]) -> subprocess.Popen[str]:
    command = [*words, "--kubeconfig", str(commands.kubeconfig)]
    made = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    commands.started.append(made)
    commands.begun.set()
    return made


def cordons(what: str, body: Any) -> bool:
    return what.startswith("PATCH") and bool(body.get("spec", {}).get("unschedulable"))


def uncordons(what: str, body: Any) -> bool:
    return what.startswith("PATCH") and body["metadata"]["annotations"][names.MAINTENANCE] is None


def evicts(what: str, body: Any) -> bool:
    return what.endswith("/eviction")


def check(commands: Running, running: subprocess.Popen[str], said: str) -> None:
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert (commands.cluster.cordoned(), commands.cluster.recorded()) == ([], {})
    assert {line.split(": ")[1] for line in err.splitlines() if line.startswith("trackbed: ")} == {said, *NODES}, err
    assert "Traceback" not in err


def during_the_drain(commands: Running, happens: Callable[[], object], stopped: bool) -> tuple[int, str, str]:
    """Maintain a node while something happens to it, and perhaps stop the command then: its exit code and what it printed."""

    def received(what: str, body: Any) -> None:
        if evicts(what, body):
            happens()
            if stopped:
                commands.signal(signal.SIGINT)
            commands.cluster.pods = []

    commands.received = received
    running = start(commands, nodes=["a"])
    out, err = running.communicate(timeout=120)
    return running.returncode, out, err


@pytest.mark.parametrize("by", ["bob", "deployer"])
@pytest.mark.parametrize("stopped", [True, False], ids=["undone", "drained"])
def test_a_record_of_another_run_is_left_to_it(commands: Running, by: str, stopped: bool) -> None:
    """Another run has taken the maintenance over (--resume) while this one waited for pods."""
    other = Record(by, "2026", "wait", True, "rebind")
    code, _, err = during_the_drain(commands, lambda: commands.cluster.note("a", other), stopped)
    assert code == (130 if stopped else 1), err
    assert f"trackbed: a: failed: {by} began" in err
    assert {name: json.loads(text) for name, text in commands.cluster.recorded().items()} == {"a": unstructure(other)}
    assert commands.cluster.cordoned() == ["a"]


@pytest.mark.parametrize("stopped", [True, False], ids=["undone", "drained"])
def test_a_maintenance_without_its_record_writes_no_other(commands: Running, stopped: bool) -> None:
    """Somebody has undone it while it waited for pods, and then cordoned the node by hand."""

    def undone() -> None:
        commands.cluster.nodes["a"]["metadata"]["annotations"] = {}

    _, out, err = during_the_drain(commands, undone, stopped)
    said = "trackbed: a: undone: " if stopped else "trackbed: a: failed: its maintenance was undone"
    assert said in err
    assert ("a: no maintenance is recorded" in out) == stopped
    assert (commands.cluster.recorded(), commands.cluster.cordoned()) == ({}, ["a"])


@pytest.mark.parametrize(
    ("number", "said", "steps"),
    [
        (signal.SIGINT, "Ctrl-C", [evicts]),
        (signal.SIGINT, "Ctrl-C", [cordons]),
        (signal.SIGINT, "Ctrl-C", [evicts, uncordons]),
        (signal.SIGTERM, "SIGTERM", [evicts, uncordons]),
        (signal.SIGHUP, "SIGHUP", [cordons, uncordons]),
    ],
)
def test_signals_leave_no_node_cordoned(
    commands: Running, number: signal.Signals, said: str, steps: list[Step]
) -> None:

    def received(what: str, body: Any) -> None:
        if any(step(what, body) for step in steps):
            for _ in range(3):
                commands.signal(number)

    commands.received = received
    check(commands, start(commands), said)


def test_a_pipe_whose_reader_has_ended_leaves_no_node_cordoned(commands: Running) -> None:
    running = start(commands)
    assert running.stdout
    assert any(line.endswith(": cordoned\n") for line in running.stdout)
    running.stdout.close()
    running.stdout = None
    check(commands, running, "standard output cannot be written")


def test_a_request_without_an_answer_leaves_no_node_cordoned(commands: Running) -> None:
    lost = set()

    def unanswered(what: str, body: Any) -> bool:
        if not cordons(what, body) or what in lost:
            return False
        lost.add(what)
        commands.signal(signal.SIGINT)
        return True

    commands.unanswered = unanswered
    check(commands, start(commands), "Ctrl-C")


def test_a_signal_that_is_ignored_when_the_command_starts_stays_ignored(commands: Running) -> None:

    def received(what: str, body: Any) -> None:
        if cordons(what, body):
            commands.signal(signal.SIGHUP)
        if evicts(what, body):
            commands.signal(signal.SIGTERM)

    commands.received = received
    check(commands, start(commands, before=["nohup"]), "SIGTERM")


def test_a_sweep_that_is_stopped_finishes_its_node_and_says_what_it_did(commands: Running) -> None:
    asked, said = threading.Event(), threading.Event()

    def received(what: str, body: Any) -> None:
        if what.startswith("POST") and what.endswith("/leases"):
            asked.set()
            said.wait(60)

    commands.received = received
    running = run(commands, [*TRACKBED, "sweep", "--max-share", "1"])
    assert running.stderr
    assert asked.wait(60)
    commands.signal(signal.SIGTERM)
    assert running.stderr.readline().startswith("trackbed: SIGTERM: stopping")
    said.set()
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "trackbed: left to the next sweep: b\n")
    assert out.startswith("a: its Lease is gone; another one was made")
