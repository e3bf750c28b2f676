"""Commands of `trackbed fleet` that are stopped early, against a small API server whose one pod a node is never evicted."""

from __future__ import annotations

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

from agent.report import names
from tests.http_server import Request, serving
from tests.unit.fleet.test_fleet import ROOT, node
from tests.unit.fleet.test_kubeconfig import KUBECONFIG
from tests.unit.fleet.test_maintenance import pod
from tests.unit.fleet.test_maintenance_requests import BUSY_AS_TEXT

NODES = ("a", "b")
TRACKBED = (sys.executable, "-m", "cli", "fleet")
Step = Callable[[str, Any], bool]


@define
class Cluster:
    """``received``: is told each request before it is carried out. ``unanswered``: which requests get no answer."""

    kubeconfig: Path = Path()
    nodes: dict[str, Any] = field(factory=lambda: {name: node(name).to_dict() for name in NODES})
    received: Callable[[str, Any], None] = lambda what, body: None
    unanswered: Step = lambda what, body: False
    started: list[subprocess.Popen[str]] = field(factory=list)

    def answer(self, what: str, body: Any) -> tuple[int, Any]:
        method, _, path = what.partition(" ")
        if path.endswith("selfsubjectreviews"):
            return 201, {
                "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
                "status": {"userInfo": {"username": "me"}},
            }
        if path.endswith("/nodes"):
            return 200, {"items": list(self.nodes.values())}
        if path.endswith("/devicetaintrules"):
            return 404, {"kind": "Status", "code": 404, "message": "the server could not find the requested resource"}
        if path.endswith("/leases"):
            return (201, body) if method == "POST" else (200, {"items": []})
        if path.endswith("/pods"):
            return 200, {"items": [pod("job").to_dict()]}
        if path.endswith("/eviction"):
            return BUSY_AS_TEXT
        there = self.nodes[path.rpartition("/")[2]]
        if method == "PATCH":
            there["metadata"].setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
            there["spec"] = {**there.get("spec", {}), **body.get("spec", {})}
        return 200, there

    def cordoned(self) -> list[str]:
        return [name for name, each in self.nodes.items() if each.get("spec", {}).get("unschedulable")]

    def recorded(self) -> list[str]:
        notes = {name: each["metadata"].get("annotations") or {} for name, each in self.nodes.items()}
        return [name for name in notes if notes[name].get(names.MAINTENANCE)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "kubeconfig")

    def answered(request: Request) -> tuple[int, Any] | None:
        what, body = f"{request.method} {request.path}", json.loads(request.body or "null")
        made.received(what, body)
        dropped = made.unanswered(what, body)
        answer = made.answer(what, body)
        return None if dropped else answer

    with serving(answered) as url:
        made.kubeconfig.write_text(KUBECONFIG.replace("https://127.0.0.1:1", url))
        yield made
        for each in made.started:
            each.kill()


def start(cluster: Cluster, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start to maintain both nodes at once."""
    inventory = cluster.kubeconfig.with_name("fleet.py")
    inventory.write_text(f"hosts = {list(NODES)!r}\n")
    return run(cluster, [*before, *TRACKBED, "maintain", *NODES, "--at-once", "2", "--inventory", str(inventory)])


def run(cluster: Cluster, words: list[str]) -> subprocess.Popen[str]:
    command = [*words, "--kubeconfig", str(cluster.kubeconfig)]
    made = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    cluster.started.append(made)
    return made


def cordons(what: str, body: Any) -> bool:
    return what.startswith("PATCH") and bool(body.get("spec", {}).get("unschedulable"))


def uncordons(what: str, body: Any) -> bool:
    return what.startswith("PATCH") and body["metadata"]["annotations"][names.MAINTENANCE] is None


def evicts(what: str, body: Any) -> bool:
    return what.endswith("/eviction")


def check(cluster: Cluster, running: subprocess.Popen[str], said: str) -> None:
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert (cluster.cordoned(), cluster.recorded()) == ([], [])
    assert {line.split(": ")[1] for line in err.splitlines() if line.startswith("trackbed: ")} == {said, *NODES}, err
    assert "Traceback" not in err


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
def test_signals_leave_no_node_cordoned(cluster: Cluster, number: signal.Signals, said: str, steps: list[Step]) -> None:
    started = threading.Event()

    def received(what: str, body: Any) -> None:
        started.wait(60)
        if any(step(what, body) for step in steps):
            for _ in range(3):
                running.send_signal(number)

    cluster.received = received
    running = start(cluster)
    started.set()
    check(cluster, running, said)


def test_a_pipe_whose_reader_has_ended_leaves_no_node_cordoned(cluster: Cluster) -> None:
    running = start(cluster)
    assert running.stdout
    assert running.stdout.readline().endswith(": cordoned\n")
    running.stdout.close()
    running.stdout = None
    check(cluster, running, "standard output cannot be written")


def test_a_request_without_an_answer_leaves_no_node_cordoned(cluster: Cluster) -> None:
    started, lost = threading.Event(), set()

    def unanswered(what: str, body: Any) -> bool:
        started.wait(60)
        if not cordons(what, body) or what in lost:
            return False
        lost.add(what)
        running.send_signal(signal.SIGINT)
        return True

    cluster.unanswered = unanswered
    running = start(cluster)
    started.set()
    check(cluster, running, "Ctrl-C")


def test_a_signal_that_is_ignored_when_the_command_starts_stays_ignored(cluster: Cluster) -> None:
    started = threading.Event()

    def received(what: str, body: Any) -> None:
        started.wait(60)
        if cordons(what, body):
            running.send_signal(signal.SIGHUP)
        if evicts(what, body):
            running.send_signal(signal.SIGTERM)

    cluster.received = received
    running = start(cluster, before=["nohup"])
    started.set()
    check(cluster, running, "SIGTERM")


def test_a_sweep_that_is_stopped_finishes_its_node_and_says_what_it_did(cluster: Cluster) -> None:
    asked, said = threading.Event(), threading.Event()

    def received(what: str, body: Any) -> None:
        if what.startswith("POST") and what.endswith("/leases"):
            asked.set()
            said.wait(60)

    cluster.received = received
    running = run(cluster, [*TRACKBED, "sweep", "--max-share", "1"])
    assert running.stderr
    assert asked.wait(60)
    running.send_signal(signal.SIGTERM)
    assert running.stderr.readline().startswith("trackbed: SIGTERM: stopping")
    said.set()
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "trackbed: left to the next sweep: b\n")
    assert out.startswith("a: its Lease is gone; another one was made")
