import json

import pytest
from attrs import evolve
from pyinfra.api.exceptions import DeployError

from agent.report.records import Change, Disruption, to_plain
from agent.spec.node import Irqs, NodeSpec, Rps, parse, to_json
from tasks import node_spec
from tasks.common.status import SPEC
from tests.deploy.conftest import PLAN, PYTHON, Answers, Node, Result, file_answers

NIC = {"name": "fabric0", "select": {"pci": "0000:01:00.0"}, "vfs": {"count": 4}}
WANTED = NodeSpec("node-a", rps=Rps(enable=False))
TEXT = to_json(WANTED)
NEW = "/etc/trackbed/.node.json.new"
COUNT = Change("vfs", "0000:01:00.0", "count", 2, 4, Disruption.VF_RESET, ("pod ml/train-0",))
MTU = Change("links", "0000:01:00.0", "mtu", 1500, 9000)
STUCK = Change(
    "vfs", "0000:02:00.0", "count", 0, 9, blocker="it offers 7 VFs at most", remedy="lower count to 7 or less"
)
ABSENT = {f"test -e {SPEC} &&": [f"__pyinfra_missing_{SPEC}"], PYTHON: "/usr/bin/python3"}


def plan(*changes: Change, errors: tuple[str, ...] = (), version: str = "2-b") -> Answers:
    document = json.dumps({"spec_hash": "x", "changes": to_plain(changes), "errors": errors})
    return {PLAN: [version, document, "", "1" if errors else "2" if changes else "0"]}


def plans(result: Result) -> list[str]:
    return [line.partition(" plan: ")[2] for line in result.log if " plan: " in line]


def deliver() -> None:
    node_spec.deliver(spec=WANTED, version="2-b")


# --- host data -> NodeSpec -----------------------------------------------------------------------------------


def test_the_name_is_the_hosts_unless_it_is_given() -> None:
    assert node_spec.node_spec({}, "gpu-01.example.net").node_name == "gpu-01.example.net"
    assert node_spec.node_spec({"node_name": "10.0.0.1"}, "gpu-01").node_name == "10.0.0.1"


def test_only_the_spec_s_keys_are_used() -> None:
    data = {
        "nics": [NIC],
        "irqs": {"exclude_cpus": "0-1"},
        "rps": None,
        "ready_timeout": 60,
        "kernel_modules": [],
        "ssh_user": "root",
        "_sudo": True,
        "site_rack": "b7",
    }
    spec = node_spec.node_spec(data, "gpu-01")
    assert spec.irqs == Irqs(exclude_cpus="0-1")
    assert spec.nics[0].name == "fabric0"
    assert parse(to_json(spec)) == spec


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(DeployError, match="gpu-01: the key 5 is not a string"):
        node_spec.node_spec({5: 1}, "gpu-01")  # type: ignore[dict-item]


def test_pyinfra_s_arguments_and_names_private_to_a_file_of_group_data_are_no_faults() -> None:
    given = {"_sudo": True, "_sudo_password": None, "_env": {"A": "b"}, "_RAILS": (1, 2), "_nics": len, "_timeout": 30}
    own = {"_password": "hunter2", "_dir": "/srv", "_shell": "/bin/sh"}
    assert node_spec.node_spec({**given, **own}, "gpu-01") == NodeSpec("gpu-01")


# --- plan and write ------------------------------------------------------------------------------------------


def test_a_first_spec_is_planned_and_written(node: Node) -> None:
    result = node.deploy(deliver, {**ABSENT, **plan(COUNT, MTU)})
    _, uploaded, replaced = result.flat
    assert uploaded == f"upload {NEW}"
    assert replaced.endswith(f"sh put {SPEC} -- {SPEC}")
    assert result.uploads == {NEW: TEXT.encode()}
    assert set(result.inputs) == {TEXT}


def test_a_list_of_priorities_as_mlnx_qos_has_it_is_a_warning(node: Node) -> None:
    spec = node_spec.node_spec({"nics": [{**NIC, "roce": {"pfc": "0,0,0,1,0,0,0,0", "ecn": "3,5"}}]}, "gpu-01")
    result = node.deploy(lambda: node_spec.deliver(spec=spec, version="2-b"), {**ABSENT, **plan(MTU)})
    said = "\n".join(result.log)
    assert "nics[0].roce.pfc: '0,0,0,1,0,0,0,0' names the priorities 0-1; if that is meant, name each once" in said
    assert "roce.ecn" not in said


