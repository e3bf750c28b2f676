"""The worker's process on the simulated kernel, without a supervisor: its arguments and environment, and how it ends."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from attrs import frozen

from agent.report import drift
from agent.report.history import read as read_history
from agent.report.records import Report, from_plain
from agent.service.activity import View
from agent.service.supervisor import CRASHED, HUNG_WRITES
from tests.contract.asking import soon

ROOT = Path(__file__).parents[3]
PF0, PF1 = "0000:21:00.0", "0000:41:00.0"

# PF0 has two VFs and some MTU, as an agent before this one may have left it.
WORKER = """
import sys
from pathlib import Path
from agent.service import worker
from tests.sim.two_nics import PF0, two_nics
folder, hung, activity, mtu = Path(sys.argv[1]), sys.argv[2].split(), *map(int, sys.argv[3:])
kernel = two_nics()
kernel.files.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "2")
kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=mtu)
def published(announcement):
    (folder / "announced").write_text(announcement)
    print("a library that talks", flush=True)
    return ""
worker.main(kernel.machine(), folder / "node.json", folder / "run", folder / "state", hung, activity, published)
"""


# A parent that does nothing else. The worker's pipes are not its own, so they stay open when it is killed.
PARENT = "import subprocess, sys; subprocess.run(sys.argv[2:], pass_fds=[int(sys.argv[1])])"


@frozen
class Worker:
    process: subprocess.Popen[str]
    folder: Path
    view: View

    def said(self) -> dict[str, object]:
        """The next message."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker has ended"
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def until(self, holds: Callable[[Report], bool]) -> Report:
        """The next report for which ``holds`` is true."""
        while True:
            message = self.said()
            if not message.keys() & {"serving", "checking"}:
                report = from_plain(message, Report)
                if holds(report):
                    return report

    def end(self) -> int:
        """Close its control, as the supervisor does. :returns: its status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []
    for name in ("run", "state"):
        (tmp_path / name).mkdir()

    def begin(
        now: int = 9000,
        hung: str = "",
        crashed: str = "",
        wrote: str = "",
        stdout: int = subprocess.PIPE,
        parent: str = "",
        **nic: object,
    ) -> Worker:
        nics = [{"name": "a", "select": {"pci": PF0}, **nic}, {"name": "b", "select": {"pci": PF1}, "required": False}]
        (tmp_path / "node.json").write_text(json.dumps({"node_name": "n1", "nics": nics}))
        view = View.new()
        between = [sys.executable, "-c", parent, str(view.descriptor)] if parent else []
        process = subprocess.Popen(
            [*between, sys.executable, "-c", WORKER, str(tmp_path), hung, str(view.descriptor), str(now)],
            stdin=subprocess.PIPE,
            stdout=stdout,
            pass_fds=[view.descriptor],
            cwd=ROOT,
            text=True,
            env={
                **os.environ,
                **({CRASHED: crashed} if crashed else {}),
                **({HUNG_WRITES: json.dumps({PF0: wrote})} if wrote else {}),
            },
        )
        started.append(Worker(process, tmp_path, view))
        return started[-1]

    yield begin
    for worker in started:
        worker.process.kill()
        worker.process.wait()
        worker.view.close()


def test_the_worker_reports_on_standard_output_alone_and_ends_with_its_input(start: Start, tmp_path: Path) -> None:
    worker = start(vfs={"count": 3})
    assert worker.said() == {"serving": True}
    announced = worker.until(lambda report: bool(report.announcement))
    assert worker.until(lambda report: report.ready)
    assert (tmp_path / "announced").read_text() == announced.announcement
    assert worker.view.last() > 0
    soon(lambda: list(read_history(tmp_path / "state")) or None, "history")
    assert {entry.outcome.change.field for entry in read_history(tmp_path / "state")} >= {"count"}
    soon(lambda: (tmp_path / "run" / drift.NAME).exists() or None, "count of the drift")
    assert set(json.loads((tmp_path / "run" / "link_flaps.json").read_text())["kept"]) == {PF0, PF1}
    assert worker.end() == 0


def test_a_device_that_hung_before_is_left_alone(start: Start) -> None:
    report = start(hung=PF1, mtu=4000).until(lambda report: report.ready)
    assert "DeviceHung" in {condition.reason for condition in report.conditions}
    assert {outcome.change.target for outcome in report.outcomes if outcome.result == "applied"} == {PF0}


def test_the_originals_that_an_agent_before_it_has_noted_are_restored(start: Start) -> None:
    first = start(mtu=4000)
    first.until(lambda report: report.ready)
    first.end()
    report = start(now=4000).until(lambda report: bool(report.outcomes))
    changes = {(outcome.result, str(outcome.change)) for outcome in report.outcomes}
    assert ("applied", f"links {PF0} mtu: 4000 -> 9000 (as it was before)") in changes


def test_after_repeated_crashes_the_spec_that_was_verified_is_in_force(start: Start) -> None:
    verified = start(mtu=4000)
    report = verified.until(lambda report: report.ready)
    verified.end()
    again = start(mtu=2000, crashed="the worker ended with status 3, 3 times in a row")
    fallen_back = again.until(lambda report: report.ready)
    assert (fallen_back.spec_hash, fallen_back.up_to_date) == (report.spec_hash, False)
    assert any("status 3, 3 times" in condition.message for condition in fallen_back.conditions)


def test_after_a_write_of_a_new_spec_hung_the_spec_that_was_verified_is_in_force(start: Start) -> None:
    verified = start(mtu=4000)
    report = verified.until(lambda report: report.ready)
    verified.end()
    # A worker that reads the new spec, and is replaced before its pass has ended.
    begun = start(now=4000, mtu=9000)
    begun.until(lambda report: report.spec_hash != "")
    begun.end()
    again = start(mtu=9000, hung=PF0, wrote="links: set_link did not return")
    fallen_back = again.until(lambda report: not report.announcement)
    assert (fallen_back.spec_hash, fallen_back.up_to_date) == (report.spec_hash, False)
    assert any("set_link did not return" in condition.message for condition in fallen_back.conditions)


def test_the_worker_ends_once_nobody_reads_its_reports(start: Start) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    worker = start(stdout=writing)
    os.close(writing)
    assert worker.process.wait(60) == 1


def test_the_worker_is_killed_when_its_parent_is_killed(start: Start) -> None:
    started = start(parent=PARENT)
    assert started.said() == {"serving": True}
    (worker,) = psutil.Process(started.process.pid).children()
    started.process.kill()
    # Where nobody reaps orphans, a zombie stays.
    soon(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE or None, "end of the worker", 60.0)
