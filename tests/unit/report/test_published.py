"""The agent's wait until NotReady is published: it is bounded, and older publications do not end it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.report import published
from agent.report.published import Published, wait_until_not_ready
from agent.report.records import Condition, Report, report_to_json
from agent.runtime import boot_id

ANNOUNCEMENT = "a1"


@pytest.fixture
def wait(tmp_path: Path) -> Callable[[float], str]:
    (tmp_path / "reporter.json").write_text("{}")
    files = tmp_path / "published.json", tmp_path / "reporter.json"
    return lambda timeout: wait_until_not_ready(tmp_path / "report.json", ANNOUNCEMENT, *files, timeout, timeout)


def announce(folder: Path, generation: int, announcement: str = ANNOUNCEMENT) -> None:
    condition = Condition("Converged", "False", "Converging", "vfs 0000:21:00.0 count: 4 -> 5")
    report = Report("n1", "h1", boot_id(), "v", False, True, "", generation)
    report = evolve(report, announcement=announcement, conditions=(condition,))
    (folder / "report.json").write_text(report_to_json(report))


def publish(folder: Path, generation: int, ready: bool = False, error: str = "", boot: str = "") -> None:
    published.write(folder / "published.json", Published(boot or boot_id(), generation, ready, error))


def test_a_node_without_the_reporters_settings_does_not_wait(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert wait_until_not_ready(tmp_path / "report.json", ANNOUNCEMENT, absent, absent, 60.0) == ""


def test_the_wait_ends_once_the_generation_is_published(tmp_path: Path, wait: Callable[[float], str]) -> None:
    announce(tmp_path, 7)
    publish(tmp_path, 6, ready=True)
    threading.Timer(0.2, publish, (tmp_path, 7)).start()
    assert wait(120.0) == ""
    latest = published.read(tmp_path / "published.json")
    assert latest is not None and latest.generation == 7


@pytest.mark.parametrize(
    ("announcement", "before"),
    [
        (ANNOUNCEMENT, {"generation": 6}),
        (ANNOUNCEMENT, {"generation": 7, "ready": True}),
        (ANNOUNCEMENT, {"generation": 9, "boot": "old"}),
        ("an earlier announcement of the same change", {"generation": 7}),
    ],
    ids=["generation", "ready", "boot", "announcement"],
)
def test_other_publications_do_not_end_the_wait(
    tmp_path: Path, wait: Callable[[float], str], announcement: str, before: dict[str, Any]
) -> None:
    announce(tmp_path, 7, announcement)
    publish(tmp_path, **before)
    assert "could not be published" in wait(0.2)


@pytest.mark.parametrize("error", ["", "the API server does not answer in time"])
def test_a_reporter_that_says_nothing_is_given_the_time_in_which_it_is_replaced(tmp_path: Path, error: str) -> None:
    """If the reporter says why nothing is published, the repair waits no longer than for an API server."""
    announce(tmp_path, 7)
    publish(tmp_path, 6, ready=True, error=error)
    (tmp_path / "reporter.json").write_text("{}")
    files = tmp_path / "report.json", ANNOUNCEMENT, tmp_path / "published.json", tmp_path / "reporter.json"
    # The time that does not count is much too long.
    limits = (0.2, 600.0) if error else (0.0, 0.3)
    assert wait_until_not_ready(*files, *limits).endswith(f"({error or 'is trackbed-reporter running?'})")


def test_a_file_that_cannot_be_replaced_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "published.json"
    assert published.write(file, Published(boot_id(), 6))
    in_the_way = tmp_path / ".published.json.new"
    in_the_way.mkdir()
    assert not published.write(file, Published(boot_id(), 7, ready=True))
    assert published.read(file) is None
    in_the_way.rmdir()
    assert published.write(file, Published(boot_id(), 7, ready=True))
