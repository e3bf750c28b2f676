"""The real supervisor and worker on the simulated kernel: a file whose read never returns, failing writes, a full /run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil
import pytest
from attrs import frozen

from agent.report import history
from agent.report.records import Report
from agent.spec.node import parse, spec_hash
from tests.unit.service.supervised import hanging_file, needs_fuse, report_in, wait_for_report

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PF0, PF1 = "0000:21:00.0", "0000:41:00.0"

SUPERVISOR = """
import sys
from pathlib import Path
from agent.service import supervisor
folder = Path(sys.argv[1])
publisher = supervisor.Publisher(folder, "boot-1", "v1")
supervisor.supervise([sys.executable, "-c", *sys.argv[2:]], publisher, supervisor.Limits(read=3.0, write=3.0, retry=1.0))
"""

# The worker also reads a real file whenever it reads PF0's sriov_numvfs. Everything else is simulated. No device can have
# five VFs.
WORKER = """
import errno, os, signal, sys, time
from pathlib import Path
import click
from attrs import evolve
from agent.service import loop, spec_in_force, worker
from agent.linux.files import LinuxFiles
from tests.sim.kernel import Kernel

spec_in_force.TRIAL = 1.0
loop.RESYNC = 0.5  # drift in a simulated kernel emits no event

class Files:
    def __init__(self, kernel, real): self.kernel, self.real = kernel, real
    def __getattr__(self, name): return getattr(self.kernel.files, name)
    def read(self, path):
        if not path.endswith("0000:21:00.0/sriov_numvfs"): return self.kernel.files.read(path)
        print("a library that talks")
        return LinuxFiles().read(self.real) and self.kernel.files.read(path)

def fault(operation, where, value):
    if where.endswith("sriov_numvfs") and value == "5":
        return OSError(errno.ENOSPC, "no space")
    if where.endswith("sriov_numvfs") and value == "6":
        raise KeyError("no such plan")
    if where.endswith("sriov_numvfs") and value == "1":
        time.sleep(600)
    if where.endswith("sriov_numvfs") and value == "7":
        os.kill(os.getpid(), signal.SIGKILL)
    if value.startswith("mtu=9000") and Path(sys.argv[1], "stuck").exists():
        return OSError(errno.EBUSY, "busy")

@click.command()
@click.argument("folder")
@click.argument("run")
@click.argument("real")
@click.option("--activity", type=int)
@click.option("--avoid", multiple=True)
def main(folder, run, real, activity, avoid):
    kernel = Kernel(fault=fault)
    kernel.add_nic("0000:21:00.0", "enp33s0", "02:00:00:00:01:00", node=0)
    kernel.add_nic("0000:41:00.0", "enp65s0", "02:00:00:00:01:01", node=1)
    machine = evolve(kernel.machine(), files=Files(kernel, real))
    folder = Path(folder)
    drift = lambda *_: kernel.netlink.set_link(kernel.netlink.link("enp65s0").ifindex, mtu=1400)
    signal.signal(signal.SIGUSR1, drift)
    worker.main(machine, folder / "node.json", Path(run), folder, avoid, activity)
