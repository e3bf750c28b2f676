from __future__ import annotations

import subprocess
import sys

import pytest
from pyinfra.api.state import State
from pyinfra.context import ctx_state
from pyinfra_cli.inventory import make_inventory  # type: ignore[import-untyped]

from agent.spec.node import NodeSpec
from tasks.common import archive
from tasks.node_spec import node_spec


def specs(name: str) -> dict[str, NodeSpec]:
    state = State()
    state.cwd = str(archive.ROOT)
    with ctx_state.use(state):
        fleet = make_inventory(str(archive.ROOT / "inventories" / name), cwd=state.cwd)
    return {host.name: node_spec(host.data.dict(), host.name) for host in fleet}


def test_prod() -> None:
    found = specs("prod.py")
    assert len(found) == 12
    assert {len(spec.nics) for name, spec in found.items() if name.startswith("gpu-")} == {8}
    assert found["10.0.1.11"].node_name == "cn-hangzhou.10.0.1.11"
    assert found["gpu-08.example.net"].disruption.allow == "none"


def test_lab_that_is_not_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKBED_LAB", "never-started")
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "inventories/lab.py", "debug-inventory"],
        cwd=archive.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the lab is not up; run `make lab`" in done.stderr
    assert "Traceback" not in done.stderr
