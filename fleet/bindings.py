"""The two RBAC bindings that give a node's user a reporter's rights. They are created when its certificate is approved.

A certificate cannot be revoked. To shut out a node, delete its two bindings: then its certificate has no rights.
"""

from __future__ import annotations

from http import HTTPStatus

from lightkube import ApiError, Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.models.rbac_v1 import RoleRef, Subject
from lightkube.resources.rbac_authorization_v1 import ClusterRoleBinding, RoleBinding

from agent.report import names

GROUP = "rbac.authorization.k8s.io"
CLUSTER_ROLE = "trackbed:node"
ROLE = "trackbed:reporter"
"""The roles in fleet/cluster/rbac.yaml: one for Nodes and certificates, one for Leases."""


Binding = ClusterRoleBinding | RoleBinding


def bindings(node: str) -> tuple[ClusterRoleBinding, RoleBinding]:
    """The bindings of a node's user to the reporter's roles."""
    user = f"{names.NODE_USER}{node}"
    subject = Subject(kind="User", name=user, apiGroup=GROUP)
    everywhere = RoleRef(kind="ClusterRole", name=CLUSTER_ROLE, apiGroup=GROUP)
    leases = RoleRef(kind="Role", name=ROLE, apiGroup=GROUP)
    return (
        ClusterRoleBinding(metadata=ObjectMeta(name=user), roleRef=everywhere, subjects=[subject]),
        RoleBinding(metadata=ObjectMeta(name=user, namespace=names.NAMESPACE), roleRef=leases, subjects=[subject]),
    )


def admit(client: Client, node: str) -> list[Binding]:
    """Create the bindings of a node that do not exist yet.

    :returns: those that it has created.
    :raises httpx2.HTTPError: as the client does.
    """
    made: list[Binding] = []
    for binding in bindings(node):
        try:
            client.create(binding)
        except ApiError as error:
            if error.status.code != HTTPStatus.CONFLICT:
                raise
        else:
            made.append(binding)
    return made


def withdraw(client: Client, made: list[Binding]) -> None:
    """Delete bindings that :func:`admit` has created.

    :raises httpx2.HTTPError: as the client does.
    """
    # The RoleBinding comes last in the list, and first here: it alone marks the node as enrolled.
    for binding in reversed(made):
        name = (binding.metadata.name if binding.metadata else None) or ""
        try:
            if isinstance(binding, RoleBinding):
                client.delete(RoleBinding, name, namespace=names.NAMESPACE)
            else:
                client.delete(ClusterRoleBinding, name)
        except ApiError as error:
            if error.status.code != HTTPStatus.NOT_FOUND:
                raise


def admitted(client: Client) -> set[str]:
    """The nodes that have bindings: enrolled, and not shut out since.

    :raises ApiError: as the client does.
    """
    bindings = [one.metadata.name or "" for one in client.list(RoleBinding, namespace=names.NAMESPACE) if one.metadata]
    return {name.removeprefix(names.NODE_USER) for name in bindings if name.startswith(names.NODE_USER)}
