"""The kernel's own inotify reports files that are replaced."""

import threading
from pathlib import Path

import pytest

from agent.reporter import inotify
from agent.runtime import write_atomically


def test_a_replaced_file_is_noticed_even_in_a_recreated_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inotify, "MISSING", 0.05)
    run, etc = tmp_path / "run", tmp_path / "etc"
    etc.mkdir()
    heard = threading.Semaphore(0)
    folders = [inotify.Folder(folder, heard.release) for folder in (run, etc)]
    threading.Thread(target=inotify.listen, args=folders, daemon=True).start()

    def hears() -> None:
        assert heard.acquire(timeout=10)

    hears()  # it looks once by itself
    run.mkdir()
    hears()
    while heard.acquire(timeout=0.5):
        pass
    for folder in (run, etc, run):
        write_atomically(folder / "report.json", "{}")
        hears()
    (run / "report.json").unlink()
    run.rmdir()
    run.mkdir()
    while heard.acquire(timeout=0.5):
        pass
    write_atomically(run / "report.json", "{}")
    hears()


def test_a_file_written_in_place_is_noticed_when_it_is_closed(tmp_path: Path) -> None:
    heard = threading.Semaphore(0)
    threading.Thread(
        target=inotify.listen, args=(inotify.Folder(tmp_path, heard.release, written=True),), daemon=True
    ).start()
    assert heard.acquire(timeout=10)  # it looks once by itself
    (tmp_path / "labels.json").write_text("[]")
    assert heard.acquire(timeout=10)
