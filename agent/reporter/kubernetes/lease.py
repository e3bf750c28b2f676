"""The node's Lease: the reporter's heartbeat in the cluster. An annotation says why it is not ready, if the Node does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from attrs import define, field

from agent.report.names import AGENT_VERSION, LEASE_DURATION, LONGEST_NOTE, NAMESPACE, NOT_READY, SPEC_HASH
from agent.report.records import Report
from agent.report.verdict import Verdict
from agent.reporter.kubernetes.api import JSON, MERGE_PATCH, Api, Refused
from agent.reporter.kubernetes.node import MANAGER, Node, ready_condition, shortened, time_stamp
from agent.reporter.settings import Settings

LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"

LEASE_EVERY = (300.0, 360.0)
"""Seconds between two renewals, drawn anew each time; three of them fit into the Lease's duration."""


@define
class LeaseWriter:
    """Writes the node's Lease. ``_last``: the Lease in the API server's last answer. ``_node``: the uid of its Node.

    ``now``: the time of day. Each write renews the Lease: only in such a write does the API server itself record the time at
    which it received it (fleet/cluster/leases-policy.yaml).
    """

    settings: Settings
    api: Api
    now: Callable[[], float]
    _renew_at: float = field(default=0.0, init=False)
    _node: str = field(default="", init=False)
    _last: dict[str, Any] = field(factory=dict, init=False)

    def renew(self, node: Node, report: Report, notice: str | None, clock: float) -> float:
        """Renew the Lease if it is due or its content differs. :returns: the seconds until it is due again.

        :param notice: why the node is not ready, if the Node itself does not say it; else None.
        :param clock: seconds since the boot.
        """
        if clock >= self._renew_at or self._node != node.uid or notice != self._notice:
            self._renew_at = 0.0  # a write that seems to fail may have been made, so the next turn writes again
            self._write(lease(self.settings, node, report, notice), create=True)
            self._renew_at, self._node = clock + random.uniform(*LEASE_EVERY), node.uid  # noqa: S311  no secret
        return self._renew_at - clock

    def lapse(self, notice: str | None) -> None:
        """Stop renewing the Lease, since there is no fresh report; add a notice if there is one."""
        self._renew_at = 0.0
        if notice is not None and notice != self._notice:
            self._write({"metadata": {"annotations": {NOT_READY: notice}}}, create=False)

    @property
    def _notice(self) -> str | None:
        """What the Lease says of a node that is not ready, by the API server's last answer."""
        notice: str | None = self._last.get("metadata", {}).get("annotations", {}).get(NOT_READY)
        return notice

    def _write(self, wanted: dict[str, Any], create: bool) -> None:
        """Send what differs from the API server's last answer, and the time."""
        path = f"{LEASES}/{self.settings.node_name}"
        try:
            self._last = self._ask("PATCH", path, self._renewed(difference(wanted, self._last)), MERGE_PATCH)
            # The answer may show that somebody has changed the Lease: then patch it once more, but only once.
            if patch := difference(wanted, self._last):
                self._last = self._ask("PATCH", path, self._renewed(patch), MERGE_PATCH)
        except Refused as error:
            self._last = {}
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            if create:
                self._last = self._ask("POST", LEASES, self._renewed(without_absent(wanted)), JSON)

    def _renewed(self, content: dict[str, Any]) -> dict[str, Any]:
        return {**content, "spec": {**content.get("spec", {}), "renewTime": time_stamp(self.now(), micro=True)}}

    def _ask(self, method: str, path: str, body: Any, content_type: str) -> dict[str, Any]:
        answer = self.api.ask(method, path, {"fieldManager": MANAGER}, body, content_type)
        metadata = answer.get("metadata")
        if not isinstance(metadata, Mapping) or not isinstance(metadata.get("annotations", {}), Mapping):
            raise Refused(HTTPStatus.OK, "something that is not a Lease")
        return answer


def notice_of(verdict: Verdict) -> str:
    """Why the node is not ready, short enough for the Lease's annotation."""
    condition = ready_condition(verdict)
    return shortened([f"{condition.reason}: {condition.message}"], LONGEST_NOTE)


def lease(settings: Settings, node: Node, report: Report, notice: str | None = None) -> dict[str, Any]:
    """The node's Lease without its time. It belongs to the Node, and names the spec and the agent's version.

    :param notice: why the node is not ready; None: without that annotation.
    """
    owner = {"apiVersion": "v1", "kind": "Node", "name": settings.node_name, "uid": node.uid}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": settings.node_name,
            "namespace": NAMESPACE,
            "annotations": {SPEC_HASH: report.spec_hash, AGENT_VERSION: report.agent_version, NOT_READY: notice},
            "ownerReferences": [owner],
        },
        "spec": {"holderIdentity": settings.node_name, "leaseDurationSeconds": LEASE_DURATION},
    }


def difference(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that gives ``there`` the wanted values."""
    patch = {}
    for key, value in wanted.items():
        beside = there.get(key)
        if isinstance(value, Mapping) and isinstance(beside, Mapping):
            value = difference(value, beside)
            if not value:
                continue
        elif value == beside:
            continue
        patch[key] = value
    return patch


def without_absent(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The object without the keys whose value is None: a merge patch removes those, a new object must not have them."""
    return {
        key: without_absent(value) if isinstance(value, Mapping) else value
        for key, value in wanted.items()
        if value is not None
    }