main()
"""


# Mounts the run-time folder and, if the file `full` or `inodes` exists beside it, uses up its space or its inodes. Then it
# starts the agent.
MOUNTED = """
mount -t tmpfs -o "$1" tmpfs "$2" || exit 1
folder=$2
shift 2
! [ -e "$folder/../full" ] || dd if=/dev/zero of="$folder/filler" bs=4096 2> /dev/null
! [ -e "$folder/../inodes" ] || while true 2> /dev/null > "$folder/$((number += 1))"; do :; done
exec "$@"
"""


def spec(count: int) -> str:
    nics = [
        {"name": "rail0", "select": {"pci": PF0}, "vfs": {"count": count}},
        {"name": "rail1", "select": {"pci": PF1}, "mtu": 9000, "vfs": {"count": 2}},
    ]
    return json.dumps({"node_name": "n1", "nics": nics})


@frozen
class Agent:
    """A running agent. ``run``: its run-time folder, as this process sees it."""

    folder: Path
    run: Path
    process: subprocess.Popen[bytes]

    def report(self) -> Report | None:
        return report_in(self.run) if (self.run / "report.json").exists() else None

    def wait_for(self, holds: Callable[[Report], bool]) -> Report:
        return wait_for_report(self.run, self.process, holds)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert self.process.poll() is None, "the supervisor ended"
            assert time.monotonic() < deadline, (self.report(), self.stderr())
            time.sleep(0.01)

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def outcomes(self, change: str) -> list[str]:
        """What the history says of a change (its text, as far as given), the newest last."""
        return [e.outcome.result for e in history.read(self.folder) if str(e.outcome.change).startswith(change)]

    def drift(self) -> None:
        """Have the simulated kernel change an MTU."""
        (worker,) = psutil.Process(self.process.pid).children()
        worker.send_signal(signal.SIGUSR1)

    def give(self, text: str) -> None:
        (self.folder / "node.json").write_text(text)
        self.process.send_signal(signal.SIGHUP)


class Start(Protocol):
    """Starts an agent: ``real`` is the file from which its first NIC's VF count is read, too."""

    def __call__(self, real: Path, tmpfs: str = "") -> Agent:
        """``tmpfs``: mount options; the run-time folder is then a file system of its own, in a mount namespace."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Agent] = []

    def begin(real: Path, tmpfs: str = "") -> Agent:
        (tmp_path / "node.json").write_text(spec(3))
        run = tmp_path / "run"
        run.mkdir()
        command = [sys.executable, "-c", SUPERVISOR, str(run), WORKER, str(tmp_path), str(run), str(real)]
        if tmpfs:
            alone = ["unshare", "-m", "--propagation", "private"]
            command = [*alone, "sh", "-c", MOUNTED, "sh", tmpfs, str(run), *command]
        with (tmp_path / "stderr").open("w") as stderr:
            process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)
        seen = Path(f"/proc/{process.pid}/root{run}") if tmpfs else run
        started.append(Agent(tmp_path, seen, process))
        return started[-1]

    yield begin
    for agent in started:
        agent.process.terminate()
        assert agent.process.wait(timeout=120) == 0


def reasons(report: Report) -> dict[str, tuple[str, str, str]]:
    return {c.type: (c.status, c.reason, c.message) for c in report.conditions}


def wait_for_rail1(agent: Agent) -> Report:
    """The first report after the other NIC's VFs were made and verified while the first NIC hangs."""
    agent.wait_until(lambda: "applied" in agent.outcomes(f"vfs {PF1} count"))
    hung = ("Unknown", "DeviceHung")
    nothing = ("", "", "")
    return agent.wait_for(
        lambda r: reasons(r).get("NicsPresent", nothing)[:2] == hung and reasons(r)["Converged"][0] == "True"
    )


def test_a_device_that_hangs_is_avoided_and_tried_again(start: Start, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)
    agent = start(hanging)
    wait_for = agent.wait_for
    # On a busy machine the supervisor may have reported another slow call before this one.
    hangs = f"vfs: read /sys/bus/pci/devices/{PF0}/sriov_numvfs (device {PF0}) has not returned for"
    stuck = wait_for(lambda r: reasons(r).get("WorkerAlive", ("",) * 3)[2].startswith(hangs))
    assert not stuck.ready
    assert reasons(stuck)["WorkerAlive"][:2] == ("False", "WorkerStuck")
    around = wait_for_rail1(agent)
    assert not around.ready
    assert PF0 in reasons(around)["DevicesAnswer"][2]
    # Each retry hangs again until the device answers.
    agent.wait_until(lambda: agent.stderr().count(hangs) >= 2)
    hanging.unlink()
    hanging.write_text("0")
    healed = wait_for(lambda r: r.ready)
    assert reasons(healed)["DevicesAnswer"][0] == "True"


@needs_fuse
def test_a_process_that_cannot_be_killed_is_abandoned_and_its_device_is_avoided_until_the_process_ends(
    start: Start, tmp_path: Path
) -> None:
    mounted = tmp_path / "mounted"
    with hanging_file(tmp_path):
        agent = start(mounted / "value")
        wait_for = agent.wait_for
        around = wait_for_rail1(agent)
        assert abandoned(agent) == ["D"]
        # After this time the device would be tried again if no process were stuck in it.
        later = wait_for(lambda r: r.heartbeat > around.heartbeat + 3)
        assert reasons(later)["NicsPresent"][:2] == ("Unknown", "DeviceHung")
        assert agent.stderr().count(f"(device {PF0}) has not returned for") == 1
        assert abandoned(agent) == ["D"]
    (mounted / "value").write_text("0")
    assert wait_for(lambda r: r.ready)
    assert abandoned(agent) == []


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file system of its own")
PAGES = "size=32k"
MTU = f"links {PF1} mtu: 1400 -> 9000"


