from __future__ import annotations

import pytest
from attrs import evolve

from agent.report.records import Report, report_to_json
from agent.report.verdict import STALE
from tasks import readiness
from tests.deploy.conftest import STATUS, Answers, Node, status

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
    node.data = {"ready_timeout": 5}
    result = node.deploy(gated, {"trackbed wait": {"success": False, "stderr": reason}})
    assert result.failed
    assert result.flat == ["/usr/local/bin/trackbed wait --hash abc --timeout 5"]
    assert "NIC fabric0 is not there" in "\n".join(result.log)
