import os
import shutil
from pathlib import Path

import pytest

from lab import LabError, cache
from lab.cluster import programs
from lab.go import go_programs
from lab.go.go_programs import Build
from tests.stand_ins import program, text_file


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
    program(tmp_path / "go", "echo go version go1.19.8 linux/amd64")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=r"older than Go 1\.21"):
        go_programs.go()


def test_the_cache_folder_follows_from_all_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = Build("tool", ("example.com/tool@v1.0.0",))
    assert one.target == Build("tool", ("example.com/tool@v1.0.0",)).target
    assert one.target != Build("tool", ("example.com/tool@v1.0.1",)).target
    folder = tmp_path / "module"
    text_file(folder / "go.mod", "module a\n")
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


GO = """#!/bin/sh
echo "$*" >> "$RECORD"
case "$*" in
  version) echo go version go1.26.0 linux/amd64 ;;
  "mod tidy -C "*) touch "$4/go.sum" ;;
  "build "*) while [ "$1" != -o ]; do shift; done; target=$2; shift 2; for package; do touch "$target${package##*/}"; done ;;
esac
"""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What a `go` is called with that builds nothing."""
    program = tmp_path / "bin" / "go"
    text_file(program, GO)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def test_another_version_of_kubernetes_is_built_beside_that_of_go_mod(
    monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    ours = programs.kubernetes("kube-apiserver")
    other = programs.kubernetes("kube-apiserver", "v1.34.2")
    assert other.exists()
    assert other.parent != ours.parent
    module = (cache.home() / "go-modules" / "kubernetes-v1.34.2" / "go.mod").read_text()
    assert "require k8s.io/kubernetes v1.34.2\n" in module
    assert "k8s.io/apiserver => k8s.io/apiserver v0.34.2\n" in module
    assert "36" not in module.replace("go 1.26", "")
    built = recorded.read_text().splitlines()[-1]
    assert "gitVersion=v1.34.2" in built
    assert "gitMinor=34" in built
    assert built.endswith(
        "cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager k8s.io/kubernetes/cmd/kube-scheduler"
    )
    # Once only.
    monkeypatch.setenv("TRACKBED_TEST_KUBERNETES", "v1.34.2")
    programs.kubernetes("kube-scheduler")
    assert recorded.read_text().splitlines()[-1] == built
    # A kubelet must not be newer than its API server.
    assert programs.kubernetes("kubelet").parent not in (ours.parent, other.parent)
    assert recorded.read_text().splitlines()[-1].endswith("cmd/kubelet")
    assert programs.kubernetes("kubectl").parent == ours.parent


@pytest.mark.parametrize("version", ["1.34", "v1.34", "v2.0.0", "v1.34.2-rc.1", "v1.34.2\n"])
def test_a_text_that_is_no_version_is_an_error(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("TRACKBED_TEST_KUBERNETES", version)
    with pytest.raises(LabError, match=r"Give it as v1\.37\.2"):
        programs.kubernetes("kube-apiserver")
