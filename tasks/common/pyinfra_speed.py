"""Replaces three functions of pyinfra 3.10 by faster ones with the same results.

Two of them run for every operation of every host. One reads the source files of the whole call stack to get line numbers. The
other evaluates the same type annotations each time. In a deploy that finds nothing to do, they took more than half of the
control host's CPU time for each host. The third looks for connectors in all installed packages, for every host whose name
begins with the connector's. tests/deploy/common/test_pyinfra_speed.py compares their results with pyinfra's.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from importlib import import_module
from types import FrameType

import pyinfra
from pyinfra.api import arguments, connectors, facts, inventory
from pyinfra.api.state import State
from pyinfra.api.util import PYINFRA_INSTALL_DIR


def replace_functions() -> None:
    """For config.py: make pyinfra use them, and have the garbage collector pass over all that is loaded so far."""
    all_arguments = cache(arguments.all_global_arguments)
    for module in (arguments, facts):
        setattr(module, "all_global_arguments", all_arguments)  # noqa: B010  mypy knows no function that is replaced
    all_connectors = cache(connectors.get_all_connectors)
    for module in (connectors, inventory):
        setattr(module, "get_all_connectors", all_connectors)  # noqa: B010
    # In pyinfra.api the module's name is that of the decorator.
    setattr(import_module("pyinfra.api.operation"), "get_operation_order_from_stack", order_from_stack)  # noqa: B010
    gc.freeze()


def order_from_stack(state: State) -> list[int]:
    """The sort key of an operation: the line numbers on the call stack, from the deploy's file to the call of pyinfra."""
    lines = list[tuple[str, int]]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    lines.reverse()
    deploy = state.current_deploy_filename
    first = next((index for index, (file, _) in enumerate(lines) if file == deploy), len(lines) - 1) if deploy else 0
    order = [state.current_op_file_number] if pyinfra.is_cli else []
    return order + [line for file, line in lines[first:] if not file.startswith(PYINFRA_INSTALL_DIR)]
