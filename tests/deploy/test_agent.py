import json
from hashlib import sha256

import pytest
from attrs import evolve

from agent.report.records import Report
from tasks import agent, readiness
from tasks.agent import AgentService
from tasks.common import archive
from tasks.common.commands import script
from tasks.common.status import COMMAND
from tasks.common.systemd_reload import RELOAD
from tests.deploy.conftest import (
    DEBIAN,
    LOSERS,
    PYTHON,
    SERVICE,
    STATUS,
    VERSIONS,
    Answers,
    Node,
    file_answers,
    of,
    status,
)

OLD = "0.0.9-000000000000"
NEW = archive.version("x86_64")
HASH = "0123456789abcdef"
BASE = {**DEBIAN, "uname -m": "x86_64", PYTHON: "/usr/bin/python3"}
TEXT = agent.launcher_text("/usr/bin/python3")
UNIT = agent.UNIT_TEMPLATE.read_text().replace("{{ command }}", COMMAND)
REPORT = Report("node-a", HASH, "boot", NEW, ready=True, up_to_date=True)


def versions(current: str | None, *staged: str, previous: str | None = None) -> Answers:
    links = [f"{name} {version}" for name, version in (("current", current), ("previous", previous)) if version]
    return {VERSIONS: [*links, *(f"staged {version}" for version in staged)]}


def service(version: str | None = None, **properties: str) -> Answers:
    shown = {"ActiveState": "active", "UnitFileState": "enabled", of(AgentService): "no", **properties}
    command = [f"Command=/usr/bin/python3 -I /opt/trackbed/versions/{version} run "] if version else []
    return {SERVICE: [*(f"{name}={value}" for name, value in shown.items()), *command]}


ABSENT = {SERVICE: ["ActiveState=inactive", "UnitFileState=", "NeedDaemonReload=no"]}
FILES = {**file_answers(COMMAND, TEXT, "-rwxr-xr-x"), **file_answers(agent.UNIT_FILE, UNIT)}
SETTLED = {**BASE, **FILES, **versions(NEW, NEW), **service(NEW), **status(REPORT)}


def control(verb: str) -> str:
    return str(script(agent._CONTROL, verb, agent.UNIT, agent.BASE))


def stage() -> None:
    agent.stage(version=agent.release())


def activate() -> None:
    agent.activate(version=agent.release(), spec_hash=HASH)


def test_a_fresh_node_gets_the_archive(node: Node) -> None:
    result = node.deploy(stage, BASE)
    made, uploaded, unpacked = result.commands["Agent | Stage"]
    assert made.endswith("sh /opt/trackbed/versions")
    assert uploaded == f"upload /opt/trackbed/{NEW}.tar.gz"
    checksum = sha256(archive.build("x86_64").read_bytes()).hexdigest()
    assert unpacked.endswith(f"sh /opt/trackbed/{NEW}.tar.gz /opt/trackbed/versions {NEW} /usr/bin/python3 {checksum}")
    assert result.uploads[f"/opt/trackbed/{NEW}.tar.gz"] == archive.build("x86_64").read_bytes()


def test_a_version_that_is_staged_is_not_staged_again(node: Node) -> None:
    result = node.deploy(stage, {**BASE, **versions(OLD, OLD, NEW)})
    assert result.planned == {"Agent | Stage": False}
    assert result.flat == []


def test_the_python_that_this_deploy_installed_unpacks_the_archive(node: Node) -> None:
    before = {**BASE, PYTHON: ""}
    result = node.deploy(stage, before, later={**BASE, PYTHON: "/usr/bin/python3.11"})
    assert f"{NEW} /usr/bin/python3.11 " in result.flat[-1]


def test_a_node_without_python_is_refused(node: Node) -> None:
    result = node.deploy(stage, {**BASE, PYTHON: ""})
    assert result.failed
    assert not result.uploads
    assert "(/usr/bin/python3 or /usr/bin/python3.11)" in "\n".join(result.log)


def test_a_fresh_node_gets_version_command_and_unit(node: Node) -> None:
    result = node.deploy(activate, {**BASE, **versions(None, NEW), **ABSENT})
    assert result.commands["Agent | Switch"][0].endswith(f"sh /opt/trackbed {NEW} ''")
    assert result.uploads == {COMMAND: TEXT.encode(), agent.UNIT_FILE: UNIT.encode()}
    assert f"chmod 755 {COMMAND}" in result.flat
    assert result.commands["Agent | Service"] == [RELOADS, ENABLES, control("start")]


TRIAL = str(agent._restart_on_trial(readiness.TIMEOUT.default))
RELOADS, ENABLES = str(script(RELOAD)), "systemctl enable trackbed.service"
REPORTS = "systemctl reload trackbed.service"
NEW_UNIT = (f"upload {agent.UNIT_FILE}", f"chmod 644 {agent.UNIT_FILE}")


@pytest.mark.parametrize(
    ("differs", "commands"),
    [
        ({}, []),
        ({**service(OLD), **status(evolve(REPORT, ready=False))}, [control("restart")]),
        (service(OLD), [TRIAL]),
        (file_answers(agent.UNIT_FILE, "[Unit]"), [*NEW_UNIT, RELOADS, control("restart")]),
        (service(NEW, NeedDaemonReload="yes"), [RELOADS, control("restart")]),
        (service(None, ActiveState="failed", UnitFileState="disabled"), [RELOADS, ENABLES, control("start")]),
        (status(evolve(REPORT, spec_hash="another")), [REPORTS]),
        ({STATUS: ["boot 0.0", json.dumps({"ready": True})]}, [REPORTS]),
    ],
    ids=[
        *("nothing", "the version that runs, and it is not ready", "the version that runs", "the unit"),
        *("what systemd has read of the unit", "it has stopped and is disabled", "the spec", "the report's format"),
    ],
)
def test_an_agent_that_differs_is_restarted_or_reloaded(node: Node, differs: Answers, commands: list[str]) -> None:
    result = node.deploy(activate, {**SETTLED, **differs})
    assert result.flat == commands
    assert any(result.planned.values()) is bool(commands)


def test_a_new_version_is_restarted_on_trial(node: Node) -> None:
    result = node.deploy(activate, {**SETTLED, **versions(OLD, OLD, NEW), **service(OLD)})
    assert result.flat[0].endswith(f"sh /opt/trackbed {NEW} {OLD}")
    assert result.flat[1:] == [TRIAL]


def test_a_changed_unit_is_refused_while_its_reload_would_take_gpus_from_containers(node: Node) -> None:
    losers = {LOSERS: ["docker-a.scope"]}
    result = node.deploy(activate, {**SETTLED, **losers, **file_answers(agent.UNIT_FILE, "[Unit]")})
    assert result.failed
    assert "running containers (docker-a.scope)" in result.errors[0]
    assert not any("systemctl" in command for command in result.commands["Agent | Service"])
    assert not node.deploy(activate, {**SETTLED, **losers}).failed


def test_older_versions_are_removed(node: Node) -> None:
    result = node.deploy(activate, {**SETTLED, **versions(NEW, NEW, OLD, "0.0.8-0", previous=OLD)})
    assert result.flat[0].endswith(f"sh /opt/trackbed {NEW} {NEW}")
    assert len(result.flat) == 1
