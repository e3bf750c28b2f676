"""Wishes for a reboot, and what the policy makes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.operations import server

from tasks import reboot
from tasks.common.commands import Commands, script
from tests.deploy.conftest import Node

WISHES = "for task in *"
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
WISH = "kernel argument iommu=pt is not in effect"
BOOTED = "systemd-run --quiet --on-active=1s --timer-property=AccuracySec=100ms systemctl reboot"


class Turns(list[list[str]]):
    """An answer that is another one each time, the last of them for good."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pop(0) if len(self) > 1 else self[0])


@operation()
def wishing(text: str) -> Commands:
    yield from reboot.record("boot", text)


@operation()
def content() -> Commands:
    yield from reboot.withdraw("boot")


def wish() -> None:
    wishing(name="Wish", text=WISH)


def test_a_new_wish_is_written_and_told_before_anything_is_done(node: Node) -> None:
    result = node.deploy(wish, {WISHES: ["boot-1"]})
    assert result.flat == [str(script(reboot._RECORD, reboot.FOLDER, "boot", WISH))]
    told = f"reboot wanted: boot: {WISH}; the host is not rebooted (reboot.policy is 'never')"
    assert sum(told in line for line in result.log) == 1


def test_a_wish_is_written_once(node: Node) -> None:
    result = node.deploy(wish, {WISHES: ["boot-1", f"boot boot-1 {WISH} "]})
    assert not result.planned["Wish"]
    assert result.flat == []


def test_another_wish_of_the_same_task_takes_its_place(node: Node) -> None:
    result = node.deploy(wish, {WISHES: ["boot-2", "boot boot-1 something else "]})
    assert result.flat == [str(script(reboot._RECORD, reboot.FOLDER, "boot", WISH))]


def test_a_wish_that_a_reboot_did_not_meet_is_refused_with_the_remedy(node: Node) -> None:
    node.data = {"reboot": {"policy": "allow"}}
    result = node.deploy(wish, {WISHES: ["boot-2", f"boot boot-1 {WISH} "]})
    assert result.failed
    (said,) = result.flat
    assert said.startswith(
        f"refuse: boot: {WISH}: so it is after a reboot, too, and the host is not rebooted for it again"
    )
    assert "removing /var/lib/trackbed/reboots/boot on the host allows one more reboot" in said


def test_where_nothing_is_rebooted_an_unmet_wish_stops_nothing(node: Node) -> None:
    result = node.deploy(wish, {WISHES: ["boot-2", f"boot boot-1 {WISH} "]})
    assert not result.failed
    assert result.flat == []
    assert any("so it is after a reboot, too" in line for line in result.log)


def test_a_wish_that_is_met_is_withdrawn(node: Node) -> None:
    result = node.deploy(lambda: content(name="Content"), {WISHES: ["boot-2", f"boot boot-1 {WISH} "]})
    assert result.flat == ["rm -f /var/lib/trackbed/reboots/boot"]
    result = node.deploy(lambda: content(name="Content"), {WISHES: ["boot-2", "ofed boot-1 else "]})
    assert result.flat == []


def test_without_a_wish_nothing_happens(node: Node) -> None:
    node.data = {"reboot": {"policy": "allow"}}
    result = node.deploy(reboot.by_policy, {WISHES: ["boot-1"]})
    assert result.planned == {"Reboot": False}
    assert result.flat == []


def test_a_host_is_not_rebooted_unless_the_policy_allows_it(node: Node) -> None:
    result = node.deploy(reboot.by_policy, {WISHES: ["boot-1", f"boot boot-1 {WISH} "]})
    assert not result.failed
    assert result.flat == []
    assert any("the host is not rebooted (reboot.policy is 'never')" in line for line in result.log)


