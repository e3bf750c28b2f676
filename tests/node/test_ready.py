"""The agent runs, and says that the node is ready for the spec that is on it. The one group that asks the agent itself."""

import json

import pytest

from agent.spec.node import spec_hash
from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.ready

UNIT = "trackbed.service"


def test_unit_runs_and_starts_at_boot(node: Node) -> None:
    shown = node.run('systemctl show --property=ActiveState,UnitFileState "$1"', UNIT)
    properties = dict(line.split("=", 1) for line in shown.splitlines())
    findings = [
        equal(UNIT, "ActiveState", "active", properties["ActiveState"]),
        equal(UNIT, "UnitFileState", "enabled", properties["UnitFileState"]),
    ]
    judge(node, findings, "")


def test_node_is_ready(node: Node) -> None:
    done = node.host.run("trackbed status")
    judge(node, [Finding("trackbed status", "answer", "ready", done.stderr.strip() or done.rc, done.rc == 0)], "")


def test_report_is_of_the_spec_on_the_node(node: Node) -> None:
    report = json.loads(node.run("trackbed status --json || true"))
    findings = [
        equal("report", "spec_hash", spec_hash(node.spec), report["spec_hash"]),
        equal("report", "up_to_date", True, report["up_to_date"]),
        equal("report", "node_name", node.spec.node_name, report["node_name"]),
    ]
    judge(node, findings, "")
