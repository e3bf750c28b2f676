"""The worker's loop on the simulated kernel: what it says, and when."""

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
from agent.service.spec_in_force import Adopted
from agent.service.worker import work
from tests.sim.readiness import PF0, Node, writer

STUCK = "/sys/module/ib_core/srcversion"


@define
class Out:
    """What the worker writes, line by line."""

    lines: Queue[dict[str, Any]] = field(factory=Queue)

    def write(self, text: str) -> None:
        self.lines.put(json.loads(text))

    def flush(self) -> None:
        pass

    def until(self, holds: Callable[[Report], bool]) -> Report:
        """The first report of which that holds."""
        while True:
            line = self.lines.get(timeout=20)
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
def worker(node: Node, view: View, tmp_path: Path) -> Iterator[Callable[[str], Out]]:
    control, end = os.pipe()
    threads = []

    def start(spec: str) -> Out:
        path = tmp_path / "node.json"
        path.write_text(spec)
        out = Out()
        adopted = Adopted(tmp_path / "state", tmp_path / "run")
        activity = Activity.at(view.descriptor)
        asked, history = Requests(tmp_path / "apply.sock"), History(tmp_path, "boot-1")
        started = (
            node.kernel.machine(),
            path,
            adopted,
            Originals(),
            activity,
            control,
            out,
            asked,
            history,
            Failures(),
        )
        threads.append(threading.Thread(target=work, args=started))
        threads[0].start()
        return out

    yield start
    os.close(end)
    threads[0].join(timeout=20)
    os.close(control)
    assert not threads[0].is_alive()


def condition(report: Report, type: str) -> Condition:
    return next(c for c in report.conditions if c.type == type)


def test_the_node_is_ready_as_soon_as_the_probes_have_spoken(worker: Callable[[str], Out]) -> None:
    out = worker('{"node_name": "n1", "readiness": {"probes": {"pcie_link": {"severity": "required"}}}}')
    assert condition(out.until(lambda report: report.ready), "PcieLink").status == "True"


def test_a_device_that_cannot_be_read_is_said_and_read_again(node: Node, worker: Callable[[str], Out]) -> None:
    unreadable = f"/sys/bus/pci/devices/{PF0}/numa_node"
    node.kernel.unreadable.add(unreadable)
    out = worker(f'{{"node_name": "n1", "nics": [{{"name": "rail0", "select": {{"pci": "{PF0}"}}}}]}}')
    said = out.until(lambda report: condition(report, "NicsPresent").reason == "DeviceUnreadable")
    assert not said.ready
    node.kernel.unreadable.discard(unreadable)
    assert out.until(lambda report: report.ready)


def test_what_is_of_no_device_and_cannot_be_read_is_said_and_read_again(
    node: Node, worker: Callable[[str], Out]
) -> None:
    node.kernel.unreadable.add("/sys/devices/system/cpu/online")
    out = worker('{"node_name": "n1"}')
    said = out.until(lambda report: condition(report, "Converged").reason == "DeviceLost")
    assert not said.ready
    node.kernel.unreadable.clear()
    assert out.until(lambda report: report.ready)


def test_what_other_probes_say_is_said_while_one_hangs_and_then_that_it_does(
    node: Node, worker: Callable[[str], Out], view: View, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    node.kernel.pipes[STUCK] = str(pipe)
    out = worker(
        '{"node_name": "n1", "readiness": {"probes": {"kernel_modules": {"severity": "required", "deadline": 2}}}}'
    )
    with writer(pipe):
        said = out.until(lambda report: condition(report, "PcieLink").status == "True")
        assert condition(said, "ClockSynchronised").status == "True"
        assert condition(said, "KernelModules").reason == "NotYetRead"
        said = out.until(lambda report: condition(report, "KernelModules").reason == "ProbeTimedOut")
        assert not said.ready
        assert view.step() is None, "the worker itself hangs in nothing, and is not to be replaced"
        del node.kernel.pipes[STUCK]
    assert out.until(lambda report: report.ready)
