"""The conditions, labels and taint that a Node should have by a report, and the patches that set them."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agent.report.names import LONGEST_MESSAGE, READY, READY_LABEL, TAINT, UP_TO_DATE
from agent.report.records import Condition, Report
from agent.report.verdict import Verdict
from agent.reporter.kubernetes.node import (
    MANAGER,
    Desired,
    Node,
    changes_more_than_messages,
    desired,
    node_patch,
    read_node,
    status_patch,
)
from agent.reporter.settings import Label, Settings

RESOURCE = "rdma/hca_shared_devices_b"
SETTINGS = Settings("n1", "https://127.0.0.1:6443", "/ca.pem", required_resources=(RESOURCE,))
NO_RESOURCES = evolve(SETTINGS, required_resources=())
FACT, PLUGIN = Label("aliyun.accelerator/erdma", "true"), Label("rdma", "hca", "plugin", RESOURCE)
LABELS = (FACT, PLUGIN)
OURS = {"key": TAINT, "effect": "NoSchedule"}
THEIRS = {"key": "example.net/busy", "effect": "NoExecute", "value": "x"}
REPORT = Report("n1", "h1", "b", "v", True, True, conditions=(Condition("Converged", "True", "AsWanted"),))
READY_NOW = Verdict(REPORT, (), 1.0, True)
NO_CARRIER = Condition("Carrier", "False", "NoCarrier", "no carrier on ens1f0; check the cable")
NOT_READY = Verdict(
    evolve(REPORT, ready=False, conditions=(NO_CARRIER,)), ("Carrier is False (NoCarrier): ...",), 1.0, True
)
SILENT = Verdict(REPORT, ("the agent's last heartbeat is 61 s old",), 61.0, False)


def document(**more: Any) -> dict[str, Any]:
    """A Node's JSON as a kubelet registers it."""
    return {
        "metadata": {"name": "n1", "uid": "u1", "resourceVersion": "7", "labels": {"kubernetes.io/os": "linux"}},
        "spec": {"taints": [OURS]},
        "status": {"allocatable": {"cpu": "2"}, "conditions": [{"type": "Ready", "status": "True"}]},
        **more,
    }


def node(**more: Any) -> Node:
    return read_node(document(**more))


def labelled(keys: dict[str, str], taints: list[Any] | None = None, **status: Any) -> dict[str, Any]:
    """A Node with labels that the reporter wrote."""
    fields: dict[str, Any] = {f"f:{key}": {} for key in keys}
    managed = [{"manager": MANAGER, "operation": "Update", "fieldsV1": {"f:metadata": {"f:labels": fields}}}]
    metadata = {"name": "n1", "uid": "u1", "resourceVersion": "8", "labels": keys, "managedFields": managed}
    return {"metadata": metadata, "spec": {"taints": taints} if taints else {}, "status": status}


def apply(patch: Sequence[dict[str, Any]], to: dict[str, Any]) -> dict[str, Any] | None:
    """Apply a JSON patch (RFC 6902); None: one of its tests failed, so nothing was changed."""
    result = copy.deepcopy(to)
    for operation in patch:
        *folders, name = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        parent: Any = result
        for folder in folders:
            parent = parent[folder]
        place: Any = int(name) if isinstance(parent, list) and name != "-" else name
        present = place in parent if isinstance(parent, dict) else place == "-" or place < len(parent)
        match operation["op"]:
            case "test":
                if (parent[place] if present else None) != operation["value"]:
                    return None
            case "add" if place == "-":
                parent.append(operation["value"])
            case "add":
                parent[place] = operation["value"]
            case "remove":
                if not present:
                    return None
                del parent[place]
    return result


def wanted(
    verdict: Verdict, there: Node, labels: Sequence[Label] = (), settings: Settings = SETTINGS, away: bool = False
) -> Desired:
    return desired(verdict, settings, labels, there, away)


