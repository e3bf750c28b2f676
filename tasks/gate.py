"""The gate: the deploy has succeeded when the node itself says that it is ready by the spec it was given."""

from __future__ import annotations

from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import Commands
from tasks.common.data import Key, whole_number
from tasks.common.status import COMMAND, NodeStatus

TIMEOUT = Key("ready_timeout", 120, whole_number(1, 3600, "seconds"))
KEYS = (TIMEOUT,)

MARGIN = 30
"""Seconds that a node may take beyond its own time-out before the connection is given up."""


def ready(version: str, spec_hash: str) -> None:
    """Wait until the node is ready by the spec with this hash, or fail with its reasons."""
    timeout = TIMEOUT.here()
    wait(name="Ready", version=version, spec_hash=spec_hash, timeout=timeout, _timeout=timeout + MARGIN)


@operation()
def wait(version: str, spec_hash: str, timeout: int) -> Commands:
    """Let the node wait; nothing if it is ready already, by this spec and this agent."""
    status = host.get_fact(NodeStatus)
    if status and status.is_ready_by(version, spec_hash):
        host.noop("the node is ready")
        return
    yield StringCommand(COMMAND, "wait", "--hash", QuoteString(spec_hash), "--timeout", QuoteString(str(timeout)))
