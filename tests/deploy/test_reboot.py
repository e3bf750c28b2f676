"""Reboot requests, and the reboots that the policy allows."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from attrs import evolve
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import server

from tasks import reboot, reboot_policy
from tasks.common.commands import Commands, script
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import Connector, Node, OwnConnector, of

REQUESTS = of(NodeRebootRequests)
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
REASON = "kernel argument iommu=pt is not in effect"
# Before the reboot, and if it has not helped.
DUE, STILL = ["boot-1", f"boot boot-1 {REASON} "], ["boot-2", f"boot boot-1 {REASON} "]
ALLOWED = {"reboot": {"policy": "allow"}}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot_policy, "POLL_INTERVAL", 0)


class Turns(list[list[str]]):
    """An answer that changes each time it is read; the last one stays."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pop(0) if len(self) > 1 else self[0])


@operation()
def request_reboot(text: str) -> Commands:
    yield from reboot.request("boot", text)


@operation()
def need_no_reboot() -> Commands:
    yield from reboot.withdraw("boot")


def request() -> None:
    request_reboot(name="Request", text=REASON)


def test_a_new_request_is_written_and_announced_in_the_prepare_phase(node: Node) -> None:
    result = node.deploy(request, {REQUESTS: ["boot-1"]})
    assert result.flat == [str(script(reboot._REQUEST, reboot.FOLDER, "boot", REASON))]
    message = f"reboot wanted: boot: {REASON}; the host is not rebooted (reboot.policy is 'never')"
    assert sum(message in line for line in result.log) == 1


def test_a_request_is_written_once(node: Node) -> None:
    assert node.deploy(request, {REQUESTS: DUE}).did_nothing


def test_another_request_of_the_same_task_replaces_it(node: Node) -> None:
    result = node.deploy(request, {REQUESTS: ["boot-2", "boot boot-1 something else "]})
    assert result.flat == [str(script(reboot._REQUEST, reboot.FOLDER, "boot", REASON))]


def test_a_request_that_a_reboot_did_not_satisfy_fails_with_the_remedy(node: Node) -> None:
    refusal = node.deploy(request, {REQUESTS: STILL}, **ALLOWED).refusal
    assert refusal.startswith(f"refuse: boot: {REASON}: ") and "remove /var/lib/trackbed/reboots/boot" in refusal


@pytest.mark.parametrize(
    ("code", "requests", "said"),
    [
        (request, STILL, "this is still so after a reboot"),
        (reboot_policy.by_policy, DUE, "not rebooted (reboot.policy is 'never')"),
    ],
    ids=["unsatisfied", "due"],
)
def test_a_request_is_a_warning_unless_the_policy_allows_reboots(
    node: Node, code: Callable[[], None], requests: list[str], said: str
) -> None:
    result = node.deploy(code, {REQUESTS: requests})
    assert not result.failed
    assert result.flat == []
    assert any(said in line for line in result.log)


def test_a_host_that_deploys_itself_is_told_that_it_is_not_rebooted(node: Node) -> None:
    itself = evolve(node, data=ALLOWED, connector=OwnConnector)
    result = itself.deploy(request, {REQUESTS: ["boot-2"]})
    assert not any("the host is rebooted" in line for line in result.log)
    assert any("a host that deploys itself" in line for line in result.log)
    result = itself.deploy(request, {REQUESTS: STILL})
    assert not result.failed
    assert any("this is still so after a reboot" in line for line in result.log)


def test_a_satisfied_reboot_request_is_withdrawn(node: Node) -> None:
    result = node.deploy(lambda: need_no_reboot(name="Satisfied"), {REQUESTS: STILL})
    assert result.flat == ["rm -f /var/lib/trackbed/reboots/boot"]
    result = node.deploy(lambda: need_no_reboot(name="Satisfied"), {REQUESTS: ["boot-2", "ofed boot-1 else "]})
    assert result.flat == []


def test_without_a_request_nothing_happens(node: Node) -> None:
    result = node.deploy(reboot_policy.by_policy, {REQUESTS: ["boot-1"]}, **ALLOWED)
    assert result.planned == {"Reboot": False}
    assert result.flat == []


@pytest.mark.parametrize(("key", "reboots"), [({}, 0), ({"kernel": {"release": "6.1.0-10-amd64"}}, 1)])
def test_the_request_of_a_task_whose_key_is_gone_does_not_count(node: Node, key: dict[str, Any], reboots: int) -> None:
    due = ["boot-1", "kernel boot-1 kernel 6.1.0-10-amd64 is installed, and 6.1.0-9-amd64 runs "]
    later = {REQUESTS: Turns([due, ["boot-2"]]), BOOT_ID: ["boot-2"]}
    result = node.deploy(reboot_policy.by_policy, {REQUESTS: due}, later, **ALLOWED, **key)
    assert result.planned == {"Reboot": bool(reboots)}
    assert result.flat.count(str(script(reboot_policy._REBOOT))) == reboots


