"""The control host's SSH configuration is read as ssh_config(5) has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paramiko import SSHException
from pyinfra.connectors.sshuserclient.config import SSHConfig

from tasks.common.replacements import REPLACEMENTS
from tests.stand_ins import text_file

REPLACED = [place for place, by in REPLACEMENTS.items() if by.__module__ == "tasks.common.ssh_config"]


@pytest.fixture(autouse=True)
def as_each_deploy(replace: Callable[..., None]) -> None:
    """pyinfra's functions are replaced as each deploy does it."""
    replace(*REPLACED)


def user(folder: Path, text: str, host: str = "gpu-1") -> Any:
    """The login user of a host by a configuration."""
    file = folder / "config"
    file.write_text(text)
    config = SSHConfig()
    with file.open() as opened:
        config.parse(opened)  # type: ignore[no-untyped-call]
    return config.lookup(host).get("user")


@pytest.mark.parametrize(
    ("criteria", "fits"),
    [
        ("host gpu-*", True),
        ("host cpu-*", False),
        # The names of criteria are in any case.
        ("Host cpu-*", False),
        ("OriginalHost gpu-1 Exec true", True),
        pytest.param("OriginalHost cpu-1 exec true", False, id="paramiko-1582"),
        pytest.param("host=gpu-1", True, id="paramiko-2522"),
        ("!host=gpu-1", False),
        pytest.param("final all", True, id="paramiko-2361"),
        ("canonical all", False),
        ("all", True),
        ("final host cpu-1", False),
        pytest.param('final !originalhost proxy !exec "test %h = gpu-1"', False, id="paramiko-1992"),
        pytest.param('exec "test %h = gpu-1"', True, id="k0sctl-1140"),
        ('exec "test %h = cpu-1 || exit 1"', False),
        pytest.param('!exec "test %h = gpu-1"', False, id="blink-970"),
        # What paramiko does not know.
        pytest.param("localnetwork 10.0.0.0/8", False, id="paramiko-2632"),
        ("!localnetwork 10.0.0.0/8", False),
        pytest.param("host gpu-1 tagged far", False, id="net-ssh-631"),
        ("sessiontype shell", False),
        ("version OpenSSH_10.*", False),
    ],
)
def test_a_criterion_fits_the_hosts_that_it_fits_for_ssh(tmp_path: Path, criteria: str, fits: bool) -> None:
    assert user(tmp_path, f"Match {criteria}\n  User root\n") == ("root" if fits else None)


def test_a_criterion_that_cannot_be_judged_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    user(tmp_path, "Match host gpu-* tagged far\n  User root\n")
    assert "`Match host gpu-* tagged far`" in caplog.text
    assert "cannot judge tagged;" in caplog.text


def test_each_file_of_an_include_is_read_as_often_as_it_is_named(tmp_path: Path) -> None:
    text_file(tmp_path / "parts" / "10-hosts", "Host gpu-*\n  Include of-gpus  # shared\n")
    (tmp_path / "parts" / "20-hosts").write_text("Host cpu-*\nInclude of-gpus\n")
    (tmp_path / "of-gpus").write_text("User root\n")
    text = f'Include absent "{tmp_path}/parts/*" absent\nHost *\nUser operator\n'
    assert [user(tmp_path, text, host) for host in ("gpu-1", "cpu-1", "nic-1")] == ["root", "root", "operator"]


def test_a_file_that_includes_itself_is_named(tmp_path: Path) -> None:
    with pytest.raises((ValueError, SSHException), match="config is included 16 files deep, or by itself"):
        user(tmp_path, "Include config\n")
