"""Helpers of the tests of the fleet's commands: Nodes without a kubelet, and a function that runs a command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attrs import frozen

from agent.report import names
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import manifest, patch_status
from tests.cluster.reporter import reporters

ROOT = Path(__file__).parents[3]
DEADLINE = 60.0
OTHERS = {"key": "example.net/busy", "effect": "NoSchedule"}
OURS = {"key": names.TAINT, "effect": "NoSchedule"}


@frozen
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def start(kubeconfig: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    command = [sys.executable, "-m", "cli", "fleet", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], timeout: float = 120) -> Done:
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err
    return Done(process.returncode, out, err)


def fleet(plane: ControlPlane, *words: str, timeout: float = 120) -> Done:
    return ended(start(plane.admin, *words), timeout)


def answer(plane: ControlPlane, *words: str) -> Any:
    """What `trackbed fleet` prints as JSON, whatever its exit code."""
    return fleet(plane, *words, "--json").document


def until(look: Callable[[], object], what: str) -> None:
    reporters.until(look, what, DEADLINE)


def stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def conditions(ready: str, up_to_date: str = "True") -> list[dict[str, str]]:
    statuses = {names.READY: ready, names.UP_TO_DATE: up_to_date, "Ready": "True"}
    return [
        {"type": type, "status": status, "reason": "AsSpecified", "message": "as it is", "lastTransitionTime": stamp()}
        for type, status in statuses.items()
    ]


def make_node(plane: ControlPlane, name: str, ready: str = "True", life: int = 900) -> None:
    """Create a Node as its reporter publishes it, with a Lease that expires after so many seconds."""
    labels = {names.READY_LABEL: "true", "kubernetes.io/hostname": name}
    plane.kubectl("delete", "node", name, "--ignore-not-found")
    plane.apply(manifest("v1", "Node", name, metadata={"labels": labels}, spec={"taints": [OTHERS]}))
    has = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    patch_status(plane, name, {"status": {"conditions": conditions(ready), "capacity": has, "allocatable": has}})
    notes = {names.SPEC_HASH: "0123456789abcdef", names.AGENT_VERSION: "0.1.0-abc"}
    renewal = {
        "holderIdentity": name,
        "leaseDurationSeconds": life,
        "renewTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    kind = ("coordination.k8s.io/v1", "Lease")
    plane.apply(manifest(*kind, name, names.NAMESPACE, metadata={"annotations": notes}, spec=renewal))


def node(plane: ControlPlane, name: str) -> Any:
    return plane.get("node", name)


def condition(plane: ControlPlane, name: str) -> Any:
    return next(one for one in node(plane, name)["status"]["conditions"] if one["type"] == names.READY)


def taints(plane: ControlPlane, name: str) -> list[dict[str, str]]:
    # The node lifecycle controller adds taints of its own, since these Nodes have no kubelet.
    every = node(plane, name)["spec"].get("taints", [])
    return [taint for taint in every if not taint["key"].startswith("node.kubernetes.io/")]
