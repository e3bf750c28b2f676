"""The connection to the Kubernetes API. Every error becomes one message for the user."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import httpx2
from attrs import field, frozen
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import GenericGlobalResource
from lightkube.models.meta_v1 import DeleteOptions, Preconditions
from lightkube.resources.authentication_v1 import SelfSubjectReview
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node
from lightkube.types import PatchType

from agent.report import names
from agent.runtime import uptime
from agent.spec.node import NODE_NAME
from fleet.connection import TEMPORARY, PluginFailed, connect, unreachable
from fleet.kubeconfig import Misconfigured, default_file, from_kubeconfig
from fleet.reading import (
    PlainConfigMap,
    PlainLease,
    PlainNode,
    PlainNodeStatus,
    Read,
    all_of,
    read,
    read_all,
    without_bad_times,
)

CONFLICTS = (409, 422)
"""HTTP status codes of a patch whose precondition (resourceVersion, or a `test`) no longer holds."""

ABSENT, FORBIDDEN = 404, 403
"""HTTP status codes: there is no such object; the user may not do that."""

NO_LEADER = 500
"""HTTP status code also of a request during which etcd has no leader ("etcdserver: leader changed")."""

SHUT_OUT = "shut-out"
"""The ConfigMap with the names of the Nodes that are shut out, each with the reason."""


def node_name(value: str) -> str:
    """A type of click's arguments: the name of a Node."""
    if not NODE_NAME.fullmatch(value):
        raise click.BadParameter(f"{value[:80]!r} is not the name of a Node; see: trackbed fleet status")
    return value


F = TypeVar("F", bound=Callable[..., Any])


class Failed(click.ClickException):
    """An error that the user can correct; exit code 1."""


class Unavailable(Failed):
    """The API server cannot answer for now: it may still be starting."""


@frozen
class Api:
    """A cluster's API. ``user``: this client's name in the cluster. ``started``: its time when this object was made."""

    client: Client
    user: str
    started: datetime
    clock: Callable[[], float] = uptime
    _started_at: float = field(init=False)

    @_started_at.default
    def _(self) -> float:
        return self.clock()

    @property
    def now(self) -> datetime:
        """The server's time now, also after a suspend. A Lease that is renewed meanwhile must not be in the future."""
        return self.started + timedelta(seconds=self.clock() - self._started_at)

    def nodes(self) -> Read[Node]:
        """Every Node."""
        with answers(self.client):
            return all_of(self.client, PlainNode, lambda listed: read_all(listed, Node))

    def leases(self) -> Read[Lease]:
        """Every reporter's Lease, by the Node's name."""
        with answers(self.client):
            return all_of(self.client, PlainLease, lambda listed: read_all(listed, Lease), namespace=names.NAMESPACE)

    def shut_out(self) -> Mapping[str, str] | None:
        """Why each Node is shut out, by its name (docs/kubernetes.md); None: this user may not read that.

        Without the ConfigMap no Node is shut out (fleet/cluster/shut-out-policy.yaml).
        """
        try:
            with answers(self.client):
                document = self.client.get(PlainConfigMap, SHUT_OUT, namespace=names.NAMESPACE)
                return {str(name): str(why) for name, why in (document.get("data") or {}).items()}
        except ApiError as error:
            if code(error) not in (ABSENT, FORBIDDEN):
                raise
            return {} if code(error) == ABSENT else None

    def node(self, name: str) -> tuple[Node, str]:
        """A Node, and why parts of it cannot be read.

        :raises Failed: nothing of it can be read.
        """
        with answers(self.client):
            return _if_readable(name, *read(self.client.get(PlainNode, name), Node))

    def lease(self, name: str) -> tuple[Lease | None, str]:
        """A node's Lease, if there is one, and what cannot be read of it."""
        try:
            with answers(self.client):
                return read(self.client.get(PlainLease, name, namespace=names.NAMESPACE), Lease)
        except ApiError as error:
            if code(error) == ABSENT:
                return None, ""
            raise

    def remove_bad_times(self, name: str) -> None:
        """Remove times that cannot be read from a Node.

        The API server itself cannot read a time after the year 9999, and then refuses every patch of the Node.
        """
        document = self.client.get(PlainNode, name)
        readable = without_bad_times(document)
        if any(readable.get(part) != document.get(part) for part in ("metadata", "spec")):
            # This leaves the status as it is.
            written = self.client.replace(PlainNode.from_dict(readable), name)
            readable["metadata"] = without_bad_times(written)["metadata"]
        self.client.replace(PlainNodeStatus.from_dict(readable), name)

    def remove_bad_lease_times(self, name: str) -> None:
        """Remove times that cannot be read from a node's Lease, since its reporter could not renew such a Lease."""
        document = self.client.get(PlainLease, name, namespace=names.NAMESPACE)
        self.client.replace(PlainLease.from_dict(without_bad_times(document)), name, namespace=names.NAMESPACE)

    def delete(self, kind: type[GenericGlobalResource], name: str, uid: str) -> None:
        """Delete the object that has this uid, and no other one of its name. lightkube's function takes no preconditions."""
        generic = self.client._client
        request = generic.prepare_request("delete", kind, name=name)
        request.data = DeleteOptions(preconditions=Preconditions(uid=uid))
        generic.handle_response("delete", generic.send(generic.build_adapter_request(request)), request)

    def patch_node(self, name: str, body: dict[str, Any] | list[dict[str, Any]], kind: PatchType) -> Node:
        """Patch a Node; the Node after it.

        :raises Failed: nothing of it can be read.
        """
        patched = self.client.patch(PlainNode, name, body, patch_type=kind)
        return _if_readable(name, *read(patched, Node))[0]


