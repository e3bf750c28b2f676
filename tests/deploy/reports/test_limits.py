"""Public reports of limits of locked memory: of which service containers have theirs, and what else limits them.

The scripts run for real, in a folder of their own, with programs that stand in for systemd's and procps'.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tasks.host import limits
from tests.deploy.conftest import Node, of
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

LIMITED = "Max locked memory         8388608              8388608              bytes\n"
# The unit's process, and containerd if the unit's process starts it.
UNIT, CONTAINERD = "100", "200"


def programs(root: Path, unit: str) -> dict[str, str]:
    """A systemd on which only this unit is installed and runs. Its process has started a containerd."""
    shown = f"LoadState=loaded LimitMEMLOCK=infinity LimitMEMLOCKSoft=infinity MainPID={UNIT}"
    program(root / "bin/systemctl", f'case "$*" in *" {unit}.service") printf "%s\\n" {shown} ;; esac')
    program(root / "bin/pgrep", f'case "$*" in *" {UNIT} "*containerd) echo {CONTAINERD} ;; *) exit 1 ;; esac')
    program(root / "bin/prlimit", f'echo "$2" >> {root}/raised')
    return {"PATH": f"{root}/bin:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("unit", "limited"),
    [
        pytest.param("rke2-agent", CONTAINERD, id="rke2-761"),
        pytest.param("rke2-server", CONTAINERD, id="rke2-3671"),
        pytest.param("k3s-agent", CONTAINERD, id="k3s-1975"),
        pytest.param("containerd", UNIT, id="docker-for-linux-1099"),
    ],
)
def test_the_service_that_starts_containers_has_no_limit_and_neither_has_its_containerd(
    tmp_path: Path, unit: str, limited: str
) -> None:
    environment = programs(tmp_path, unit)
    for process in (UNIT, CONTAINERD):
        (tmp_path / "proc" / process).mkdir(parents=True)
        text = LIMITED if process == limited else LIMITED.replace("8388608", "unlimited")
        (tmp_path / "proc" / process / "limits").write_text(text)
    given: list[Any] = [tmp_path, *limits.Limits().daemons]
    assert sh(limits._LIMITED, *given, **environment) == [f"running {unit}"]
    sh(limits._LIFT, *given, **environment)
    assert (tmp_path / "raised").read_text().split() == [UNIT, CONTAINERD]


def lift(root: Path, raising: str) -> None:
    """Lift the limits of a node whose kubelet has not joined, with a prlimit that does this."""
    environment = programs(root, "kubelet")
    (root / "proc" / UNIT).mkdir(parents=True)
    program(root / "bin/prlimit", f"{raising}; echo 'prlimit: failed to get the MEMLOCK resource limit' >&2; exit 1")
    sh(limits._LIFT, root, "kubelet", **environment)


def test_a_daemon_that_ends_meanwhile_does_not_stop_the_deploy(tmp_path: Path) -> None:
    lift(tmp_path, f"rm -rf {tmp_path}/proc/{UNIT}")


def test_a_limit_that_stays_stops_the_deploy(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="failed to get the MEMLOCK"):
        lift(tmp_path, "true")


SPEC = '{{"process": {{"rlimits": [{{"type": "RLIMIT_MEMLOCK", "soft": {0}, "hard": {0}}}]}}}}'
LATER = "etc/security/limits.d/99-site.conf"


def others(root: Path, **files: str) -> list[str]:
    """What limits locked memory on a node with these files, beside what the deploy sets."""
    for path, text in files.items():
        text_file(root / path, text)
    return limits.OtherLimits().process(sh(limits._OTHERS, root, "90-trackbed.conf", "yes", "yes"))


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        pytest.param(LATER, "* hard memlock 64", True, id="linux-pam-249"),
        pytest.param("etc/security/limits.d/sap.conf", "root - memlock 8388608", True, id="content-1329"),
        (LATER, "* - memlock unlimited\n# * hard memlock 64\noracle hard memlock 64\n* hard nofile 64", False),
        ("etc/security/limits.d/20-site.conf", "* hard memlock 64", False),
    ],
)
def test_a_file_of_limits_that_is_read_later_is_named(
    tmp_path: Path, node: Node, file: str, line: str, said: bool
) -> None:
    expected = f"/{file} is read after the deploy's own file, and has `{line}`"
    found = others(tmp_path, **{file: f"{line}\n"})
    assert found == [expected] * said
    result = node.deploy(limits.lift, {of(limits.OtherLimits): found}, limits={"daemons": []})
    assert result.failed is said
    assert any(f"limits: {expected}; remove it there" in line for line in result.errors) is said


@pytest.mark.parametrize(
    ("file", "text", "limited"),
    [
        pytest.param("etc/containerd/base.json", SPEC.format(8388608), True, id="containerd-6063"),
        pytest.param(
            "etc/crio/crio.conf.d/10-limits", 'default_ulimits = ["nofile=1:2", "memlock=64:64"]', True, id="cri-o-1840"
        ),
        pytest.param(
            "etc/docker/daemon.json",
            '{"default-ulimits": {"memlock": {"Name": "memlock", "Hard": 8388608, "Soft": 8388608}}}',
            True,
            id="qserv-229",
        ),
        ("etc/containerd/base.json", SPEC.format(2**64 - 1), False),
        ("etc/crio/crio.conf", 'default_ulimits = ["memlock=-1:-1"]\n# default_ulimits = ["memlock=64:64"]', False),
        (
            "etc/docker/daemon.json",
            '{"default-ulimits": {"memlock": {"Hard": -1, "Soft": -1}, "nofile": {"Hard": 1}}}',
            False,
        ),
        ("etc/docker/daemon.json", "{}", False),
    ],
)
def test_an_engine_that_limits_its_containers_itself_is_named(
    tmp_path: Path, file: str, text: str, limited: bool
) -> None:
    containerd = {"etc/containerd/config.toml": "[plugins.x]\n  base_runtime_spec = '/etc/containerd/base.json'\n"}
    found = others(tmp_path, **containerd, **{file: f"{text}\n"})
    assert found == [f"/{file} gives containers a limit of locked memory"] * limited
