import subprocess
import sys
from pathlib import Path

import pytest
from pyinfra.api.exceptions import DeployError

from tasks.common import archive
from tasks.common.failures import NodeError


def test_the_version_names_machine_and_content() -> None:
    assert len(archive.version("x86_64").rpartition("-")[2]) == 12
    assert archive.version("x86_64") != archive.version("aarch64")


def test_a_machine_type_without_an_agent_is_refused() -> None:
    with pytest.raises(NodeError, match="does not support the machine type 's390x'; it supports x86_64, aarch64"):
        archive.version("s390x")


def test_the_archive_has_the_agent_and_what_python_3_10_needs(unpacked: Path) -> None:
    assert (unpacked / "VERSION").read_text() == archive.version("x86_64") + "\n"
    node = Path("agent/spec/node.py")
    assert (unpacked / node).read_bytes() == (archive.ROOT / node).read_bytes()
    # Asked for by a marker that is false on the Python that runs the tests.
    assert (unpacked / "exceptiongroup").is_dir()
    # Imported only where there is a kubelet: nothing else would miss it.
    assert (unpacked / "h2").is_dir()
    assert (unpacked / "prometheus_client").is_dir()
    assert not (unpacked / "bin").exists()
    assert not list(unpacked.rglob("*.pyc"))
    assert not list(unpacked.glob("win_*"))


def test_the_archive_runs_without_the_python_packages_of_the_host(unpacked: Path) -> None:
    message = subprocess.run(
        [sys.executable, "-I", str(unpacked), "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert message.split()[-1] == archive.version("x86_64")


def test_pip_s_message_is_shown_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(archive, "REQUIREMENTS", tmp_path / "node.txt")
    (tmp_path / "node.txt").write_text(f"attrs==26.1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(DeployError, match=r"cannot be fetched(.|\n)*HASHES"):
        archive.build("x86_64")
    assert list((tmp_path / "trackbed").iterdir()) == []
