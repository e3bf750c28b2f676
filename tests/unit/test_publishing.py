"""What the reporter publishes about a node, and when, without a cluster."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from agent.report.names import LONGEST_MESSAGE, READY, READY_LABEL, TAINT, UP_TO_DATE
from agent.report.records import Condition, Report, report_to_json
from agent.report.verdict import STALE, Verdict, judge
from agent.reporter.kubernetes.api import LAST_WAIT, NoCredentials, Session, trust
from agent.reporter.kubernetes.calm import LASTING, LOSSES
from agent.reporter.kubernetes.lease import LEASE_EVERY
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
from agent.reporter.kubernetes.plugins import PLUGIN_PAUSE
from agent.reporter.kubernetes.publish import Files, Publication
from agent.reporter.settings import Label, Settings
from agent.runtime import boot_id, uptime
from tests.unit.scripted import api_server

RESOURCE = "rdma/hca_shared_devices_b"
SETTINGS = Settings("n1", "https://127.0.0.1:6443", "/ca.pem", required_resources=(RESOURCE,))
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


@frozen
class Fixed:
    """Credentials that never change; None: there are none."""

    known: Session | None = None

    def session(self) -> Session:
        if self.known is None:
            raise NoCredentials("there is none")
        return self.known

    def keep(self, now: float) -> float:
        return float("inf")


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


def test_a_fresh_node_gets_its_labels_first_and_keeps_the_taint_until_the_resource_is_there() -> None:
    first = desired(READY_NOW, SETTINGS, LABELS, node(), away=False)
    assert {type: said.status for type, said in first.conditions.items()} == {READY: "True", UP_TO_DATE: "True"}
    after = apply(node_patch(first, node()), document())
    assert after is not None
    assert after["metadata"]["labels"] == {
        "kubernetes.io/os": "linux",
        FACT.key: "true",
        PLUGIN.key: "hca",
        READY_LABEL: "true",
    }
    assert after["spec"]["taints"] == [OURS]
    there = read_node({**after, "status": {"allocatable": {RESOURCE: "4"}}})
    last = apply(node_patch(desired(READY_NOW, SETTINGS, LABELS, there, away=False), there), after)
    assert last is not None and last["spec"]["taints"] == []


def test_a_node_that_registered_without_the_taint_gets_it_while_the_resource_is_missing() -> None:
    bare = node(spec={})
    assert desired(READY_NOW, SETTINGS, LABELS, bare, away=False).taint is True
    assert node_patch(Desired({}, {}, frozenset(), True), bare) == [
        {"op": "test", "path": "/spec/taints", "value": None},
        {"op": "add", "path": "/spec/taints", "value": [OURS]},
    ]


@pytest.mark.parametrize("taints", [[OURS], None])
def test_resources_reported_before_a_boot_do_not_lift_the_taint(taints: list[Any] | None) -> None:
    def patched(boot: str) -> list[Any]:
        was = labelled({READY_LABEL: "true"}, taints, allocatable={RESOURCE: "4"}, nodeInfo={"bootID": boot})
        wanted = desired(READY_NOW, SETTINGS, (), read_node(was), away=False)
        after = apply(node_patch(wanted, read_node(was)), was)
        assert after is not None
        found: list[Any] = after["spec"].get("taints", [])
        return found

    assert patched("the boot before") == [OURS]
    assert patched(REPORT.boot_id) == patched("") == []


def test_a_ready_node_that_loses_a_resource_is_not_tainted_again() -> None:
    there = read_node(labelled({READY_LABEL: "true"}, allocatable={RESOURCE: "0"}))
    assert desired(READY_NOW, SETTINGS, LABELS, there, away=False).taint is None


@pytest.mark.parametrize("amount", ["0", "", "0k", "00"])
def test_a_resource_of_which_none_is_allocatable_does_not_lift_the_taint(amount: str) -> None:
    assert not node(status={"allocatable": {RESOURCE: amount}}).can_give(RESOURCE)
    assert node(status={"allocatable": {RESOURCE: "1k"}}).can_give(RESOURCE)


def test_a_node_that_is_no_longer_ready_is_tainted_and_keeps_the_plugins_label() -> None:
    was = labelled({FACT.key: "true", PLUGIN.key: "hca", READY_LABEL: "true"}, [THEIRS])
    lost = desired(NOT_READY, SETTINGS, LABELS, read_node(was), away=False)
    assert lost.conditions[READY].status == "False"
    assert lost.conditions[READY].reason == "NoCarrier"
    after = apply(node_patch(lost, read_node(was)), was)
    assert after is not None
    assert after["metadata"]["labels"] == {FACT.key: "true", PLUGIN.key: "hca"}
    assert after["spec"]["taints"] == [THEIRS, OURS]


def test_a_stale_heartbeat_makes_the_node_unknown_and_tainted() -> None:
    silent = desired(SILENT, SETTINGS, LABELS, node(), away=False)
    assert (silent.conditions[READY].status, silent.conditions[READY].reason) == ("Unknown", "AgentSilent")
    assert silent.taint is True
    missing = desired(Verdict(None, ("no report",)), SETTINGS, LABELS, node(), away=False)
    assert missing.conditions[READY].status == "Unknown"


def test_a_heartbeat_alone_changes_nothing_on_the_node() -> None:
    older = evolve(SILENT, reasons=("the agent's last heartbeat is 99 s old",), age=99.0)
    assert desired(SILENT, SETTINGS, LABELS, node(), away=False) == desired(older, SETTINGS, LABELS, node(), away=False)


def test_the_plugins_label_is_absent_while_its_devices_change() -> None:
    was = labelled({FACT.key: "true", PLUGIN.key: "hca", READY_LABEL: "true"})
    wanted = desired(READY_NOW, SETTINGS, LABELS, read_node(was), away=True)
    after = apply(node_patch(wanted, read_node(was)), was)
    assert after is not None and after["metadata"]["labels"] == {FACT.key: "true", READY_LABEL: "true"}


def test_the_taint_stays_while_a_plugin_restarts_and_the_resource_is_its_predecessors() -> None:
    was = labelled({PLUGIN.key: "hca", READY_LABEL: "true"}, [OURS], allocatable={RESOURCE: "8"})
    for away, taints in ((True, [OURS]), (False, [])):
        after = apply(node_patch(desired(READY_NOW, SETTINGS, LABELS, read_node(was), away), read_node(was)), was)
        assert after is not None and after["spec"].get("taints", []) == taints


@pytest.mark.parametrize(
    ("started", "spoke", "lifted"),
    [
        (0.0, "2026-01-01T00:00:00Z", True),  # no kubelet is known
        (1767225590.0, "2026-01-01T00:00:00Z", True),
        (1767225600.4, "2026-01-01T00:00:00Z", False),  # within the same second
        (1767225700.0, "2026-01-01T00:00:00Z", False),
        (1767225700.0, "some day", True),
        (1767225700.0, None, True),
        (1767229900.0, "2026-01-01T00:00:00Z", True),  # by a clock that has been put back
    ],
)
def test_resources_reported_before_a_kubelet_restart_do_not_lift_the_taint(
    started: float, spoke: str | None, lifted: bool
) -> None:
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": spoke}
    there = node(status={"allocatable": {RESOURCE: "4"}, "conditions": [ready]})
    verdict = evolve(READY_NOW, report=evolve(REPORT, kubelet=started))
    assert desired(verdict, SETTINGS, (), there, away=False, now=1767226000.0).taint is (not lifted)


def test_a_kubelet_restart_does_not_taint_a_ready_node() -> None:
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    there = read_node(labelled({READY_LABEL: "true"}, conditions=[ready], allocatable={RESOURCE: "4"}))
    verdict = evolve(READY_NOW, report=evolve(REPORT, kubelet=1767225700.0))
    assert desired(verdict, SETTINGS, (), there, away=False).taint is None


def test_a_label_that_the_inventory_no_longer_has_is_removed_and_others_stay() -> None:
    was = labelled({FACT.key: "true", READY_LABEL: "true"})
    was["metadata"]["labels"]["example.net/rack"] = "7"
    after = apply(node_patch(desired(READY_NOW, SETTINGS, (), read_node(was), away=False), read_node(was)), was)
    assert after is not None and after["metadata"]["labels"] == {READY_LABEL: "true", "example.net/rack": "7"}


def test_another_controllers_taint_is_left_alone() -> None:
    lifted = evolve(SETTINGS, taint_lifted_by="node-readiness-controller")
    for verdict in (READY_NOW, NOT_READY):
        assert desired(verdict, lifted, (), node(), away=False).taint is None


def test_nothing_is_written_if_the_node_already_says_everything() -> None:
    wanted = desired(READY_NOW, SETTINGS, (), node(), away=False)
    body = status_patch(wanted, node(), 0.0)
    assert body is not None
    done = read_node(labelled({READY_LABEL: "true"}, [OURS], conditions=body["status"]["conditions"]))
    assert status_patch(wanted, done, 60.0) is None
    assert not changes_more_than_messages(wanted, done)


def test_only_another_status_changes_the_time_of_the_last_transition() -> None:
    first = status_patch(desired(NOT_READY, SETTINGS, (), node(), away=False), node(), 0.0)
    assert first is not None
    said = read_node(labelled({}, [OURS], conditions=first["status"]["conditions"]))
    other = evolve(NOT_READY, reasons=("Carrier is False (NoCarrier): two ports",))
    message = status_patch(desired(other, SETTINGS, (), said, away=False), said, 60.0)
    assert message is not None
    (condition,) = message["status"]["conditions"]
    assert (condition["type"], condition["lastTransitionTime"]) == (READY, "1970-01-01T00:00:00Z")
    assert not changes_more_than_messages(desired(other, SETTINGS, (), said, away=False), said)


def test_messages_and_reasons_stay_within_limits() -> None:
    odd = evolve(NO_CARRIER, reason="not a word")
    verdict = Verdict(evolve(REPORT, ready=False, conditions=(odd,)), ("x" * 5000,), 1.0, True)
    said = desired(verdict, SETTINGS, (), node(), away=False).conditions[READY]
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
    wanted = desired(verdict, evolve(SETTINGS, required_resources=()), (FACT,), seen, away=False)
    patch = node_patch(wanted, seen)
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


# --- what is due -------------------------------------------------------------------------------------------------


HOURS = 8 * 3600.0


def merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch that removes nothing."""
    both = {key: merged(document.get(key, {}), value) for key, value in patch.items() if isinstance(value, dict)}
    return {**document, **patch, **both}


