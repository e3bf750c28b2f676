"""Replaces two functions of pyinfra 3.10 with ones that return the same in less time.

Both run for every operation of every host. One reads the source files of the whole call stack to learn line numbers, the other
evaluates the same type annotations again. In a deploy that finds nothing to do they took more of the control host's CPU time
for each further host than all else together. tests/deploy/common/test_quick.py compares both with pyinfra's own.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import FrameType

import pyinfra
from pyinfra.api import arguments, facts
from pyinfra.api.state import State
from pyinfra.api.util import PYINFRA_INSTALL_DIR


def replace() -> None:
    """Use them instead of pyinfra's own. For config.py."""
    all_arguments = cache(arguments.all_global_arguments)
    for module in (arguments, facts):
        setattr(module, "all_global_arguments", all_arguments)  # noqa: B010  mypy knows no function that is replaced
    # In pyinfra.api the module's name is that of the decorator.
    setattr(import_module("pyinfra.api.operation"), "get_operation_order_from_stack", order_from_stack)  # noqa: B010


def order_from_stack(state: State) -> list[int]:
    """The order of an operation: the lines that are being run, from the deploy's file to the one that calls pyinfra."""
    lines = list[tuple[str, int]]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    lines.reverse()
    deploy = state.current_deploy_filename
    begins = next((index for index, (file, _) in enumerate(lines) if file == deploy), len(lines) - 1) if deploy else 0
    order = [state.current_op_file_number] if pyinfra.is_cli else []
    return order + [line for file, line in lines[begins:] if not file.startswith(PYINFRA_INSTALL_DIR)]
