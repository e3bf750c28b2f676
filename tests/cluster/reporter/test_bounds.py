"""What a reporter writes in its Lease is bounded, by every way to write it."""

import itertools
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

import pytest
from lightkube.resources.coordination_v1 import Lease

from agent.report import names
from agent.reporter.kubernetes.api import MERGE_PATCH, Api, Refused
from fleet.reading import read
from fleet.standing import renewed
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import LEASES as NAMESPACED
from tests.cluster.objects import manifest, patch_lease
from tests.cluster.reporter.reporters import by_admin, by_token, node, prepare
from tests.cluster.reporter.thief import APPLY, LEASES, Thief

OWN = "bounded"
PLACE = LEASES.format(names.NAMESPACE)
GROUP = "coordination.k8s.io/v1"
MANY: dict[str, Any] = {"f:spec": {f"f:x{number}": {} for number in range(2000)}}
# Few fields, and yet large: what is in them, or their names.
DEEP: dict[str, Any] = {"f:spec": {"f:x": {f"f:y{number}": {} for number in range(2000)}}}
LONG: dict[str, Any] = {"f:spec": {f"f:{'x' * 200_000}": {}}}


def managed(version: str, **more: Any) -> dict[str, Any]:
    entry = {"manager": "m", "operation": "Update", "apiVersion": version, "time": "2026-01-01T00:00:00Z"}
    return {"managedFields": [{**entry, "fieldsType": "FieldsV1", "fieldsV1": MANY, **more}]}


# Many clients read no time of the years 0 and 10000, and one such object ends their list of all.
DATED: dict[str, Any] = {"fieldsV1": {"f:spec": {"f:x": {}}}}


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    prepare(control_plane)
    control_plane.apply(node(OWN))
    return control_plane


@pytest.fixture(scope="module")
def thief(plane: ControlPlane) -> Thief:
    return Thief(plane, by_token(plane, OWN))


