"""Gets from the API server what the deploy needs for a reporter: a token, or the approval of its certificate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from httpx2 import HTTPError
from lightkube import ApiError, Client
from lightkube.core.exceptions import ConfigError
from lightkube.models.authentication_v1 import BoundObjectReference, TokenRequestSpec
from lightkube.models.certificates_v1 import CertificateSigningRequestCondition, CertificateSigningRequestStatus
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.certificates_v1 import CertificateSigningRequest
from lightkube.resources.core_v1 import ServiceAccountToken

from agent.report import names
from fleet.api import Failed, answers
from fleet.approval import KnownNodes, verdicts
from fleet.bindings import admit
from fleet.connection import connect, why
from fleet.issued import decide, wrong
from fleet.kubeconfig import Misconfigured, default_file, from_kubeconfig
from fleet.reading import PlainNode, PlainRequest, read

# The names that reporters give their requests. A name becomes part of a URL.
_REQUEST_NAME = re.compile(r"trackbed-[a-z0-9](?:[-a-z0-9.]{0,242}[a-z0-9])?")


class NotGiven(Exception):
    """The API server gave no token or no approval. The message says why."""


class NotJoined(NotGiven):
    """The cluster has no Node that a token could be bound to."""


def enrolment_token(kubeconfig: str | None, seconds: int) -> str:
    """A token that may request a certificate, valid for so many seconds.

    :raises NotGiven: saying why.
    """
    with _client(kubeconfig) as client:
        return _token(client, "enrolment", TokenRequestSpec(expirationSeconds=seconds))


def bound_token(kubeconfig: str | None, node: str, seconds: int) -> str:
    """A token for a reporter, valid for so many seconds while its Node exists.

    :raises NotJoined: there is no such Node.
    :raises NotGiven: saying why.
    """
    with _client(kubeconfig) as client:
        try:
            uid = client.get(PlainNode, node)["metadata"]["uid"]
            bound = BoundObjectReference(apiVersion="v1", kind="Node", name=node, uid=uid)
            return _token(client, "reporter", TokenRequestSpec(boundObjectRef=bound, expirationSeconds=seconds))
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
                # With several clusters it may be the kubeconfig of another one.
                raise NotJoined(f"{node} has not joined the cluster of {client.config.cluster.server}") from None
            raise


def approve(kubeconfig: str | None, node: str, request: str, csr: str) -> None:
    """Approve the request of this name if its content is ``csr``, which was read on the node itself (base64).

    :raises NotGiven: saying why.
    """
    with _client(kubeconfig) as client:
        pending = _request(client, request, csr)
        for verdict in verdicts([pending], KnownNodes(expected={node}, again={node})):
            if verdict.action != "approve" or verdict.node != node:
                raise NotGiven(verdict.reason)
            if verdict.requester == names.ENROLMENT:
                # Not for a renewal: it must not give back rights that were removed.
                admit(client, node)
            _decide(client, pending)
            if faults := wrong(client, {request: pending}):
                raise NotGiven(faults[request])


def _request(client: Client, name: str, csr: str) -> CertificateSigningRequest:
    """The request of this name, if its content is what was read on the node.

    :raises NotGiven: the content differs, or the name, which comes from the node, is not a valid name of a request.
    """
    if not _REQUEST_NAME.fullmatch(name):
        raise NotGiven(f"{name[:80]!r} is not the name of a reporter's request")
    pending, fault = read(client.get(PlainRequest, name), CertificateSigningRequest)
    if pending is None or fault:
        raise NotGiven(f"it cannot be read: {fault}")
    if pending.spec.request != csr:
        raise NotGiven("its content is not the request on the node: somebody else made it")
    return pending


def _token(client: Client, account: str, spec: TokenRequestSpec) -> str:
    asked = ServiceAccountToken(metadata=ObjectMeta(), spec=spec)
    made = client.create(asked, account, namespace=names.NAMESPACE)
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
        raise NotGiven(f"the API server refuses: {error.status.message}; is fleet/cluster applied?") from None
    except HTTPError as error:
        raise NotGiven(why(error)) from None
    except (Misconfigured, OSError) as error:
        raise NotGiven(str(error)) from None
    except ConfigError as error:
        raise NotGiven(f"{error}; give another kubeconfig") from None
    except Failed as error:
        raise NotGiven(error.message) from None


def _decide(client: Client, request: CertificateSigningRequest) -> None:
    condition = CertificateSigningRequestCondition(
        type="Approved",
        status="True",
        message="the node has shown this request over SSH (trackbed's deploy)",
        reason="TrackbedDeploy",
    )
    request.status = CertificateSigningRequestStatus(conditions=[condition])
    decide(client, request)
