"""The reporter's Publication with an API server of one Node, and clocks that a test sets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from attrs import define, evolve, field, frozen

from agent.report.records import Report, report_to_json
from agent.reporter.kubernetes.api import Api, Session, trust
from agent.reporter.kubernetes.publish import Files, Publication
from agent.runtime import boot_id, uptime
from tests.unit.reporter.scripted import Answer, api_server, merged
from tests.unit.reporter.test_node import NO_CARRIER, REPORT, SETTINGS, apply, document, node

UNREADY = evolve(REPORT, ready=False, conditions=(NO_CARRIER,))


def never(now: float, api: Api) -> float:
    """The renewal of credentials that never change."""
    return float("inf")


@frozen
class Credentials:
    """Credentials, and what keeps them: the seconds until their next renewal."""

    session: Callable[[], Session]
    keep: Callable[[float, Api], float] = never


@define
class Cluster:
    """A Node and its Lease at an API server.

    ``busy``: it answers 503. ``refusing``: the status of what it refuses, by the last part of the path. ``conflicts``: the last
    parts of the paths whose next patch finds that somebody has written meanwhile. ``devices`` answers for the API group of
    DRA, resource.k8s.io. ``keeps``: the Node is as it was written, and else as it was before. ``unconfirmed``: the status that
    answers writes of the Lease, although they are made. ``hanging``: the last part of the path whose writes it does not answer
    until ``over``; ``hung``: there is one. ``writes``: the last parts of the paths; ``patches``: what was written to the Node.
    """

    node: dict[str, Any] = field(factory=document)
    lease: dict[str, Any] | None = None
    renewals: list[Any] = field(factory=list)
    busy: bool = False
    refusing: dict[str, int] = field(factory=dict)
    conflicts: list[str] = field(factory=list)
    writes: list[str] = field(factory=list)
    patches: list[Any] = field(factory=list)
    listings: int = 0
    hanging: str = ""
    hung: Event = field(factory=Event)
    over: Event = field(factory=Event)
    devices: Answer = field(default=lambda method, path, body: (404, {}))
    keeps: bool = False
    unconfirmed: int = 0

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]] | None:
        if self.busy:
            return 503, {}
        if "/resource.k8s.io/" in path:
            return self.devices(method, path, body)
        if method == "GET":
            return 200, self.node if path.endswith("/n1") else self.listed()
        what = "lease" if "leases" in path else path.rpartition("/")[2]
        if what == self.hanging:
            self.hung.set()
            self.over.wait(60.0)
        if what in self.refusing:
            return self.refusing[what], {"message": "no"}
        if what in self.conflicts:
            self.conflicts.remove(what)
            return 422, {"message": "testing value /spec/taints failed"}
        if what == "lease":
            status, lease = self.renewed(method, body)
            return self.unconfirmed or status, lease
        self.writes.append(what)
        self.patches.append(body)
        if self.keeps:
            self.node = self.written(what, body)
        return 200, self.node

    def written(self, what: str, body: Any) -> dict[str, Any]:
        """The Node after a patch of the reporter."""
        node = self.node if what == "status" else apply(body, self.node) or self.node
        node = {**node, "metadata": {**node["metadata"], "resourceVersion": str(100 + len(self.patches))}}
        if what != "status":
            return node
        conditions = [*node["status"].get("conditions", []), *body["status"]["conditions"]]
        by_type = {condition["type"]: condition for condition in conditions}
        return {**node, "status": {**node["status"], "conditions": list(by_type.values())}}

    def listed(self) -> dict[str, Any]:
        """First all Nodes, then the first event of the watch, then all Nodes, and so on."""
        self.listings += 1
        if self.listings % 2:
            return {"items": [self.node], "metadata": {"resourceVersion": "7"}}
        return {"type": "BOOKMARK", "object": {}}

    def renewed(self, method: str, body: Any) -> tuple[int, dict[str, Any]]:
        if method == "PATCH" and self.lease is None:
            return 404, {}
        self.writes.append("lease")
        self.renewals.append(body)
        self.lease = merged(self.lease or {}, body)
        return 200, self.lease


@define
class Clocks:
    """The time of day, and the seconds since the boot."""

    day: float = 1e9
    boot: float = 100.0

    def goes_on(self, seconds: float) -> None:
        self.day, self.boot = self.day + seconds, self.boot + seconds


Running = tuple[Publication, Cluster, Clocks]


@contextmanager
def publishing(folder: Path) -> Iterator[Running]:
    """A reporter whose Node has just been registered by its kubelet."""
    cluster, clocks = Cluster(), Clocks()
    report, labels, out, memory = (folder / name for name in ("report", "labels", "out", "memory"))
    with api_server(folder, cluster.answer) as (url, authority):
        settings = evolve(SETTINGS, server=url, ca_file=str(authority))
        known = Session(trust(authority))
        who = Credentials(lambda: known)
        publication = Publication(
            settings, who, Files(report, labels, out, memory), lambda: clocks.day, lambda: clocks.boot
        )
        publication.watch.known, publication.watch.node = True, node()
        yield publication, cluster, clocks


def say(publication: Publication, report: Report) -> None:
    publication.files.report.write_text(report_to_json(evolve(report, boot_id=boot_id(), uptime=uptime())))


def turn(publication: Publication, report: Report) -> float:
    """A turn once the agent says this; the seconds until the next one is due."""
    say(publication, report)
    return publication.turn()


def later(publication: Publication, clocks: Clocks, seconds: float) -> float:
    """A turn so many seconds later."""
    clocks.goes_on(seconds)
    return publication.turn()