@define
class Cluster:
    """A Node and its Lease at an API server. ``busy``: it answers 503. ``writes``: the last parts of the paths."""

    node: dict[str, Any] = field(factory=document)
    lease: dict[str, Any] | None = None
    renewals: list[Any] = field(factory=list)
    busy: bool = False
    writes: list[str] = field(factory=list)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if self.busy:
            return 503, {}
        if "leases" in path:
            return self.renewed(method, body)
        self.writes.append(path.rpartition("/")[2])
        return 200, self.node

    def renewed(self, method: str, body: Any) -> tuple[int, dict[str, Any]]:
        if method == "PATCH" and self.lease is None:
            return 404, {}
        self.writes.append("lease")
        self.renewals.append(body)
        self.lease = merged(self.lease or {}, body)
        return 200, self.lease


@define
class Clocks:
    """The time of day, and the seconds since the boot."""

    day: float = 1e9
    boot: float = 100.0

    def goes_on(self, seconds: float) -> None:
        self.day, self.boot = self.day + seconds, self.boot + seconds


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Publication, Cluster, Clocks]]:
    """A reporter whose Node has just been registered by its kubelet."""
    cluster, clocks = Cluster(), Clocks()
    report, labels, out, memory = (tmp_path / name for name in ("report", "labels", "out", "memory"))
    with api_server(tmp_path, cluster.answer) as (url, authority):
        settings = evolve(SETTINGS, server=url, ca_file=str(authority))
        who = Fixed(Session(trust(authority)))
        found = Publication(settings, who, Files(report, labels, out, memory), lambda: clocks.day, lambda: clocks.boot)
        found.watch.known, found.watch.node = True, node()
        yield found, cluster, clocks