def test_the_plan_is_printed_once(node: Node) -> None:
    count, mtu, total = plans(node.deploy(deliver, {**ABSENT, **plan(COUNT, MTU)}))
    assert (count.split("  ")[:2], mtu) == ([str(COUNT), "[vf-reset]"], str(MTU))
    assert all(f"disturbs {COUNT.affected[0]}" in line for line in (count, total))


def test_an_unchanged_spec_is_not_written(node: Node) -> None:
    result = node.deploy(deliver, {**file_answers(SPEC, TEXT), **plan()})
    assert result.planned == {"Spec | Plan and write": False}
    assert result.flat == []
    assert plans(result) == ["nothing to change"]


def test_the_first_deploy_plans_once_the_agent_is_staged(node: Node) -> None:
    result = node.deploy(deliver, ABSENT, later={**ABSENT, **plan(MTU)})
    assert result.planned == {"Spec | Plan and write": True}
    unknown, *then = plans(result)
    assert (unknown.startswith("unknown until"), then) == (True, [str(MTU), "1 to change"])
    assert len(result.flat) == 3


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (plan(MTU, STUCK), f"{STUCK}: {STUCK.blocker}; {STUCK.remedy}"),
        (plan(errors=("no such NIC",)), "no such NIC"),
        ({PLAN: ["2-b", "Traceback", "OSError: x", "", "1"]}, "agent 2-b could not plan (exit code 1): Traceback"),
        (
            {PLAN: ["2-b", "sh: python3: not found", "", "127"]},
            "could not plan (exit code 127): sh: python3: not found",
        ),
        ({PLAN: ["2-b", '{"changes": 1, "errors": []}', "", "0"]}, "the plan of agent 2-b cannot be read"),
        # Of an agent that is none: it would have ended the deploy of all nodes.
        ({PLAN: ["2-b", '{"changes": [], "errors": [17]}', "", "1"]}, "17"),
        ({}, "the node has no agent to make a plan, so /etc/trackbed/node.json was not written; deploy again"),
    ],
)
def test_nothing_is_written_if_the_spec_cannot_be_applied(node: Node, answers: Answers, message: str) -> None:
    result = node.deploy(deliver, {**ABSENT, **answers})
    assert result.failed
    assert result.uploads == {}
    (refusal,) = result.flat
    assert message in refusal
    assert message in "\n".join(result.log)
    assert f"{SPEC} was not written" in "\n".join(result.log)


def test_a_blocker_that_an_earlier_operation_removes_does_not_stop_the_deploy(node: Node) -> None:
    result = node.deploy(deliver, {**ABSENT, **plan(STUCK)}, later={**ABSENT, **plan(MTU)})
    assert not result.failed
    assert len(result.flat) == 3


def test_a_key_that_the_older_agent_refuses_does_not_stop_the_deploy(node: Node) -> None:
    error = "stdin: unknown key 'roce'; did you mean 'rps'?"
    older = plan(errors=(error,), version="1-a")
    result = node.deploy(deliver, {**ABSENT, **older}, later={**ABSENT, **plan(MTU)})
    by, refused, *_ = plans(result)
    assert "agent 1-a" in by and refused == f"refused by the older agent: {error}"
    assert not result.failed


def test_a_spec_of_mode_observe_is_written_although_the_node_does_not_fit_it(node: Node) -> None:
    """The node may be broken, and somebody wants the agent to leave it alone."""
    observing = evolve(WANTED, mode="observe")
    answers = plan(STUCK, errors=("no such NIC",))
    result = node.deploy(lambda: node_spec.deliver(spec=observing, version="2-b"), {**ABSENT, **answers})
    assert not result.failed
    assert result.uploads == {NEW: to_json(observing).encode()}
    assert "no such NIC" in "\n".join(result.log)
    not_understood = {PLAN: ["2-b", '{"spec_hash": "", "changes": [], "errors": ["unknown key"]}', "", "1"]}
    result = node.deploy(lambda: node_spec.deliver(spec=observing, version="2-b"), {**ABSENT, **not_understood})
    assert result.failed
