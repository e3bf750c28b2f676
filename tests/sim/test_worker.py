"""The messages of the worker's loop on the simulated kernel."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from attrs import define, field

from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.report.activity import Activity, View
from agent.report.history import History
from agent.report.records import Condition, Report, report_from_json
from agent.service.apply_socket import Requests
from agent.service.passes import Memory
from agent.service.spec_in_force import SpecInForce
from agent.service.worker import work
from tests.sim.readiness import PF0, Node, writer

STUCK = "/sys/module/ib_core/srcversion"


@define
class Out:
    """The worker's messages."""

    lines: Queue[dict[str, Any]] = field(factory=Queue)

    def write(self, text: str) -> None:
        self.lines.put(json.loads(text))

    def flush(self) -> None:
        pass

    def until(self, holds: Callable[[Report], bool]) -> Report:
        """The next report for which ``holds`` is true."""
        while True:
            line = self.lines.get(timeout=120)
            if "serving" not in line:
                report = report_from_json(json.dumps({"boot_id": "b", "agent_version": "v", **line}))
                if holds(report):
                    return report


@pytest.fixture
def node() -> Node:
    return Node.with_two_nics()


@pytest.fixture
def view() -> Iterator[View]:
    view = View.new()
    yield view
    view.close()


@pytest.fixture
def awaited() -> Queue[str]:
    """The announcements whose publication the worker has waited for."""
    return Queue()


@pytest.fixture
def worker(node: Node, view: View, tmp_path: Path, awaited: Queue[str]) -> Iterator[Callable[[str], Out]]:
    control, end = os.pipe()
    threads = []

    def wait_until_published(announcement: str) -> str:
        awaited.put(announcement)
        return ""

    def start(spec: str) -> Out:
        path = tmp_path / "node.json"
        path.write_text(spec)
        out = Out()
        in_force = SpecInForce(tmp_path / "state", tmp_path / "run")
        memory = Memory(Originals(), Failures(), History(tmp_path, "boot-1"))
        activity = Activity.at(view.descriptor)
        requests = Requests(tmp_path / "apply.sock")
        arguments = (
            node.kernel.machine(),
            path,
            in_force,
            memory,
            activity,
            control,
            out,
            requests,
            wait_until_published,
        )
        threads.append(threading.Thread(target=work, args=arguments))
        threads[0].start()
        return out

    yield start
    os.close(end)
    threads[0].join(timeout=120)
    os.close(control)
    assert not threads[0].is_alive()


def condition(report: Report, type: str) -> Condition:
    return next(c for c in report.conditions if c.type == type)


def test_the_node_is_ready_once_all_probes_have_answered(worker: Callable[[str], Out]) -> None:
    out = worker('{"node_name": "n1", "readiness": {"probes": {"pcie_link": {"severity": "required"}}}}')
    assert condition(out.until(lambda report: report.ready), "PcieLink").status == "True"


def test_a_device_that_cannot_be_read_is_reported_and_read_again(node: Node, worker: Callable[[str], Out]) -> None:
    unreadable = f"/sys/bus/pci/devices/{PF0}/numa_node"
    node.kernel.unreadable.add(unreadable)
    out = worker(f'{{"node_name": "n1", "nics": [{{"name": "rail0", "select": {{"pci": "{PF0}"}}}}]}}')
    report = out.until(lambda report: condition(report, "NicsPresent").reason == "DeviceUnreadable")
    assert not report.ready
    node.kernel.unreadable.discard(unreadable)
    assert out.until(lambda report: report.ready)


def test_an_unreadable_file_of_no_device_is_reported_and_read_again(node: Node, worker: Callable[[str], Out]) -> None:
    node.kernel.unreadable.add("/sys/devices/system/cpu/online")
    out = worker('{"node_name": "n1"}')
    report = out.until(lambda report: condition(report, "Converged").reason == "DeviceLost")
    assert not report.ready
    node.kernel.unreadable.clear()
    assert out.until(lambda report: report.ready)


def test_while_a_probe_hangs_the_others_are_reported_and_then_its_timeout(
    node: Node, worker: Callable[[str], Out], view: View, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    node.kernel.pipes[STUCK] = str(pipe)
    out = worker(
        '{"node_name": "n1", "readiness": {"probes": {"kernel_modules": {"severity": "required", "deadline": 2}}}}'
    )
    with writer(pipe):
        report = out.until(lambda report: condition(report, "PcieLink").status == "True")
        assert condition(report, "ClockSynchronised").status == "True"
        assert condition(report, "KernelModules").reason == "NotYetRead"
        report = out.until(lambda report: condition(report, "KernelModules").reason == "ProbeTimedOut")
        assert not report.ready
        assert view.step() is None, "the worker itself does not hang, so it must not be replaced"
        del node.kernel.pipes[STUCK]
    assert out.until(lambda report: report.ready)


def test_a_disruptive_change_waits_until_its_announcement_is_published(
    node: Node, worker: Callable[[str], Out], awaited: Queue[str]
) -> None:
    node.kernel.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "2")
    out = worker(
        f'{{"node_name": "n1", "nics": [{{"name": "a", "select": {{"pci": "{PF0}"}}, "vfs": {{"count": 3}}}}]}}'
    )
    announced = out.until(lambda report: bool(report.announcement))
    assert not announced.ready
    assert awaited.get(timeout=120) == announced.announcement
    assert out.until(lambda report: report.ready).announcement == ""
