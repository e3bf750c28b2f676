"""Each step of the deploy that interrupts something obeys the policies and windows of `disruption`."""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from attrs import evolve, frozen
from pyinfra.context import host

from tasks import disruption, reboot_policy
from tasks.containers import container_engine
from tasks.containers.engine_files import ContainersRun
from tasks.drivers import erdma, gpu_driver
from tasks.host import limits
from tasks.reboot import NodeRebootRequests
from tasks.reboot_users import RebootUsers
from tests.deploy.conftest import DEBIAN, LOSERS, Answers, Connector, Node, of
from tests.deploy.containers import test_container_engine as engine
from tests.deploy.drivers import gpu_node, test_erdma, test_ofed

WHOLE_DAY = (("00:00", "12:00"), ("12:00", "00:00"))
RUNNING = of(ContainersRun)


def careful(level: str = "none") -> dict[str, Any]:
    """The data of a host where nothing may be disturbed, but in windows that are always open for this level."""
    windows = [{"start": start, "end": end, "allow": level} for start, end in WHOLE_DAY]
    return {"disruption": {"allow": "none", "windows": windows}}


@frozen
class Step:
    """A step of the deploy, as it is named if it is deferred, and a part of the command that makes it."""

    name: str
    level: str
    data: dict[str, Any]
    code: Callable[[], object]
    answers: Answers
    command: str


def boots() -> Answers:
    return {
        of(NodeRebootRequests): ["boot-1", "boot boot-1 an argument is missing "],
        "cat /proc/sys/kernel": ["boot-2"],
        of(RebootUsers): [],
    }


STEPS = [
    Step("reboot", "reboot", {"reboot": {"policy": "allow"}}, reboot_policy.by_policy, boots(), "systemctl reboot"),
    Step(
        "reload of OFED's modules", "vf-reset", {}, test_ofed.in_force,
        {**test_ofed.stack(loaded="CD"), test_ofed.USERS: [], **test_ofed.NO_REQUEST, **test_ofed.UNAME},
        test_ofed.RELOAD,
    ),
    Step(
        "reload of erdma", "vf-reset", {"erdma": test_erdma.DKMS}, erdma.install,
        {**test_erdma.there(), test_erdma.LOADED: ["mode N", "users 0"]}, "rmmod erdma",
    ),
    Step(
        "reload of the GPU driver", "vf-reset", {"gpu_driver": {"version": gpu_node.VERSION}}, gpu_driver.install,
        gpu_node.there(nvidia=gpu_node.STALE), "rmmod",
    ),
    Step(
        f"the GPU driver {gpu_node.VERSION}", "vf-reset", {"gpu_driver": {"version": gpu_node.VERSION}}, gpu_driver.install,
        {**gpu_node.there(), **gpu_node.debs("570.86.15-1"), gpu_node.IN_MEMORY: "570.86.15"}, "nvidia-open=580.95.05-",
    ),
    Step(
        "restart of containerd", "rebind", {"container_engine": {"name": "containerd"}}, container_engine.install,
        {**DEBIAN, "dpkg -l": engine.have("containerd"), engine.STATE: [engine.RUNNING],
         engine.DRY_RUN: ["ran", "change x"], RUNNING: "running"}, "sh apply",
    ),
]  # fmt: skip
each_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
BELOW = {"reboot": "vf-reset", "vf-reset": "link-flap", "rebind": "none"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot_policy, "POLL_INTERVAL", 0)


def makes(node: Node, step: Step, policy: dict[str, Any]) -> tuple[bool, str]:
    """Whether the deploy makes the step, and what it prints."""
    node.data = {**step.data, **policy}
    result = node.deploy(step.code, step.answers)
    return any(step.command in command for command in result.flat), "\n".join(result.log)


@each_step
def test_a_step_is_deferred_and_named_unless_its_level_is_allowed(node: Node, step: Step) -> None:
    for policy in (careful(), careful(BELOW[step.level]), {"disruption": {"allow": BELOW[step.level]}}):
        node.data = {**step.data, **policy}
        result = node.deploy(step.code, step.answers)
        assert not any(step.command in command for command in result.flat)
        assert not result.failed
        # It is said once, although pyinfra runs the code twice.
        (said,) = [line for line in result.log if "deferred: " in line]
        assert f"deferred: {step.name}: disruption allows " in said
        assert f" now, and this is {step.level}" in said


