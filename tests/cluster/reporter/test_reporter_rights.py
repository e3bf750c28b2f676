"""With a reporter's credentials one can change only its own fields of its own Node: every attempt, by every kind of patch."""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agent.reporter.kubernetes.api import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, Api, Refused
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import manifest, patch, patch_status
from tests.cluster.reporter.forbidden_writes import ATTACKS, KINDS, Attack
from tests.cluster.reporter.reporters import by_token
from tests.cluster.reporter.thief import APPLY, OURS, OWN, READY, THEIRS, Thief, add, labels, remove, status


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_a_reporter_can_change_only_its_own_fields(thief: Thief, attack: Attack, kind: str) -> None:
    before = thief.seen(attack.on)
    content_type, body = attack.bodies()[kind]
    answer = thief.tries("PATCH", f"/api/v1/nodes/{attack.on}{'/status' if attack.status else ''}", body, content_type)
    if answer < 400:
        # The API server answers with success if a write applies nothing, or names fields that it ignores there.
        assert attack.ignored or kind == "apply"
        assert thief.seen(attack.on) == before


def test_a_reporter_may_write_all_that_it_needs(thief: Thief) -> None:
    own = f"/api/v1/nodes/{OWN}"
    assert thief.tries("PATCH", own, labels(rdma="hca"), MERGE_PATCH) == 200
    assert thief.tries("PATCH", own, add("/spec/taints/-", OURS), JSON_PATCH) == 200
    assert thief.tries("PATCH", f"{own}/status", status(conditions=[READY]), STRATEGIC_PATCH) == 200
    seen = thief.seen(OWN)
    assert (seen["metadata"]["labels"]["rdma"], OURS in seen["spec"]["taints"]) == ("hca", True)
    assert [c["status"] for c in seen["status"]["conditions"] if c["type"] == READY["type"]] == ["True"]
    assert thief.tries("PATCH", own, remove("/spec/taints/1"), JSON_PATCH) == 200
    assert thief.tries("PATCH", own, {"metadata": {"labels": {"rdma": None}}}, MERGE_PATCH) == 200


# --- whose fields they are -----------------------------------------------------------------------------------------

Managed = list[dict[str, Any]]
ARGO = "argocd-controller"
BOTH = ("", "/status")


def entry(managed: Managed) -> dict[str, Any]:
    return next(one for one in managed if one["manager"] == ARGO)


def dropped(managed: Managed) -> Managed:
    return [one for one in managed if one["manager"] != ARGO]


def exchanged(managed: Managed) -> Managed:
    first, second = managed[0], managed[1]
    first["fieldsV1"], second["fieldsV1"] = second["fieldsV1"], first["fieldsV1"]
    return managed


def with_merged_changes(managed: Managed) -> Managed:
    return [*dropped(managed), {**entry(managed), "manager": "ancient-changes", "operation": "Update"}]


def without_entries(managed: Managed) -> Managed:
    return []


def with_values(values: dict[str, Any], managed: Managed) -> Managed:
    entry(managed).update(values)
    return managed


def with_fields(change: Any, managed: Managed) -> Managed:
    """As if the entry had these fields as well; None: as if it had not."""

    def merge(into: dict[str, Any], change: dict[str, Any]) -> None:
        for name, inside in change.items():
            if inside is None:
                del into[name]
            else:
                merge(into.setdefault(name, {}), inside)

    merge(entry(managed)["fieldsV1"], change)
    return managed


def with_another(values: dict[str, Any], managed: Managed) -> Managed:
    return [*managed, {**entry(managed), **values}]


CORDON: dict[str, Any] = {"f:spec": {"f:unschedulable": {}}}
DEEP: dict[str, Any] = {f"f:x{number}": {} for number in range(2000)}
OURS_BY_UPDATE = {"manager": "trackbed-reporter", "operation": "Update"}
VALUES: dict[str, dict[str, Any]] = {
    "renamed": {"manager": "somebody"},
    "taken_over": {"manager": "trackbed-reporter"},
    "updated": {"operation": "Update"},
    "dated": {"time": "2001-01-01T00:00:00Z"},
}
FIELDS: dict[str, Any] = {
    "without_a_field": {"f:metadata": {"f:labels": {"f:example.net/tier": None}}},
    "no_annotations": {"f:metadata": {"f:annotations": None}},
    # What it no longer applies, it would take away: here the cordon.
    "with_another_field": CORDON,
    "another_label": {"f:metadata": {"f:labels": {"f:example.net/rack": {}}}},
}
ADDED: dict[str, dict[str, Any]] = {
    "made_up": {"manager": "somebody", "fieldsV1": CORDON},
    "claimed": {**OURS_BY_UPDATE, "fieldsV1": CORDON},
    "deep_label": {**OURS_BY_UPDATE, "fieldsV1": {"f:metadata": {"f:labels": {"f:rdma": DEEP}}}},
    "deep_condition": {
        **OURS_BY_UPDATE,
        "fieldsV1": {"f:status": {"f:conditions": {'k:{"type":"TrackbedReady"}': DEEP}}},
    },
}
TAMPERED: dict[str, Callable[[Managed], Managed]] = {
    **{each.__name__: each for each in (dropped, exchanged, with_merged_changes, without_entries)},
    **{name: partial(with_values, values) for name, values in VALUES.items()},
    **{name: partial(with_fields, change) for name, change in FIELDS.items()},
    **{name: partial(with_another, values) for name, values in ADDED.items()},
}


