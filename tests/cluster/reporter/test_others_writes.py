"""How the reporter reacts to what others write into its Node and its Lease, against a real API server."""

import json
import threading
from typing import Any

import pytest

from agent.report.names import READY_LABEL
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import LEASES, manifest, patch, patch_status
from tests.cluster.reporter.conftest import Start
from tests.cluster.reporter.reporters import notice, renewed, until
from tests.cluster.reporter.test_publishing import BUSY, PLUGIN
from tests.cluster.reporter.thief import OURS, add


def test_what_others_write_at_the_same_time_survives(plane: ControlPlane, start: Start) -> None:
    reporter = start("busy")
    stop = threading.Event()

    def others() -> None:
        for turn in range(10):
            plane.kubectl("taint", "node", reporter.name, f"other-{turn % 3}=x:NoSchedule", "--overwrite")
            plane.kubectl("label", "node", reporter.name, f"example.net/turn-{turn}=x")
            body = {"status": {"conditions": [{"type": f"Other{turn}", "status": "True"}]}}
            patch_status(plane, reporter.name, body, how="strategic")
        stop.set()

    thread = threading.Thread(target=others)
    thread.start()
    ready = False
    while not stop.wait(0.02):
        ready = not ready
        reporter.say(ready)
    thread.join()
    # After so many changes Ready is held back for a minute.
    reporter.acknowledged(reporter.say(False))
    node = reporter.node()
    theirs = {BUSY["key"], "other-0", "other-1", "other-2"}
    assert {taint["key"] for taint in node["spec"]["taints"]} == {*theirs, OURS["key"]}
    assert {f"example.net/turn-{turn}" for turn in range(10)} <= node["metadata"]["labels"].keys()
    assert {f"Other{turn}" for turn in range(10)} <= {c["type"] for c in node["status"]["conditions"]}
    assert reporter.condition()["status"] == "False"


def applied(plane: ControlPlane, name: str, *options: str, **fields: Any) -> None:
    """Write as a GitOps tool does, which by force becomes the owner of each field that it applies."""
    words = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller", *options)
    plane.kubectl("apply", *words, "--filename=-", stdin=json.dumps(manifest("v1", "Node", name, **fields)))


LIED = [{"type": "TrackbedReady", "status": "True", "reason": "Applied", "message": "as it is in git"}]

IN_STATUS = ("--subresource=status",)

GITOPS: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "taints": [((), {"spec": {"taints": [BUSY]}})],
    "our-taint-too": [((), {"spec": {"taints": [BUSY, OURS]}}), ((), {"spec": {"taints": [BUSY]}})],
    "no-taints": [((), {"spec": {"taints": []}})],
    "labels": [((), {"metadata": {"labels": {READY_LABEL: "true"}}})],
    "annotations": [((), {"metadata": {"annotations": {"example.net/note": "applied"}}})],
    "condition": [(IN_STATUS, {"status": {"conditions": LIED}})],
    "everything": [
        (
            (),
            {
                "metadata": {
                    "labels": {READY_LABEL: "true", "rdma": "hca"},
                    "annotations": {"example.net/note": "applied"},
                },
                "spec": {"taints": [BUSY]},
            },
        ),
        (IN_STATUS, {"status": {"conditions": LIED}}),
    ],
}


@pytest.mark.parametrize("manifests", GITOPS.values(), ids=GITOPS.keys())
def test_whatever_others_own_by_server_side_apply_a_node_that_is_not_ready_says_so(
    plane: ControlPlane, start: Start, manifests: list[tuple[tuple[str, ...], dict[str, Any]]], request: Any
) -> None:
    def says_so() -> bool:
        labels = reporter.node()["metadata"]["labels"]
        return reporter.is_tainted() and READY_LABEL not in labels and reporter.condition()["status"] == "False"

    reporter = start(f"gitops-{request.node.callspec.id}", [PLUGIN])
    reporter.opened()
    for options, fields in manifests:
        applied(plane, reporter.name, *options, **fields)
    reporter.acknowledged(reporter.say(False))
    assert says_so()
    # The tool applies the same again and again, and owns all of it again.
    for options, fields in manifests:
        applied(plane, reporter.name, *options, **fields)
    until(says_so, "it says so again")
    until(lambda: not reporter.published().error, "and nothing is in the way")


