"""The node's status, read from the agent's report."""

from __future__ import annotations

from attrs import frozen

from agent.report import names
from agent.report.records import Report, report_from_json
from agent.report.verdict import why_not_ready
from tasks.common.facts import FactBase


@frozen
class Status:
    """The node's report, and whether it says that the node is ready and is recent enough to be believed."""

    report: Report
    ready: bool

    def is_ready_by(self, version: str, spec_hash: str) -> bool:
        """Whether the node is ready with this spec and this version of the agent."""
        return self.ready and (self.report.agent_version, self.report.spec_hash) == (version, spec_hash)


COMMAND = names.COMMAND
REPORT = f"{names.RUN_FOLDER}/{names.REPORT}"
SPEC = names.SPEC_FILE
VERIFIED = f"{names.STATE_FOLDER}/verified.json"
"""The last spec that the agent verified in full. The agent writes it."""
OBSERVED = f"{names.STATE_FOLDER}/observed.json"
"""The last spec of mode observe, until the agent has verified a later one. The agent writes it."""

# The file is read, since `trackbed status` starts a Python, which takes as long as all other facts of a deploy.
_STATUS = """
[ -e "$1" ] || exit 0
read -r uptime _ < /proc/uptime
echo "$(cat /proc/sys/kernel/random/boot_id) $uptime"
cat "$1"
"""


class NodeStatus(FactBase[Status | None]):
    """The node's status; None: there is no agent, no report yet, or a report in another version's format."""

    prefetched = False
    shell = _STATUS
    words = (REPORT,)

    def process(self, output: list[str]) -> Status | None:
        """Parse the report, and judge it as `trackbed status` does on the node."""
        try:
            boot_id, uptime = output[0].split()
            report = report_from_json("\n".join(output[1:]))
            return Status(report, not why_not_ready(report, boot_id, float(uptime)))
        except ValueError:
            return None