def say(publication: Publication, found: Report) -> None:
    publication.files.report.write_text(report_to_json(evolve(found, boot_id=boot_id(), uptime=uptime())))


def test_setting_the_clock_back_delays_neither_a_retry_nor_the_lease(
    running: tuple[Publication, Cluster, Clocks],
) -> None:
    reporter, cluster, clocks = running
    say(reporter, REPORT)
    cluster.busy = True
    reporter.turn()
    assert "503" in reporter.acknowledged.now.error
    cluster.busy = False
    clocks.day -= HOURS
    clocks.goes_on(LAST_WAIT)
    reporter.turn()
    assert (reporter.acknowledged.now.error, cluster.writes.count("lease")) == ("", 1)
    clocks.day -= HOURS
    clocks.goes_on(LEASE_EVERY[1])
    reporter.turn()
    assert cluster.writes.count("lease") == 2


def test_a_renewal_sends_only_the_time_and_restores_what_somebody_has_changed(
    running: tuple[Publication, Cluster, Clocks],
) -> None:
    reporter, cluster, clocks = running
    say(reporter, REPORT)
    reporter.turn()
    first = copy.deepcopy(cluster.lease)
    assert first is not None
    assert cluster.renewals == [first]

    def renew() -> list[Any]:
        cluster.renewals.clear()
        clocks.goes_on(LEASE_EVERY[1])
        reporter.turn()
        return cluster.renewals

    (patch,) = renew()
    assert [*patch, *patch["spec"]] == ["spec", "renewTime"]
    assert cluster.lease is not None
    cluster.lease["metadata"]["annotations"] = {}
    cluster.lease["spec"]["leaseDurationSeconds"] = 1
    assert len(renew()) == 2
    assert cluster.lease["metadata"] == first["metadata"]
    assert cluster.lease["spec"]["leaseDurationSeconds"] == first["spec"]["leaseDurationSeconds"]
    cluster.lease = None
    assert [made["metadata"] for made in renew()] == [first["metadata"]]


