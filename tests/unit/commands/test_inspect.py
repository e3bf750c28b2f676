"""`trackbed inspect` as a process, on this machine."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.spec.node import from_mapping
from tests.programs import success
from tests.unit.commands.node_folder import ROOT, trackbed

pytestmark = pytest.mark.slow


def test_as_spec_of_this_machine_has_an_empty_plan(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text(success(trackbed(tmp_path, "inspect", "--as-spec", "--node-name", "n1")))
    assert trackbed(tmp_path, "plan").returncode == 0


def test_as_inventory_of_this_machine_is_python_with_a_valid_spec(tmp_path: Path) -> None:
    written = success(trackbed(tmp_path, "inspect", "--as-inventory", "--node-name", "n1"))
    scope: dict[str, Any] = {}
    exec(written, scope)  # noqa: S102  what pyinfra does with an inventory
    (host,), data = scope["servers"]
    name, own = host
    assert (name, own) == (socket.gethostname().lower(), {"node_name": "n1"})
    assert from_mapping({**data, **own}).node_name == "n1"


def test_as_spec_says_that_it_cannot_take_the_name_from_a_damaged_spec(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text("{")
    written = trackbed(tmp_path, "inspect", "--as-spec")
    assert f"{tmp_path}/node.json cannot be read" in written.stderr
    assert json.loads(written.stdout)["node_name"] == socket.gethostname().lower()
    assert "node_name" not in trackbed(tmp_path, "inspect", "--as-spec", "--node-name", "n1").stderr


def test_a_program_for_nodes_describes_this_machine() -> None:
    program = (ROOT / "tests/zoo/describe.py").read_text()
    words = [sys.executable, "-"]
    described = subprocess.run(words, cwd=ROOT, input=program, capture_output=True, text=True, check=True)
    assert json.loads(described.stdout)["cpus"]["nodes"]