def written(verdict: Verdict, was: dict[str, Any], labels: Sequence[Label] = (), away: bool = False) -> dict[str, Any]:
    """The Node after the reporter's patch."""
    there = read_node(was)
    after = apply(node_patch(wanted(verdict, there, labels, away=away), there), was)
    assert after is not None
    return after


def test_a_fresh_node_gets_its_labels_first_and_keeps_the_taint_until_the_resource_is_there() -> None:
    first = wanted(READY_NOW, node(), LABELS)
    assert {type: said.status for type, said in first.conditions.items()} == {READY: "True", UP_TO_DATE: "True"}
    after = written(READY_NOW, document(), LABELS)
    assert after["metadata"]["labels"] == {
        "kubernetes.io/os": "linux",
        FACT.key: "true",
        PLUGIN.key: "hca",
        READY_LABEL: "true",
    }
    assert after["spec"]["taints"] == [OURS]
    last = written(READY_NOW, {**after, "status": {"allocatable": {RESOURCE: "4"}}}, LABELS)
    assert last["spec"]["taints"] == []


def test_a_node_that_registered_without_the_taint_gets_it_while_the_resource_is_missing() -> None:
    bare = node(spec={})
    assert wanted(READY_NOW, bare).taint is True
    assert node_patch(Desired({}, {}, frozenset(), True), bare) == [
        {"op": "test", "path": "/spec/taints", "value": None},
        {"op": "add", "path": "/spec/taints", "value": [OURS]},
    ]


@pytest.mark.parametrize("taints", [[OURS], None])
def test_resources_reported_before_a_boot_do_not_lift_the_taint(taints: list[Any] | None) -> None:
    def patched(boot: str) -> list[Any]:
        was = labelled({READY_LABEL: "true"}, taints, allocatable={RESOURCE: "4"}, nodeInfo={"bootID": boot})
        return list(written(READY_NOW, was)["spec"].get("taints", []))

    assert patched("the boot before") == [OURS]
    assert patched(REPORT.boot_id) == patched("") == []


@pytest.mark.parametrize("amount", ["0", "", "0k", "00"])
def test_a_resource_with_the_amount_0_is_not_allocatable(amount: str) -> None:
    assert not node(status={"allocatable": {RESOURCE: amount}}).can_give(RESOURCE)
    assert node(status={"allocatable": {RESOURCE: "1k"}}).can_give(RESOURCE)


def test_a_node_that_is_no_longer_ready_is_tainted_and_keeps_the_plugins_label() -> None:
    was = labelled({FACT.key: "true", PLUGIN.key: "hca", READY_LABEL: "true"}, [THEIRS])
    lost = wanted(NOT_READY, read_node(was), LABELS).conditions[READY]
    assert (lost.status, lost.reason) == ("False", "NoCarrier")
    after = written(NOT_READY, was, LABELS)
    assert after["metadata"]["labels"] == {FACT.key: "true", PLUGIN.key: "hca"}
    assert after["spec"]["taints"] == [THEIRS, OURS]


def test_a_stale_heartbeat_makes_the_node_unknown_and_tainted() -> None:
    silent = wanted(SILENT, node(), LABELS)
    assert (silent.conditions[READY].status, silent.conditions[READY].reason) == ("Unknown", "AgentSilent")
    assert silent.taint is True
    assert wanted(Verdict(None, ("no report",)), node(), LABELS).conditions[READY].status == "Unknown"


def test_a_heartbeat_alone_changes_nothing_on_the_node() -> None:
    older = evolve(SILENT, reasons=("the agent's last heartbeat is 99 s old",), age=99.0)
    assert wanted(SILENT, node(), LABELS) == wanted(older, node(), LABELS)


def test_the_taint_stays_while_a_plugin_restarts_and_its_old_resource_is_still_allocatable() -> None:
    was = labelled({PLUGIN.key: "hca", READY_LABEL: "true"}, [OURS], allocatable={RESOURCE: "8"})
    for away, taints in ((True, [OURS]), (False, [])):
        assert written(READY_NOW, was, LABELS, away)["spec"].get("taints", []) == taints


