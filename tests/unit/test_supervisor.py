"""The supervisor with workers that do as they are told: real processes, a real notify socket, real signals."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen

from agent.report.records import Report, report_from_json
from tests.contract.asking import soon

ROOT = Path(__file__).parent.parent.parent

SUPERVISOR = """
import sys
from pathlib import Path
from agent.service import supervisor
folder = Path(sys.argv[1])
limits = supervisor.Limits(read=2.0, retry=600.0)
supervisor.supervise([sys.executable, "-c", sys.argv[2]], supervisor.Publisher(folder, "boot-1", "v1"), limits)
"""

WORKER = """
import json, sys
def say(message): print(json.dumps(message), flush=True)
def found(ready, spec_hash="h1", cluster=True):
    conditions = [{"type": "Converged", "status": "True" if ready else "False", "reason": "R"},
                  {"type": "DevicePlugins", "status": str(cluster), "reason": "R", "stage": "cluster"}]
    say({"node_name": "n1", "spec_hash": spec_hash, "ready": ready and cluster, "up_to_date": True,
         "conditions": conditions, "outcomes": []})
say({"serving": True})
"""


@frozen
class Supervised:
    process: subprocess.Popen[bytes]
    folder: Path
    notified: socket.socket

    def report(self) -> Report:
        return report_from_json((self.folder / "report.json").read_text())

    def wait_for(self, holds: Callable[[Report], bool]) -> Report:
        deadline = time.monotonic() + 20
        while True:
            try:
                report = self.report()
                if holds(report):
                    return report
            except FileNotFoundError:
                pass
            assert time.monotonic() < deadline, (self.folder / "report.json").read_text()
            assert self.process.poll() is None, "the supervisor ended"
            time.sleep(0.02)


Start = Callable[[str], Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def begin(worker: str) -> Supervised:
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = tmp_path / f"notify{len(started)}"
        notified.bind(str(address))
        notified.settimeout(20)
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(tmp_path), WORKER + worker],
            cwd=ROOT,
            env={**os.environ, "NOTIFY_SOCKET": str(address)},
        )
        started.append(Supervised(process, tmp_path, notified))
        return started[-1]

    yield begin
    for supervised in started:
        supervised.process.kill()
        supervised.process.wait()
        supervised.notified.close()


def test_ready_is_told_to_systemd_and_to_the_world(start: Start) -> None:
    supervised = start("found(True); sys.stdin.read()")
    assert supervised.notified.recv(100) == b"READY=1"
    report = supervised.wait_for(lambda report: report.ready)
    assert (report.node_name, report.spec_hash, report.boot_id) == ("n1", "h1", "boot-1")
    marker = supervised.folder / "first-pass"
    soon(lambda: marker.exists() or None, "marker, which comes after the report")
    assert marker.read_text().strip() == "boot-1"


def test_before_the_first_finding_the_node_is_not_ready(start: Start) -> None:
    supervised = start("sys.stdin.read()")
    report = supervised.wait_for(lambda report: True)
    assert not report.ready
    assert report.conditions[0].reason == "Starting"
    assert not (supervised.folder / "first-pass").exists()


def test_the_first_pass_does_not_wait_for_what_comes_after_the_kubelet(start: Start) -> None:
    supervised = start("found(False); found(True, 'h2', cluster=False); found(False, 'h3'); sys.stdin.read()")
    assert not supervised.wait_for(lambda report: report.spec_hash == "h3").ready
    assert (supervised.folder / "first-pass").exists()


def test_there_is_no_first_pass_while_a_device_is_not_as_it_should_be(start: Start) -> None:
    supervised = start("found(False); found(False, 'h2'); sys.stdin.read()")
    supervised.wait_for(lambda report: report.spec_hash == "h2")
    assert not (supervised.folder / "first-pass").exists()


def test_a_worker_that_dies_makes_the_node_not_ready_until_the_next_one_has_looked(start: Start) -> None:
    supervised = start("found(True)\nif sys.stdin.readline(): sys.exit(3)")
    first = supervised.wait_for(lambda report: report.ready)
    supervised.process.send_signal(signal.SIGHUP)
    lost = supervised.wait_for(lambda report: not report.ready)
    assert "status 3" in lost.conditions[-1].message
    again = supervised.wait_for(lambda report: report.ready)
    assert again.generation == first.generation + 2


def test_a_worker_that_was_only_slow_has_its_successor_at_once(start: Start) -> None:
    supervised = start(
        """
import os, pathlib, time
from agent.report.activity import Activity
marker = pathlib.Path(os.environ["NOTIFY_SOCKET"] + ".slow")
if not marker.exists():
    marker.touch()
    Activity.at(int(sys.argv[2])).call("", "running")
    time.sleep(600)
found(True); sys.stdin.read()
"""
    )
    stuck = supervised.wait_for(lambda report: report.conditions[-1].reason == "WorkerStuck")
    assert "has not returned" in stuck.conditions[-1].message
    supervised.wait_for(lambda report: report.ready)


def test_a_reload_reaches_the_worker(start: Start) -> None:
    supervised = start("found(True)\nfor line in sys.stdin: found(True, 'h2')")
    supervised.wait_for(lambda report: report.ready)
    supervised.process.send_signal(signal.SIGHUP)
    supervised.wait_for(lambda report: report.spec_hash == "h2")


def test_what_does_not_change_is_no_new_generation(start: Start) -> None:
    supervised = start("found(True); found(True); found(True); found(False); sys.stdin.read()")
    report = supervised.wait_for(lambda report: not report.ready and report.spec_hash == "h1")
    assert report.generation == 2


def test_a_restart_in_the_same_boot_starts_from_not_ready_and_a_higher_generation(start: Start) -> None:
    first = start("found(True); sys.stdin.read()")
    before = first.wait_for(lambda report: report.ready)
    first.process.kill()
    first.process.wait()
    second = start("sys.stdin.read()")
    report = second.wait_for(lambda report: report.generation > before.generation)
    assert not report.ready


def test_sigterm_ends_it_and_the_node_is_not_ready_from_then_on(start: Start) -> None:
    supervised = start("found(True); sys.stdin.read()")
    supervised.wait_for(lambda report: report.ready)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.process.wait(timeout=20) == 0
    report = supervised.report()
    assert not report.ready
    assert report.conditions[-1].reason == "Stopped"