def test_a_rebooted_host_goes_through_the_deploy_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot, "PAUSE", 0)
    node.data = {"reboot": {"policy": "allow"}, "ready_timeout": 7}

    def code() -> None:
        server.shell(name="Driver", commands=["build-driver"], _env={"LEVEL": "1"})
        content(name="Content")
        reboot.by_policy()
        server.shell(name="After", commands=["after"])

    due = ["boot-1", f"boot boot-1 {WISH} "]
    # Asked in turn: by the first reading of each phase, before the reboot; then after it.
    later = {
        WISHES: Turns([["boot-1"], due, ["boot-2", due[1]], ["boot-2"]]),
        BOOT_ID: Turns([["boot-1"], [], ["boot-2"]]),
        "status --json": ["ready"],
    }
    result = node.deploy(code, {WISHES: due}, later)
    assert not result.failed
    assert result.commands["Reboot"] == [
        str(script(reboot._REBOOT)),
        "refuse: boot-1",
        str(script(reboot._SETTLED, "120")),
        "build-driver",
        "rm -f /var/lib/trackbed/reboots/boot",
    ]
    assert result.commands["After"] == ["after"]
    assert any(f"reboot wanted: boot: {WISH}; the host is rebooted" in line for line in result.log)


def test_a_wish_that_is_new_after_each_reboot_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot, "PAUSE", 0)
    node.data = {"reboot": {"policy": "allow"}}
    readings = [[f"boot-{n}", f"boot boot-{n} {n} is too many "] for n in range(1, 5)]
    later = {WISHES: Turns(readings), BOOT_ID: Turns([["boot-2"], ["boot-3"], ["boot-4"]])}
    result = node.deploy(reboot.by_policy, {WISHES: readings[0]}, later)
    assert result.failed
    assert sum(command == str(script(reboot._REBOOT)) for command in result.flat) == reboot.MOST
    assert result.flat[-1] == (
        "refuse: rebooted 3 times in this deploy, and still another reboot is wanted: boot: 4 is too many"
    )


class Silent(list[str]):
    """An answer that never comes: the host went away between a connection and its first command."""

    def __iter__(self) -> Iterator[Any]:
        gevent.sleep(600)
        return iter(())


def test_a_look_that_hangs_is_given_up_and_the_next_one_made(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot, "PAUSE", 0)
    monkeypatch.setattr(reboot, "PATIENCE", 0.05)
    node.data = {"reboot": {"policy": "allow"}}
    due = ["boot-1", f"boot boot-1 {WISH} "]
    later = {WISHES: Turns([due, ["boot-2"]]), BOOT_ID: Turns([["boot-1"], Silent(), ["boot-2"]])}
    began = time.monotonic()
    # So that a look without an end fails here, and does not hang.
    with gevent.Timeout(20):
        result = node.deploy(reboot.by_policy, {WISHES: due}, later)
    assert time.monotonic() - began < 15
    assert not result.failed


def test_a_host_that_does_not_come_back_fails(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot, "PAUSE", 0)
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("tasks.reboot.time.monotonic", lambda: next(clock))
    node.data = {"reboot": {"policy": "allow", "timeout": 60}}
    result = node.deploy(reboot.by_policy, {WISHES: ["boot-1", f"boot boot-1 {WISH} "], BOOT_ID: ["boot-1"]})
    assert result.failed
    assert any("the host did not go down within 60 s of its reboot" in line for line in result.log)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("allow", "is not an object with keys"),
        ({"policy": "always"}, 'policy: "always" is not one of never, allow'),
        ({"timeout": 5}, "timeout: 5 is out of range; give 30 to 7200 seconds"),
        ({"polcy": "never"}, "unknown key 'polcy'; did you mean 'policy'?"),
    ],
)
def test_bad_data(node: Node, given: Any, said: str) -> None:
    node.data = {"reboot": given}
    with pytest.raises(DeployError) as caught:
        node.deploy(reboot.by_policy, {})
    assert str(caught.value).startswith("@fake/node-a.reboot: ")
    assert said in str(caught.value)