SPOKE = "2026-01-01T00:00:00Z"  # 1767225600


def tainted(started: float, spoke: str | None, now: float) -> bool | None:
    """Whether a ready node with the taint keeps it, whose kubelet has started and has reported at these times."""
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": spoke}
    there = node(status={"allocatable": {RESOURCE: "4"}, "conditions": [ready]})
    verdict = evolve(READY_NOW, report=evolve(REPORT, kubelet=started))
    return desired(verdict, SETTINGS, (), there, away=False, now=now).taint


@pytest.mark.parametrize(
    ("started", "spoke", "lifted"),
    [
        (0.0, SPOKE, True),  # no kubelet is known
        (1767225590.0, SPOKE, True),
        (1767225599.9, SPOKE, True),
        (1767225601.0, SPOKE, False),
        (1767225700.0, SPOKE, False),
        (1767225700.0, "some day", True),
        (1767225700.0, None, True),
        (1767229900.0, SPOKE, True),  # by a clock that has been put back
    ],
)
def test_resources_reported_before_a_kubelet_restart_do_not_lift_the_taint(
    started: float, spoke: str | None, lifted: bool
) -> None:
    assert tainted(started, spoke, now=1767226000.0) is (not lifted)


@pytest.mark.parametrize("started", [1767225600.0, 1767225600.4, 1767225600.999])
@pytest.mark.parametrize("spoke", [SPOKE, "2026-01-01T03:00:00Z"], ids=["same second", "clock set back"])
def test_a_heartbeat_that_may_be_of_either_kubelet_lifts_the_taint_later(started: float, spoke: str) -> None:
    assert [tainted(started, spoke, started + age) for age in (0.0, 59.9, 60.0, 3600.0)] == [True, True, False, False]


def test_a_kubelet_that_starts_twice_within_a_second_lifts_the_taint_by_its_next_heartbeat() -> None:
    # The first of the two has reported in that second.
    twice = [tainted(1767225600.9, spoke, 1767225602.0) for spoke in (SPOKE, "2026-01-01T00:00:01Z")]
    assert twice == [True, False]


def test_a_kubelet_restart_does_not_taint_a_ready_node() -> None:
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": SPOKE}
    there = read_node(labelled({READY_LABEL: "true"}, conditions=[ready], allocatable={RESOURCE: "4"}))
    assert wanted(evolve(READY_NOW, report=evolve(REPORT, kubelet=1767225700.0)), there).taint is None


def test_another_controllers_taint_is_left_alone() -> None:
    lifted = evolve(SETTINGS, taint_lifted_by="node-readiness-controller")
    for verdict in (READY_NOW, NOT_READY):
        assert wanted(verdict, node(), settings=lifted).taint is None


def test_only_another_status_changes_the_time_of_the_last_transition() -> None:
    first = status_patch(wanted(NOT_READY, node()), node(), 0.0)
    assert first is not None
    said = read_node(labelled({}, [OURS], conditions=first["status"]["conditions"]))
    other = wanted(evolve(NOT_READY, reasons=("Carrier is False (NoCarrier): two ports",)), said)
    message = status_patch(other, said, 60.0)
    assert message is not None
    (condition,) = message["status"]["conditions"]
    assert (condition["type"], condition["lastTransitionTime"]) == (READY, "1970-01-01T00:00:00Z")
    assert not changes_more_than_messages(other, said)


def test_messages_and_reasons_stay_within_limits() -> None:
    odd = evolve(NO_CARRIER, reason="not a word")
    verdict = Verdict(evolve(REPORT, ready=False, conditions=(odd,)), ("x" * 5000,), 1.0, True)
    said = wanted(verdict, node()).conditions[READY]
    assert (said.reason, len(said.message)) == ("NotReady", LONGEST_MESSAGE)


