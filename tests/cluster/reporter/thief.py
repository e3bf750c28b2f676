"""An attacker with a reporter's credentials, and the bodies and paths of what it writes."""

from typing import Any

from attrs import field, frozen

from agent.reporter.kubernetes.api import JSON, Api, Refused
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import manifest
from tests.cluster.reporter.reporters import Fixed

APPLY = "application/apply-patch+yaml"
OWN, OTHER = "victim-a", "victim-b"
OURS = {"key": "readiness.k8s.io/trackbed", "effect": "NoSchedule"}
THEIRS = {"key": "example.net/busy", "effect": "NoSchedule"}
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "00000000-0000-0000-0000-000000000000"}
READY = {"type": "TrackbedReady", "status": "True", "reason": "AsSpecified", "message": ""}


def labels(**more: Any) -> dict[str, Any]:
    return {"metadata": {"labels": more}}


def add(path: str, value: Any) -> list[dict[str, Any]]:
    return [{"op": "add", "path": path, "value": value}]


def remove(path: str) -> list[dict[str, Any]]:
    return [{"op": "remove", "path": path}]


def taints(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"taints": list(entries)}}


def status(**more: Any) -> dict[str, Any]:
    return {"status": more}


@frozen
class Thief:
    """An attacker with a node's credentials, and the administrator's view."""

    plane: ControlPlane
    identity: Fixed
    api: Api = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "api", Api(self.plane.url, self.identity.session))

    def tries(self, method: str, path: str, body: Any = None, content_type: str = JSON) -> int:
        """The status of the answer."""
        query = {"fieldManager": "thief", "force": "true"} if content_type == APPLY else {}
        try:
            self.api.ask(method, path, query, body, content_type)
        except Refused as error:
            return error.status
        return 200

    def seen(self, name: str) -> dict[str, Any]:
        node = self.plane.get("node", name, "--show-managed-fields")
        managers = node["metadata"].pop("managedFields")
        del node["metadata"]["resourceVersion"]
        # The owner of each field counts, not the time of the last write; the attacker's own fields are left out.
        node["managers"] = sorted(f"{m['manager']} {m['operation']}" for m in managers if m["manager"] != "thief")
        return node


ACCOUNTS = "/api/v1/namespaces/trackbed-system/serviceaccounts"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def lease(name: str, namespace: str, holder: str | None = None) -> dict[str, Any]:
    return manifest("coordination.k8s.io/v1", "Lease", name, namespace, spec={"holderIdentity": holder or name})
