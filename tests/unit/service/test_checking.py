"""Ready while an event waits for its reading: supervisor and worker as they are, a simulated kernel, real link events.

They run in a network namespace of their own, in which netdevs have the indexes of the simulated ones.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from attrs import frozen

from agent.report.records import Condition, Report
from tests.contract.asking import soon
from tests.sim.readiness import writer
from tests.unit.service.supervised import report_in, wait_for_report

ROOT = Path(__file__).parents[3]
REQUIRED, OPTIONAL = "0000:21:00.0", "0000:41:00.0"
NETDEVS = {REQUIRED: ("required", 2), OPTIONAL: ("optional", 3), "": ("other", 50)}
PEERS = 100
NUMBERS = count()
"""Each event is a change: one MTU after the other."""

SUPERVISOR = """
import sys
from pathlib import Path
from agent.service import activity
activity.ANSWERED_WITHIN = float(sys.argv[2])
from agent.service import supervisor
supervisor.HEARTBEAT = 1.0
supervisor.supervise([sys.executable, "-c", *sys.argv[3:]], supervisor.Publisher(Path(sys.argv[1]), "boot-1", "v1"))
"""

# A PF's sriov_numvfs is read from the file of its name, too: a named pipe, while a test has the kernel wait. "EIO": it fails.
# Each reading is a line in the file `reads` before it begins. What the file `lost` names loses its VFs before the next one,
# and the links to them at once, as when pci_iov_remove_virtfn (drivers/pci/iov.c) deletes them.
WORKER = """
import errno, sys
from pathlib import Path
import click
from attrs import evolve
from agent.service import activity
from agent.linux import events
activity.ANSWERED_WITHIN = float(sys.argv[2])
events.BUFFER = int(sys.argv[3])
from agent.service import worker
from tests.sim.kernel import Kernel

class Files:
    def __init__(self, kernel, folder): self.kernel, self.folder = kernel, folder
    def __getattr__(self, name): return getattr(self.kernel.files, name)
    def read(self, path):
        if path.endswith("/sriov_numvfs"):
            self.come_to(path.split("/")[-2])
        return self.kernel.files.read(path)
    def names(self, path):
        names, lost = self.kernel.files.names(path), self.folder / "lost"
        going = lost.exists() and path.endswith(lost.read_text())
        return [name for name in names if not (going and name.startswith("virtfn"))]
    def come_to(self, function):
        lost = self.folder / "lost"
        if lost.exists():
            self.kernel.files.write(f"/sys/bus/pci/devices/{lost.read_text()}/sriov_numvfs", "0")
            lost.unlink()
        with (self.folder / "reads").open("a") as reads: reads.write(function + chr(10))
        if (self.folder / function).read_text() == "EIO":
            raise OSError(errno.EIO, "Input/output error", function)

@click.command()
@click.argument("folder")
@click.argument("limit")
@click.argument("room")
@click.option("--activity", type=int)
def main(folder, limit, room, activity):
    kernel = Kernel()
    kernel.add_nic("0000:21:00.0", "enp33s0", "02:00:00:00:01:00", node=0)
    kernel.add_nic("0000:41:00.0", "enp65s0", "02:00:00:00:01:01", node=1)
    folder = Path(folder)
    machine = evolve(kernel.machine(), files=Files(kernel, folder), events=events.LinuxEvents())
    worker.main(machine, folder / "node.json", folder, folder, (), activity)