@pytest.fixture
def owned(cluster: ControlPlane) -> ControlPlane:
    """Another manager applies taints, labels, annotations and a condition of the Node."""
    metadata = {"labels": {"example.net/tier": "gpu"}, "annotations": {"example.net/by": "git"}}
    applied = manifest("v1", "Node", OWN, metadata=metadata, spec={"taints": [THEIRS]})
    words = ("apply", "--server-side", "--force-conflicts", f"--field-manager={ARGO}", "--filename=-")
    cluster.kubectl(*words, stdin=json.dumps(applied))
    return cluster


def managers(plane: ControlPlane) -> Managed:
    fields = plane.get("node", OWN, "--show-managed-fields")["metadata"]["managedFields"]
    return [each for each in fields if each["manager"] not in ("trackbed-reporter", "kube-controller-manager")]


@pytest.mark.parametrize("subresource", BOTH, ids=["node", "status"])
@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_a_reporter_cannot_change_the_ownership_of_fields(
    owned: ControlPlane, tamper: Callable[[Managed], Managed], subresource: str
) -> None:
    thief = Thief(owned, by_token(owned, OWN))
    before = managers(owned)
    live = owned.get("node", OWN, "--show-managed-fields")
    others = [c for c in live["status"]["conditions"] if not c["type"].startswith("Trackbed")]
    # Something that may be written goes with it, and is another each time: what changes nothing is not even judged.
    condition = {**READY, "reason": f"Tampered{time.monotonic_ns()}"}
    change = add("/status/conditions", [*others, condition]) if subresource else add(RDMA, str(time.monotonic_ns()))
    operations = [*change, *add("/metadata/managedFields", tamper(live["metadata"]["managedFields"]))]
    answer = thief.tries("PATCH", f"/api/v1/nodes/{OWN}{subresource}", operations, JSON_PATCH)
    # In a write to a subresource the API server ignores managedFields.
    assert answer == (200 if subresource else 403)
    assert managers(owned) == before


@pytest.mark.parametrize("content_type", [MERGE_PATCH, APPLY], ids=["merge", "apply"])
def test_a_reporter_cannot_write_as_another_manager(owned: ControlPlane, content_type: str) -> None:
    before = managers(owned)
    api = Api(owned.url, by_token(owned, OWN).session)
    body = manifest("v1", "Node", OWN, **labels(rdma="hca"))
    query = {"fieldManager": ARGO, **({"force": "true"} if content_type == APPLY else {})}
    with pytest.raises(Refused) as refused:
        api.ask("PATCH", f"/api/v1/nodes/{OWN}", query, body, content_type)
    assert refused.value.status == 403
    assert managers(owned) == before


def test_writes_are_admitted_although_the_api_server_merges_old_managers(owned: ControlPlane) -> None:
    for number in range(12):
        words = ("label", "node", OWN, f"example.net/many-{number}=x", f"--field-manager=many-{number}")
        owned.kubectl(*words)
    api = Api(owned.url, by_token(owned, OWN).session)
    own = f"/api/v1/nodes/{OWN}"
    for value in ("True", "False"):
        body = {"status": {"conditions": [{**READY, "status": value}]}}
        api.ask("PATCH", f"{own}/status", {"fieldManager": "trackbed-reporter"}, body, STRATEGIC_PATCH)
    api.ask("PATCH", own, {"fieldManager": "trackbed-reporter"}, add("/spec/taints/-", OURS), JSON_PATCH)
    api.ask("PATCH", own, {"fieldManager": "trackbed-reporter"}, remove("/spec/taints/1"), JSON_PATCH)
    assert any(one["manager"] == "ancient-changes" for one in managers(owned))
    owned.kubectl("label", "node", OWN, *[f"example.net/many-{number}-" for number in range(12)])


def test_writes_to_a_node_with_many_fields_of_many_managers_are_admitted(owned: ControlPlane) -> None:
    """A policy's expressions may cost so much and no more; beyond that, the API server refuses the write."""

    def applied(number: int, count: int) -> None:
        keys = [f"example.net/many-{number}-{each}" for each in range(count)]
        metadata = {"labels": dict.fromkeys(keys, "x"), "annotations": dict.fromkeys(keys, "x")}
        body = json.dumps(manifest("v1", "Node", OWN, metadata=metadata))
        owned.kubectl("apply", "--server-side", f"--field-manager=many-{number}", "--filename=-", stdin=body)

    for number in range(8):
        applied(number, 100)
    api = Api(owned.url, by_token(owned, OWN).session)
    own, query = f"/api/v1/nodes/{OWN}", {"fieldManager": "trackbed-reporter"}
    for value in ("True", "False"):
        body = {"status": {"conditions": [{**READY, "status": value}]}}
        api.ask("PATCH", f"{own}/status", query, body, STRATEGIC_PATCH)
    api.ask("PATCH", own, query, [*add("/spec/taints/-", OURS), *add(RDMA, "hca")], JSON_PATCH)
    api.ask("PATCH", own, query, remove("/spec/taints/1"), JSON_PATCH)
    for number in range(8):
        applied(number, 0)


