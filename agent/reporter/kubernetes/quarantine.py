"""Taints the devices of bad NICs and VFs for claims of DRA, and removes the taints of those that are good again.

It writes once a turn, so that nothing delays the message that the node is not ready. It acts only by a fresh report, and what
that does not know changes no rule. The reporter never evicts: `trackbed fleet sweep` does, since it sees the whole fleet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from attrs import define, field

from agent.report.dra_devices import read_devices
from agent.report.names import OF_NODE
from agent.report.verdict import Verdict
from agent.reporter.kubernetes.api import TROUBLE, Api, Refused
from agent.reporter.kubernetes.device_rules import Judged, Rule, judged, read_rules, writes
from agent.reporter.kubernetes.node import MANAGER, Node
from agent.reporter.kubernetes.steps import LONGEST_SLEEP
from agent.reporter.settings import Settings

RULES = "/apis/resource.k8s.io/v1/devicetaintrules"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"

LOOK_EVERY = (20.0, 40.0)
"""Seconds between two looks at rules and ResourceSlices while a NIC is bad, drawn anew each time: a driver may publish devices
later, and somebody may have deleted a rule. Nodes whose NICs are all good ask nothing."""

ABSENT = "no device is quarantined: the cluster has no DeviceTaintRule of resource.k8s.io/v1 (Kubernetes 1.37)"

T = TypeVar("T")


@define
class DeviceTaints:
    """Keeps the node's DeviceTaintRules as its report says. ``trouble``: what it cannot do, and no request has failed."""

    settings: Settings
    api: Api
    trouble: str = field(default="", init=False)
    _create: list[dict[str, Any]] = field(factory=list, init=False)
    _delete: list[Rule] = field(factory=list, init=False)
    _taken: set[str] = field(factory=set, init=False)
    _seen: tuple[str, Judged] | None = field(default=None, init=False)
    _look_at: float = field(default=0.0, init=False)
    _absent_until: float = field(default=0.0, init=False)

    def keep(self, verdict: Verdict, node: Node, clock: float) -> float:
        """Make the next write, or look what must be written. :returns: the seconds until there may be more to do.

        :param clock: seconds since the boot.
        :raises ValueError: the API server's answer cannot be read.
        """
        report = verdict.report
        # A pass that ended early says nothing of any NIC. After a complete one the spec may have none (any more).
        if not verdict.fresh or report is None or not (report.nics or report.devices):
            return LONGEST_SLEEP
        if clock < self._absent_until:
            return self._absent_until - clock
        seen = (node.uid, judged(report.nics))
        if seen != self._seen or clock >= self._look_at:
            self._seen, self._create, self._delete = None, [], []
            self._look_at = clock + self._look(node.uid, seen[1], clock)
            self._seen = seen
        if self._create or self._delete:
            try:
                self._write()
            except TROUBLE as error:
                self._seen = None
                if self._create and isinstance(error, Refused) and error.status == HTTPStatus.CONFLICT:
                    # Somebody has changed the rule of this name, so that it is no longer one of this node's.
                    self._taken.add(self._create[0]["metadata"]["name"])
                raise
            return 0.0
        return self._look_at - clock

    def _look(self, uid: str, verdicts: Judged, clock: float) -> float:
        """Find what must be written. :returns: the seconds until the next look."""
        name, policy = self.settings.node_name, self.settings.quarantine
        self.trouble = ""
        try:
            rules = self._read(RULES, {"labelSelector": f"{OF_NODE}={name}"}, read_rules)
        except Refused as error:
            if policy is None and error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
                # Without the setting, the cluster may lack these rules, or the right to list them.
                return LONGEST_SLEEP
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            self.trouble, self._absent_until = ABSENT, clock + LONGEST_SLEEP
            return LONGEST_SLEEP
        bad = policy is not None and False in verdicts.functions.values()
        # The API server may answer from its cache: the next look finds what is not there yet.
        query = {"fieldSelector": f"spec.nodeName={name}", "resourceVersion": "0"}
        own, others = self._read(SLICES, query, read_devices) if bad else ([], [])
        needed = writes(name, uid, policy, verdicts, own, rules, self._taken)
        self._create, self._delete = list(needed.create), list(needed.delete)
        foreign = {device.driver for device in others if verdicts.bad(device)}
        left = [f"{driver} publishes a bad NIC in a pool that is not named as the Node" for driver in sorted(foreign)]
        self.trouble = "; ".join([*needed.left, *left])
        return random.uniform(*LOOK_EVERY) if bad else LONGEST_SLEEP  # noqa: S311  no secret

    def _read(self, path: str, query: Mapping[str, str], read: Callable[[Mapping[str, Any], str], T]) -> T:
        answer = self.api.ask("GET", path, query)
        try:
            return read(answer, self.settings.node_name)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the API server's answer to {path} cannot be read: {error!r}") from None

    def _write(self) -> None:
        if self._create:
            self.api.ask("POST", RULES, {"fieldManager": MANAGER}, self._create[0])
            del self._create[0]
            return
        rule = self._delete[0]
        try:
            self.api.ask("DELETE", f"{RULES}/{rule.name}", body={"preconditions": {"uid": rule.uid}})
        except Refused as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
        del self._delete[0]
