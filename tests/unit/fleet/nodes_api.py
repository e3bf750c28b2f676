"""An API server of Nodes and their pods, for the commands of the fleet and for a deploy."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from agent.report import names
from fleet.maintenance_record import Record, annotated
from tests.unit.reporter.scripted import merged

REFUSED = (429, "Too many requests, please try again later.")


@define
class Cluster:
    """``nodes``: their documents, by name. ``events``: what happened to Nodes and pods, in its order.

    ``starting``: how many requests it does not answer yet. ``evicts``: whether a pod may be evicted.
    """

    nodes: dict[str, dict[str, Any]]
    pods: list[Any] = field(factory=list)
    events: list[str] = field(factory=list)
    starting: int = 0
    evicts: bool = True

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.starting:
            self.starting -= 1
            return 503, {"kind": "Status", "code": 503, "message": "the server is starting"}
        *_, over, name = path.split("/")
        if name == "selfsubjectreviews":
            user = {"userInfo": {"username": "deployer"}}
            return 201, {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": user}
        if name == "leases":
            return (201, body) if method == "POST" else (200, {"items": []})
        if name in ("nodes", "pods"):
            return 200, {"items": list(self.nodes.values()) if name == "nodes" else self.pods}
        if name == "eviction":
            return self._evict(over) if self.evicts else REFUSED
        if name not in self.nodes:
            return 404, {"kind": "Status", "code": 404, "message": "not found"}
        if method == "PATCH":
            self.nodes[name] = merged(self.nodes[name], body)
            if "unschedulable" in body.get("spec", {}):
                self.events.append("cordoned" if body["spec"]["unschedulable"] else "uncordoned")
        return 200, self.nodes[name]

    def _evict(self, pod: str) -> tuple[int, Any]:
        self.events.append(f"evicted {pod}")
        self.pods = [each for each in self.pods if each["metadata"]["name"] != pod]
        return 201, {}

    def cordoned(self) -> list[str]:
        return [name for name, each in self.nodes.items() if each.get("spec", {}).get("unschedulable")]

    def recorded(self) -> dict[str, str]:
        """The records of maintenances, by the Node's name."""
        notes = {name: each["metadata"].get("annotations") or {} for name, each in self.nodes.items()}
        return {name: each[names.MAINTENANCE] for name, each in notes.items() if names.MAINTENANCE in each}

    def note(self, name: str, record: Record) -> None:
        """As if this maintenance had begun."""
        self.nodes[name] = merged(self.nodes[name], {**annotated(record), "spec": {"unschedulable": True}})