def test_a_rebooted_host_runs_the_deploy_again(node: Node) -> None:

    def code() -> None:
        server.shell(name="Driver", commands=["build-driver"], _env={"LEVEL": "1"})
        need_no_reboot(name="Satisfied")
        reboot_policy.by_policy()
        server.shell(name="After", commands=["after"])

    # Read in turn: by the first fact of the execute phase, before the reboot, and after it.
    later = {
        REQUESTS: Turns([["boot-1"], DUE, STILL, ["boot-2"]]),
        BOOT_ID: Turns([["boot-1"], [], [""], ["boot-2"]]),
        "status --json": ["ready"],
    }
    result = node.deploy(code, {REQUESTS: DUE}, later, **ALLOWED, ready_timeout=7)
    assert not result.failed
    assert later[BOOT_ID] == [["boot-2"]]
    assert result.commands["Reboot"] == [
        str(script(reboot_policy._REBOOT)),
        "refuse: boot-1",
        str(script(reboot_policy._SETTLED, "120")),
        "build-driver",
        "rm -f /var/lib/trackbed/reboots/boot",
    ]
    assert result.commands["After"] == ["after"]
    assert any(f"reboot wanted: boot: {REASON}; the host is rebooted" in line for line in result.log)


def test_a_new_request_after_each_reboot_ends_at_the_limit(node: Node) -> None:
    readings = [[f"boot-{n}", f"boot boot-{n} {n} is too many "] for n in range(1, 5)]
    later = {REQUESTS: Turns(readings), BOOT_ID: Turns([["boot-2"], ["boot-3"], ["boot-4"]])}
    result = node.deploy(reboot_policy.by_policy, {REQUESTS: readings[0]}, later, **ALLOWED)
    assert result.failed
    assert sum(command == str(script(reboot_policy._REBOOT)) for command in result.flat) == reboot_policy.MAX_REBOOTS
    assert result.flat[-1].startswith("refuse: rebooted 3 times in this deploy")
    assert result.flat[-1].endswith("boot: 4 is too many")


@pytest.mark.parametrize(
    "given", [{}, {"_retries": 2, "_retry_delay": 0}, {"_ignore_errors": True}, {"_continue_on_error": True}]
)
def test_a_reboot_that_fails_is_a_failure_whatever_the_inventory_says_of_errors(
    node: Node, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    node.data = {"reboot": {"policy": "allow", "timeout": 30}, **given}
    clock = itertools.count()
    monkeypatch.setattr("tasks.reboot_policy.time.monotonic", lambda: next(clock))
    result = node.deploy(reboot_policy.by_policy, {REQUESTS: DUE}, {REQUESTS: DUE, BOOT_ID: ["boot-1"]})
    assert result.failed
    assert sum(command == str(script(reboot_policy._REBOOT)) for command in result.flat) == 1
    assert not any("deferred" in line for line in result.log)
    assert any("did not shut down within 30 s" in line for line in result.errors)


class Silent(list[str]):
    """An answer that never comes: the host goes away after the connection and before its first command."""

    def __iter__(self) -> Iterator[Any]:
        gevent.sleep(600)
        return iter(())


def test_an_attempt_that_hangs_times_out_and_is_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot_policy, "ATTEMPT_TIMEOUT", 1)
    later = {REQUESTS: Turns([DUE, ["boot-2"]]), BOOT_ID: Turns([["boot-1"], Silent(), ["boot-2"]])}
    # Fails the test instead of hanging it.
    with gevent.Timeout(60):
        result = node.deploy(reboot_policy.by_policy, {REQUESTS: DUE}, later, **ALLOWED)
    assert not result.failed


def test_a_host_that_refuses_logins_while_it_boots_is_asked_again(node: Node) -> None:
    """pam_nologin(8): only root may log in then."""
    refusals = ["Authentication error (username=deployer)"] * 2

    class Booting(Connector):
        def connect(self) -> None:
            if self.state.is_executing and refusals:
                raise ConnectError(refusals.pop())

    later = {REQUESTS: Turns([DUE, ["boot-2"]]), BOOT_ID: ["boot-2"]}
    booting = evolve(node, data=ALLOWED, connector=Booting)
    assert not booting.deploy(reboot_policy.by_policy, {REQUESTS: DUE}, later).failed
    assert refusals == []


def test_the_program_that_gives_sudo_its_password_is_not_deleted_by_the_old_connection(node: Node) -> None:

    @operation()
    def answer_sudo() -> Commands:
        # As pyinfra's connectors do it for _sudo_password: connectors/util.py.
        host.connector_data["sudo_askpass_path__/tmp"] = "/tmp/pyinfra-sudo-askpass-1"
        yield from ()

    def code() -> None:
        answer_sudo(name="Password")
        reboot_policy.by_policy()

    later = {REQUESTS: Turns([DUE, ["boot-2"]]), BOOT_ID: ["boot-2"], "rm -f /tmp/pyinfra-sudo-askpass": Silent()}
    with gevent.Timeout(60):
        result = node.deploy(code, {REQUESTS: DUE}, later, **ALLOWED)
    assert not result.failed
    assert not any("askpass" in command for command in result.ran)


def test_the_old_connection_is_closed(node: Node) -> None:
    closed = []

    class WithClient(Connector):
        """Has a client as pyinfra's SSH connector has."""

        class client:
            @staticmethod
            def close() -> None:
                closed.append("closed")

    reachable = evolve(node, data=ALLOWED, connector=WithClient)
    later = {REQUESTS: Turns([DUE, ["boot-2"]]), BOOT_ID: ["boot-2"]}
    result = reachable.deploy(reboot_policy.by_policy, {REQUESTS: DUE}, later)
    assert not result.failed
    assert closed == ["closed"]
