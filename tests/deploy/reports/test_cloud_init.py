"""Public reports of servers on which cloud-init is still at work when one can log in."""

from pathlib import Path

import pytest

from tasks import packages
from tests.deploy.scripts import sh
from tests.stand_ins import program

# The unit's job, while it waits for other units or runs (`systemctl show` of systemd).
SYSTEMCTL = 'case "$*" in *--property=Job*" cloud-config.service") cat {root}/job ;; esac'


@pytest.mark.parametrize(
    ("manager", "script"),
    [
        pytest.param("apt-get", f"{packages.APT}apt_update", id="lisa-2327"),
        pytest.param("dnf", f"{packages.DNF}dnf install -y jq", id="agentbaker-181"),
    ],
)
def test_nothing_is_installed_before_cloud_init_has_written_the_sources(
    tmp_path: Path, manager: str, script: str
) -> None:
    (tmp_path / "job").write_text("215\n")
    program(tmp_path / "bin/systemctl", SYSTEMCTL.format(root=tmp_path))
    program(tmp_path / "bin/sleep", f"echo waited >> {tmp_path}/log; echo > {tmp_path}/job")
    program(tmp_path / f"bin/{manager}", f"echo installs >> {tmp_path}/log")
    sh(script, programs=tmp_path / "bin")
    assert (tmp_path / "log").read_text().split() == ["waited", "installs"]
