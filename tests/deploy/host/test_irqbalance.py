from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from agent.kinds.host.irqbalance import LIST, SCRIPT
from tasks.common import systemd_reload
from tasks.common.units import UnitStates
from tasks.host import irqbalance
from tasks.host.irqbalance import Confined, IrqbalanceCommand
from tests.deploy.conftest import LOSERS, Answers, Node, file_answers, files, of
from tests.deploy.scripts import sh
from tests.stand_ins import program

RUNS = {of(UnitStates): ["ActiveState=active LoadState=loaded UnitFileState=enabled "]}
ABSENT = {of(UnitStates): ["ActiveState=inactive LoadState=not-found UnitFileState= "]}
MAIN_PID = of(IrqbalanceCommand)
NEW = "/etc/systemd/system/irqbalance.service.d/.trackbed.conf.new"
RUNS_WITH_OURS = ["/usr/sbin/irqbalance", "--foreground", f"--policyscript={SCRIPT}"]


def in_place() -> Answers:
    return {
        **file_answers(irqbalance.SCRIPT, irqbalance.SCRIPT_SOURCE.read_text(), mode="-rwxr-xr-x"),
        **files(**{irqbalance.DROP_IN: irqbalance.DROP_IN_SOURCE.read_text()}),
    }


def test_irqbalance_is_stopped_and_disabled(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("disabled"), RUNS)
    stop, disable = result.flat
    assert stop == "systemctl stop irqbalance.service"
    assert disable.endswith("""systemctl disable "$1"' sh irqbalance.service""")


def test_irqbalance_is_stopped_alone_while_disabling_it_would_take_gpus_from_containers(node: Node) -> None:
    losers = {LOSERS: ["docker-a.scope", "end"]}
    assert node.deploy(lambda: irqbalance.policy("disabled"), {**RUNS, **losers}).flat == [
        "systemctl stop irqbalance.service"
    ]


def test_a_node_without_irqbalance_needs_nothing(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("disabled"), ABSENT)
    assert set(result.planned.values()) == {False}
    assert result.flat == []


def test_with_the_policy_untouched_nothing_is_done(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("untouched"), RUNS)
    assert result.flat == []


def test_in_observe_mode_irqbalance_is_left_alone(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("disabled", "observe"), RUNS)
    assert result.flat == []


def test_with_the_policy_banned_irqbalance_runs_with_our_script(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("banned"), RUNS)
    assert f"--policyscript={irqbalance.SCRIPT}" in result.uploads[NEW].decode()
    assert f" {LIST}; then echo ban=true" in result.uploads[irqbalance.SCRIPT].decode()
    assert systemd_reload.RELOAD in result.flat[-1]
    assert result.flat[-1].endswith(f" sh put {irqbalance.DROP_IN} -- irqbalance.service {irqbalance.SCRIPT}")


def test_what_is_in_place_and_runs_is_left_alone(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("banned"), {**RUNS, **in_place(), MAIN_PID: RUNS_WITH_OURS})
    assert result.flat == []


@pytest.mark.parametrize(
    ("shown", "restarted", "error"),
    [
        (f"--foreground $IRQBALANCE_ARGS --policyscript={SCRIPT} ; ignore_errors=no", True, ""),
        ("--foreground $IRQBALANCE_ARGS ; ignore_errors=no", False, "since a later drop-in sets ExecStart"),
    ],
)
def test_one_that_runs_without_our_script_is_restarted_unless_it_would_again(
    node: Node, tmp_path: Path, shown: str, restarted: bool, error: str
) -> None:
    """Otherwise each deploy would restart it, and succeed."""
    result = node.deploy(
        lambda: irqbalance.policy("banned"), {**RUNS, **in_place(), MAIN_PID: ["/usr/sbin/irqbalance"]}
    )
    [command] = result.flat
    program(
        tmp_path / "bin/systemctl",
        f"""case $1,$2 in
        show,*LoadState) echo loaded ;;
        show,*ExecStart) echo '{{ path=/usr/sbin/irqbalance ; argv[]=/usr/sbin/irqbalance {shown} ; }}' ;;
        try-restart,irqbalance.service) touch {tmp_path}/restarted ;;
        esac""",
    )
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False, env=path)
    assert (tmp_path / "restarted").exists() is restarted
    assert error in done.stderr
    assert (done.returncode == 0) is restarted


@pytest.mark.parametrize(
    ("enforce", "permissive", "confined"),
    [
        pytest.param("1", False, True, id="selinux-policy-1582"),
        pytest.param("1", False, True, id="irqbalance-320"),
        ("1", True, False),
        ("0", False, False),
        (None, False, False),
    ],
)
def test_where_selinux_keeps_irqbalance_from_its_script_the_policy_is_refused(
    node: Node, tmp_path: Path, enforce: str | None, permissive: bool, confined: bool
) -> None:
    if enforce is not None:
        (tmp_path / "sys/fs/selinux").mkdir(parents=True)
        (tmp_path / "sys/fs/selinux/enforce").write_text(enforce)
    if permissive:
        (tmp_path / "var/lib/selinux/targeted/active/modules/400/permissive_irqbalance_t").mkdir(parents=True)
    answer = sh(irqbalance._CONFINED, tmp_path)
    result = node.deploy(lambda: irqbalance.policy("banned"), {**RUNS, of(Confined): answer})
    assert any("semanage permissive -a irqbalance_t" in line for line in result.errors) == result.failed == confined
    assert (NEW in result.uploads) is not confined


def test_another_policy_removes_the_drop_in(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("untouched"), {**RUNS, **in_place(), MAIN_PID: RUNS_WITH_OURS})
    (command,) = result.flat
    assert systemd_reload.RESTART in command
    assert command.endswith(f" sh remove {irqbalance.DROP_IN} -- irqbalance.service {irqbalance.SCRIPT}")


def test_deploy_and_agent_name_the_same_files() -> None:
    assert irqbalance.SCRIPT == SCRIPT