@each_step
def test_a_step_is_made_once_its_level_is_allowed_or_a_window_is_open(node: Node, step: Step) -> None:
    for policy in ({}, careful(step.level), {"disruption": {"allow": "reboot"}}):
        made, printed = makes(node, step, policy)
        assert made
        assert "deferred" not in printed


@pytest.mark.parametrize("step", STEPS[:3], ids=lambda step: step.name)
def test_the_policy_of_a_nic_binds_what_interrupts_nics(node: Node, step: Step) -> None:
    nics = [{"name": "rail0", "select": {"pci": "0000:18:00.0"}, "disruption": {"allow": "none"}}]
    made, printed = makes(node, step, {"nics": nics, "disruption": {"allow": "reboot"}})
    assert not made
    assert f"deferred: {step.name}: nics[0].disruption allows none now" in printed


def test_an_engine_without_containers_is_restarted(node: Node) -> None:
    made, _ = makes(node, evolve(STEPS[-1], answers={**STEPS[-1].answers, RUNNING: []}), careful())
    assert made


def test_a_gpu_driver_is_not_replaced_if_another_is_loaded_only_after_pyinfra_prepared(node: Node) -> None:
    """In a boot: programs of the new version would not work with the loaded modules, which may not be loaded again now."""
    step = STEPS[4]
    node.data = {**step.data, **careful()}
    result = node.deploy(step.code, {**step.answers, gpu_node.IN_MEMORY: []}, later=step.answers)
    (refused,) = result.flat
    assert refused.startswith("refuse: gpu_driver: ") and "not installed beside 570.86.15: " in refused


def test_another_window_is_named(node: Node) -> None:
    window = {"start": "22:00", "end": "22:01", "days": ["Sat"], "allow": "reboot"}
    windows = [window, {**window, "allow": "none"}]
    _, printed = makes(node, STEPS[0], {"disruption": {"allow": "none", "windows": windows}})
    assert " Sat 22:00-22:01 UTC (reboot)" in printed


def test_a_deferred_reload_requests_a_reboot_as_one_that_users_prevent(node: Node) -> None:
    node.data = careful()
    result = node.deploy(test_ofed.in_force, STEPS[1].answers)
    assert result.flat[-1].endswith(": rdma_rxe (AB)'")


def test_the_steps_are_named_at_the_end_with_their_hosts() -> None:
    deferred: dict[str, dict[str, str]] = {"b": {"reboot": "y"}, "a": {"reboot": "y"}, "c": {}, "d": {"reload": "x"}}
    two, one = disruption.summary(deferred)
    assert two == "deferred on 2 of 4 hosts: reboot: y: a, b" and " 1 of 4 hosts: reload: x: d" in one


class Changing(Connector):
    """A host that answers otherwise once the operations run."""

    before: ClassVar[Answers]
    later: ClassVar[Answers]

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        self.data["fake_responses"] = self.later if self.state.is_executing else self.before
        return super().run_shell_command(command, *positional, **arguments)


@pytest.mark.parametrize(
    ("code", "data", "before", "later"),
    [
        (limits.lift, {"limits": {}}, {LOSERS: ["cri-containerd-a.scope"]}, {}),
        (reboot_policy.by_policy, {**STEPS[0].data, **careful()}, boots(), {of(NodeRebootRequests): ["boot-1"]}),
    ],
)
def test_what_is_no_longer_deferred_when_the_operations_run_is_not_named_at_the_end(
    node: Node, code: Callable[[], object], data: dict[str, Any], before: Answers, later: Answers
) -> None:
    def with_summary() -> None:
        host.state.add_callback_handler(disruption.Summary())  # type: ignore[no-untyped-call]
        code()

    Changing.before, Changing.later = before, later
    result = evolve(node, data=data, connector=Changing).deploy(with_summary, {})
    assert any("deferred: " in line for line in result.log)
    assert not any("deferred on " in line for line in result.log)


def test_the_summary_comes_with_the_last_operation(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    def code() -> None:
        host.state.add_callback_handler(disruption.Summary())  # type: ignore[no-untyped-call]
        reboot_policy.by_policy()

    result = node.deploy(code, STEPS[0].answers, **STEPS[0].data, **careful())
    assert result.log[-1].startswith("deferred on 1 of 1 hosts: reboot: ")
    assert caplog.records[-1].levelno == logging.WARNING
