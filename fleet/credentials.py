"""Gets a reporter's first token from the API server, for the deploy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from httpx2 import HTTPError
from lightkube import ApiError, Client
from lightkube.core.exceptions import ConfigError
from lightkube.models.authentication_v1 import BoundObjectReference, TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ServiceAccountToken

from agent.report import names
from fleet.api import Failed, answers
from fleet.connection import connect, why
from fleet.kubeconfig import Misconfigured, default_file, from_kubeconfig
from fleet.reading import PlainNode


class NotGiven(Exception):
    """The API server gave no token. The message says why."""


class NotJoined(NotGiven):
    """The cluster has no Node that a token could be bound to."""


def bound_token(kubeconfig: str | None, node: str, seconds: int) -> str:
    """A token for a reporter, valid for so many seconds while its Node exists.

    :raises NotJoined: there is no such Node.
    :raises NotGiven: saying why.
    """
    with _client(kubeconfig) as client:
        try:
            uid = client.get(PlainNode, node)["metadata"]["uid"]
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
                # With several clusters it may be the kubeconfig of another one.
                raise NotJoined(f"{node} has not joined the cluster of {client.config.cluster.server}") from None
            raise
        bound = BoundObjectReference(apiVersion="v1", kind="Node", name=node, uid=uid)
        asked = ServiceAccountToken(
            metadata=ObjectMeta(), spec=TokenRequestSpec(boundObjectRef=bound, expirationSeconds=seconds)
        )
        made = client.create(asked, names.ACCOUNT, namespace=names.NAMESPACE)
        return (made.status.token if made.status else None) or ""


@contextmanager
def _client(kubeconfig: str | None) -> Iterator[Client]:
    """A client of the cluster.

    :raises NotGiven: for each error of the client.
    """
    try:
        config = from_kubeconfig(Path(kubeconfig) if kubeconfig else default_file())
        with connect(config, "trackbed-deploy") as client, answers(client):
            yield client
    except ApiError as error:
        remedy = "; is fleet/cluster applied?" if error.status.code == HTTPStatus.NOT_FOUND else ""
        raise NotGiven(f"the API server refuses: {error.status.message}{remedy}") from None
    except HTTPError as error:
        raise NotGiven(why(error)) from None
    except (Misconfigured, OSError) as error:
        raise NotGiven(str(error)) from None
    except ConfigError as error:
        raise NotGiven(f"{error}; give another kubeconfig") from None
    except Failed as error:
        raise NotGiven(error.message) from None
