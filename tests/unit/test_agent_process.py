"""Supervisor and worker as they are, on the simulated kernel: with a real file whose read never returns, and refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen

from agent.report.records import Report, report_from_json

ROOT = Path(__file__).parent.parent.parent
PF0, PF1 = "0000:21:00.0", "0000:41:00.0"

SUPERVISOR = """
import sys
from pathlib import Path
from agent.service import supervisor
folder = Path(sys.argv[1])
publisher = supervisor.Publisher(folder, "boot-1", "v1")
supervisor.supervise([sys.executable, "-c", *sys.argv[2:]], publisher, supervisor.Limits(read=0.5, write=0.5, retry=1.0))
"""

# PF0's sriov_numvfs is read from a file of this machine, too; all else is simulated. No device has room for five VFs.
WORKER = """
import errno, sys
from pathlib import Path
import click
from attrs import evolve
from agent.service import spec_in_force, worker
from agent.linux.files import LinuxFiles
from tests.sim.kernel import Kernel

spec_in_force.TRIAL = 1.0

class Files:
    def __init__(self, kernel, real): self.kernel, self.real = kernel, real
    def __getattr__(self, name): return getattr(self.kernel, name)
    def read(self, path):
        if not path.endswith("0000:21:00.0/sriov_numvfs"): return self.kernel.read(path)
        return LinuxFiles().read(self.real) and self.kernel.read(path)

def no_room(operation, where, value):
    return OSError(errno.ENOSPC, "no space") if where.endswith("sriov_numvfs") and value == "5" else None

@click.command()
@click.argument("folder")
@click.argument("real")
@click.option("--activity", type=int)
@click.option("--avoid", multiple=True)
def main(folder, real, activity, avoid):
    kernel = Kernel(fault=no_room)
    kernel.add_nic("0000:21:00.0", "enp33s0", "02:00:00:00:01:00", node=0)
    kernel.add_nic("0000:41:00.0", "enp65s0", "02:00:00:00:01:01", node=1)
    machine = evolve(kernel.machine(), files=Files(kernel, real))
    folder = Path(folder)
    worker.main(machine, folder / "node.json", folder, folder, avoid, activity)
main()
"""


def spec(count: int) -> str:
    nics = [
        {"name": "rail0", "select": {"pci": PF0}, "vfs": {"count": count}},
        {"name": "rail1", "select": {"pci": PF1}, "vfs": {"count": 2}},
    ]
    return json.dumps({"node_name": "n1", "nics": nics})


@frozen
class Agent:
    """A running agent."""

    folder: Path
    process: subprocess.Popen[bytes]

    def wait_for(self, holds: Callable[[Report], bool]) -> Report:
        deadline = time.monotonic() + 30
        while True:
            assert self.process.poll() is None, "the supervisor ended"
            try:
                found = report_from_json((self.folder / "report.json").read_text())
                if holds(found):
                    return found
            except FileNotFoundError:
                pass
            assert time.monotonic() < deadline, (self.folder / "report.json").read_text()
            time.sleep(0.01)

    def give(self, text: str) -> None:
        (self.folder / "node.json").write_text(text)
        self.process.send_signal(signal.SIGHUP)


Start = Callable[[Path], Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an agent whose first NIC's VF count is read from the given file, too."""
    started: list[Agent] = []

    def begin(real: Path) -> Agent:
        (tmp_path / "node.json").write_text(spec(3))
        command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), WORKER, str(tmp_path), str(real)]
        started.append(Agent(tmp_path, subprocess.Popen(command, cwd=ROOT)))
        return started[-1]

    yield begin
    for agent in started:
        agent.process.terminate()
        assert agent.process.wait(timeout=20) == 0


def reasons(report: Report) -> dict[str, tuple[str, str, str]]:
    return {c.type: (c.status, c.reason, c.message) for c in report.conditions}


def rail1_is_there(report: Report) -> bool:
    """The other NIC's VFs were made, and are in order."""
    return ("vfs", PF1, "count") in [(o.change.kind, o.change.target, o.change.field) for o in report.outcomes]


def test_a_device_that_hangs_is_left_alone_while_the_others_go_on_and_is_tried_again(
    start: Start, tmp_path: Path
) -> None:
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)
    wait_for = start(hanging).wait_for
    stuck = wait_for(lambda r: "WorkerAlive" in reasons(r))
    status, reason, message = reasons(stuck)["WorkerAlive"]
    assert (stuck.ready, status, reason) == (False, "False", "WorkerStuck")
    assert message.startswith(f"vfs: read /sys/bus/pci/devices/{PF0}/sriov_numvfs (device {PF0}) has not returned for")
    around = wait_for(rail1_is_there)
    assert not around.ready
    assert reasons(around)["NicsPresent"][:2] == ("Unknown", "DeviceHung")
    assert reasons(around)["Converged"][0] == "True"
    assert PF0 in reasons(around)["DevicesAnswer"][2]
    # Every try ends so, until the device answers again.
    again = wait_for(
        lambda r: r.generation > around.generation and reasons(r).get("WorkerAlive", ("",) * 3)[1] == "WorkerStuck"
    )
    assert again.heartbeat > stuck.heartbeat
    hanging.unlink()
    hanging.write_text("0")
    healed = wait_for(lambda r: r.ready)
    assert reasons(healed)["DevicesAnswer"][0] == "True"


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse")
def test_a_process_that_no_signal_ends_is_left_behind_and_its_device_alone_until_it_is_gone(
    start: Start, tmp_path: Path
) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.hanging", str(mounted)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        assert server.stdout.readline() == b"mounted\n"
        agent = start(mounted / "value")
        wait_for = agent.wait_for
        around = wait_for(rail1_is_there)
        assert reasons(around)["NicsPresent"][:2] == ("Unknown", "DeviceHung")
        assert abandoned(agent) == ["D"]
        # Longer than it takes until a device is tried again: not while a process hangs in it.
        later = wait_for(lambda r: r.heartbeat > around.heartbeat + 3)
        assert later.generation == around.generation
        assert abandoned(agent) == ["D"]
    finally:
        server.stdin.close()
        server.wait(timeout=10)
    (mounted / "value").write_text("0")
    assert wait_for(lambda r: r.ready)
    assert abandoned(agent) == []


def test_a_new_spec_that_fails_is_given_up_for_the_last_verified_one(start: Start, tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.write_text("0")
    agent = start(answers)
    good = agent.wait_for(lambda r: r.ready)
    agent.give(spec(5))
    tried = agent.wait_for(lambda r: r.spec_hash != good.spec_hash)
    assert not tried.ready
    back = agent.wait_for(lambda r: r.ready)
    assert (back.spec_hash, back.up_to_date) == (good.spec_hash, False)
    assert "out of MSI-X vectors" in back.refusal
    agent.give(spec(4))
    assert agent.wait_for(lambda r: r.ready and r.up_to_date).spec_hash not in (good.spec_hash, tried.spec_hash)


def abandoned(agent: Agent) -> list[str]:
    """The states of the agent's processes that hang in the file system."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == agent.process.pid and (process / "wchan").read_text() == "request_wait_answer":
                found.append(state)
        except OSError:
            continue
    return found
