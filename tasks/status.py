"""What the node says of itself, read through its own command."""

from __future__ import annotations

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase

from agent.change import Report, report_from_json
from tasks.commands import script

COMMAND = "/usr/local/bin/trackbed"
"""By its path: sudo's on RHEL leaves /usr/local/bin out."""


@frozen
class Status:
    """The node's report, and whether the node calls itself ready (then the report is fresh, too)."""

    report: Report
    ready: bool


# Not ready is an answer, not a failed fact.
_STATUS = """
[ -x "$1" ] || exit 0
if said=$("$1" status --json 2>/dev/null); then echo ready; else echo "not ready"; fi
printf '%s\\n' "$said"
"""


class NodeStatus(FactBase[Status | None]):
    """The node's status; None: it has no agent, no report yet, or one of another agent's format."""

    def command(self) -> StringCommand:
        """Run `trackbed status --json`, whatever its exit code."""
        return script(_STATUS, COMMAND)

    def process(self, output: list[str]) -> Status | None:
        """Whether it is ready, and the report."""
        try:
            return Status(report_from_json("\n".join(output[1:])), output[0] == "ready")
        except ValueError:
            return None
