"""The control plane with what a reporter needs, and reporters on it. A test with another set-up has a fixture of its own."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.reporter.kubernetes.identity import BoundToken
from agent.reporter.settings import Settings
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import patch_status
from tests.cluster.reporter.reporters import BROUGHT, STATUS, Reporter, bring, by_token, node, prepare
from tests.cluster.reporter.thief import OTHER, OWN, Thief, status

Start = Callable[..., Reporter]


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    prepare(control_plane)
    return control_plane


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with the Nodes of two reporters."""
    prepare(control_plane)
    for name in (OWN, OTHER):
        control_plane.apply(node(name))
        patch_status(control_plane, name, status(**STATUS))
    return control_plane


@pytest.fixture(scope="module")
def thief(cluster: ControlPlane) -> Thief:
    """The credentials of the first node's reporter, in an attacker's hands."""
    return Thief(cluster, by_token(cluster, OWN))


@pytest.fixture
def start(plane: ControlPlane, tmp_path: Path) -> Iterator[Start]:
    """Start the reporter of a new Node."""

    def begin(
        name: str, labels: list[dict[str, Any]] | None = None, server: str | None = None, **more: Any
    ) -> Reporter:
        plane.apply(node(name))
        (tmp_path / "labels.json").write_text(json.dumps({"labels": labels or []}))
        settings = Settings(name, server or plane.url, str(plane.authority.pair.certificate), **more)
        bring(plane, name, tmp_path)
        return Reporter.start(plane, tmp_path, settings, BoundToken(settings, tmp_path, tmp_path / BROUGHT))

    yield begin
