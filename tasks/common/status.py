"""What the node says of itself, read from its report."""

from __future__ import annotations

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase

from agent.report.records import Report, report_from_json, why_not
from tasks.common.commands import script

COMMAND = "/usr/local/bin/trackbed"
"""By its path: sudo's on RHEL leaves /usr/local/bin out."""


@frozen
class Status:
    """The node's report, and whether the node calls itself ready (then the report is fresh, too)."""

    report: Report
    ready: bool

    def is_ready_by(self, version: str, spec_hash: str) -> bool:
        """Whether it is ready by this spec, and by this agent's word."""
        return self.ready and (self.report.agent_version, self.report.spec_hash) == (version, spec_hash)


REPORT = "/run/trackbed/report.json"
SPEC = "/etc/trackbed/node.json"
VERIFIED = "/var/lib/trackbed/verified.json"
"""The last spec that the node was seen to follow in full; the agent keeps it."""

# Read, not asked for: to start a Python for it takes as long as all the other facts of a deploy.
_STATUS = """
[ -e "$1" ] || exit 0
read -r uptime _ < /proc/uptime
echo "$(cat /proc/sys/kernel/random/boot_id) $uptime"
cat "$1"
"""


class NodeStatus(FactBase[Status | None]):
    """The node's status; None: it has no agent, no report yet, or one of another agent's format."""

    def command(self) -> StringCommand:
        """The report, and what tells how fresh it is: the boot's id, and the seconds since it (proc(5))."""
        return script(_STATUS, REPORT)

    def process(self, output: list[str]) -> Status | None:
        """Whether it is ready, as `trackbed status` judges it on the node, and the report."""
        try:
            boot_id, uptime = output[0].split()
            report = report_from_json("\n".join(output[1:]))
            return Status(report, not why_not(report, boot_id, float(uptime)))
        except ValueError:
            return None
