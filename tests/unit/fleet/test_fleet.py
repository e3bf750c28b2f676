"""What the fleet's commands derive from a cluster's objects."""

import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml
from lightkube import Client, KubeConfig
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.core_v1 import NodeCondition, NodeSpec, NodeStatus, Taint
from lightkube.models.meta_v1 import ManagedFieldsEntry, ObjectMeta, OwnerReference
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
    kubelet: str | None = "True",
    message: str = "as it is",
) -> Node:
    conditions = []
    if kubelet:
        conditions.append(NodeCondition(kubelet, "Ready", message="Kubelet stopped posting node status."))
    if ready:
        conditions.append(NodeCondition(ready, names.READY, reason=reason, message=message, lastTransitionTime=NOW))
    return Node(
        metadata=ObjectMeta(name=name, uid=f"u-{name}", resourceVersion="7", labels=labels),
        spec=NodeSpec(taints=[Taint("NoSchedule", key) for key in taints] or None),
        status=NodeStatus(conditions=conditions),
    )


def lease(
    name: str = "a",
    age: float = 60,
    written: datetime | None = None,
    seconds: int = 900,
    holder: str | None = None,
    annotations: dict[str, str] | None = None,
) -> Lease:
    """A Lease that was renewed so many seconds ago by the server's clock. ``written``: the time by the node's clock."""
    stamp = NOW - timedelta(seconds=age)
    owners = [
        ManagedFieldsEntry(fieldsV1={"f:spec": {"f:renewTime": {}}}, time=stamp),
        ManagedFieldsEntry(fieldsV1={"f:metadata": {"f:annotations": {}}}, time=NOW),
    ]
    notes = {names.SPEC_HASH: "0123", names.AGENT_VERSION: "0.1.0", **(annotations or {})}
    return Lease(
        metadata=ObjectMeta(name=name, resourceVersion="9", managedFields=owners, annotations=notes),
        spec=LeaseSpec(leaseDurationSeconds=seconds, renewTime=written or stamp, holderIdentity=holder or name),
    )


def owned(uid: str, age: float) -> Lease:
    """A Lease of the Node with this uid."""
    made = lease(age=age)
    assert made.metadata
    made.metadata.ownerReferences = [OwnerReference(apiVersion="v1", kind="Node", name="a", uid=uid)]
    return made


def noticed(age: float = 60) -> Lease:
    """A Lease that says why the node is not ready."""
    return lease(age=age, annotations={names.NOT_READY: NOTICE})


def fleet(*ages: float) -> list[Standing]:
    by_name = {f"n{index}": age for index, age in enumerate(ages)}
    return standings(
        {name: node(name) for name in by_name}, {name: lease(name, age) for name, age in by_name.items()}, NOW
    )


NOTICE = "NoCarrier: no carrier on ens1f0"
SWEPT = node("a", "Unknown", names.EXPIRED, (names.TAINT,))
AGENT_SILENT = node("a", "Unknown", "AgentSilent", (names.TAINT,))
NEW = node(ready=None, taints=(names.TAINT,))


@pytest.mark.parametrize(
    ("there", "noted", "expected"),
    [
        (node(), lease(age=899), {"ready": "True", "reason": "Ready", "spec_hash": "0123", "agent_version": "0.1.0"}),
        (
            node(),
            lease(age=901),
            {"ready": "Unknown", "condition": "True", "reason": names.EXPIRED, "message": "no heartbeat for 15m1s"},
        ),
        # The node's clock is wrong.
        (node(), lease(age=60, written=NOW - timedelta(days=9000)), {"expired": False}),
        (node(), lease(age=60, written=NOW + timedelta(days=1)), {"expired": False}),
        (node(), lease(age=1000, written=NOW - timedelta(days=9000)), {"expired": True}),
        (node(), lease(age=1000, written=NOW + timedelta(days=1)), {"expired": True}),
        # A reporter writes no such durations.
        *((node(), lease(age=901, seconds=seconds), {"expired": True}) for seconds in (2**31 - 1, 0, -5)),
        *(
            (
                node(),
                Lease(metadata=ObjectMeta(name="a"), spec=spec),
                {"ready": "Unknown", "message": "its Lease was never renewed", "missing": False},
            )
            for spec in (None, LeaseSpec(), LeaseSpec(leaseDurationSeconds=900, holderIdentity="other"))
        ),
        (node(), None, {"expired": True}),
        # It has just registered, and cannot have lost its heartbeat.
        (NEW, None, {"expired": False, "ready": "Unknown", "reason": "NotPublished"}),
        # It was made anew, and the Lease of the Node before it is still there.
        (NEW, owned("before", age=1000), {"expired": False, "reason": "NotPublished", "renewed": None}),
        (NEW, owned("u-a", age=1000), {"expired": True, "reason": names.EXPIRED}),
        (None, lease(), {"joined": False, "reason": "NotJoined"}),
        *(
            (node(kubelet=kubelet), lease(), {"ready": ready, "reason": reason})
            for kubelet, ready, reason in (
                ("True", "True", "Ready"),
                ("False", "False", "KubeletNotReady"),
                ("Unknown", "Unknown", "KubeletNotReady"),
                ("?", "Unknown", "KubeletNotReady"),
                (None, "Unknown", "KubeletNotReady"),
            )
        ),
        (node(ready="False", reason="NoCarrier", kubelet="Unknown"), lease(), {"reason": "NoCarrier"}),
        # A made-up status.
        *((node(ready=status or None), lease(), {"ready": "Unknown"}) for status in ("Maybe", "", "true", "\x1b[2J")),
        (node(), noticed(), {"ready": "False", "condition": "True", "message": NOTICE}),
        # It returns and can write only its Lease, until it is silent again.
        *((there, noticed(), {"ready": "False", "reason": names.NOTICE, "message": NOTICE}) for there in (SWEPT, NEW)),
        *((there, noticed(age=1000), {"reason": names.EXPIRED}) for there in (SWEPT, NEW)),
        # The reporter's own Unknown is newer than the notice.
        (AGENT_SILENT, noticed(), {"reason": "AgentSilent"}),
    ],
)
def test_a_node_stands_as_its_conditions_and_its_lease_say(
    there: Node | None, noted: Lease | None, expected: dict[str, object]
) -> None:
    status = standing("a", there, noted, NOW)
    assert {key: getattr(status, key) for key in expected} == expected


