"""A worker on the simulated kernel, and its ends."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import TextIO, cast

import pytest

from agent.engine.context import Memory
from agent.service.activity import Activity, Step, View
from agent.service.apply_socket import Requests
from agent.service.pass_log import PassRecords
from agent.service.spec_in_force import SpecInForce
from agent.service.worker import work
from tests.sim.readiness import Node
from tests.sim.service.running import Announced, Out, Worker


@pytest.fixture
def node() -> Node:
    return Node.with_two_nics()


@pytest.fixture
def announced(node: Node) -> Iterator[Announced]:
    """Set up before the worker, and closed after it."""
    announced = node.kernel.events = Announced()
    yield announced
    os.close(announced.descriptor)


@pytest.fixture
def view() -> Iterator[View]:
    view = View.new()
    yield view
    view.close()


@pytest.fixture
def awaited() -> Queue[tuple[str, Step | None]]:
    """The announcements for whose publication the worker has waited, and the call that its memory named during each wait."""
    return Queue()


@pytest.fixture
def pipe() -> tuple[int, int]:
    """The worker's control, and the supervisor's end of it."""
    return os.pipe()


@pytest.fixture
def worker(
    node: Node, view: View, tmp_path: Path, awaited: Queue[tuple[str, Step | None]], pipe: tuple[int, int]
) -> Iterator[Worker]:
    control, end = pipe
    threads = []

    def wait_until_published(announcement: str) -> str:
        awaited.put((announcement, view.step()))
        return ""

    def start(spec: str) -> Out:
        path = tmp_path / "node.json"
        path.write_text(spec)
        out = Out()
        in_force = SpecInForce(tmp_path / "state", tmp_path / "run")
        memory, records = Memory(time.monotonic), PassRecords.kept(tmp_path, tmp_path)
        activity = Activity.at(view.descriptor)
        requests = Requests(tmp_path / "apply.sock")
        machine, stream = node.kernel.machine(), cast(TextIO, out)

        def run() -> None:
            try:
                work(
                    machine, path, in_force, memory, records, activity, control, stream, requests, wait_until_published
                )
            finally:
                out.lines.put({})

        threads.append(threading.Thread(target=run))
        threads[0].start()
        return out

    yield start
    os.close(end)
    threads[0].join(timeout=120)
    os.close(control)
    assert not threads[0].is_alive()


@pytest.fixture
def reload(pipe: tuple[int, int], tmp_path: Path) -> Callable[[str], None]:
    """Have the worker read another spec."""

    def ask(spec: str) -> None:
        (tmp_path / "node.json").write_text(spec)
        os.write(pipe[1], b"reload\n")

    return ask