# --- bounds --------------------------------------------------------------------------------------------------------

RDMA = "/metadata/labels/rdma"
SAID = {**READY, "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}
UNBOUNDED: dict[str, dict[str, Any]] = {
    "a-long-message": {"message": "x" * 1025},
    "a-message-of-a-megabyte": {"message": "x" * 1_400_000},
    "another-status": {"status": "Maybe"},
    "no-status": {"status": ""},
    "a-reason-of-words": {"reason": "not one word"},
    "a-long-reason": {"reason": "x" * 129},
    "a-reason-on-two-lines": {"reason": "One\nTwo"},
    "before-its-time": {"lastTransitionTime": "0001-06-01T00:00:00Z"},
    "year-zero": {"lastHeartbeatTime": "0000-01-01T00:00:00Z"},
    "year-10000": {"lastTransitionTime": "9999-12-31T23:59:59-01:00"},
}


@pytest.mark.parametrize("type", ["TrackbedReady", "TrackbedUpToDate", "TrackbedDevicesReady"])
@pytest.mark.parametrize("different", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_a_condition_has_bounds(thief: Thief, different: dict[str, str], type: str) -> None:
    before = thief.seen(OWN)
    for kind, body in (
        (STRATEGIC_PATCH, status(conditions=[{**SAID, **different, "type": type}])),
        (JSON_PATCH, add("/status/conditions/-", {**SAID, **different, "type": type})),
    ):
        assert thief.tries("PATCH", f"/api/v1/nodes/{OWN}/status", body, kind) in (400, 403, 422)
    assert thief.seen(OWN) == before


@pytest.mark.parametrize("more", [1, 2000])
def test_there_is_one_condition_of_each_type(thief: Thief, more: int) -> None:
    own = f"/api/v1/nodes/{OWN}/status"
    assert thief.tries("PATCH", own, status(conditions=[SAID]), STRATEGIC_PATCH) == 200
    before = thief.seen(OWN)
    assert thief.tries("PATCH", own, add("/status/conditions/-", SAID) * more, JSON_PATCH) == 403
    assert thief.seen(OWN) == before


def test_the_order_of_others_conditions_stays(thief: Thief) -> None:
    before = thief.seen(OWN)
    others = [c for c in before["status"]["conditions"] if not c["type"].startswith("Trackbed")]
    body = add("/status/conditions", [*reversed(others), {**SAID, "reason": "Reversed"}])
    assert thief.tries("PATCH", f"/api/v1/nodes/{OWN}/status", body, JSON_PATCH) == 403
    assert thief.seen(OWN) == before


def test_a_reporter_cannot_write_a_time_into_its_taint(thief: Thief) -> None:
    body = add("/spec/taints/-", {**OURS, "timeAdded": "2001-01-01T00:00:00Z"})
    assert thief.tries("PATCH", f"/api/v1/nodes/{OWN}", body, JSON_PATCH) == 403


def test_an_old_value_out_of_bounds_does_not_keep_not_ready_from_being_written(thief: Thief) -> None:
    """As an earlier version of the policies let it through."""
    cluster = thief.plane
    bad = [
        {**SAID, "message": "x" * 5000},
        {**SAID, "status": "Maybe"},
        {**SAID, "type": "TrackbedUpToDate", "reason": "a b"},
    ]
    conditions = cluster.get("node", OWN)["status"]["conditions"]
    others = [c for c in conditions if not c["type"].startswith("Trackbed")]
    patch_status(cluster, OWN, add("/status/conditions", [*bad, *others]), how="json")
    patch(cluster, "node", OWN, add("/spec/taints/-", {**OURS, "timeAdded": "2001-01-01T00:00:00Z"}), how="json")
    cluster.kubectl("label", "node", OWN, "trackbed.internal/ready=true")
    own = f"/api/v1/nodes/{OWN}"
    not_ready = {**SAID, "status": "False", "reason": "NoCarrier"}
    assert thief.tries("PATCH", f"{own}/status", status(conditions=[not_ready]), STRATEGIC_PATCH) == 200
    assert thief.tries("PATCH", own, remove("/metadata/labels/trackbed.internal~1ready"), JSON_PATCH) == 200
    patch_status(cluster, OWN, add("/status/conditions", others), how="json")
    patch(cluster, "node", OWN, add("/spec/taints", [THEIRS]), how="json")
