"""Runs reporters against a real API server. Their Nodes are objects only, and the test writes their reports."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen

from agent.report import published
from agent.report.published import Published
from agent.report.records import Condition, Report, report_to_json
from agent.reporter.kubernetes.api import MERGE_PATCH, Api, Refused, Session, trust
from agent.reporter.kubernetes.identity import Identity
from agent.reporter.kubernetes.node import is_ours
from agent.reporter.kubernetes.publish import Files, Publication
from agent.reporter.settings import Settings
from agent.runtime import boot_id, uptime
from lab.cluster.certificates import Pair
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import LEASES, manifest

CLUSTER = Path(__file__).parents[3] / "fleet" / "cluster"
DEADLINE = 30.0
NO_CARRIER = Condition("Carrier", "False", "NoCarrier", "no carrier on ens1f0; check the cable")
STATUS: dict[str, Any] = {
    "capacity": {"cpu": "2", "memory": "4Gi", "pods": "110"},
    "allocatable": {"cpu": "2", "memory": "4Gi", "pods": "110"},
    "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "KubeletReady"},
        {"type": "DiskPressure", "status": "False", "reason": "Enough"},
    ],
    "images": [{"names": ["example.net/pause:1"], "sizeBytes": 1}],
}
T = TypeVar("T")


def until(look: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Wait until ``look`` returns something true, and return it."""
    end = time.monotonic() + deadline
    while not (value := look()):
        assert time.monotonic() < end, f"not within {deadline:.0f} s: {what}"
        time.sleep(0.05)
    return value


def node(name: str) -> dict[str, Any]:
    """A Node as a kubelet registers it, with labels and taints of others."""
    theirs = {
        "labels": {"example.net/rack": "7", "kubernetes.io/hostname": name},
        "annotations": {"example.net/note": "theirs"},
    }
    taint = {"key": "example.net/busy", "effect": "NoSchedule"}
    return manifest("v1", "Node", name, metadata=theirs, spec={"taints": [taint]})


def prepare(plane: ControlPlane) -> None:
    """Apply the manifests, and wait until the policies are in force, which takes a second or two."""
    plane.kubectl("apply", "-k", str(CLUSTER))
    plane.apply(node("probe"))
    api = Api(plane.url, by_token(plane, "probe").session)

    def refused() -> bool:
        # Another value each time: what changes nothing is never refused.
        change = {"metadata": {"labels": {"theirs": str(time.monotonic_ns())}}}
        try:
            api.ask("PATCH", "/api/v1/nodes/probe", {}, change, MERGE_PATCH)
        except Refused as error:
            return "a reporter changes" in str(error)
        return False

    until(refused, "the policies are in force")


@frozen
class Fixed:
    """Credentials that never change."""

    known: Session

    def session(self) -> Session:
        return self.known

    def keep(self, now: float, api: Api) -> float:
        return float("inf")


def by_admin(plane: ControlPlane) -> Fixed:
    """The administrator's credentials."""
    return Fixed(session(plane.authority.pair.certificate, plane.authority.client("admin", ["system:masters"])))


def session(authority: Path, pair: Pair) -> Session:
    """A session by a client's certificate."""
    context = trust(authority)
    context.load_cert_chain(pair.certificate, pair.key)
    return Session(context)


def by_token(plane: ControlPlane, name: str) -> Fixed:
    """A node's credentials: a token that is bound to its Node."""
    return holder(plane, "--bound-object-kind=Node", f"--bound-object-name={name}")


BROUGHT = "brought"
"""The file with the token that a deploy has brought."""


def bring(plane: ControlPlane, name: str, folder: Path) -> None:
    """Bring a reporter its token, as a deploy does."""
    (folder / BROUGHT).write_text(str(by_token(plane, name).known.token))


def holder(plane: ControlPlane, *options: str) -> Fixed:
    """Credentials: a token of the reporters' account."""
    token = plane.kubectl("create", "token", "reporter", LEASES, *options).strip()
    return Fixed(Session(trust(plane.authority.pair.certificate), token))


@define
class Reporter:
    """A reporter in a thread of this process, and its report."""

    plane: ControlPlane | None
    publication: Publication
    report: Report = field(init=False)

    @classmethod
    def start(cls, plane: ControlPlane | None, folder: Path, settings: Settings, identity: Identity) -> "Reporter":
        folder.mkdir(parents=True, exist_ok=True)
        report, labels, out, memory = (folder / f"{name}.json" for name in ("report", "labels", "published", "memory"))
        reporter = cls(plane, Publication(settings, identity, Files(report, labels, out, memory)))
        reporter.report = Report(settings.node_name, "h1", boot_id(), "v1", False, True)
        reporter.say(False)
        for work in (reporter.publication.run, reporter.publication.watch.follow):
            threading.Thread(target=work, daemon=True).start()
        return reporter

    @property
    def name(self) -> str:
        return self.publication.settings.node_name

    def say(self, ready: bool, **more: Any) -> int:
        """Write a report; its generation."""
        generation = self.report.generation + 1
        conditions = () if ready else (NO_CARRIER,)
        fields = {"ready": ready, "generation": generation, "uptime": uptime(), "conditions": conditions, **more}
        self.report = evolve(self.report, **fields)
        self._write()
        self.publication.report_written()
        return generation

    def beat(self) -> None:
        """Renew the report's heartbeat."""
        self.report = evolve(self.report, uptime=uptime())
        self._write()

    def _write(self) -> None:
        beside = self.publication.files.report.with_suffix(".new")
        beside.write_text(report_to_json(self.report))
        beside.rename(self.publication.files.report)

    def published(self) -> Published:
        return published.read(self.publication.files.acknowledgement) or Published()

    def acknowledged(self, generation: int) -> None:
        """Wait until a generation is published."""
        until(lambda: self.published().generation >= generation, f"generation {generation} of {self.name}")

    def node(self) -> dict[str, Any]:
        assert self.plane is not None
        return self.plane.get("node", self.name)

    def condition(self, type: str = "TrackbedReady") -> dict[str, Any]:
        conditions: list[dict[str, Any]] = self.node().get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type), {})

    def opened(self) -> None:
        """Report that the node is ready, and wait until the taint is lifted."""
        self.acknowledged(self.say(True))
        until(lambda: not self.is_tainted(), "the taint is lifted")

    def is_tainted(self) -> bool:
        return any(is_ours(taint) for taint in self.node()["spec"].get("taints", []))

    def writes(self, since: int = 0) -> list[dict[str, Any]]:
        """The patches of its Node in the audit log, from the event ``since`` on."""
        assert self.plane is not None
        return [
            event
            for event in self.plane.audit()[since:]
            if event["verb"] == "patch"
            and wrote(event, self.name)
            and event.get("objectRef", {}).get("resource") == "nodes"
        ]


def wrote(event: dict[str, Any], name: str) -> bool:
    """Whether an audit event is of the reporter of a Node."""
    return bool(event["user"].get("extra", {}).get("authentication.kubernetes.io/node-name") == [name])


def notice(plane: ControlPlane, name: str) -> str:
    """What a Lease says of a node that cannot say it by its Node."""
    lease = plane.get("lease", name, LEASES)
    return str(lease["metadata"].get("annotations", {}).get("trackbed.internal/not-ready", ""))


def renewed(plane: ControlPlane, name: str) -> str:
    """When a Lease was last renewed."""
    return str(plane.get("lease", name, LEASES)["spec"]["renewTime"])
