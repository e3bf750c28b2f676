"""A fleet with DRA for maintenances of one NIC: its API server, its one node's host, and commands for them."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import parse_qs

import pytest
from attrs import define, evolve, field, frozen
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster as ClusterConfig
from lightkube.config.models import User
from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
from lightkube.models.policy_v1 import PodDisruptionBudgetSpec, PodDisruptionBudgetStatus
from lightkube.resources.policy_v1 import PodDisruptionBudget

from agent.report.records import Disruption
from fleet.api import Api
from fleet.eviction import Rules
from fleet.inventory import CommandResult, Inventory
from fleet.maintenance import Maintenance
from fleet.sweeping import SweepResult, decide, sweep
from tests.http_server import Request, serving
from tests.unit.fleet.nodes_api import Cluster, Dra, status
from tests.unit.fleet.test_fleet import node
from tests.unit.fleet.test_maintenance import NOW, pod

PF, VF0, VF1 = "0000:3b:00.0", "0000:3b:00.2", "0000:3b:00.3"
NIC = {"name": "rail0", "pci": PF, "ready": True, "vfs": [VF0, ""]}
FORBIDDEN = status(403, "nobody may do this")
EXPIRED = status(401, "nobody may do this")
LOST = (504, "<html>time-out")


@frozen
class Connected(Inventory):
    """A fleet whose one host answers as a node's `trackbed` does. ``asked``: what it ran. ``nic``: what its agent says."""

    asked: list[Sequence[str]] = field(factory=list)
    nic: dict[str, Any] = field(factory=lambda: dict(NIC))
    applies: Callable[[], bool] = lambda: True
    faults: list[str] = field(factory=lambda: ["a change waits"])

    def run(self, node: str, command: Sequence[str], timeout: float) -> CommandResult:
        self.asked.append(command)
        if command[1] == "apply":
            return CommandResult(not self.applies(), "a pod has it")
        if command[3] not in (self.nic["name"], self.nic["pci"]):
            return CommandResult(True, "trackbed: the report has no NIC rail7; it has: rail0")
        # A change of the NIC waits, so the command fails, and pyinfra says so.
        return CommandResult(True, json.dumps({"nic": self.nic, "faults": self.faults}) + "; Error: executed 0")

    def applied(self) -> int:
        return sum(command[1] == "apply" for command in self.asked)


@define
class Fleet:
    """A cluster, its one node's host, and commands for them.

    ``refuse_from``: the number of the first request that is refused, and so are all later ones: as if the run were killed
    there, or its rights were taken. ``lose``: that of the one request that is carried out, and whose answer is lost.
    """

    cluster: Cluster
    node: Connected
    url: str = ""
    requests: int = 0
    refuse_from: int | None = None
    lose: int | None = None
    received: Callable[[str], None] = lambda what: None

    def answer(self, request: Request) -> tuple[int, Any]:
        number, self.requests = self.requests, self.requests + 1
        if self.refuse_from is not None and number >= self.refuse_from:
            return EXPIRED
        self.received(f"{request.method} {request.path}")
        status, answer = self.cluster.answer(request.method, request.path, json.loads(request.body or "null"))
        asked = {key: value for key, (value,) in parse_qs(request.query).items()}
        field, _, name = asked.get("fieldSelector", "").partition("=")
        if field == "metadata.name":
            answer = {"items": [each for each in answer["items"] if each["metadata"]["name"] == name]}
        if status == 200 and (label := asked.get("labelSelector")):
            answer = {"items": [each for each in answer["items"] if label in each["metadata"]["labels"]]}
        return LOST if number == self.lose else (status, answer)

    @property
    def dra(self) -> Dra:
        assert self.cluster.dra
        return self.cluster.dra

    def api(self, user: str = "me") -> Api:
        config = KubeConfig.from_one(cluster=ClusterConfig(server=self.url), user=User(), context_name="a")
        return Api(Client(config), user, NOW, clock=lambda: 0.0)

    def sweep(self) -> SweepResult:
        api = self.api()
        return sweep(api, decide(api, 1.0), Event())

    def maintenance(self, user: str = "me", **more: Any) -> Maintenance:
        limits = (60.0, 60.0, 60.0)
        made = Maintenance(self.api(user), self.node, Disruption.VF_RESET, Rules(), *limits, lambda line: None)
        return evolve(made, nic="rail0", **more)

    def state(self) -> tuple[list[str], list[str]]:
        """The tainted devices, and the nodes with a record. Nothing is ever cordoned, and no pod is evicted by the command."""
        assert self.cluster.events == []
        return self.dra.tainted(), list(self.cluster.recorded())


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr("fleet.node_patch.CHECK_INTERVAL", 0.01)
    dra = Dra({"pf": PF, "vf0": VF0, "other": "0000:5e:00.0"}, {"vf0": ["u-job"], "other": ["u-web"]})
    pods = [pod(name).to_dict() for name in ("job", "web", "daemon")]
    made = Fleet(Cluster({"a": node("a").to_dict()}, pods, dra=dra), Connected(tmp_path, {"a": "a"}))
    with serving(made.answer) as url:
        made.url = url
        yield made


CLEAN: tuple[list[str], list[str]] = ([], [])
DONE = {"a": ("done", "")}


def budget(
    allowed: int, selector: LabelSelector | None, generation: int = 1, namespace: str = "ml"
) -> PodDisruptionBudget:
    status = PodDisruptionBudgetStatus(
        currentHealthy=1, desiredHealthy=1, disruptionsAllowed=allowed, expectedPods=1, observedGeneration=1
    )
    metadata = ObjectMeta(name="b", namespace=namespace, generation=generation)
    return PodDisruptionBudget(metadata=metadata, spec=PodDisruptionBudgetSpec(selector=selector), status=status)