main()
"""

ROOM = 1 << 20


@frozen
class Agent:
    """A running agent, and the namespace's netdevs."""

    folder: Path
    process: subprocess.Popen[bytes]

    def report(self) -> Report:
        return report_in(self.folder)

    def wait_for(self, holds: Callable[[Report], bool]) -> Report:
        return wait_for_report(self.folder, self.process, holds)

    def ip(self, *lines: str) -> None:
        """Commands of ip(8) in the namespace."""
        command = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(command, input="\n".join(lines), text=True, check=True)

    def event(self, of: str, times: int = 1) -> None:
        name, _ = NETDEVS[of]
        self.ip(*(f"link set dev {name} mtu {1000 + next(NUMBERS)}" for _ in range(times)))

    def lose_events(self) -> None:
        """More events of another netdev than there is room for. All is stopped meanwhile, so nobody makes room."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            self.event("", times=2000)
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def reads(self, function: str = REQUIRED) -> int:
        asked = self.folder / "reads"
        return asked.read_text().split().count(function) if asked.exists() else 0

    def heartbeats(self, times: int) -> Report:
        """The report after so many more heartbeats."""
        for _ in range(times):
            before = self.report().heartbeat
            report = self.wait_for(lambda r, before=before: r.heartbeat > before)  # type: ignore[misc]
        return report

    def block(self, function: str = REQUIRED) -> Path:
        """Have readings of a PF wait from now on: each until somebody has opened and closed the pipe."""
        pipe = self.folder / function
        pipe.unlink()
        os.mkfifo(pipe)
        return pipe

    def lose_vfs(self) -> None:
        """Have the required PF lose its VFs, and no event tell it. The kernel has deleted them when their number is read."""
        (self.folder / "new").write_text(REQUIRED)
        (self.folder / "new").replace(self.folder / "lost")

    def wait_for_reading(self, function: str, before: int) -> None:
        """Until there were more readings of a PF than so many."""
        soon(lambda: self.reads(function) > before or None, f"reading of {function}")

    def release(self, pipe: Path) -> None:
        """Let the reading that waits return."""
        with writer(pipe):
            pass

    def go_on_to_the_next_reading(self, pipe: Path) -> None:
        """Let the reading of REQUIRED that waits return, and wait until the next one has begun."""
        reads = self.reads()
        self.release(pipe)
        self.wait_for_reading(REQUIRED, reads)

    def unblock(self, pipe: Path) -> None:
        """Let the reading that waits, and all that come, return."""
        with writer(pipe):
            (self.folder / "free").write_text("")
            (self.folder / "free").replace(pipe)

    def unblock_until_ready(self, pipe: Path) -> Report:
        """Do that, and wait until the node is ready."""
        self.unblock(pipe)
        return self.wait_for(lambda r: r.ready)

    def checks_an_event(self, pipe: Path) -> None:
        """An event of the required device is noticed while its reading waits, and answered when it returns."""
        self.event(REQUIRED)
        self.wait_for(is_checking)
        self.unblock_until_ready(pipe)

    def is_as(self, before: Report, after: Report) -> None:
        """No report between these two said anything else than Ready."""
        assert (after.ready, after.generation) == (True, before.generation)


Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Agent] = []

    def begin(answered_within: float = 0.5, room: int = ROOM, mode: str = "enforce", blocked: bool = False) -> Agent:
        nics = [
            {"name": "rail0", "select": {"pci": REQUIRED}, "vfs": {"count": 2}},
            {"name": "rail1", "select": {"pci": OPTIONAL}, "required": False},
        ]
        (tmp_path / "node.json").write_text(json.dumps({"node_name": "n1", "mode": mode, "nics": nics}))
        for function in (REQUIRED, OPTIONAL):
            (tmp_path / function).write_text("")
        arguments = [str(tmp_path), str(answered_within), WORKER, str(tmp_path), str(answered_within), str(room)]
        process = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", SUPERVISOR, *arguments], cwd=ROOT, start_new_session=True
        )
        agent = Agent(tmp_path, process)
        started.append(agent)
        if blocked:
            agent.block()
        soon(lambda: (tmp_path / "report.json").exists() or None, "report")
        agent.ip(
            *(
                f"link add {name} index {index} type veth peer name peer{index} index {PEERS + index}"
                for name, index in NETDEVS.values()
            )
        )
        if not blocked:
            agent.wait_for(lambda r: r.ready)
            # The report has the changes of the first pass until the next one.
            agent.event(REQUIRED)
            agent.wait_for(lambda r: r.ready and has_nothing_to_do(r))
        return agent

    if os.geteuid() != 0:
        pytest.skip("needs root, to make a network namespace")
    yield begin
    for agent in started:
        # The worker, too, which may wait for a pipe.
        os.killpg(agent.process.pid, signal.SIGKILL)
        agent.process.wait()


def condition(report: Report) -> Condition:
    return next(c for c in report.conditions if c.type == "Converged")


def has_nothing_to_do(report: Report) -> bool:
    """Whether the report's pass changed nothing."""
    return not any(outcome.result == "applied" for outcome in report.outcomes)


def is_checking(report: Report) -> bool:
    return condition(report).reason == "Checking"


def test_an_event_about_a_required_device_takes_ready_back_while_its_reading_waits(start: Start) -> None:
    agent = start()
    pipe = agent.block()
    agent.event(REQUIRED)
    checking = agent.wait_for(lambda r: not r.ready)
    assert (condition(checking).status, condition(checking).reason) == ("Unknown", "Checking")
    assert f"{REQUIRED}/sriov_numvfs" in condition(checking).message
    assert condition(agent.unblock_until_ready(pipe)).reason == "AsWanted"


def test_while_the_kernel_deletes_vfs_the_first_event_takes_ready_back_before_anything_waits(start: Start) -> None:
    agent = start(answered_within=600.0)
    pipe = agent.block()
    agent.lose_vfs()
    agent.event(REQUIRED)
    lost = agent.wait_for(lambda r: not r.ready)
    assert condition(lost).message == f"vfs {REQUIRED} count: 0 -> 2"
    agent.unblock_until_ready(pipe)


