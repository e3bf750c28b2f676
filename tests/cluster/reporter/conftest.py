"""The control plane with what a reporter needs, and reporters on it. A test with another set-up has a fixture of its own."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.reporter.settings import Settings
from lab.cluster.control_plane import ControlPlane
from tests.cluster.reporter.reporters import Reporter, admit, by_certificate, node, prepare

Start = Callable[..., Reporter]


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    prepare(control_plane)
    return control_plane


@pytest.fixture
def start(plane: ControlPlane, tmp_path: Path) -> Iterator[Start]:
    """Start the reporter of a new Node."""

    def begin(
        name: str, labels: list[dict[str, Any]] | None = None, server: str | None = None, **more: Any
    ) -> Reporter:
        plane.apply(node(name))
        admit(plane, name)
        (tmp_path / "labels.json").write_text(json.dumps({"labels": labels or []}))
        settings = Settings(name, server or plane.url, str(plane.authority.pair.certificate), **more)
        return Reporter.start(plane, tmp_path, settings, by_certificate(plane, name))

    yield begin
