"""How long a Node says Ready although its node is not, or nobody knows: a real reporter, a real API server, and each fault.

systemd is played by the test, by the limits in the units' templates. A fault begins at the worst moment that a test can choose.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attrs import define, evolve, field

from agent.report.records import Report, report_to_json
from agent.report.verdict import STALE
from agent.reporter.kubernetes.backoff import LAST_URGENT_WAIT
from agent.reporter.settings import Settings, to_json
from agent.runtime import boot_id, uptime, write_atomically
from agent.service.supervisor import HEARTBEAT
from lab.cluster.control_plane import ControlPlane
from tests.cluster.conftest import Say
from tests.cluster.reporter.reporters import BROUGHT, NO_CARRIER, bring, node, until

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[3]
UNIT = (ROOT / "templates" / "trackbed-reporter.service.j2").read_text()
WATCHDOG, RESTART = (
    float(re.search(rf"^{key}=(\d+)$", UNIT, re.MULTILINE)[1])  # type: ignore[index]
    for key in ("WatchdogSec", "RestartSec")
)
# For what the API server, the processes and this machine take beside the limits.
SLOWNESS = 10.0

PROGRAM = """
import sys
from pathlib import Path
from cli import node_files
from agent.report import published
from agent.reporter import settings
folder = Path(sys.argv[1])
node_files.RUN, published.PATH, settings.LABELS = folder / "run", folder / "published.json", folder / "labels" / "labels.json"
from cli.__main__ import cli
cli(["reporter", "--listen", "127.0.0.1:0", *sys.argv[2:]])
"""


@define
class Unit:
    """The reporter's process as systemd keeps it, and the agent's report.

    ``beating``: the agent renews its heartbeat. ``at_most``: the longest time between two signs of life, in seconds.
    """

    plane: ControlPlane
    folder: Path
    name: str
    words: list[str]
    report: Report
    process: subprocess.Popen[bytes] | None = None
    beating: bool = True
    at_most: float = 0.0
    _over: threading.Event = field(factory=threading.Event)
    _writing: threading.Lock = field(factory=threading.Lock)

    def say(self, ready: bool) -> None:
        """Write a report."""
        with self._writing:
            self.report = evolve(
                self.report,
                ready=ready,
                generation=self.report.generation + 1,
                conditions=() if ready else (NO_CARRIER,),
            )
            self._write()

    def _write(self) -> None:
        self.report = evolve(self.report, uptime=uptime())
        write_atomically(self.folder / "run" / "report.json", report_to_json(self.report))

    def beat(self) -> None:
        """Play the supervisor."""
        while not self._over.wait(HEARTBEAT):
            with self._writing:
                if self.beating:
                    self._write()

    def keep(self) -> None:
        """Play systemd: start the process, kill it if its watchdog is silent, and start it again."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(self.folder / "notify"))
            notified.settimeout(0.1)
            while not self._over.is_set():
                environment = {
                    **os.environ,
                    "NOTIFY_SOCKET": str(self.folder / "notify"),
                    "STATE_DIRECTORY": str(self.folder),
                }
                self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *self.words], env=environment, cwd=ROOT)
                last, started = time.monotonic(), False
                while not self._over.is_set() and self.process.poll() is None:
                    with suppress(TimeoutError):
                        message = notified.recv(200)
                        started = started or message == b"READY=1"
                        self.at_most, last = max(self.at_most, time.monotonic() - last), time.monotonic()
                    if started and time.monotonic() - last > WATCHDOG:
                        self.process.kill()
                self.process.kill()
                self.process.wait()
                self._over.wait(RESTART)

    def is_tainted(self) -> bool:
        taints = self.plane.get("node", self.name)["spec"].get("taints", [])
        return any(taint["key"] == "readiness.k8s.io/trackbed" for taint in taints)

    def status(self) -> str:
        conditions = self.plane.get("node", self.name)["status"].get("conditions", [])
        return next((str(c["status"]) for c in conditions if c["type"] == "TrackbedReady"), "")


@contextmanager
def running(plane: ControlPlane, folder: Path, name: str) -> Iterator[Unit]:
    """A unit whose Node is ready and has no taint."""
    for each in ("run", "labels"):
        (folder / each).mkdir()
    plane.apply(node(name))
    bring(plane, name, folder)
    (folder / "labels" / "labels.json").write_text('{"labels": []}')
    settings = Settings(name, plane.url, str(plane.authority.pair.certificate))
    (folder / "settings.json").write_text(to_json(settings))
    words = [str(folder), "--kubernetes", str(folder / "settings.json"), "--kubernetes-secret", str(folder / BROUGHT)]
    unit = Unit(plane, folder, name, words, Report(name, "h1", boot_id(), "v1", True, True))
    unit.say(True)
    threads = [threading.Thread(target=work) for work in (unit.beat, unit.keep)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: unit.status() == "True" and not unit.is_tainted(), "ready and untainted", 60.0)
        yield unit
    finally:
        unit._over.set()
        for thread in threads:
            thread.join()


def until_tainted(unit: Unit, limit: float) -> float:
    """Seconds until the Node is tainted."""
    began = time.monotonic()
    until(unit.is_tainted, "the taint", limit)
    return time.monotonic() - began


def test_a_reporter_that_hangs(plane: ControlPlane, tmp_path: Path, say: Say) -> None:
    with running(plane, tmp_path, "hangs-for-good") as unit:
        assert unit.process is not None
        os.kill(unit.process.pid, signal.SIGSTOP)
        unit.say(False)
        took = until_tainted(unit, WATCHDOG + RESTART + SLOWNESS)
    say(f"a reporter that hangs: tainted after {took:.1f} s")


def test_a_reporter_that_is_killed(plane: ControlPlane, tmp_path: Path, say: Say) -> None:
    with running(plane, tmp_path, "killed") as unit:
        assert unit.process is not None
        unit.process.kill()
        unit.say(False)
        took = until_tainted(unit, RESTART + SLOWNESS)
    say(f"a reporter that is killed: tainted after {took:.1f} s")


def test_an_agent_that_is_killed_for_good(plane: ControlPlane, tmp_path: Path, say: Say) -> None:
    with running(plane, tmp_path, "agent-killed") as unit:
        unit.beating = False
        # ExecStopPost of its unit.
        (tmp_path / "run" / "report.json").unlink()
        took = until_tainted(unit, SLOWNESS)
    say(f"an agent that is killed for good: tainted after {took:.1f} s")


def test_an_agent_that_hangs(plane: ControlPlane, tmp_path: Path, say: Say) -> None:
    with running(plane, tmp_path, "agent-hangs") as unit:
        with unit._writing:
            unit.beating = False
            unit._write()
        took = until_tainted(unit, STALE + 1.0 + SLOWNESS)
    say(f"an agent that hangs: tainted {took:.1f} s after its last heartbeat")


@pytest.mark.parametrize("seconds", [20.0, 180.0])
def test_an_outage_of_the_api_server(plane: ControlPlane, tmp_path: Path, say: Say, seconds: float) -> None:
    with running(plane, tmp_path, f"outage-{seconds:.0f}") as unit:
        plane.kill_api_server()
        unit.say(False)
        time.sleep(seconds)
        plane.start_api_server()
        took = until_tainted(unit, LAST_URGENT_WAIT + SLOWNESS)
        at_most = unit.at_most
    say(
        f"an API server that was away for {seconds:.0f} s: tainted {took:.1f} s after its return; "
        f"at most {at_most:.1f} s between two signs of life"
    )
    assert at_most < WATCHDOG / 2
