"""A supervisor with scripted workers: real processes, a real notify socket, real signals."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attrs import field, frozen

from agent.report.records import Report, report_from_json
from tests.contract.asking import soon

ROOT = Path(__file__).parents[3]

SUPERVISOR = """
import sys
from pathlib import Path
from agent.service import supervisor
folder = Path(sys.argv[1])
limits = supervisor.Limits(*map(float, sys.argv[3:8]))
supervisor.LEAVE_WAIT, supervisor.LAST_RESPAWN, supervisor.ANSWERED_WITHIN = map(float, sys.argv[8:11])
supervisor.LONGEST_LINE = 1 << 20
supervisor.HEARTBEAT = 600.0
supervisor.supervise([sys.argv[11], "-c", sys.argv[2]], supervisor.Publisher(folder, "boot-1", "v1"), limits)
"""

WORKER = """
import json, sys
def say(message): print(json.dumps(message), flush=True)
def report(ready, spec_hash="h1", cluster=True):
    conditions = [{"type": "Converged", "status": "True" if ready else "False", "reason": "R"},
                  {"type": "DevicePlugins", "status": str(cluster), "reason": "R", "stage": "cluster"}]
    say({"node_name": "n1", "spec_hash": spec_hash, "ready": ready and cluster, "up_to_date": True,
         "conditions": conditions, "outcomes": []})
say({"serving": True})
"""

# What a worker notes in a file, and what it does before it hangs: PF is a device.
NOTED = """
import os, pathlib, time
from agent.service.activity import Activity
PF = "0000:21:00.0"
folder = pathlib.Path(os.environ["NOTIFY_SOCKET"]).parent
def note(word):
    with (folder / "noted").open("a") as file: file.write(word + "\\n")
activity = Activity.at(int(sys.argv[sys.argv.index("--activity") + 1]))
if not (folder / "noted").exists(): (folder / "first-report").write_text((folder / "report.json").read_text())
note("start " + " ".join(sys.argv[3:]))
starts = (folder / "noted").read_text().count("start")
"""

needs_fuse = pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse")


@frozen
class Supervised:
    process: subprocess.Popen[bytes]
    folder: Path
    notified: socket.socket

    def noted(self) -> list[str]:
        path = self.folder / "noted"
        return [line.strip() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until_noted(self, *lines: str) -> None:
        soon(lambda: self.noted()[: len(lines)] == list(lines) or None, f"{lines} in {self.noted()}", 60.0)

    def report(self) -> Report:
        return report_in(self.folder)

    def reload(self) -> None:
        """Ask for a reload, and wait until the supervisor has begun it."""
        self.process.send_signal(signal.SIGHUP)
        while not self.notified.recv(200).startswith(b"RELOADING=1"):
            pass

    def end(self) -> None:
        """Stop it as systemd does."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0

    def changes(self, report: Report) -> int:
        """How often the report has changed since the first worker started."""
        first = report_from_json((self.folder / "first-report").read_text())
        return report.generation - first.generation

    def wait_for(self, holds: Callable[[Report], bool]) -> Report:
        return wait_for_report(self.folder, self.process, holds)


def report_in(run: Path) -> Report:
    """The report in an agent's run-time folder."""
    return report_from_json((run / "report.json").read_text())


def wait_for_report(run: Path, supervisor: subprocess.Popen[bytes], holds: Callable[[Report], bool]) -> Report:
    """The first report there for which ``holds`` is true."""

    def looked() -> Report | None:
        assert supervisor.poll() is None, "the supervisor ended"
        with suppress(FileNotFoundError):
            report = report_in(run)
            return report if holds(report) else None
        return None

    return soon(looked, "such report", 120.0)


@frozen
class Start:
    """Starts supervisors in a folder."""

    folder: Path
    started: list[Supervised] = field(factory=list)

    def __call__(
        self,
        worker: str,
        *,
        read: float = 2.0,
        write: float = 300.0,
        retry: float = 600.0,
        silence: float = 600.0,
        first: float = 600.0,
        leave: float = 10.0,
        well: float = 30.0,
        answered: float = 0.5,
        program: str = sys.executable,
        notify: str = "",
        stderr: int | None = None,
    ) -> Supervised:
        """Start one with these limits: ``first`` is Limits.start, ``well`` is LAST_RESPAWN, ``answered`` is ANSWERED_WITHIN.

        Its heartbeat is ``read``.

        ``notify``: another NOTIFY_SOCKET than the test's.
        """
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = self.folder / f"notify{len(self.started)}"
        notified.bind(str(address))
        notified.settimeout(20)
        limits = map(str, (read, write, retry, silence, first, leave, well, answered))
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(self.folder), WORKER + worker, *limits, program],
            cwd=ROOT,
            env={**os.environ, "NOTIFY_SOCKET": notify or str(address)},
            stderr=stderr,
        )
        self.started.append(Supervised(process, self.folder, notified))
        return self.started[-1]


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Each supervisor that was started is killed in the end."""
    start = Start(folder)
    yield start
    for supervised in start.started:
        supervised.process.kill()
        supervised.process.wait()
        supervised.notified.close()


@contextmanager
def hanging_file(folder: Path) -> Iterator[Callable[[], None]]:
    """Whoever reads the file ``mounted/value`` hangs in the kernel until this is called."""
    mounted = folder / "mounted"
    mounted.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.service.hanging", str(mounted)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"mounted\n"

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(timeout=60)

    try:
        yield end
    finally:
        end()


def waits_in(pid: int, function: str) -> bool:
    """Whether a process waits in this function of the kernel."""
    return Path(f"/proc/{pid}/wchan").read_text().startswith(function)
