"""The reboots of a fleet: how many hosts are away at once, when they stop, and how they are resumed."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import define, field
from pyinfra.api import operations
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.operations import run_ops
from pyinfra.api.state import State, StateStage
from pyinfra.context import ctx_state
from pyinfra.operations import server

from tasks import disruption, reboot_policy
from tasks.common import failures
from tasks.common.turns import Turns, hosts_of
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import Connector, of, prepare, state_of

ATTEMPTS = 5
"""How often a booting host is tried in vain."""


@define
class Machines:
    """Simulated hosts. Those that are rebooted as the numbers in ``breaks`` do not come back.

    ``loses``: how many give no answer any more once another one has been rebooted: these are ``lost``.
    ``away``: those whose turn has not ended. ``at_once``: how many these were at each reboot.
    """

    breaks: tuple[int, ...] = ()
    broken: set[str] = field(factory=set)
    boots: dict[str, int] = field(factory=dict)
    down: dict[str, int] = field(factory=dict)
    loses: int = 0
    lost: set[str] = field(factory=set)
    away: set[str] = field(factory=set)
    at_once: list[int] = field(factory=list)

    def reboot(self, name: str) -> None:
        self.down[name] = ATTEMPTS
        self.away.add(name)
        self.at_once.append(len(self.away))
        if len(self.at_once) in self.breaks:
            self.broken.add(name)

    def connect(self, name: str) -> None:
        if name in self.down:
            self.down[name] -= 1
            if self.down[name] or name in self.broken:
                raise ConnectError("no route to host")
            del self.down[name]
            self.boots[name] = self.boots.get(name, 1) + 1


MACHINES: list[Machines] = []


class Simulated(Connector):
    """A host that needs a reboot until it has booted once more."""

    def connect(self) -> None:
        MACHINES[-1].connect(self.host.name)

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        machines, name = MACHINES[-1], self.host.name
        another = machines.boots and name not in machines.boots
        if another and len(machines.lost | {name}) <= machines.loses:
            machines.lost.add(name)
            raise failures.HostFailed
        boot = f"boot-{machines.boots.get(name, 1)}"
        if "systemctl reboot" in str(command):
            machines.reboot(name)
        if "last step" in str(command):
            machines.away.discard(name)
        self.data["fake_responses"] = {
            of(NodeRebootRequests): [boot, "boot boot-1 an argument is missing "], "cat /proc/sys/kernel": [boot],
        }  # fmt: skip
        return super().run_shell_command(command, *positional, **arguments)


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    clock = itertools.count()
    monkeypatch.setattr(reboot_policy, "POLL_INTERVAL", 0)
    monkeypatch.setattr("tasks.reboot_policy.time.monotonic", lambda: next(clock))
    MACHINES.append(Machines())
    yield MACHINES[-1]
    MACHINES.pop()


def deploy(groups: dict[str, tuple[list[str], dict[str, Any]]]) -> State:
    """Deploy to all hosts at once."""

    def steps() -> None:
        server.shell(name="Last step before the reboot", commands=["last step"])
        reboot_policy.by_policy()
        server.shell(name="After", commands=["after"])

    state = state_of((name for hosts, _ in groups.values() for name in hosts), **groups)
    state.config.PARALLEL = 64
    with ctx_state.use(state):
        for host in state.inventory:
            host.connector = Simulated(state, host)
        prepare(state, steps)
        state.set_stage(StateStage.Execute)
        run_ops(state)
    return state


def hosts(count: int, kind: str = "gpu") -> list[str]:
    return [f"@fake/{kind}-{number:02}" for number in range(1, count + 1)]


def group(names: list[str], **policy: Any) -> tuple[list[str], dict[str, Any]]:
    return names, {"reboot": {"policy": "allow", **policy}}


def test_of_64_hosts_at_most_8_are_away_and_two_failures_stop_the_rest_which_the_next_deploy_resumes(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = hosts(64)
    machines.breaks = (15, 25)
    with caplog.at_level(logging.INFO, "pyinfra"):
        first = deploy({"gpu": group(fleet, at_once="12%", stop_at=2, timeout=90)})
    assert machines.at_once[0] == 1
    assert max(machines.at_once) == 7
    assert {host.name for host in first.failed_hosts} == machines.broken
    done = set(machines.boots)
    assert 20 <= len(done) < 40
    names = ", ".join(sorted(machines.broken))
    rest = set(fleet) - done - machines.broken
    for name in rest:
        assert f"[{name}] deferred: reboot: reboots in its group failed: {names} " in caplog.text
        # Otherwise it is deployed.
        assert f"[{name}] Success" in caplog.text.rpartition("After")[2]

    # Somebody has switched the broken ones off and on.
    machines.boots |= dict.fromkeys(machines.broken, 2)
    machines.breaks, machines.broken, machines.down, machines.away = (), set(), {}, set()
    rebooted = len(machines.at_once)
    second = deploy({"gpu": group(fleet, at_once="12%", stop_at=2, timeout=90)})
    assert not second.failed_hosts
    assert machines.boots == dict.fromkeys(fleet, 2)
    assert len(machines.at_once) == rebooted + len(rest)
    assert max(machines.at_once) == 7


def test_the_first_host_is_alone_and_more_follow_once_others_have_succeeded(machines: Machines) -> None:
    deploy({"gpu": group(hosts(40), at_once="100%")})
    assert machines.at_once[0] == 1
    assert max(machines.at_once[1:5]) <= 4
    assert max(machines.at_once[5:15]) <= 10
    assert max(machines.at_once) > 10
    assert machines.boots == dict.fromkeys(hosts(40), 2)


def test_without_a_number_one_host_is_rebooted_after_the_other(machines: Machines) -> None:
    deploy({"gpu": group(hosts(5))})
    assert machines.at_once == [1] * 5


def test_a_host_that_goes_away_while_it_waits_for_its_turn_stops_no_other(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "_run_host_op_with_context"
    monkeypatch.setattr(operations, place, failures.running(getattr(operations, place)))
    machines.loses = 1
    state = deploy({"gpu": group(hosts(3))})
    assert {host.name for host in state.failed_hosts} == machines.lost
    assert machines.boots == dict.fromkeys({*hosts(3)} - machines.lost, 2)
    assert len(machines.lost) == 1


GPU, SPARK = hosts(10), hosts(10, "spark")
OWN: dict[str, Any] = {"reboot_overrides": {}}


@pytest.mark.parametrize(
    "groups",
    [
        {"gpu": group(GPU, at_once=2), "spark": group(SPARK, at_once=2)},
        {"every": group(GPU + SPARK), "gpu": (GPU, OWN), "spark": (SPARK, OWN)},
    ],
    ids=["a policy of its own", "a part of the policy"],
)
def test_a_group_has_a_number_and_a_threshold_of_its_own(machines: Machines, groups: dict[str, Any]) -> None:
    machines.broken = set(SPARK)
    [failed] = deploy(groups).failed_hosts
    assert failed.name in SPARK
    assert machines.boots == dict.fromkeys(GPU, 2)


def test_a_window_that_ends_while_a_host_waits_defers_its_reboot(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        disruption, "why_not", lambda level, of_nics: "the window has ended" if len(machines.boots) == 2 else ""
    )
    state = deploy({"gpu": group(hosts(5))})
    assert not state.failed_hosts
    assert len(machines.boots) == 2
    assert caplog.text.count("deferred: reboot: the window has ended") == 3


@pytest.mark.parametrize(("given", "count"), [(3, 3), ("25%", 16), ("1%", 1), ("100%", 64)])
def test_a_share_is_a_number_or_a_percentage(given: int | str, count: int) -> None:
    assert hosts_of(given, 64) == count


def test_a_canary_that_failed_is_followed_by_another_one() -> None:
    turns = Turns(100, 100, stop_at=2)
    assert turns.take("a") == "at once"
    turns.end("a", succeeded=False)
    assert turns.limit == 1
    assert turns.take("b") == "at once"
    turns.end("b", succeeded=False)
    assert turns.take("c") == "never"


def test_a_host_that_failed_is_still_away() -> None:
    turns = Turns(100, 1, stop_at=2)
    assert turns.take("a") == "at once"
    turns.end("a", succeeded=False)
    assert turns.take("b") == "never"
