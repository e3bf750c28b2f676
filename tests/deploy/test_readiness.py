from typing import Any

import pytest
from attrs import evolve

from agent.report.records import Change, Condition, Disruption, Outcome, Report, report_to_json
from agent.report.verdict import STALE
from tasks import readiness
from tests.deploy.conftest import STATUS, Answers, Connector, Node, status

REPORT = Report("node-a", "abc", "boot", "1-a", ready=True, up_to_date=True)


def gated() -> None:
    readiness.wait(version="1-a", spec_hash="abc")


def test_a_ready_node_is_not_waited_for(node: Node) -> None:
    result = node.deploy(gated, status(REPORT))
    assert result.planned == {"Ready": False}
    assert result.flat == []


@pytest.mark.parametrize(
    "answers",
    [
        {},
        status(evolve(REPORT, ready=False)),
        status(evolve(REPORT, spec_hash="older")),
        status(evolve(REPORT, agent_version="0-z")),
        {STATUS: ["another-boot 0.0", report_to_json(REPORT).strip()]},
        {STATUS: [f"boot {STALE + 1}", report_to_json(REPORT).strip()]},
    ],
)
def test_the_deploy_waits_until_the_node_is_ready(node: Node, answers: Answers) -> None:
    assert node.deploy(gated, answers).flat == ["/usr/local/bin/trackbed wait --hash abc --timeout 120"]


def test_a_node_that_does_not_become_ready_fails_with_its_reasons(node: Node) -> None:
    reason = "trackbed: not ready after 5 s\nNicsPresent is False (NicMissing): NIC fabric0 is not there"
    result = node.deploy(gated, {"trackbed wait": {"success": False, "stderr": reason}}, ready_timeout=5)
    assert result.failed
    assert result.flat == ["/usr/local/bin/trackbed wait --hash abc --timeout 5"]
    assert "NIC fabric0 is not there" in "\n".join(result.log)


VFS = Change("vfs", "0000:21:00.0", "count", 4, 5, Disruption.VF_RESET, ("pod default/job (0000:21:00.0#0)",))
WAITS = (Outcome(VFS, "deferred", "in use: pod default/job"), Outcome(VFS, "applied"))
DEFERRED = evolve(
    REPORT, up_to_date=False, outcomes=WAITS, conditions=(Condition("UpToDate", "False", "Deferred", severity="warn"),)
)
NAMED = "deferred: vfs 0000:21:00.0 count: 4 -> 5: in use: pod default/job"


class Waits(Connector):
    """That of a node that is ready, but for what waits, once somebody has waited for it."""

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        if "trackbed wait" in str(command):
            self.data["fake_responses"] = {**self.data["fake_responses"], **status(DEFERRED)}
        return super().run_shell_command(command, *positional, **arguments)


@pytest.mark.parametrize("before", [DEFERRED, evolve(REPORT, spec_hash="older")])
def test_changes_that_the_agent_defers_are_named_and_the_deploy_succeeds(node: Node, before: Report) -> None:
    result = evolve(node, connector=Waits).deploy(gated, status(before))
    assert not result.failed
    assert any(NAMED in line for line in result.log)


def test_what_waits_since_the_mode_is_observe_is_not_named(node: Node) -> None:
    result = node.deploy(gated, status(evolve(DEFERRED, up_to_date=True)))
    assert not any("deferred" in line for line in result.log)
