"""The rights that docs/fleet.md lists for the fleet's commands and for a deploy suffice: each is run with no others."""

from pathlib import Path
from typing import Any

import pytest

from agent.report import names
from fleet import credentials
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import ended, make_node, start
from tests.cluster.objects import LEASES as IN_NAMESPACE
from tests.cluster.objects import manifest

RBAC = "rbac.authorization.k8s.io"
LEASES = ("coordination.k8s.io", ("leases",))


def rule(group: str, resources: tuple[str, ...], verbs: tuple[str, ...], *objects: str) -> dict[str, Any]:
    made = {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}
    return {**made, "resourceNames": list(objects)} if objects else made


def grant(
    plane: ControlPlane, subject: dict[str, Any], cluster: list[dict[str, Any]], own: list[dict[str, Any]]
) -> None:
    """Give somebody these rights in the whole cluster, and those in the namespace trackbed-system."""
    name, version = f"test:{subject['name']}", f"{RBAC}/v1"
    for kind, rules, place in (("ClusterRole", cluster, ""), ("Role", own, names.NAMESPACE)):
        role = {"apiGroup": RBAC, "kind": kind, "name": name}
        plane.apply(
            manifest(version, kind, name, place, rules=rules),
            manifest(version, f"{kind}Binding", name, place, roleRef=role, subjects=[subject]),
        )


def user_with(plane: ControlPlane, name: str, cluster: list[dict[str, Any]], own: list[dict[str, Any]]) -> Path:
    """A kubeconfig of a user with these rights and no others."""
    grant(plane, {"kind": "User", "name": name, "apiGroup": RBAC}, cluster, own)
    return plane.identity(name)


@pytest.mark.usefixtures("no_nodes")
def test_the_rights_of_status_and_sweep_suffice(plane: ControlPlane) -> None:
    make_node(plane, "a")
    make_node(plane, "b", life=1)
    make_node(plane, "c")
    plane.kubectl("delete", "lease", "c", IN_NAMESPACE)
    listed = [rule(*LEASES, ("list",)), rule("", ("configmaps",), ("get",), "shut-out")]
    looks = user_with(plane, "looks", [rule("", ("nodes",), ("list",))], listed)
    shown = ended(start(looks, "status"))
    assert (shown.code, shown.err) == (2, "")
    sweeps = user_with(
        plane,
        "sweeps",
        [rule("", ("nodes",), ("list", "get")), rule("", ("nodes", "nodes/status"), ("patch",))],
        [rule(*LEASES, ("list", "get", "create"))],
    )
    swept = ended(start(sweeps, "sweep", "--max-share", "1", "--json"))
    assert (swept.code, swept.err) == (0, "")
    assert (swept.document["renewed"], swept.document["tainted"]) == (["c"], ["b"])


@pytest.mark.usefixtures("no_nodes")
def test_the_rights_of_a_deploy_suffice(plane: ControlPlane) -> None:
    make_node(plane, "a")
    brings = user_with(
        plane,
        "brings",
        [rule("", ("nodes",), ("get",))],
        [rule("", ("serviceaccounts/token",), ("create",), "reporter")],
    )
    assert credentials.bound_token(str(brings), "a", 3600)