@pytest.mark.slow  # each event must be answered in time, also on a busy machine
def test_a_hundred_harmless_events_change_nothing_in_the_report(start: Start) -> None:
    agent = start(answered_within=10.0)
    before = agent.heartbeats(1)
    for _ in range(20):
        reads = agent.reads()
        agent.event(REQUIRED, times=5)
        agent.wait_for_reading(REQUIRED, reads)
    # By then an event that was taken for unanswered would have been noticed.
    agent.is_as(before, agent.heartbeats(12))


def test_events_of_optional_devices_do_not_withdraw_ready_even_while_another_reading_waits(start: Start) -> None:
    agent = start()
    before = agent.heartbeats(1)
    pipe, reads = agent.block(OPTIONAL), agent.reads(OPTIONAL)
    agent.event(OPTIONAL)
    agent.wait_for_reading(OPTIONAL, reads)
    agent.event(OPTIONAL)
    agent.event("")
    agent.is_as(before, agent.heartbeats(2))
    # The reading of the devices still waits; the event is noticed nevertheless.
    agent.checks_an_event(pipe)


def test_a_slow_reading_without_an_event_keeps_ready(start: Start) -> None:
    agent = start()
    before = agent.heartbeats(1)
    pipe, reads = agent.block(), agent.reads()
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_reading(REQUIRED, reads)
    agent.event("")
    agent.is_as(before, agent.heartbeats(2))
    agent.checks_an_event(pipe)


def test_lost_events_may_have_been_about_a_required_device(start: Start) -> None:
    agent = start(room=1)
    pipe = agent.block()
    agent.lose_events()
    agent.wait_for(is_checking)
    agent.unblock_until_ready(pipe)


def test_after_lost_events_everything_is_read_and_put_right(start: Start) -> None:
    agent = start(room=1)

    def made() -> int:
        """How often the VFs were made."""
        entries = [json.loads(line) for line in (agent.folder / "history.jsonl").read_text().splitlines()]
        changes = [entry["outcome"]["change"] for entry in entries if entry["outcome"]["result"] == "applied"]
        return sum((change["kind"], change["field"]) == ("vfs", "count") for change in changes)

    before = made()
    agent.lose_vfs()
    agent.lose_events()
    # A resync comes only after a minute.
    soon(lambda: made() > before or None, "VF made again")
    agent.wait_for(lambda r: r.ready)


def test_in_observe_mode_ready_is_not_withdrawn(start: Start) -> None:
    agent = start(mode="observe")
    before = agent.heartbeats(1)
    pipe, reads = agent.block(), agent.reads()
    agent.event(REQUIRED)
    agent.wait_for_reading(REQUIRED, reads)
    agent.is_as(before, agent.heartbeats(2))
    agent.unblock(pipe)


def test_ready_is_not_reported_while_an_event_waits(start: Start) -> None:
    agent = start(answered_within=60.0)
    pipe, reads = agent.block(), agent.reads()
    agent.lose_vfs()
    agent.event(REQUIRED)
    agent.wait_for_reading(REQUIRED, reads)
    # The readings wait before the VFs are created again, then when they are read again, and so on.
    for _ in range(4):
        agent.event(REQUIRED)
        agent.go_on_to_the_next_reading(pipe)
        assert not agent.heartbeats(1).ready
    agent.unblock_until_ready(pipe)


def test_an_event_during_the_first_pass_is_answered_after_it(start: Start) -> None:
    agent = start(blocked=True)
    agent.wait_for_reading(REQUIRED, 0)
    agent.event(REQUIRED)
    agent.unblock(agent.folder / REQUIRED)
    agent.wait_for(lambda r: r.ready and has_nothing_to_do(r))


def test_with_endless_events_a_device_that_is_not_read_in_time_is_not_ready(start: Start) -> None:
    agent = start()
    pipe, reads = agent.block(), agent.reads()
    agent.event(REQUIRED)
    checking = agent.wait_for(is_checking)
    agent.wait_for_reading(REQUIRED, reads)
    for _ in range(8):
        agent.event(REQUIRED)
        agent.heartbeats(1)
        agent.go_on_to_the_next_reading(pipe)
    assert agent.heartbeats(1).generation == checking.generation
    agent.unblock_until_ready(pipe)


def test_after_a_failed_reading_the_node_is_not_ready_until_the_device_was_read(start: Start) -> None:
    agent = start()
    (agent.folder / REQUIRED).write_text("EIO")
    agent.event(REQUIRED)
    agent.wait_for(lambda r: not r.ready)
    for _ in range(3):
        agent.event(OPTIONAL)
        assert not agent.heartbeats(1).ready
    (agent.folder / REQUIRED).write_text("")
    agent.wait_for(lambda r: r.ready)