def _if_readable(name: str, node: Node | None, fault: str) -> tuple[Node, str]:
    if node is None:
        raise Failed(f"{name}: its Node cannot be read: {fault}; see: kubectl get node {name} -o yaml")
    return node, fault


def options(command: F) -> F:
    """Give a command the options that choose the cluster, and pass it an :class:`Api` as ``api``."""

    @click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path),
        help="Default: $KUBECONFIG, then ~/.kube/config, then the pod's service account.",
    )
    @click.option("--context", help="The kubeconfig's context to use.")
    @wraps(command)
    def connected(kubeconfig: Path | None, context: str | None, **arguments: Any) -> Any:
        with errors(), api(kubeconfig, context) as made:
            return command(api=made, **arguments)

    return connected  # type: ignore[return-value]  # click's options add parameters


@contextmanager
def api(kubeconfig: Path | None, context: str | None = None) -> Iterator[Api]:
    """The API of a kubeconfig's cluster; without one, that of the environment.

    :raises Failed: the API server does not say its time.
    """
    with client(kubeconfig, context) as connected:
        with answers(connected):
            review = connected.create(SelfSubjectReview())
            user = review.status.userInfo.username if review.status and review.status.userInfo else None
            now = review.metadata.creationTimestamp if review.metadata else None
        if now is None:
            raise Failed(f"{connected.config.cluster.server} does not say its time, which needs Kubernetes 1.28")
        yield Api(connected, user or "unknown", now)


@contextmanager
def answers(client: Client) -> Iterator[None]:
    """Turn the error of an answer that is no object of Kubernetes into one message.

    :raises Failed: with that message.
    """
    try:
        yield
    # msgspec's and JSON's errors are ValueErrors.
    except (
        ValueError, LookupError, TypeError, AttributeError, RecursionError, httpx2.InvalidURL, httpx2.DecodingError,
    ) as error:  # fmt: skip
        user = client.config.user
        source = ", or the kubeconfig's exec command prints no token" if user and user.exec else ""
        raise Failed(
            f"{client.config.cluster.server} gives no answer of an API server{source} ({type(error).__name__}); "
            "does the kubeconfig name one?"
        ) from None


def _from_environment(context: str | None) -> SingleConfig:
    """As kubectl finds it: lightkube's own function takes the service account first, and an empty KUBECONFIG as a file."""
    file = default_file()
    # pathlib's function raises some errors, as for the home of another user, which a pod's HOME may be.
    there = os.path.isfile(file)  # noqa: PTH113
    if os.environ.get("KUBECONFIG") or there or not Path(SERVICE_ACCOUNT).is_dir():
        return from_kubeconfig(file, context)
    try:
        # None is only for a kubeconfig without a current context.
        return cast(SingleConfig, KubeConfig.from_service_account(SERVICE_ACCOUNT).get(context))
    except (KeyError, OSError, ValueError) as error:
        raise Misconfigured(
            f"the service account in {SERVICE_ACCOUNT} cannot be used: {type(error).__name__}: {error}; give --kubeconfig FILE"
        ) from None


def client(kubeconfig: Path | None, context: str | None = None) -> Client:
    """A client of a kubeconfig's cluster; without one, of that of the environment.

    :raises ConfigError: the kubeconfig, its context, or what they name cannot be used.
    """
    return connect(_from_environment(context) if kubeconfig is None else from_kubeconfig(kubeconfig, context))


@contextmanager
def errors() -> Iterator[None]:
    """Turn each error of the client into one message.

    :raises Failed: with that message.
    :raises Unavailable: a retry may succeed; with that message.
    """
    try:
        yield
    except (Misconfigured, PluginFailed) as error:
        raise Failed(str(error)) from None
    except ConfigError as error:
        raise Failed(f"{error}; give another kubeconfig, or another context") from None
    except ApiError as error:
        raise (Unavailable if code(error) in TEMPORARY else Failed)(explain(error)) from None
    except httpx2.LocalProtocolError as error:
        raise Failed(unreachable(error)) from None
    except httpx2.TransportError as error:
        at = error.request.url.copy_with(path=None, query=None) if _has_request(error) else "the API server"
        raise Unavailable(
            f"{at} cannot be reached: {str(error) or type(error).__name__}; is it up, and does the kubeconfig name it?"
        ) from None
    except (ssl.SSLError, httpx2.HTTPError) as error:
        raise Failed(f"the API server does not answer: {error}") from None


def _has_request(error: httpx2.RequestError) -> bool:
    try:
        return error.request is not None
    except RuntimeError:
        return False


def explain(error: ApiError) -> str:
    """Why the API server refused, and the remedy."""
    message = error.status.message or f"it answered {error.status.code}"
    remedy = {
        401: "the credentials of the kubeconfig are not valid (any more)",
        403: "use a kubeconfig that may do this; docs/fleet.md has the rights each command needs",
        404: "is the cluster prepared? docs/fleet.md",
    }.get(error.status.code or 0, "try it again")
    return f"the API server refuses: {message}; {remedy}"


def code(error: ApiError) -> int:
    """The HTTP status code of the API server's answer."""
    return error.status.code or 0
