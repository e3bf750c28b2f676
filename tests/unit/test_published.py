"""The agent's wait for NotReady to be published: bounded, and not fooled by what was published before."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.report import published
from agent.report.published import Published, wait_until_not_ready
from agent.report.records import Change, Condition, Report, report_to_json
from agent.runtime import boot_id

CHANGE = Change("vfs", "0000:21:00.0", "count", 4, 5)


@pytest.fixture
def wait(tmp_path: Path) -> Callable[[float], str]:
    (tmp_path / "reporter.json").write_text("{}")
    files = tmp_path / "published.json", tmp_path / "reporter.json"
    return lambda timeout: wait_until_not_ready(tmp_path / "report.json", CHANGE, *files, timeout)


def announce(folder: Path, generation: int, change: Change = CHANGE) -> None:
    condition = Condition("Converged", "False", "Converging", str(change))
    report = Report("n1", "h1", boot_id(), "v", False, True, generation=generation, conditions=(condition,))
    (folder / "report.json").write_text(report_to_json(report))


def publish(folder: Path, generation: int, ready: bool = False, error: str = "", boot: str = "") -> None:
    published.write(folder / "published.json", Published(boot or boot_id(), generation, ready, error))


def test_where_nothing_is_published_nobody_waits(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert wait_until_not_ready(tmp_path / "report.json", CHANGE, absent, absent, 60.0) == ""


def test_it_returns_as_soon_as_the_generation_is_published(tmp_path: Path, wait: Callable[[float], str]) -> None:
    announce(tmp_path, 7)
    publish(tmp_path, 6, ready=True)
    threading.Timer(0.2, publish, (tmp_path, 7)).start()
    start = time.monotonic()
    assert wait(20.0) == ""
    assert 0.2 <= time.monotonic() - start < 5.0


@pytest.mark.parametrize(
    "before", [{"generation": 6}, {"generation": 7, "ready": True}, {"generation": 9, "boot": "old"}]
)
def test_what_was_published_before_does_not_count(
    tmp_path: Path, wait: Callable[[float], str], before: dict[str, object]
) -> None:
    announce(tmp_path, 7)
    publish(tmp_path, **before)  # type: ignore[arg-type]
    assert "could not be published" in wait(0.2)


def test_a_report_that_does_not_announce_the_change_yet_is_not_enough(
    tmp_path: Path, wait: Callable[[float], str]
) -> None:
    announce(tmp_path, 7, Change("vfs", "0000:21:00.1", "count", 4, 5))
    publish(tmp_path, 7)
    assert "could not be published" in wait(0.2)


def test_an_api_server_that_is_gone_stops_no_repair(tmp_path: Path, wait: Callable[[float], str]) -> None:
    announce(tmp_path, 7)
    publish(tmp_path, 6, ready=True, error="the API server does not answer in time")
    said = wait(0.2)
    assert "the API server does not answer in time" in said and "going on with vfs" in said


def test_what_cannot_be_written_does_not_stand_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "published.json"
    assert published.write(file, Published(boot_id(), 6))
    in_the_way = tmp_path / ".published.json.new"
    in_the_way.mkdir()
    assert not published.write(file, Published(boot_id(), 7, ready=True))
    assert published.read(file) is None
    in_the_way.rmdir()
    assert published.write(file, Published(boot_id(), 7, ready=True))
