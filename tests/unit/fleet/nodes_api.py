"""An API server of Nodes and their pods, for the commands of the fleet and for a deploy."""

from typing import Any

from attrs import define, field

from agent.report import names
from fleet.maintenance_record import Record, annotated
from tests.unit.reporter.scripted import merged, rules_answer

REFUSED = (429, "Too many requests, please try again later.")


def status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    """An answer of an API server that is no object."""
    return code, {"kind": "Status", "code": code, "message": message}


@define
class Dra:
    """What a cluster has for DRA (resource.k8s.io) and PodDisruptionBudgets.

    ``users``: the uids of the pods that use each device. A rule with NoExecute ends them, unless they are in ``tolerating``.
    ``group``: the PodGroup for which claims are reserved. ``tolerations``: those of each claim.
    ``generations``: in how many ResourceSlices a driver publishes each device. Those before the last stay for a moment.
    """

    devices: dict[str, str]
    users: dict[str, list[str]]
    tolerating: set[str] = field(factory=set)
    budgets: list[Any] = field(factory=list)
    rules: dict[str, Any] = field(factory=dict)
    made: int = 0
    pool: str = "a"
    generations: int = 1
    group: str = ""
    tolerations: list[Any] = field(factory=list)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any] | None:
        """The answer; None: the path is of something else. ``devices``: the PCI address of each."""
        *_, over, name = path.split("/")
        if name == "poddisruptionbudgets":
            return 200, {"items": self.budgets}
        if name == "resourceslices":
            return 200, {"items": [{"metadata": {"name": "s"}, "spec": self._slice()}] * self.generations}
        if name == "resourceclaims":
            return 200, {"items": [self._claim(each) for each in self.users]}
        if method == "POST" and name == "devicetaintrules":
            body = self._named(body)
        return rules_answer(self.rules, method, name, body) if "devicetaintrules" in (over, name) else None

    def _slice(self) -> dict[str, Any]:
        devices = [
            {"name": each, "attributes": {"resource.kubernetes.io/pciBusID": {"string": pci}}}
            for each, pci in self.devices.items()
        ]
        return {"driver": "sriov", "pool": {"name": self.pool}, "devices": devices}

    def _claim(self, device: str) -> dict[str, Any]:
        result = {"driver": "sriov", "pool": self.pool, "device": device, "tolerations": self.tolerations}
        reserved = [{"resource": "pods", "name": uid.removeprefix("u-"), "uid": uid} for uid in self.users[device]]
        if self.group:
            reserved = [{"resource": "podgroups", "name": self.group, "uid": f"u-{self.group}"}]
        status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved}
        return {"metadata": {"name": f"of-{device}", "namespace": "ml"}, "status": status}

    def _named(self, rule: Any) -> Any:
        self.made += 1
        if rule["spec"]["taint"]["effect"] == "NoExecute":
            device = rule["spec"]["deviceSelector"]["device"]
            self.users[device] = [uid for uid in self.users.get(device, ()) if uid in self.tolerating]
        return merged(rule, {"metadata": {"name": f"{rule['metadata']['generateName']}{self.made}"}})

    def tainted(self) -> list[str]:
        """The devices that a rule taints."""
        return sorted(each["spec"]["deviceSelector"]["device"] for each in self.rules.values())


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
    dra: Dra | None = None

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.starting:
            self.starting -= 1
            return status(503, "the server is starting")
        *_, over, name = path.split("/")
        if name == "selfsubjectreviews":
            user = {"userInfo": {"username": "deployer"}}
            return 201, {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": user}
        if self.dra and (answered := self.dra.answer(method, path, body)):
            return answered
        if name == "leases":
            return (201, body) if method == "POST" else (200, {"items": []})
        if name in ("nodes", "pods"):
            return 200, {"items": list(self.nodes.values()) if name == "nodes" else self.pods}
        if name == "eviction":
            return self._evict(over) if self.evicts else REFUSED
        if name not in self.nodes:
            return status(404, "not found")
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