def test_an_outage_is_reported_without_writing_to_the_disk(running: tuple[Publication, Cluster, Clocks]) -> None:
    reporter, cluster, _ = running
    say(reporter, REPORT)
    reporter.turn()
    before = reporter.files.memory.stat().st_ino
    cluster.busy = True
    say(reporter, evolve(REPORT, ready=False, conditions=(NO_CARRIER,)))
    reporter.turn()
    assert "503" in reporter.files.acknowledgement.read_text()
    assert reporter.files.memory.stat().st_ino == before


def test_a_ready_node_gets_its_lease_first_and_one_that_is_not_ready_its_taint(
    running: tuple[Publication, Cluster, Clocks],
) -> None:
    reporter, cluster, _ = running
    say(reporter, REPORT)
    reporter.turn()
    assert cluster.writes == ["lease", "status", "n1"]
    cluster.writes.clear()
    # Another Node, which has neither.
    cluster.node = {"metadata": {"uid": "u2", "resourceVersion": "9"}}
    reporter.watch.node = read_node(cluster.node)
    say(reporter, evolve(REPORT, ready=False, conditions=(NO_CARRIER,)))
    reporter.turn()
    assert cluster.writes == ["n1", "status", "lease"]


def test_a_heartbeat_is_no_change_unless_the_one_before_was_stale(tmp_path: Path) -> None:
    path = tmp_path / "report"

    def heard(age: float, **more: Any) -> Verdict:
        beaten = evolve(REPORT, boot_id=boot_id(), uptime=uptime() - age, heartbeat=age, **more)
        path.write_text(report_to_json(beaten))
        return judge(path).without_heartbeat()

    assert heard(20.0) == heard(0.0)
    assert heard(2 * STALE) != heard(0.0)
    assert heard(0.0, generation=2) != heard(0.0, generation=1)


