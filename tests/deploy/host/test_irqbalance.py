from pathlib import Path
from typing import Any

import pytest

from agent.kinds.host.irqbalance import LIST, SCRIPT
from tasks.common import systemd_reload
from tasks.common.units import UnitStates
from tasks.host import irqbalance
from tasks.host.irqbalance import Confined, IrqbalanceCommand
from tests.deploy.conftest import LOSERS, Answers, Node, file_answers, files, of
from tests.deploy.scripts import ran, sh
from tests.stand_ins import program, text_file

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
    losers = {LOSERS: ["docker-a.scope"]}
    assert node.deploy(lambda: irqbalance.policy("disabled"), {**RUNS, **losers}).flat == [
        "systemctl stop irqbalance.service"
    ]


@pytest.mark.parametrize(
    ("policy", "mode", "answers"),
    [
        ("disabled", "enforce", ABSENT),
        ("disabled", "observe", RUNS),
        ("untouched", "enforce", RUNS),
        ("banned", "enforce", {**RUNS, **in_place(), MAIN_PID: RUNS_WITH_OURS}),
    ],
    ids=["absent", "observed", "untouched", "in place"],
)
def test_irqbalance_is_left_alone(node: Node, policy: Any, mode: Any, answers: Answers) -> None:
    assert node.deploy(lambda: irqbalance.policy(policy, mode), answers).did_nothing


def test_with_the_policy_banned_irqbalance_runs_with_our_script(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("banned"), RUNS)
    # The agent looks for its own name of the file.
    assert f"--policyscript={SCRIPT}" in result.uploads[NEW].decode()
    assert f" {LIST}; then echo ban=true" in result.uploads[irqbalance.SCRIPT].decode()
    assert systemd_reload.RELOAD in result.flat[-1]
    assert result.flat[-1].endswith(f" sh put {irqbalance.DROP_IN} -- irqbalance.service {irqbalance.SCRIPT}")


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
    done = ran(command, tmp_path / "bin")
    assert (tmp_path / "restarted").exists() is restarted
    assert error in done.stderr
    assert (done.returncode == 0) is restarted


@pytest.mark.parametrize(
    ("enforce", "permissive", "confined"),
    [
        pytest.param("1", False, True, id="selinux-policy-1582"),
        ("1", True, False),
        ("0", False, False),
        (None, False, False),
    ],
)
def test_where_selinux_keeps_irqbalance_from_its_script_the_policy_is_refused(
    node: Node, tmp_path: Path, enforce: str | None, permissive: bool, confined: bool
) -> None:
    if enforce is not None:
        text_file(tmp_path / "sys/fs/selinux/enforce", enforce)
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
