"""Runs operations of the current deploy a second time on one host, as a reboot requires.

pyinfra 3.10 has no public way to do this: ``run_host_op`` refuses an operation that has completed, and nested operations would
need the deploy as a function. So this module reads what pyinfra keeps of each operation: its command generator, and the
attributes of Host that the generator sets. No other module does. tests/deploy/common/test_replay.py fails if an
upgrade of pyinfra changes them.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.context import host

from tasks.common.commands import Commands

_SET_BY_OPERATION = ("in_op", "current_op_hash", "current_op_global_arguments", "current_op_deploy_data")
"""Attributes of Host that each operation sets for itself and clears when it ends. Facts are read with them."""


def earlier_operations() -> Commands:
    """For an operation: the commands that the operations before it would run now, in their order."""
    this_operation = host.current_op_hash
    kept = {name: getattr(host, name) for name in _SET_BY_OPERATION}
    for op_hash in takewhile(lambda op_hash: op_hash != this_operation, list(host.op_hash_order)):
        operation = host.state.get_op_data_for_host(host, op_hash)
        connector_arguments: dict[str, Any] = {
            key: value for key, value in operation.global_arguments.items() if key in CONNECTOR_ARGUMENT_KEYS
        }
        for command in operation.command_generator():
            arguments: Any = connector_arguments | dict(command.connector_arguments)
            command.connector_arguments = arguments
            yield command
        for name, value in kept.items():
            setattr(host, name, value)
