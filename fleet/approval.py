"""Pure functions: which requests for a reporter's certificate are approved.

A certificate of this signer authenticates its holder to the whole cluster, and cannot be revoked. So only a request for exactly
what a reporter needs is approved. Any other request in a reporter's name is denied. Whether a node may be enrolled is for an
operator to decide: such a request is left pending, with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from attrs import evolve, frozen
from lightkube.models.certificates_v1 import CertificateSigningRequestCondition
from lightkube.resources.certificates_v1 import CertificateSigningRequest

from agent.report import names
from agent.spec.node import NODE_NAME
from fleet.certificate_request import Asked, read
from fleet.objects import name_of

SIGNER = "kubernetes.io/kube-apiserver-client"
USAGES = frozenset({"client auth"})
OPTIONAL_USAGES = frozenset({"digital signature"})
YEAR = 365 * 86400
"""The longest life of a certificate, in seconds."""

MOST_PENDING = 8
"""At most so many pending requests in one node's name are approved. A reporter has one; forgotten ones end after a day."""

Action = Literal["approve", "deny", "leave"]


@frozen
class Verdict:
    """The decision on one request, and why. ``request``: its name. ``node``: the Node in whose name it was made."""

    request: str
    requester: str
    node: str
    action: Action
    reason: str


@frozen
class KnownNodes:
    """What is known about nodes. ``expected``: may be enrolled. ``enrolled``: were enrolled. ``joined``: have a Node.

    ``again``: may be enrolled once more, because they were reinstalled.
    """

    expected: Collection[str] = ()
    enrolled: Collection[str] = ()
    joined: Collection[str] = ()
    again: Collection[str] = ()


def verdicts(
    requests: Iterable[CertificateSigningRequest], known: KnownNodes, faults: Mapping[str, str] | None = None
) -> list[Verdict]:
    """The verdict on each pending request that a reporter made, or that is in a reporter's name.

    :param faults: what cannot be read of the objects around the requests, by name; such a request is denied.
    """
    unreadable = faults or {}
    judged = []
    keys: dict[tuple[str, str], list[bytes]] = defaultdict(list)
    for request in requests:
        if not decisions(request) and _is_ours(request):
            asked = read(request.spec.request)
            if name_of(request) in unreadable:
                asked = evolve(asked, faults=(*asked.faults, f"it cannot be read: {unreadable[name_of(request)]}"))
            judged.append(_judge(request, asked, known))
            if judged[-1].action == "approve":
                keys[judged[-1].requester, judged[-1].node].append(asked.key)
    return [_unless_ambiguous(verdict, keys[verdict.requester, verdict.node]) for verdict in judged]


def _unless_ambiguous(verdict: Verdict, keys: Collection[bytes]) -> Verdict:
    """Leave requests to the operator if two keys claim to be the same new node, or if too many are in one node's name.

    :param keys: the keys of this requester's requests in this node's name that would be approved, one for each request.
    """
    if verdict.action != "approve":
        return verdict
    delete = "delete the wrong ones: kubectl delete csr NAME"
    if verdict.requester == names.ENROLMENT and len(set(keys)) > 1:
        reason = f"several requests with different keys claim to be {verdict.node}; {delete}"
    elif len(keys) > MOST_PENDING:
        # Requests are counted, and not keys: a node can make any number of requests with one key.
        reason = f"{verdict.node} has {len(keys)} pending requests, and at most {MOST_PENDING} are approved; {delete}"
    else:
        return verdict
    return evolve(verdict, action="leave", reason=reason)


def decisions(request: CertificateSigningRequest) -> set[str]:
    """What was decided: Approved or Denied; Failed: its signer issues no certificate. Empty: the request is pending."""
    return {condition.type for condition in conditions(request)} & {"Approved", "Denied", "Failed"}


def conditions(request: CertificateSigningRequest) -> list[CertificateSigningRequestCondition]:
    """A request's conditions."""
    return list((request.status.conditions if request.status else None) or [])


def _is_ours(request: CertificateSigningRequest) -> bool:
    if _is_reporter(request) or _is_enrolment(request):
        return True
    claims = read(request.spec.request).claims if request.spec.signerName == SIGNER else ()
    return any(name.startswith("trackbed:") for name in claims)


def _is_reporter(request: CertificateSigningRequest) -> bool:
    return (request.spec.username or "").startswith(names.NODE_USER)


def _is_enrolment(request: CertificateSigningRequest) -> bool:
    return request.spec.username == names.ENROLMENT


def _judge(request: CertificateSigningRequest, asked: Asked, known: KnownNodes) -> Verdict:
    requester = request.spec.username or ""
    node = asked.common_name.removeprefix(names.NODE_USER)
    faults = [*_faults(request), *asked.faults, *_name_faults(asked.common_name)]
    if requester not in (asked.common_name, names.ENROLMENT):
        faults.append(f"{requester or 'nobody'} may not ask for {asked.common_name or 'no name'}")
    if faults:
        return Verdict(name_of(request), requester, node, "deny", "; ".join(faults))
    action, reason = _renewal(node, known) if requester == asked.common_name else _enrolment(node, known)
    return Verdict(name_of(request), requester, node, action, reason)


def _renewal(node: str, known: KnownNodes) -> tuple[Action, str]:
    if node in known.joined or node in known.expected:
        return "approve", "renewal"
    return "leave", f"there is no Node {node} (any more); if it is yours, name it: trackbed fleet approve {node}"


def _enrolment(node: str, known: KnownNodes) -> tuple[Action, str]:
    if node in known.again:
        return "approve", "enrolment, again"
    if node in known.enrolled:
        again = f"trackbed fleet approve --again {node}"
        return "leave", f"{node} has been enrolled already; if it was installed anew: {again}"
    if node not in known.expected:
        return "leave", f"{node} is not named as a new node; if it is one: trackbed fleet approve {node}"
    return "approve", "enrolment"


def _name_faults(name: str) -> list[str]:
    """What is wrong with the common name. An empty one was already reported when the request was read."""
    if not name:
        return []
    if not name.startswith(names.NODE_USER):
        return [f"the subject is CN={name}, not CN={names.NODE_USER}NAME alone"]
    node = name.removeprefix(names.NODE_USER)
    return [] if NODE_NAME.fullmatch(node) else [f"{node!r} is not a Node's name"]


def _faults(request: CertificateSigningRequest) -> list[str]:
    """What is wrong with the request apart from its PKCS #10 part."""
    faults = []
    spec = request.spec
    if spec.signerName != SIGNER:
        faults.append(f"the signer is {spec.signerName}, not {SIGNER}")
    if set(spec.usages or ()) - OPTIONAL_USAGES != USAGES:
        faults.append(f"the usages are {', '.join(spec.usages or ()) or 'none'}, not {', '.join(USAGES)}")
    if spec.expirationSeconds is None:
        faults.append("it names no expiry")
    elif spec.expirationSeconds > YEAR:
        faults.append(f"it would be valid for {spec.expirationSeconds} s, more than a year ({YEAR} s)")
    return faults
