"""Gets a reporter's first token from the API server, for the deploy."""

from __future__ import annotations

from pathlib import Path

from lightkube import ApiError
from lightkube.models.authentication_v1 import BoundObjectReference, TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ServiceAccountToken

from agent.report import names
from fleet.api import ABSENT, Failed, answers, client, code, errors
from fleet.reading import PlainNode


class NotJoined(Failed):
    """The cluster has no Node that a token could be bound to."""


def bound_token(kubeconfig: str | None, node: str, seconds: int) -> str:
    """A token for a reporter, valid for so many seconds while its Node exists.

    :raises NotJoined: there is no such Node.
    :raises Failed: saying why the API server gives none.
    """
    with errors(), client(Path(kubeconfig) if kubeconfig else None) as connected, answers(connected):
        try:
            uid = connected.get(PlainNode, node)["metadata"]["uid"]
        except ApiError as error:
            if code(error) == ABSENT:
                # With several clusters it may be the kubeconfig of another one.
                raise NotJoined(f"{node} has not joined the cluster of {connected.config.cluster.server}") from None
            raise
        bound = BoundObjectReference(apiVersion="v1", kind="Node", name=node, uid=uid)
        asked = ServiceAccountToken(
            metadata=ObjectMeta(), spec=TokenRequestSpec(boundObjectRef=bound, expirationSeconds=seconds)
        )
        made = connected.create(asked, names.ACCOUNT, namespace=names.NAMESPACE)
        return (made.status.token if made.status else None) or ""