def lease(plane: ControlPlane, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """A Lease as a reporter writes it, and what is different in it."""
    uid = plane.get("node", OWN)["metadata"]["uid"]
    made = {
        "annotations": {names.SPEC_HASH: "a" * 64, names.AGENT_VERSION: "0.1.0"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": OWN, "uid": uid}],
    }
    renewal = {"holderIdentity": OWN, "leaseDurationSeconds": 900, "renewTime": "2026-01-01T00:00:00.000000Z"}
    return manifest(GROUP, "Lease", OWN, names.NAMESPACE, metadata={**made, **metadata}, spec={**renewal, **spec})


LARGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "finalizers": ({"finalizers": ["example.net/never"]}, {}),
    "labels": ({"labels": {"example.net/a": "b"}}, {}),
    "another annotation": ({"annotations": {"example.net/a": "b"}}, {}),
    "a large annotation": ({"annotations": {names.SPEC_HASH: "a" * 200_000}}, {}),
    "another owner": ({"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "other", "uid": "u"}]}, {}),
    "many owners": (
        {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": OWN, "uid": f"u{n}"} for n in range(1000)]},
        {},
    ),
    "68 years": ({}, {"leaseDurationSeconds": 2**31 - 1}),
    "a second more": ({}, {"leaseDurationSeconds": 901}),
    "the year 0": ({}, {"renewTime": "0000-01-01T00:00:00.000000Z"}),
    # In UTC, which is what the API server says, it is the year 10000.
    "the year 10000": ({}, {"renewTime": "9999-12-31T23:59:59.999999-23:59"}),
    "another time": ({}, {"acquireTime": "0000-01-01T00:00:00.000000Z"}),
    "many managed fields": (managed(GROUP), {}),
    "deep managed fields": (managed(GROUP, fieldsV1=DEEP), {}),
    "long managed fields": (managed(GROUP, fieldsV1=LONG), {}),
    "managed in the year 0": (managed(GROUP, **DATED, time="0000-01-01T00:00:00Z"), {}),
    "managed in the year 10000": (managed(GROUP, **DATED, time="9999-12-31T23:59:59-23:59"), {}),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_lease_is_bounded_in_size_and_time(thief: Thief, what: str) -> None:
    place = f"{PLACE}/{OWN}"
    metadata, spec = LARGE[what]
    bad, good = lease(thief.plane, metadata, spec), lease(thief.plane, {}, {})
    thief.plane.kubectl("delete", "lease", OWN, NAMESPACED, "--ignore-not-found")
    assert thief.tries("POST", PLACE, bad) == 403
    assert thief.tries("POST", PLACE, good) == 200
    before = thief.plane.get("lease", OWN, NAMESPACED)
    for kind in (MERGE_PATCH, APPLY):
        assert thief.tries("PATCH", place, bad, kind) in (400, 403), kind
    assert thief.plane.get("lease", OWN, NAMESPACED) == before
    renewed = {"spec": {"renewTime": "2026-01-01T00:10:00.000000Z"}}
    assert thief.tries("PATCH", place, renewed, MERGE_PATCH) == 200


def test_a_reporter_can_write_its_lease_whatever_others_have_put_into_it(thief: Thief) -> None:
    """The Lease is where a reporter says that its node is not ready if it can write nothing else."""
    place, plane = f"{PLACE}/{OWN}", thief.plane
    plane.kubectl("delete", "lease", OWN, NAMESPACED, "--ignore-not-found")
    assert thief.tries("POST", PLACE, lease(plane, {}, {})) == 200
    # One that exists: the garbage collector would delete the Lease.
    uid = plane.get("configmap", "reporter", NAMESPACED)["metadata"]["uid"]
    owners = [
        *lease(plane, {}, {})["metadata"]["ownerReferences"],
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "reporter", "uid": uid},
    ]
    notes = {names.SPEC_HASH: "a" * 500, "example.net/a": "b"}
    body = {
        "metadata": {"annotations": notes, "labels": {"example.net/a": "b"}, "ownerReferences": owners},
        "spec": {"leaseDurationSeconds": 86400, "renewTime": "0000-01-01T00:00:00.000000Z", "leaseTransitions": 5},
    }
    patch_lease(plane, OWN, body)
    notice = {"metadata": {"annotations": {names.NOT_READY: "NoCarrier: no carrier"}}}
    assert thief.tries("PATCH", place, notice, MERGE_PATCH) == 200
    assert thief.tries("PATCH", place, lease(plane, {}, {}), MERGE_PATCH) == 200
    written = plane.get("lease", OWN, NAMESPACED)
    assert written["spec"]["leaseDurationSeconds"] == 900
    assert written["metadata"]["annotations"]["example.net/a"] == "b"


def stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest.mark.parametrize(("count", "fields"), [(12, 1), (60, 40)])
@pytest.mark.parametrize("operation", ["Apply", "Update"])
def test_any_number_of_other_field_managers_refuses_no_renewal_and_no_notice(
    thief: Thief, operation: str, count: int, fields: int
) -> None:
    """The API server keeps all who apply, and folds all but ten of those who update, the reporter's own entry among them."""
    place, plane = f"{PLACE}/{OWN}", thief.plane
    plane.kubectl("delete", "lease", OWN, NAMESPACED, "--ignore-not-found")
    assert thief.tries("POST", PLACE, lease(plane, {}, {})) == 200
    others = Api(plane.url, by_admin(plane).session)
    for number in range(count if operation == "Apply" else 12):
        notes = {f"example.net/a-{number}-{field}": "x" for field in range(fields)}
        body = manifest(GROUP, "Lease", OWN, names.NAMESPACE, metadata={"annotations": notes})
        kind = APPLY if operation == "Apply" else MERGE_PATCH
        others.ask("PATCH", place, {"fieldManager": f"other-{number}"}, body, kind)
    for notice in ({names.NOT_READY: "NoCarrier: no carrier"}, {names.NOT_READY: "None: two"}, {names.NOT_READY: None}):
        body = {"metadata": {"annotations": notice}, "spec": {"renewTime": stamp()}}
        assert thief.tries("PATCH", place, body, MERGE_PATCH) == 200
        assert thief.tries("PATCH", place, lease(plane, {}, {"renewTime": stamp()}), MERGE_PATCH) == 200


TIMES = ("1971-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "2199-01-01T00:00:00Z")


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("version", [GROUP, f"{GROUP}beta1", "v1"])
@pytest.mark.parametrize("manager", ["trackbed-reporter", "ancient-changes", "thief"])
def test_a_node_cannot_set_the_time_at_which_its_lease_was_renewed(
    thief: Thief, manager: str, version: str, when: str
) -> None:
    """A sweep reads it from the field managers, which whoever writes an object may write, too."""
    place, plane, admin = f"{PLACE}/{OWN}", thief.plane, Api(thief.plane.url, by_admin(thief.plane).session)
    notice, renewal = {"annotations": {names.NOT_READY: "x"}}, {"spec": {"renewTime": stamp()}}
    spec: dict[str, Any] = {"f:spec": {"f:renewTime": {}}}
    forged = [managed(version, manager=manager, operation=how, time=when, fieldsV1=spec) for how in ("Update", "Apply")]
    changes: list[dict[str, Any]] = [{}, {"metadata": notice}, renewal, {"metadata": notice, **renewal}]
    for fields, change in itertools.product([*forged, {"managedFields": [{}]}, {"managedFields": []}], changes):
        with suppress(Refused):
            admin.ask("DELETE", place)
        began = datetime.now(timezone.utc).replace(microsecond=0)
        assert thief.tries("POST", PLACE, lease(plane, fields, {})) in (200, 403)
        thief.tries("POST", PLACE, lease(plane, {}, {}))
        thief.tries("PATCH", place, {**change, "metadata": {**change.get("metadata", {}), **fields}}, MERGE_PATCH)
        there, fault = read(admin.ask("GET", place), Lease)
        at = renewed(there) if there else None
        assert fault == "" and at is not None and began <= at <= datetime.now(timezone.utc), (fields, change)