def test_the_kubelets_message_says_why_a_node_is_not_ready() -> None:
    assert "Kubelet stopped posting" in standing("a", node(kubelet="Unknown"), lease(), NOW).message


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_conditions_of_one_type_the_one_that_is_not_true_counts(order: int) -> None:
    there = node()
    assert there.status and there.status.conditions
    more = NodeCondition("False", names.READY, reason="NoCarrier")
    there.status.conditions = [*there.status.conditions, more][::order]
    assert (standing("a", there, lease(), NOW).ready, condition_of(there, names.READY)) == ("False", more)


def test_long_texts_that_others_write_are_cut() -> None:
    there = node(ready="False", reason="x" * 100_000, message="x" * 1_400_000)
    noted = lease(annotations={names.SPEC_HASH: "x" * 200_000, names.AGENT_VERSION: "x" * 200_000})
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


def test_the_servers_time_goes_on_while_a_command_runs_and_its_host_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = [5.0]
    monkeypatch.setattr(time, "clock_gettime", lambda clock: at[0] if clock == time.CLOCK_BOOTTIME else 5.0)
    api = Api(Client(KubeConfig.from_dict(yaml.safe_load(KUBECONFIG)).get()), "me", NOW)
    assert api.now == NOW
    at[0] += 600
    # A Lease that was renewed meanwhile is not renewed in the future.
    assert standing("a", node(), lease(age=-600), api.now).ready == "True"


def test_an_expected_node_without_a_node_object_is_listed() -> None:
    (status,) = standings({}, {}, NOW, expected=["a"])
    assert (status.name, status.ready, status.reason, status.joined) == ("a", "Unknown", "NotJoined", False)
    assert "deleted, or node_name is wrong" in status.message


def test_objects_of_other_programs_are_left_out_even_if_they_cannot_be_read() -> None:
    elected = lease("controller-leader", age=5, holder="controller-7d9f_1b2c")
    leases = {"controller-leader": elected, "never-held": Lease(metadata=ObjectMeta(name="never-held")), "a": lease()}
    nodes = {"a": node(), "x": node("x", ready=None, taints=("other",))}
    faults = {"controller-leader": "a time", "x": "a time", "dark": "nothing can be read"}
    assert [one.name for one in standings(nodes, leases, NOW)] == ["a"]
    assert [one.name for one in standings(nodes, leases, NOW, faults)] == ["a", "dark"]


def test_a_nodes_lease_counts_whoever_holds_it() -> None:
    (status,) = standings({"a": node()}, {"a": lease(holder="somebody else")}, NOW)
    assert (status.expired, status.missing) == (False, False)


@pytest.mark.parametrize(
    ("there", "noted", "taint", "renew"),
    [
        (node(), lease(age=1000), ("a",), ()),
        (SWEPT, lease(age=1000), (), ()),
        (AGENT_SILENT, lease(age=1000), (), ()),
        # An earlier sweep was interrupted.
        (node("a", "Unknown", names.EXPIRED), lease(age=1000), ("a",), ()),
        (node("a", "True", "Ready", (names.TAINT,)), lease(age=1000), ("a",), ()),
        (node(), noticed(age=1000), ("a",), ()),
        # Its Lease is gone.
        (node(), None, (), ("a",)),
        (SWEPT, None, (), ()),
    ],
)
def test_a_sweep_taints_a_silent_node_once_and_makes_a_lease_that_is_gone_anew(
    there: Node, noted: Lease | None, taint: tuple[str, ...], renew: tuple[str, ...]
) -> None:
    planned = sweeping.plan([standing("a", there, noted, NOW)], 0.25)
    assert (planned.taint, planned.renew) == (taint, renew)


@pytest.mark.parametrize(
    ("there", "swept"),
    [
        (node(), True),
        (node(taints=(names.TAINT,)), True),  # it calls itself ready still
        (node(ready="False"), True),  # pods may come still
        (node(ready="False", taints=(names.TAINT,)), False),
        (SWEPT, True),  # it was silent, and has returned
        (AGENT_SILENT, False),  # its reporter has written that
        (NEW, True),
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
    assert (decided.refused, decided.taint, decided.expired) == (True, (), ("a", "n0", "n1"))


@pytest.mark.parametrize(("nodes", "hostile"), [(2, 0), (4, 0), (3, 1), (4, 1), (5, 2), (7, 3), (12, 4), (40, 9)])
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
    swept = standing("a", SWEPT, lease(age=1000), NOW)
    assert sweeping.plan([swept, *fleet(1000, 1000, 60)], 0.25).refused


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
