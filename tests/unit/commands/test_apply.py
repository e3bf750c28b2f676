"""`trackbed apply` as a process, with and without the service."""

import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import CompletedProcess

from attrs import evolve

from agent.report import names
from agent.report.records import Condition, Disruption, NicVerdict
from agent.service import lock
from agent.service.apply_socket import NAME, Progress, Requests
from tests.programs import failure
from tests.unit.commands.node_folder import CONDITIONS, OUTCOME, report, spec, trackbed

WAITS = Condition("UpToDate", "False", "Deferred", "vfs ...", severity="warn")


def test_without_the_service_apply_makes_the_changes(tmp_path: Path) -> None:
    spec(tmp_path, irqs={"irqbalance": "untouched"})
    applied = trackbed(tmp_path, "apply", "--timeout", "60")
    assert (applied.returncode, applied.stdout.splitlines()[-1]) == (0, "ready")


def test_in_observe_mode_apply_changes_nothing(tmp_path: Path) -> None:
    spec(tmp_path, mode="observe")
    assert "mode: observe" in failure(trackbed(tmp_path, "apply"))


def service(folder: Path) -> Requests:
    """A service that runs."""
    spec(folder)
    lock.take(folder)
    return Requests(folder / NAME)


Allowed = list[tuple[Disruption | None, str]]


def applied_by(folder: Path, passes: Sequence[Progress], *words: str) -> tuple[CompletedProcess[str], Allowed]:
    """The command, while the service makes these passes, and what it allows the service."""
    requests = service(folder)
    allowed: Allowed = []

    def serve() -> None:
        assert wait([requests.fileno()], 60), "nobody came"
        assert requests.accept()
        allowed.append(requests.allowed())
        for each in passes:
            requests.send(each)

    server = threading.Thread(target=serve)
    server.start()
    done = trackbed(folder, "apply", *words)
    server.join()
    return done, allowed


def test_with_the_service_apply_lets_it_make_the_changes(tmp_path: Path) -> None:
    passes = [Progress(False, (OUTCOME,), CONDITIONS), Progress(True, (), CONDITIONS)]
    applied, allowed = applied_by(tmp_path, passes, "--allow", "vf-reset")
    assert allowed == [(Disruption.VF_RESET, "")]
    assert applied.returncode == 0
    assert f"applied     {OUTCOME.change}" in applied.stdout
    assert applied.stdout.splitlines()[-1] == "ready"


def test_an_apply_that_ends_before_its_first_pass_names_the_time_that_it_waits(tmp_path: Path) -> None:
    """What the command allows ends with the command, so the pass makes no further disruptive change."""
    requests = service(tmp_path)
    applied = trackbed(tmp_path, "apply", "--allow", "vf-reset", "--timeout", "0.5")
    assert requests.accept() and not requests.has_client()
    assert applied.returncode == 1
    assert "give a longer --timeout" in applied.stderr


def test_apply_fails_if_the_node_is_ready_only_by_the_former_spec(tmp_path: Path) -> None:
    deferred = evolve(OUTCOME, result="deferred", error="not allowed now", remedy="allow it")
    applied, _ = applied_by(tmp_path, [Progress(True, (deferred,), (WAITS,))])
    assert applied.returncode == 1
    assert applied.stdout.splitlines()[-1].startswith("ready, but a part")


def test_apply_for_one_nic_waits_for_its_users_and_for_no_other_nic(tmp_path: Path) -> None:
    used = evolve(OUTCOME, result="deferred", error="it would disturb pod team/a", remedy="move it away")
    other = evolve(used, change=evolve(OUTCOME.change, target="0000:41:00.0"))
    nics = (NicVerdict("rail0", "0000:21:00.0", True, True), NicVerdict("rail1", "0000:41:00.0", True, False, "NoLink"))
    passes = [Progress(False, (each, other), (WAITS,), nics=nics) for each in (used, OUTCOME)]
    applied, allowed = applied_by(tmp_path, passes, "--allow", "vf-reset", "--device", "rail0", "--timeout", "30")
    assert allowed == [(Disruption.VF_RESET, "rail0")]
    assert (applied.returncode, applied.stdout.splitlines()[-1]) == (0, "rail0 is ready")


def test_apply_is_refused_while_the_service_has_the_lock(tmp_path: Path) -> None:
    spec(tmp_path)
    lock.take(tmp_path)
    for arguments, reason in (
        (("--spec", str(tmp_path / "node.json")), "the service is running, and keeps"),
        ((), "and refuses this"),
    ):
        refused = failure(trackbed(tmp_path, "apply", *arguments))
        assert reason in refused
        assert "systemctl stop trackbed" in refused


def test_a_service_that_cannot_take_its_lock_leaves_no_report_behind(tmp_path: Path) -> None:
    report(tmp_path)
    (tmp_path / lock.NAME).mkdir()
    refused = trackbed(tmp_path, "run")
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1 and "make room" in refused.stderr
    assert not (tmp_path / names.REPORT).exists()