TAINTS = st.lists(st.sampled_from(["a", "b", TAINT]), unique=True, max_size=3).map(
    lambda keys: [{"key": key, "effect": "NoSchedule"} for key in keys] or None
)
OTHERS = st.dictionaries(
    st.sampled_from(["a/x", "b~y", READY_LABEL, FACT.key]), st.sampled_from(["1", "2"]), max_size=4
)


@given(TAINTS, TAINTS, OTHERS, OTHERS, st.sampled_from([READY_NOW, NOT_READY, SILENT]))
def test_a_patch_keeps_what_others_have_written_or_fails(
    taints: list[Any] | None,
    taints_then: list[Any] | None,
    labels: dict[str, str],
    labels_then: dict[str, str],
    verdict: Verdict,
) -> None:
    def build(labels: dict[str, str], taints: list[Any] | None) -> dict[str, Any]:
        return {
            "metadata": {"uid": "u1", "resourceVersion": "8", **({"labels": labels} if labels else {})},
            "spec": {"taints": taints} if taints else {},
        }

    seen, then = read_node(build(labels, taints)), build(labels_then, taints_then)
    patch = node_patch(wanted(verdict, seen, (FACT,), NO_RESOURCES), seen)
    json.dumps(patch)
    try:
        after = apply(patch, then)
    except (KeyError, IndexError):
        return  # the API server refuses a path that is not there
    if after is None:
        return
    mine = {READY_LABEL, FACT.key}
    kept = {key: value for key, value in labels_then.items() if key not in mine}
    assert {k: v for k, v in after["metadata"].get("labels", {}).items() if k not in mine} == kept
    theirs = [taint for taint in taints_then or () if taint["key"] != TAINT]
    assert [taint for taint in after["spec"].get("taints") or () if taint["key"] != TAINT] == theirs


def test_the_condition_of_a_ready_node_says_which_warnings_it_has() -> None:
    clock = Condition("ClockSynchronised", "False", "NotSynchronised", "hours", severity="warn")
    warned = evolve(READY_NOW, report=evolve(REPORT, conditions=(*REPORT.conditions, clock)))
    said = wanted(warned, node()).conditions[READY]
    assert said.status == "True" and said.message.endswith("with 1 warning: ClockSynchronised")


def test_trackbeds_taint_with_a_value_counts_and_is_left_alone() -> None:
    """The API server accepts one taint of a key and an effect: ours beside it would be refused for ever."""
    valued = node(spec={"taints": [{**OURS, "value": "x"}]})
    assert node_patch(wanted(NOT_READY, valued, LABELS), valued) == []
    assert node_patch(wanted(READY_NOW, valued, settings=NO_RESOURCES), valued) == [
        {"op": "add", "path": f"/metadata/labels/{READY_LABEL.replace('/', '~1')}", "value": "true"}
    ]
    weaker = node(spec={"taints": [{**OURS, "effect": "PreferNoSchedule"}]})
    assert node_patch(wanted(NOT_READY, weaker), weaker)[-1]["value"] == OURS


def test_of_several_conditions_of_one_type_one_is_left() -> None:
    """A client may write two with a JSON patch. A patch that merges by the type changes the first, and who reads the last one
    would be told something else."""
    lost = wanted(NOT_READY, node())
    said = [
        {"type": type, "status": content.status, "reason": content.reason, "message": content.message}
        for type, content in lost.conditions.items()
    ]
    for conditions in ([*said, {**said[0], "status": "True"}], [{**said[0], "status": "True"}, *said]):
        there = node(status={"conditions": conditions})
        patch = status_patch(lost, there, 0.0)
        assert patch is not None and changes_more_than_messages(lost, there)
        first, second = patch["status"]["conditions"]
        assert first == {"$patch": "delete", "type": READY}
        assert (second["type"], second["status"]) == (READY, "False")
    assert status_patch(lost, node(status={"conditions": said}), 0.0) is None