def test_a_ready_that_comes_and_goes_is_published_only_after_it_has_lasted(
    running: tuple[Publication, Cluster, Clocks],
) -> None:
    reporter, cluster, clocks = running
    checking = evolve(REPORT, ready=False, conditions=(Condition("Converged", "Unknown", "Checking", "it waits"),))
    published: list[bool] = []
    for generation in range(100):
        for found in (REPORT, checking):
            say(reporter, evolve(found, generation=generation))
            reporter.turn()
            published.append(reporter.acknowledged.now.ready)
            assert not (reporter.acknowledged.now.ready and not found.ready)
            # As the API server would tell it.
            labels = {READY_LABEL: "true"} if reporter.acknowledged.now.ready else {}
            ready = ("True", "AsSpecified", "the node is as its spec says")
            waits = ("False", "Checking", "Converged is Unknown (Checking): it waits")
            said = [
                (READY, *(ready if reporter.acknowledged.now.ready else waits)),
                (UP_TO_DATE, "True", "SpecDone", ""),
            ]
            told = [dict(zip(("type", "status", "reason", "message"), each, strict=True)) for each in said]
            reporter.watch.node = read_node(labelled(labels, [OURS], conditions=told))
            clocks.goes_on(2.0)
    assert published == [True, False] * LOSSES + [False] * (200 - 2 * LOSSES)
    assert len([where for where in cluster.writes if where != "lease"]) < 20
    say(reporter, REPORT)
    left = reporter.turn()
    assert (reporter.acknowledged.now.ready, left) == (False, LASTING)
    assert "Ready was lost 3 times" in reporter.acknowledged.now.error
    clocks.goes_on(left)
    reporter.turn()
    assert (reporter.acknowledged.now.ready, reporter.acknowledged.now.error) == (True, "")


def test_the_condition_of_a_ready_node_says_which_warnings_it_has() -> None:
    clock = Condition("ClockSynchronised", "False", "NotSynchronised", "hours", severity="warn")
    warned = evolve(READY_NOW, report=evolve(REPORT, conditions=(*REPORT.conditions, clock)))
    said = desired(warned, SETTINGS, LABELS, node(), away=False).conditions[READY]
    assert (said.status, said.message) == ("True", "the node is as its spec says, with 1 warning: ClockSynchronised")


def test_a_wrong_clock_does_not_stop_a_not_ready(running: tuple[Publication, Cluster, Clocks]) -> None:
    reporter, cluster, clocks = running
    for clocks.day in (-1e12, 1e15):
        cluster.writes.clear()
        reporter.watch.node = node()
        say(reporter, evolve(REPORT, ready=False, conditions=(NO_CARRIER,)))
        reporter.turn()
        assert (reporter.acknowledged.now.error, cluster.writes[:1]) == ("", ["status"])


def test_an_answer_that_is_no_node_is_reported_as_an_error(running: tuple[Publication, Cluster, Clocks]) -> None:
    reporter, cluster, _ = running
    cluster.node = {"kind": "Status"}
    say(reporter, evolve(REPORT, ready=False, conditions=(NO_CARRIER,)))
    reporter.turn()
    assert "something that is not a Node" in reporter.acknowledged.now.error


@pytest.mark.parametrize("metadata", [None, [], 5, {"annotations": []}, {"annotations": None}])
def test_an_answer_that_is_no_lease_is_reported_as_an_error(
    running: tuple[Publication, Cluster, Clocks], metadata: Any
) -> None:
    reporter, cluster, clocks = running
    say(reporter, REPORT)
    reporter.turn()
    assert cluster.lease is not None
    good, cluster.lease = cluster.lease, {"metadata": metadata}
    clocks.goes_on(LEASE_EVERY[1])
    reporter.turn()
    assert "something that is not a Lease" in reporter.acknowledged.now.error
    cluster.lease = good
    reporter.retry_now()
    reporter.turn()
    assert reporter.acknowledged.now.error == ""


def test_a_taint_of_our_key_with_a_value_is_anothers_and_enough() -> None:
    """The API server accepts one taint of a key and an effect: ours beside it would be refused for ever."""
    valued = node(spec={"taints": [{**OURS, "value": "x"}]})
    assert node_patch(desired(NOT_READY, SETTINGS, LABELS, valued, False), valued) == []
    assert node_patch(desired(READY_NOW, evolve(SETTINGS, required_resources=()), (), valued, False), valued) == [
        {"op": "add", "path": f"/metadata/labels/{READY_LABEL.replace('/', '~1')}", "value": "true"}
    ]
    weaker = node(spec={"taints": [{**OURS, "effect": "PreferNoSchedule"}]})
    assert node_patch(desired(NOT_READY, SETTINGS, LABELS, weaker, False), weaker)[-1]["value"] == OURS


