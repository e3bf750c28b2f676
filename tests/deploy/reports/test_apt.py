"""Public reports of another apt that is at work, as after a server's first boot: apt itself answers, in folders of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tasks import packages
from tests.deploy.scripts import program, sh

CONTROL = (
    "Package: fabric-tools\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: none\n"
)
ENTRY = "{}Filename: ./fabric-tools.deb\nSize: {}\nSHA256: {}\n\n"
SETTINGS = """\
Dir::Etc "{root}/etc"; Dir::Etc::sourceparts "-"; Dir::Cache "{root}/cache"; APT::Sandbox::User "";
Dir::State "{root}/state"; Dir::State::status "{root}/state/status";
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An apt with a repository of one package. It looks often whether the lock is free."""
    for folder in ("etc/preferences.d", "state/lists/partial", "cache/archives/partial", "repo", "package/DEBIAN"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "package/DEBIAN/control").write_text(CONTROL)
    package = tmp_path / "repo/fabric-tools.deb"
    subprocess.run(["dpkg-deb", "--build", tmp_path / "package", package], check=True, capture_output=True)
    checksum = hashlib.sha256(package.read_bytes()).hexdigest()
    (tmp_path / "repo/Packages").write_text(ENTRY.format(CONTROL, package.stat().st_size, checksum))
    (tmp_path / "etc/sources.list").write_text(f"deb [trusted=yes] file:{tmp_path}/repo ./\n")
    (tmp_path / "state/status").touch()
    (tmp_path / "apt.conf").write_text(SETTINGS.format(root=tmp_path))
    program(tmp_path / "bin/sleep", "exec /bin/sleep 0.2")
    made = {"APT_CONFIG": str(tmp_path / "apt.conf"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    sh(f"{packages.APT}apt_update", **made)
    return made


@pytest.mark.skipif(
    shutil.which("dpkg-deb") is None or os.geteuid() != 0, reason="apt locks its folders only for root, and on Debian"
)
@pytest.mark.parametrize(
    "lock",
    [
        pytest.param("cache/archives/lock", id="connectbox-pi-150"),
        pytest.param("state/lock-frontend", id="packer-ci-build-221"),
        pytest.param("state/lock-frontend", id="fogros2-20"),
        pytest.param("state/lock-frontend", id="algo-14335"),
        pytest.param("state/lock-frontend", id="amneziawg-installer-155"),
        pytest.param("state/lock-frontend", id="mapsnap-443"),
        pytest.param("state/lists/lock", id="performance-is-57"),
    ],
)
def test_an_installation_waits_for_another_apt(tmp_path: Path, environment: dict[str, str], lock: str) -> None:
    with (tmp_path / lock).open("w") as file:
        holder = subprocess.Popen(
            ["python3", "-c", "import fcntl, sys; fcntl.lockf(1, fcntl.LOCK_EX); sys.stderr.write('held'); sys.stdin.read()"],
            stdin=subprocess.PIPE, stdout=file, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdin is not None
        assert holder.stderr is not None
        assert holder.stderr.read(4) == b"held"
        release = threading.Timer(0.5, holder.stdin.close)
        release.start()
        said = sh(
            f'{packages.APT}apt_update\napt_install --download-only install -- "$@"', "fabric-tools", **environment
        )
        release.join()
        holder.wait()
    assert any(line.startswith("Get:1 ") or "newly installed" in line for line in said)