ON_LEASE: dict[str, tuple[str, dict[str, Any]]] = {
    "its-time": ("patch", {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}),
    "its-duration": ("patch", {"spec": {"leaseDurationSeconds": 60}}),
    "its-notice": ("patch", {"metadata": {"annotations": {"trackbed.internal/not-ready": "somebody: says so"}}}),
    "its-labels-and-notice": (
        "patch",
        {
            "metadata": {
                "labels": {f"example.net/{number}": "x" for number in range(20)},
                "annotations": {"trackbed.internal/not-ready": "somebody: says so"},
            }
        },
    ),
    "its-spec-applied": ("apply", {"spec": {"holderIdentity": "owned-its-spec-applied", "leaseDurationSeconds": 60}}),
    "its-owners": ("patch", {"metadata": {"ownerReferences": []}}),
}


@pytest.mark.parametrize("what", ON_LEASE)
def test_whatever_others_have_written_in_its_lease_it_is_renewed(
    plane: ControlPlane, start: Start, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.lease.LEASE_EVERY", (0.5, 0.5))
    reporter = start(f"owned-{what}")
    reporter.opened()
    how, body = ON_LEASE[what]
    place = (LEASES, "--field-manager=somebody")
    if how == "apply":
        document = manifest("coordination.k8s.io/v1", "Lease", reporter.name, **body)
        plane.kubectl("apply", "--server-side", "--force-conflicts", *place, "--filename=-", stdin=json.dumps(document))
    else:
        patch(plane, "lease", reporter.name, body, *place)

    def restored() -> bool:
        lease = plane.get("lease", reporter.name, LEASES)
        return lease["spec"]["leaseDurationSeconds"] == 900 and bool(lease["metadata"].get("ownerReferences"))

    until(restored, "it is as the reporter writes it")
    until(lambda: not notice(plane, reporter.name), "it says nothing else")
    before = renewed(plane, reporter.name)
    until(lambda: renewed(plane, reporter.name) > before, "and it is renewed")
    assert reporter.published().error == ""


def test_if_a_node_has_two_conditions_of_its_type_the_reporter_leaves_one(plane: ControlPlane, start: Start) -> None:
    """Whoever may write a Node may write two with a JSON patch, and who reads the other one is told something else."""

    def said() -> list[str]:
        conditions = reporter.node()["status"]["conditions"]
        return [one["status"] for one in conditions if one["type"] == "TrackbedReady"]

    reporter = start("doubled")
    reporter.opened()
    lie = {"type": "TrackbedReady", "status": "True", "reason": "Doubled", "message": ""}
    for path in ("/status/conditions/-", "/status/conditions/0"):
        patch_status(plane, reporter.name, add(path, lie), how="json")
        until(lambda: said() == ["True"], "one is left")
    reporter.acknowledged(reporter.say(False))
    mark = len(plane.audit())
    patch_status(plane, reporter.name, add("/status/conditions/0", lie), how="json")
    until(lambda: said() == ["False"], "one is left, and it says so")
    plane.kubectl("label", "node", reporter.name, "example.net/after=x")
    until(lambda: reporter.published().error == "", "nothing is in the way")
    assert len(reporter.writes(mark)) <= 2


def test_trackbeds_taint_with_a_value_is_left_alone_and_writes_succeed(plane: ControlPlane, start: Start) -> None:
    reporter = start("valued")
    reporter.opened()
    valued = {**OURS, "value": "by-somebody"}
    applied(plane, reporter.name, spec={"taints": [BUSY, valued]})
    reporter.acknowledged(reporter.say(False))
    assert reporter.condition()["status"] == "False"
    assert reporter.node()["spec"]["taints"] == [BUSY, valued]
    assert reporter.published().error == ""
