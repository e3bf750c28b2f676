"""Which spec is in force: restarts, refusals and failures, with whole passes on the simulated kernel."""

import errno
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import define, evolve

from agent.machine import Files
from agent.report.verdict import is_ready
from agent.service.spec_in_force import OBSERVED, TRIAL, SpecInForce
from agent.spec.node import NodeSpec, from_mapping, to_json
from tests.sim.kernel import Kernel
from tests.sim.refusing import refusing
from tests.sim.service.specs import PF, Agent, refuse_five, spec


@pytest.fixture
def fresh(tmp_path: Path) -> Agent:
    kernel = Kernel()
    kernel.add_nic(PF, "enp33s0", "02:00:00:00:01:00")
    return Agent(tmp_path, kernel)


@pytest.fixture
def agent(fresh: Agent) -> Agent:
    """One that has verified a spec of three VFs."""
    fresh.give(spec(3))
    fresh.look()
    return fresh


def test_a_verified_spec_writes_nothing_into_the_journal(fresh: Agent, capsys: pytest.CaptureFixture[str]) -> None:
    fresh.give(spec(3))
    fresh.look()
    assert fresh.in_force.state() == "verified"
    assert not capsys.readouterr().err


def test_an_unreadable_device_during_the_check_of_a_new_spec_keeps_the_old_one(agent: Agent) -> None:
    agent.kernel.unreadable.add(f"/sys/bus/pci/devices/{PF}/numa_node")
    agent.give(spec(5))
    assert agent.in_force.spec == spec(3)
    assert "Input/output error" in agent.in_force.refusal
    agent.kernel.unreadable.clear()
    agent.read()
    assert (agent.in_force.spec, agent.in_force.refusal) == (spec(5), "")


