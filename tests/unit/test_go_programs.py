import os
import shutil
from pathlib import Path

import pytest

from lab import LabError, go_programs
from lab.go_programs import Build


def test_without_root_the_error_names_the_missing_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("dpkg-query", "qemu-system-x86_64", "qemu-img"):
        if (program := shutil.which(name)) is not None:
            (tmp_path / name).symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(go_programs, "PLACES", ())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"(?s)lacks .*golang.*bookworm-backports"):
        go_programs.go()


def test_an_old_go_is_an_error_with_the_needed_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=r"older than Go 1\.21"):
        go_programs.go()


def test_the_cache_folder_follows_from_all_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = Build("tool", ("example.com/tool@v1.0.0",))
    assert one.target == Build("tool", ("example.com/tool@v1.0.0",)).target
    assert one.target != Build("tool", ("example.com/tool@v1.0.1",)).target
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "go.mod").write_text("module a\n")
    pinned = Build("tool", ("example.com/tool",), folder=folder)
    before = pinned.target
    (folder / "go.mod").write_text("module b\n")
    assert pinned.target != before


def test_too_little_disk_or_memory_stops_it_before_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(go_programs, "go", lambda: tmp_path / "go")
    with pytest.raises(LabError, match=r"(?s)MiB of disk.*Make room"):
        go_programs.ensure(Build("tool", ("example.com/tool@v1.0.0",), disk_mib=10**9))
    with pytest.raises(LabError, match="MiB of memory"):
        go_programs.ensure(Build("tool", ("example.com/tool@v1.0.0",), memory_mib=10**9))