def fill(agent: Agent) -> None:
    """Take all the room in the agent's run-time folder."""
    with (agent.run / "filler").open("ab", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """A file from which a VF count can be read."""
    path = tmp_path / "answers"
    path.write_text("0")
    return path


@needs_root
def test_when_run_is_full_the_outdated_report_is_removed_and_repairs_go_on(start: Start, answers: Path) -> None:
    agent = start(answers, PAGES)
    before = agent.wait_for(lambda r: r.ready)
    fill(agent)
    stuck = agent.folder / "stuck"
    stuck.touch()
    agent.drift()
    agent.wait_until(lambda: "failed" in agent.outcomes(MTU))
    agent.wait_until(lambda: (report := agent.report()) is None or not report.ready)
    stuck.unlink()
    agent.wait_until(lambda: agent.outcomes(MTU)[-1] == "applied")
    (agent.run / "filler").unlink()
    after = agent.wait_for(lambda r: r.ready)
    assert after.generation > before.generation


@needs_root
@pytest.mark.parametrize(
    ("marker", "options", "unkept"),
    [
        ("full", PAGES, ("report.json", "originals.jsonl", "first-pass")),
        ("inodes", "nr_inodes=8", ("report.json", "originals.jsonl", "first-pass", "apply.sock")),
    ],
)
def test_a_node_converges_without_any_room_in_run_and_the_journal_names_each_file_that_cannot_be_written(
    start: Start, answers: Path, marker: str, options: str, unkept: tuple[str, ...]
) -> None:
    (answers.parent / marker).touch()
    agent = start(answers, options)
    agent.wait_until(lambda: "applied" in agent.outcomes(f"links {PF1} mtu"))
    agent.wait_until(lambda: all(f"{name} cannot be" in agent.stderr() for name in unkept))
    assert agent.report() is None
    agent.drift()
    agent.wait_until(lambda: "applied" in agent.outcomes(MTU))
    for filler in agent.run.iterdir():
        filler.unlink()
    agent.wait_for(lambda r: r.ready)
    agent.wait_until((agent.run / "first-pass").exists)


@pytest.mark.parametrize(
    ("count", "why", "tries", "recorded"),
    [
        pytest.param(6, "KeyError: 'no such plan'", 0, False, id="no pass survives it"),
        pytest.param(7, "ended with status -9", 0, False, id="no worker survives it"),
        # The device is left alone, then tried again with the verified spec.
        pytest.param(1, f"{PF0}/sriov_numvfs 1 (device {PF0}) did not return", 1, False, id="its write hangs"),
        pytest.param(5, "out of MSI-X vectors", 0, True, id="its write fails"),
    ],
)
def test_a_new_spec_that_cannot_be_made_true_is_given_up_for_the_last_verified_one(
    start: Start, answers: Path, count: int, why: str, tries: int, recorded: bool
) -> None:
    agent = start(answers)
    good = agent.wait_for(lambda r: r.ready)
    agent.give(spec(count))
    back = agent.wait_for(lambda r: r.ready and bool(r.refusal))
    assert (back.spec_hash, back.up_to_date) == (good.spec_hash, False)
    refused = spec_hash(parse(spec(count), "spec"))
    assert refused in back.refusal and why in back.refusal
    assert reasons(back)["UpToDate"][1:] == ("Refused", back.refusal)
    assert agent.stderr().count("sriov_numvfs 1") == tries
    if recorded:
        assert refused in [entry.spec_hash for entry in history.read(agent.folder)]
    agent.give(spec(4))
    assert agent.wait_for(lambda r: r.ready and r.up_to_date).spec_hash not in (good.spec_hash, refused)


def abandoned(agent: Agent) -> list[str]:
    """The states of the agent's processes that hang in the file system."""
    states = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == agent.process.pid and (process / "wchan").read_text() == "request_wait_answer":
                states.append(state)
        except OSError:
            continue
    return states