def test_of_several_conditions_of_one_type_one_is_left() -> None:
    """A client may write two with a JSON patch. A patch that merges by the type changes the first, and who reads the last one
    would be told something else."""
    wanted = desired(NOT_READY, SETTINGS, LABELS, node(), False)
    said = [
        {"type": type, "status": content.status, "reason": content.reason, "message": content.message}
        for type, content in wanted.conditions.items()
    ]
    for conditions in ([*said, {**said[0], "status": "True"}], [{**said[0], "status": "True"}, *said]):
        there = node(status={"conditions": conditions})
        patch = status_patch(wanted, there, 0.0)
        assert patch is not None and changes_more_than_messages(wanted, there)
        first, second = patch["status"]["conditions"]
        assert first == {"$patch": "delete", "type": READY}
        assert (second["type"], second["status"]) == (READY, "False")
    assert status_patch(wanted, node(status={"conditions": said}), 0.0) is None


# --- a plugin does not follow a change of its devices ------------------------------------------------------------


@pytest.fixture
def begin(tmp_path: Path) -> Callable[[], Publication]:
    """Start a reporter, with the files that an earlier one has left."""

    def make() -> Publication:
        report, labels, out, memory = (tmp_path / f"{name}.json" for name in ("report", "labels", "out", "memory"))
        return Publication(SETTINGS, Fixed(), Files(report, labels, out, memory))

    return make


def away(publication: Publication, devices: str, there: dict[str, Any], now: float) -> bool:
    """Whether the plugin's label is absent after a report of these devices."""
    report = Report("n1", "h1", boot_id(), "v", True, True, devices=devices)
    found, _ = publication._plugins_absent(Verdict(report, (), 1.0, True), LABELS, read_node(there), now)
    # The state once everything else is written.
    publication.acknowledged.now = evolve(publication.acknowledged.now, boot_id=report.boot_id)
    publication._acknowledge()
    return found


WITH, WITHOUT = {PLUGIN.key: "hca", READY_LABEL: "true"}, {READY_LABEL: "true"}


def test_a_plugins_label_returns_once_its_resource_is_gone(begin: Callable[[], Publication]) -> None:
    reporter = begin()
    assert not away(reporter, "four", labelled({}), 0.0)
    assert not away(reporter, "four", labelled(WITH, allocatable={RESOURCE: "4"}), 10.0)
    assert away(reporter, "eight", labelled(WITH, allocatable={RESOURCE: "4"}), 20.0)
    assert away(reporter, "eight", labelled(WITHOUT, allocatable={RESOURCE: "4"}), 20.0 + PLUGIN_PAUSE)
    assert not away(reporter, "eight", labelled(WITHOUT, allocatable={RESOURCE: "0"}), 21.0 + PLUGIN_PAUSE)
    assert not away(reporter, "eight", labelled(WITHOUT), 22.0 + PLUGIN_PAUSE)


def test_a_restart_of_the_reporter_does_not_set_the_label_too_early(
    begin: Callable[[], Publication],
) -> None:
    first = begin()
    assert not away(first, "four", labelled(WITH, allocatable={RESOURCE: "4"}), 0.0)
    assert away(first, "eight", labelled(WITH, allocatable={RESOURCE: "4"}), 10.0)
    second = begin()
    assert away(second, "eight", labelled(WITHOUT, allocatable={RESOURCE: "4"}), 12.0)
    assert not away(begin(), "eight", labelled(WITHOUT, allocatable={RESOURCE: "0"}), 14.0)


def test_devices_that_change_before_the_first_plugin_started_remove_no_label(begin: Callable[[], Publication]) -> None:
    reporter = begin()
    for devices in ("none", "four"):
        assert not away(reporter, devices, labelled({}), 0.0)
