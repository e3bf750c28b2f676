"""The faster functions return the same as pyinfra's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tasks.common.archive import ROOT

# Both are called on the same line, since they return line numbers.
DEPLOY = """
from importlib import import_module

from pyinfra.api import arguments, connectors, inventory
from pyinfra.api.arguments import AllArguments, get_type_hints
from pyinfra.api.deploy import deploy
from pyinfra.api.util import get_operation_order_from_stack
from pyinfra.context import state
from pyinfra.operations import server

from tasks.common import pyinfra_speed


def same():
    for theirs, ours in [(get_operation_order_from_stack(state), pyinfra_speed.order_from_stack(state))]:
        assert theirs == ours and len(ours) > 2, (theirs, ours)


@deploy("Nested")
def nested():
    (lambda: [same() for _ in range(2)])()


same()
nested()
assert import_module("pyinfra.api.operation").get_operation_order_from_stack is pyinfra_speed.order_from_stack
assert arguments.all_global_arguments() == list(get_type_hints(AllArguments).items())
assert inventory.get_all_connectors() is connectors.get_all_connectors() == inventory.get_all_connectors.__wrapped__()
server.shell(name="Nothing", commands=["true"])
server.shell(name="Reached", commands=["true"])
"""


def test_the_order_of_operations_and_the_arguments_are_those_of_pyinfra(tmp_path: Path) -> None:
    (tmp_path / "deploy.py").write_text(DEPLOY)
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", "@local", str(tmp_path / "deploy.py")],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("Nothing") < done.stderr.index("Reached")