def test_damaged_files_are_refused(agent: Agent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.file.write_bytes(b"\xff\xfe\x00")
    agent.start()
    assert agent.in_force.spec == spec(3)
    assert f"{agent.file}: not UTF-8 text" in agent.in_force.refusal
    verified = agent.folder / "state" / "verified.json"
    verified.write_text("{")
    agent.reboot()
    assert str(verified) in capsys.readouterr().err
    verified.write_bytes(b"\xff\xfe\x00")
    agent.reboot()
    assert str(verified) in capsys.readouterr().err
    assert agent.in_force.spec is None


@pytest.mark.parametrize("text", ["{", to_json(spec(8)), None], ids=["unparsable", "impossible", "absent"])
def test_after_a_restart_a_refused_file_leaves_the_last_verified_spec_in_force(agent: Agent, text: str | None) -> None:
    agent.file.unlink() if text is None else agent.file.write_text(text)
    agent.reboot()
    assert agent.in_force.spec == spec(3)
    assert agent.in_force.refusal
    assert is_ready(agent.look().conditions)


def test_without_a_verified_spec_the_first_is_in_force_even_if_it_does_not_fit(fresh: Agent) -> None:
    fresh.give(spec(8))
    assert not is_ready(fresh.try_out().conditions)
    assert (fresh.in_force.spec, fresh.in_force.refusal) == (spec(8), "")


def test_a_new_spec_is_refused_for_what_the_host_lacks_unless_the_spec_before_lacks_it_too(fresh: Agent) -> None:
    def wanting(vfs: int, pages: int) -> NodeSpec:
        nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": vfs}}
        return from_mapping({"node_name": "n1", "nics": [nic], "hugepages": [{"size": "16G", "count": pages}]})

    for given in (wanting(3, 1), wanting(4, 1)):
        fresh.give(given)
        assert (fresh.in_force.spec, fresh.in_force.refusal) == (given, "")
    fresh.give(wanting(4, 2))
    assert fresh.in_force.spec == wanting(4, 1)
    assert fresh.in_force.refusal.startswith("hugepages host 16G: none -> 2: ")


def test_a_state_folder_that_cannot_be_written_does_not_stop_the_agent(fresh: Agent) -> None:
    (fresh.folder / "state").rmdir()
    fresh.give(spec(3))
    assert is_ready(fresh.look().conditions)


def test_a_verified_spec_that_could_not_be_kept_is_kept_once_the_disk_has_room(
    fresh: Agent, capfd: pytest.CaptureFixture[str]
) -> None:
    state = fresh.folder / "state"
    state.rmdir()
    fresh.give(spec(3))
    for _ in range(2):
        assert is_ready(fresh.look().conditions)
    assert capfd.readouterr().err.count("verified.json cannot be written: ") == 1
    state.mkdir()
    fresh.look()
    fresh.file.write_text("no spec")
    fresh.reboot()
    assert fresh.in_force.spec == spec(3)


@pytest.mark.parametrize(
    "content",
    [
        b'{"node_name": "n1", "sysctls": {"vm.swappiness": "1\\ud800"}}',
        b'{"node_name": "n1", "sysctls": {"vm.swappiness\\udfff": "1"}}',
        b'{"node_name": "n1", "readiness": {"silenced": {"carrier": {"until": "2026-12-01", "reason": "\\ud83d"}}}}',
        b'{"node_name": "n1\xff"}',
        b"[" * 100_000,
        b" " * (5 << 20),
    ],
    ids=["value", "key", "reason", "no UTF-8", "deep", "large"],
)
def test_a_file_that_cannot_be_written_again_is_refused_and_the_spec_before_kept(agent: Agent, content: bytes) -> None:
    agent.file.write_bytes(content)
    agent.read()
    assert agent.in_force.spec == spec(3)
    assert str(agent.file) in agent.in_force.refusal
    agent.in_force.refusal.encode()
    assert is_ready(agent.look().conditions)


def test_a_device_that_cannot_be_read_is_no_fault_of_a_new_spec(agent: Agent) -> None:
    agent.give(spec(4))
    agent.kernel.unreadable.add("/sys/class/net/enp33s0/queues/rx-0/rps_cpus")
    result = agent.look()
    assert not is_ready(result.conditions)
    assert not agent.in_force.gives_up(result, agent.now + TRIAL)
    assert agent.in_force.state() == "kept"
    agent.kernel.unreadable.clear()
    assert is_ready(agent.look().conditions)
    assert agent.in_force.spec == spec(4)


def test_a_new_spec_is_tried_for_half_a_minute_however_often_the_file_is_read(agent: Agent) -> None:
    agent.kernel.fault = refuse_five
    agent.give(spec(5))
    for _ in range(2):
        agent.now += TRIAL / 2 - 0.25
        agent.read()
        assert not agent.in_force.gives_up(agent.look(), agent.now)
        assert agent.in_force.spec == spec(5)
    result = agent.look()
    agent.now += 0.5
    assert agent.in_force.gives_up(result, agent.now)
    assert agent.in_force.spec == spec(3)


def test_the_trial_of_a_spec_begins_again_with_another_worker(agent: Agent) -> None:
    """The new worker has not tried the spec yet."""
    agent.kernel.fault = refuse_five
    agent.give(spec(5))
    agent.now += TRIAL
    agent.start()
    assert agent.in_force.trial_left(agent.now) == TRIAL
    agent.look()
    assert agent.in_force.spec == spec(5)


@pytest.mark.parametrize("in_force", [True, False])
def test_a_spec_that_is_given_up_for_crashes_says_how_the_workers_crashed(agent: Agent, in_force: bool) -> None:
    """The spec may also crash the workers before it is in force."""
    if in_force:
        agent.give(spec(5))
    else:
        agent.file.write_text(to_json(spec(5)))
    agent.start(crashed="the worker ended with status 3, 3 times in a row")
    assert agent.in_force.spec == spec(3)
    assert "status 3, 3 times in a row" in agent.in_force.refusal


def test_a_spec_that_is_refused_has_a_line_for_each_reason(agent: Agent) -> None:
    nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": 8}}
    pages = [{"size": "16G", "count": 1}]
    agent.give(from_mapping({"node_name": "n1", "nics": [nic], "hugepages": pages}))
    assert {line.split()[0] for line in agent.in_force.refusal.splitlines()} == {"vfs", "hugepages"}


def one(count: int, **more: object) -> NodeSpec:
    nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": count}, **more}
    return from_mapping({"node_name": "n1", "nics": [nic]})


def test_a_failure_of_a_device_whose_changes_wait_for_users_is_no_fault_of_a_new_spec(agent: Agent) -> None:
    """What fails may need what waits."""
    agent.kernel.routed.add("enp33s0")
    agent.kernel.fault = refusing(errno.EIO, "txqueuelen")
    agent.give(one(5, txqueuelen=500))
    results = {outcome.result for outcome in agent.try_out().outcomes}
    assert results >= {"deferred", "failed"}
    assert (agent.in_force.spec, agent.in_force.refusal) == (one(5, txqueuelen=500), "")


def observing(count: int) -> NodeSpec:
    return evolve(spec(count), mode="observe")


@pytest.mark.parametrize("crashed", [None, "the worker died, 3 times in a row"])
def test_in_mode_observe_a_crash_brings_no_verified_spec_back(agent: Agent, crashed: str | None) -> None:
    """The agent would write to a node that it should only look at."""
    agent.give(observing(5))
    assert not agent.in_force.gives_up_crashing("a fault")
    agent.in_force = SpecInForce(agent.folder / "state", agent.folder / "run", crashed=crashed)
    agent.read()
    assert (agent.in_force.spec, agent.in_force.refusal) == (observing(5), "")


@pytest.mark.parametrize("text", ["{", None], ids=["unparsable", "absent"])
def test_in_mode_observe_a_refused_file_leaves_the_agent_observing(agent: Agent, text: str | None) -> None:
    agent.give(observing(5))
    agent.look()
    agent.file.unlink() if text is None else agent.file.write_text(text)
    agent.reboot()
    assert agent.in_force.spec == observing(5)
    agent.give(spec(4))
    agent.look()
    agent.file.unlink()
    agent.reboot()
    assert agent.in_force.spec == spec(4)


def test_until_a_spec_is_verified_after_the_observing_no_older_one_comes_back(agent: Agent) -> None:
    """The deploy returns to the observed spec, too, if it rolls the agent back."""
    agent.give(observing(4))
    agent.kernel.fault = refuse_five
    agent.give(spec(5))
    assert not is_ready(agent.try_out().conditions)
    assert not agent.in_force.gives_up_crashing("a fault")
    assert (agent.in_force.spec, agent.in_force.refusal) == (spec(5), "")
    agent.file.unlink()
    agent.reboot()
    assert agent.in_force.spec == observing(4)


def test_a_spec_of_which_a_part_waits_after_the_observing_is_no_reason_to_forget_the_observed_one(agent: Agent) -> None:
    agent.give(observing(4))
    agent.kernel.routed.add("enp33s0")
    agent.give(one(5, required=False))
    assert is_ready(agent.look().conditions)
    agent.file.unlink()
    agent.reboot()
    assert agent.in_force.spec == observing(4)


def test_a_spec_of_mode_observe_comes_into_force_although_the_node_does_not_fit_it(agent: Agent) -> None:
    """The node may be broken, and somebody wants the agent to leave it alone."""
    agent.give(observing(8))
    assert (agent.in_force.spec, agent.in_force.refusal) == (observing(8), "")
    assert is_ready(agent.look().conditions)
    assert agent.vfs() == "3"


def test_an_observed_spec_that_cannot_be_used_makes_the_agent_write_by_no_other(agent: Agent) -> None:
    """Another version of the agent has written it."""
    agent.give(observing(5))
    for file in (agent.file, agent.folder / "state" / "observed.json"):
        file.write_text('{"node_name": "n1", "key_of_another_version": 1}')
    agent.reboot()
    assert agent.in_force.spec is None


def test_an_observed_spec_that_cannot_be_used_is_removed_once_another_is_in_force(agent: Agent) -> None:
    """Else the agent would have no verified spec after each restart."""
    (agent.folder / "state" / OBSERVED).write_text('{"node_name": "n1", "key_of_another_version": 1}')
    agent.start()
    assert is_ready(agent.look().conditions)
    agent.file.unlink()
    agent.start()
    assert agent.in_force.spec == spec(3)


def test_a_state_folder_that_cannot_be_read_does_not_stop_the_agent(fresh: Agent) -> None:
    fresh.in_force = SpecInForce(fresh.folder / ("s" * 300), fresh.folder / "run")
    fresh.give(spec(3))
    assert is_ready(fresh.look().conditions)


@define
class Broken:
    """Files; reading one of them fails because of a bug in the agent."""

    kernel: Kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel.files, name)

    def read(self, path: str) -> str:
        if path.endswith("sriov_totalvfs"):
            raise KeyError("a fault")
        return self.kernel.files.read(path)


def test_a_spec_whose_check_crashes_is_refused(agent: Agent) -> None:
    agent.file.write_text(to_json(spec(4)))
    machine = evolve(agent.kernel.machine(), files=cast(Files, Broken(agent.kernel)))
    agent.in_force.reload(machine, agent.file, agent.now, asked=True, last=agent.last)
    assert agent.in_force.spec == spec(3)
    assert "KeyError: 'a fault'" in agent.in_force.refusal
