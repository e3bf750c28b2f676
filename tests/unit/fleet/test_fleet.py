"""What the fleet's commands derive from a cluster's objects."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml
from lightkube import Client, KubeConfig
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.core_v1 import NodeCondition, NodeSpec, NodeStatus, Taint
from lightkube.models.meta_v1 import ManagedFieldsEntry, ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node

from agent.report import names
from fleet import sweeping
from fleet.api import Api
from fleet.objects import condition_of
from fleet.standing import Standing, standing, standings
from tests.unit.fleet.test_kubeconfig import KUBECONFIG

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 1, 1, 12, 0, tzinfo=timezone.utc)


def node(
    name: str = "a",
    ready: str | None = "True",
    reason: str = "Ready",
    taints: tuple[str, ...] = (),
    labels: dict[str, str] | None = None,
) -> Node:
    conditions = [NodeCondition("True", "Ready")]
    if ready:
        conditions.append(NodeCondition(ready, names.READY, reason=reason, message="as it is", lastTransitionTime=NOW))
    return Node(
        metadata=ObjectMeta(name=name, resourceVersion="7", labels=labels),
        spec=NodeSpec(taints=[Taint("NoSchedule", key) for key in taints] or None),
        status=NodeStatus(conditions=conditions),
    )


def lease(name: str = "a", age: float = 60, written: datetime | None = None) -> Lease:
    """A Lease that was renewed so many seconds ago by the server's clock. ``written``: the time by the node's clock."""
    stamp = NOW - timedelta(seconds=age)
    owners = [
        ManagedFieldsEntry(fieldsV1={"f:spec": {"f:renewTime": {}}}, time=stamp),
        ManagedFieldsEntry(fieldsV1={"f:metadata": {"f:annotations": {}}}, time=NOW),
    ]
    notes = {names.SPEC_HASH: "0123", names.AGENT_VERSION: "0.1.0"}
    return Lease(
        metadata=ObjectMeta(name=name, resourceVersion="9", managedFields=owners, annotations=notes),
        spec=LeaseSpec(leaseDurationSeconds=900, renewTime=written or stamp, holderIdentity=name),
    )


def fleet(*ages: float) -> list[Standing]:
    by_name = {f"n{index}": age for index, age in enumerate(ages)}
    return standings(
        {name: node(name) for name in by_name}, {name: lease(name, age) for name, age in by_name.items()}, NOW
    )


def test_a_node_with_a_fresh_lease_has_its_condition_s_status() -> None:
    status = standing("a", node(), lease(age=899), NOW)
    assert (status.ready, status.reason, status.spec_hash, status.agent_version) == ("True", "Ready", "0123", "0.1.0")


def test_an_expired_lease_makes_a_node_unknown_whatever_its_condition_says() -> None:
    status = standing("a", node(), lease(age=901), NOW)
    assert (status.ready, status.condition, status.reason) == ("Unknown", "True", names.EXPIRED)
    assert status.message == "no heartbeat for 15m1s"


@pytest.mark.parametrize("offset", [timedelta(days=-9000), timedelta(days=1)])
def test_a_nodes_wrong_clock_does_not_count(offset: timedelta) -> None:
    assert not standing("a", node(), lease(age=60, written=NOW + offset), NOW).expired
    assert standing("a", node(), lease(age=1000, written=NOW + offset), NOW).expired


def test_a_node_that_has_just_registered_cannot_have_lost_its_heartbeat() -> None:
    status = standing("a", node(ready=None, taints=(names.TAINT,)), None, NOW)
    assert (status.expired, status.ready, status.reason) == (False, "Unknown", "NotPublished")


def test_a_condition_without_a_lease_has_no_heartbeat() -> None:
    assert standing("a", node(), None, NOW).expired


def test_a_lease_without_a_node_has_not_joined() -> None:
    status = standing("a", None, lease(), NOW)
    assert (status.joined, status.reason) == (False, "NotJoined")


@pytest.mark.parametrize(
    ("kubelet", "ready"), [("True", "True"), ("False", "False"), ("Unknown", "Unknown"), ("?", "Unknown")]
)
def test_a_node_whose_kubelet_is_not_ready_is_not_ready(kubelet: str, ready: str) -> None:
    there = node()
    assert there.status and there.status.conditions
    there.status.conditions[0] = NodeCondition(kubelet, "Ready", message="Kubelet stopped posting node status.")
    status = standing("a", there, lease(), NOW)
    assert status.ready == ready
    if ready != "True":
        assert status.reason == "KubeletNotReady" and "Kubelet stopped posting" in status.message


def test_a_node_whose_kubelet_has_not_started_is_not_ready() -> None:
    there = node()
    assert there.status and there.status.conditions
    del there.status.conditions[0]
    status = standing("a", there, lease(), NOW)
    assert (status.ready, status.reason) == ("Unknown", "KubeletNotReady")


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_conditions_of_one_type_the_one_that_is_not_true_counts(order: int) -> None:
    there = node()
    assert there.status and there.status.conditions
    more = NodeCondition("False", names.READY, reason="NoCarrier")
    there.status.conditions = [*there.status.conditions, more][::order]
    assert (standing("a", there, lease(), NOW).ready, condition_of(there, names.READY)) == ("False", more)


@pytest.mark.parametrize("status", ["Maybe", "", "true", "\x1b[2J"])
def test_a_condition_with_a_made_up_status_counts_as_unknown(status: str) -> None:
    assert standing("a", node(ready=status or None), lease(), NOW).ready == "Unknown"


def test_long_texts_that_others_write_are_cut() -> None:
    there = node(ready="False", reason="x" * 100_000)
    assert there.status and there.status.conditions
    there.status.conditions[-1].message = "x" * 1_400_000
    noted = lease()
    assert noted.metadata and noted.metadata.annotations
    noted.metadata.annotations |= {names.SPEC_HASH: "x" * 200_000, names.AGENT_VERSION: "x" * 200_000}
    for each in (standing("a", there, noted, NOW), standing("a", there, lease(age=1000), NOW)):
        assert len(str(each)) < 4 * names.LONGEST_MESSAGE
        said = sweeping.unknown(there, each, NOW)
        assert len(said["message"]) <= names.LONGEST_MESSAGE and said["message"].endswith("trackbed-reporter")


@pytest.mark.parametrize("effect", ["PreferNoSchedule", "NoExecute"])
def test_trackbeds_taint_with_another_effect_does_not_count(effect: str) -> None:
    there = node()
    assert there.spec
    there.spec.taints = [Taint(effect, names.TAINT)]
    assert not standing("a", there, lease(), NOW).tainted
    assert sweeping.taint_patch(there)[1]["value"] == {"key": names.TAINT, "effect": "NoSchedule"}


def test_a_lease_that_was_never_renewed_is_expired_and_not_missing() -> None:
    for spec in (None, LeaseSpec(), LeaseSpec(leaseDurationSeconds=900, holderIdentity="other")):
        status = standing("a", node(), Lease(metadata=ObjectMeta(name="a"), spec=spec), NOW)
        assert (status.ready, status.message, status.missing) == ("Unknown", "its Lease was never renewed", False)


@pytest.mark.parametrize("seconds", [2**31 - 1, 0, -5])
def test_a_lease_counts_for_no_longer_than_a_reporter_writes(seconds: int) -> None:
    noted = lease(age=901)
    assert noted.spec
    noted.spec.leaseDurationSeconds = seconds
    assert standing("a", node(), noted, NOW).expired


def test_the_servers_time_goes_on_while_a_command_runs() -> None:
    at = [5.0]
    api = Api(Client(KubeConfig.from_dict(yaml.safe_load(KUBECONFIG)).get()), "me", NOW, lambda: at[0])
    assert api.now == NOW
    at[0] += 600
    # A Lease that was renewed meanwhile is not renewed in the future.
    assert standing("a", node(), lease(age=-600), api.now).ready == "True"


def test_a_nodes_own_reason_comes_before_the_kubelets() -> None:
    there = node(ready="False", reason="NoCarrier")
    assert there.status and there.status.conditions
    there.status.conditions[0] = NodeCondition("Unknown", "Ready")
    assert standing("a", there, lease(), NOW).reason == "NoCarrier"


def test_an_expected_node_without_a_node_object_is_listed() -> None:
    (status,) = standings({}, {}, NOW, expected=["a"])
    assert (status.name, status.ready, status.reason, status.joined) == ("a", "Unknown", "NotJoined", False)
    assert "deleted" in status.message


def noticed(age: float = 60) -> Lease:
    """A Lease that says why the node is not ready."""
    made = lease(age=age)
    assert made.metadata and made.metadata.annotations
    made.metadata.annotations[names.NOT_READY] = "NoCarrier: no carrier on ens1f0"
    return made


def test_a_node_whose_lease_says_not_ready_is_not_ready() -> None:
    status = standing("a", node(), noticed(), NOW)
    assert (status.ready, status.condition, status.message) == ("False", "True", "NoCarrier: no carrier on ens1f0")


@pytest.mark.parametrize(
    "there", [node("a", "Unknown", names.EXPIRED, (names.TAINT,)), node(ready=None, taints=(names.TAINT,))]
)
def test_a_node_that_returns_and_can_write_only_its_lease_is_not_ready(there: Node) -> None:
    status = standing("a", there, noticed(), NOW)
    assert (status.ready, status.reason, status.message) == ("False", names.NOTICE, "NoCarrier: no carrier on ens1f0")
    # Until it is silent again.
    assert standing("a", there, noticed(age=1000), NOW).reason == names.EXPIRED


def test_a_reporters_own_unknown_is_shown_and_not_an_older_notice() -> None:
    there = node("a", "Unknown", "AgentSilent", (names.TAINT,))
    assert standing("a", there, noticed(), NOW).reason == "AgentSilent"


@pytest.mark.parametrize(
    ("there", "swept"),
    [
        (node(), True),
        (node(taints=(names.TAINT,)), True),  # it calls itself ready still
        (node(ready="False"), True),  # pods may come still
        (node(ready="False", taints=(names.TAINT,)), False),
        (node("a", "Unknown", names.EXPIRED, (names.TAINT,)), True),  # it was silent, and has returned
        (node("a", "Unknown", "AgentSilent", (names.TAINT,)), False),  # its reporter has written that
        (node(ready=None, taints=(names.TAINT,)), True),
    ],
)
def test_a_sweep_taints_a_node_that_its_reporter_could_not_write(there: Node, swept: bool) -> None:
    others = fleet(1000, 1000, 1000)
    decided = sweeping.plan([standing("a", there, noticed(), NOW), *others], 0.25)
    # However many others are silent: it has said so itself.
    assert (decided.refused, decided.taint) == (True, ("a",) if swept else ())


def test_a_silent_node_is_not_swept_beyond_the_share_though_its_lease_says_not_ready() -> None:
    silent = standing("a", node(), noticed(age=1000), NOW)
    decided = sweeping.plan([silent, *fleet(1000, 1000, 60)], 0.25)
    assert (decided.refused, decided.taint) == (True, ())
    assert sweeping.plan([silent], 0.25).taint == ("a",)


def test_a_node_whose_lease_is_gone_gets_another_one_and_is_not_swept() -> None:
    decided = sweeping.plan([standing("a", node(), None, NOW)], 0.25)
    assert (decided.taint, decided.renew) == ((), ("a",))
    swept = node("a", "Unknown", names.EXPIRED, (names.TAINT,))
    assert sweeping.plan([standing("a", swept, None, NOW)], 0.25).renew == ()


def test_nodes_without_trackbed_are_left_out() -> None:
    assert standings({"x": node("x", ready=None, taints=("other",))}, {}, NOW) == []


def test_objects_of_other_programs_are_left_out_even_if_they_cannot_be_read() -> None:
    elected = lease("controller-leader", age=5)
    assert elected.spec
    elected.spec.holderIdentity = "controller-7d9f_1b2c"
    leases = {"controller-leader": elected, "never-held": Lease(metadata=ObjectMeta(name="never-held")), "a": lease()}
    nodes = {"a": node(), "x": node("x", ready=None)}
    faults = {"controller-leader": "a time", "x": "a time", "dark": "nothing can be read"}
    assert [one.name for one in standings(nodes, leases, NOW)] == ["a"]
    assert [one.name for one in standings(nodes, leases, NOW, faults)] == ["a", "dark"]


def test_a_nodes_lease_counts_whoever_holds_it() -> None:
    held = lease()
    assert held.spec
    held.spec.holderIdentity = "somebody else"
    (status,) = standings({"a": node()}, {"a": held}, NOW)
    assert (status.expired, status.missing) == (False, False)


def test_a_silent_node_is_swept() -> None:
    assert sweeping.plan(fleet(60, 60, 60, 1000), 0.25).taint == ("n3",)


def test_if_more_nodes_than_the_share_are_silent_none_is_swept() -> None:
    decided = sweeping.plan(fleet(60, 1000, 1000, 1000), 0.25)
    assert (decided.refused, decided.taint, decided.expired) == (True, (), ("n1", "n2", "n3"))


@pytest.mark.parametrize(("nodes", "hostile"), [(3, 1), (4, 1), (5, 2), (7, 3), (12, 4), (40, 9)])
def test_a_few_nodes_that_are_silent_on_purpose_do_not_keep_others_from_being_swept(nodes: int, hostile: int) -> None:
    silent = hostile + 1
    decided = sweeping.plan(fleet(*[1000] * silent, *[60] * (nodes - silent)), 0.25)
    assert decided.taint == tuple(f"n{index}" for index in range(silent))


@pytest.mark.parametrize(("share", "silent"), [(0.29, 29), (0.57, 57), (0.58, 58), (0.25, 25), (0.0, 5), (1.0, 100)])
def test_the_share_itself_is_allowed_and_one_node_more_is_not(share: float, silent: int) -> None:
    nodes = [standing("a", node(), lease(age=60), NOW)] * 100
    lost = [standing("a", node(), lease(age=1000), NOW)] * 100
    assert not sweeping.plan([*lost[:silent], *nodes[silent:]], share).refused
    assert silent == 100 or sweeping.plan([*lost[: silent + 1], *nodes[silent + 1 :]], share).refused


def test_nodes_that_were_swept_before_count_towards_the_share() -> None:
    nodes = {f"n{index}": node(f"n{index}") for index in range(4)}
    nodes["n0"] = node("n0", "Unknown", names.EXPIRED, (names.TAINT,))
    leases = {name: lease(name, 60 if name == "n3" else 1000) for name in nodes}
    assert sweeping.plan(standings(nodes, leases, NOW), 0.25).refused


def test_one_node_of_a_small_fleet_may_be_swept() -> None:
    assert sweeping.plan(fleet(60, 1000), 0.25).taint == ("n1",)


def test_a_swept_node_is_not_swept_again() -> None:
    swept = node("a", "Unknown", names.EXPIRED, (names.TAINT,))
    decided = sweeping.plan([standing("a", swept, lease(age=1000), NOW)], 0.25)
    assert (decided.taint, decided.expired) == ((), ("a",))


def test_a_reporter_that_says_itself_that_its_agent_is_silent_is_left_alone() -> None:
    silent = node("a", "Unknown", "AgentSilent", (names.TAINT,))
    assert sweeping.plan([standing("a", silent, lease(age=1000), NOW)], 0.25).taint == ()


@pytest.mark.parametrize("half", [node("a", "Unknown", names.EXPIRED), node("a", "True", "Ready", (names.TAINT,))])
def test_an_interrupted_sweep_is_finished(half: Node) -> None:
    assert sweeping.plan([standing("a", half, lease(age=1000), NOW)], 0.25).taint == ("a",)


def test_the_taint_is_added_beside_others_and_only_to_the_node_that_was_read() -> None:
    same = {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    taint = {"key": names.TAINT, "effect": "NoSchedule"}
    assert sweeping.taint_patch(node(taints=("other",))) == [
        same, {"op": "add", "path": "/spec/taints/-", "value": taint},
    ]  # fmt: skip
    assert sweeping.taint_patch(node(labels={names.READY_LABEL: "true"})) == [
        same,
        {"op": "add", "path": "/spec/taints", "value": [taint]},
        {"op": "remove", "path": "/metadata/labels/trackbed.internal~1ready"},
    ]
    assert sweeping.taint_patch(node(taints=(names.TAINT,))) == []


@pytest.mark.parametrize(
    "name",
    [
        names.NAMESPACE, names.READY, names.UP_TO_DATE, names.TAINT, names.READY_LABEL, names.SPEC_HASH, names.AGENT_VERSION,
        names.NOT_READY, names.ACCOUNT,
    ],
)  # fmt: skip
def test_the_cluster_s_admission_policies_know_each_name(name: str) -> None:
    assert any(name in file.read_text() for file in (ROOT / "fleet" / "cluster").glob("*.yaml"))
