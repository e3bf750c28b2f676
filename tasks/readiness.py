"""Waits until the node reports that it is ready with its new spec. Only then has the deploy succeeded.

Changes that the agent defers, for users of a NIC or for a policy, are named at the end, as the deploy's own deferred steps are.
"""

from __future__ import annotations

from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import disruption
from tasks.common.commands import Commands
from tasks.common.data import Key, whole_number
from tasks.common.status import COMMAND, NodeStatus, Status

TIMEOUT = Key("ready_timeout", 120, whole_number(1, 3600, "seconds"))

MARGIN = 30
"""Seconds that a command may take beyond its own timeout before pyinfra gives up the connection."""


def wait(version: str, spec_hash: str) -> None:
    """Wait until the node is ready with this spec and this agent, or fail with the node's reasons."""
    timeout = TIMEOUT.here()
    wait_on_node(name="Ready", version=version, spec_hash=spec_hash, timeout=timeout, _timeout=timeout + MARGIN)


@operation()
def wait_on_node(version: str, spec_hash: str, timeout: int) -> Commands:
    """Run `trackbed wait` on the node, unless it is ready with this spec and this agent."""
    status: Status | None = host.get_fact(NodeStatus)
    if status and status.is_ready_by(version, spec_hash):
        host.noop("the node is ready")
    else:
        yield StringCommand(COMMAND, "wait", "--hash", QuoteString(spec_hash), "--timeout", QuoteString(str(timeout)))
        status = host.get_fact(NodeStatus) if host.state.is_executing else None
    # Of a spec whose mode is observe, all changes are deferred, and none waits.
    for outcome in status.report.outcomes if status and not status.report.up_to_date else ():
        if outcome.result == "deferred":
            disruption.defer(str(outcome.change), outcome.error)
