"""Reboot requests. A task requests a reboot and gives the reason; tasks/reboot_policy.py decides whether and when there is one.

/var/lib/trackbed/reboots/TASK      a reboot request: the boot ID at which the task first made it, and the reason
/var/lib/trackbed/reboots/.drained  a deploy has cordoned the Node for a reboot, and not uncordoned it yet

A request of the current boot is due. If a task makes a request again that is from an earlier boot, that reboot did not help,
and the host is not rebooted for it again (docs/decisions/0017-what-a-reboot-is-for.md).
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.context import host

from agent.report.names import STATE_FOLDER
from agent.report.records import Disruption
from agent.spec.validators import Within
from tasks import disruption
from tasks.common.commands import Commands, refuse, script, warn
from tasks.common.connection import deploys_itself
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.common.turns import share

FOLDER = f"{STATE_FOLDER}/reboots"


@frozen
class Reboot:
    """The policy. ``timeout``: seconds until a rebooted host must answer; a server's firmware alone takes minutes.

    ``at_once``: how many hosts of the group may be away for their reboots at the same time. ``stop_at``: once so many of them
    have failed, no other one is rebooted. Both are a number of hosts, or a percentage of them as text.
    """

    policy: Literal["never", "allow"] = "never"
    timeout: int = field(default=1800, validator=Within(30, 7200, "seconds"))
    at_once: Any = field(default=1, validator=share)
    stop_at: Any = field(default=1, validator=share)


POLICY = Key("reboot", Reboot(), record(Reboot))


@frozen
class RebootRequest:
    """Why a task needs a reboot. ``boot_id``: the boot at which it first made the request."""

    task: str
    boot_id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.task}: {self.reason}"


@frozen
class RebootRequests:
    """A node's reboot requests, and the ID of its current boot. ``drained``: its Node is still cordoned for a reboot."""

    boot_id: str
    requests: tuple[RebootRequest, ...] = ()
    drained: bool = False

    def of(self, task: str) -> RebootRequest | None:
        """The task's request, if there is one."""
        return next((each for each in self.requests if each.task == task), None)

    def due(self) -> list[RebootRequest]:
        """The requests that no reboot has followed yet."""
        return [each for each in self.requests if each.boot_id == self.boot_id]


_REQUESTS = """
cat /proc/sys/kernel/random/boot_id
cd "$1" 2>/dev/null || exit 0
for task in *; do
  if [ -f "$task" ]; then printf '%s ' "$task"; tr '\\n' ' ' < "$task"; echo; fi
done
if [ -e .drained ]; then echo drained; fi
"""


class NodeRebootRequests(FactBase[RebootRequests]):
    """The reboot requests on the node, and its boot ID (/proc/sys/kernel/random/boot_id)."""

    shell = _REQUESTS
    words = (FOLDER,)

    def process(self, output: list[str]) -> RebootRequests:
        """Parse lines such as `boot BOOT-ID kernel arguments iommu=pt are not in effect`."""
        if not output[0]:
            raise ValueError("it has no boot ID")
        lines = (line.split(" ", 2) for line in output[1:])
        return RebootRequests(
            output[0],
            tuple(RebootRequest(line[0], line[1], line[2].strip()) for line in lines if len(line) == 3),
            "drained" in output[1:],
        )


# The rename makes the request appear complete: half a reason would be another request.
REQUEST = """
request() {
  mkdir -p "$1"
  printf '%s\\n%s\\n' "$(cat /proc/sys/kernel/random/boot_id)" "$3" > "$1/.$2.new"
  mv -T "$1/.$2.new" "$1/$2"
}
"""
"""A shell function for scripts whose change needs a reboot: `request FOLDER TASK REASON`.

If the change and the request were two commands, the request would be lost if a deploy was interrupted in between.
"""

_REQUEST = f"""{REQUEST}
request "$@"
"""


def request(task: str, reason: str) -> Commands:
    """For an operation: request a reboot, unless the task has made the same request in this boot.

    If the same request is from an earlier boot, another reboot would not help either. Then the host fails where the policy
    allows reboots; elsewhere this is a warning.
    """
    reason = " ".join(reason.split())
    have = host.get_fact(NodeRebootRequests)
    policy = POLICY.here().policy
    present = have.of(task) if have else None
    if present is None or present.reason != reason:
        if not host.state.is_executing:
            warn(host, f"reboot wanted: {task}: {reason}; {consequence()}")
        yield script(_REQUEST, FOLDER, task, reason)
    elif present.boot_id != have.boot_id:
        unmet = (
            f"{present}: this is still so after a reboot, so the host is not rebooted for it again. "
            f"Find out why it does not take effect; to allow one more reboot, remove {FOLDER}/{task} on the host"
        )
        if policy == "never" or deploys_itself(host):
            warn(host, unmet)
        else:
            yield refuse(unmet)


def awaited_by(*tasks: str) -> bool:
    """For an operation: whether a request of one of these tasks is due."""
    have = host.get_fact(NodeRebootRequests)
    return have is not None and any(each.task in tasks for each in have.due())


def withdraw(task: str) -> Commands:
    """For an operation: the task needs no reboot; remove its request if there is one."""
    have = host.get_fact(NodeRebootRequests)
    if have is None or have.of(task):
        yield StringCommand("rm", "-f", QuoteString(f"{FOLDER}/{task}"))


def expire(task: str) -> Commands:
    """For an operation: remove the task's request if the host has booted since. Any boot satisfies it."""
    have = host.get_fact(NodeRebootRequests)
    if have is None or ((present := have.of(task)) and present.boot_id != have.boot_id):
        yield StringCommand("rm", "-f", QuoteString(f"{FOLDER}/{task}"))


def consequence() -> str:
    """What follows from a request on the current host, for a message."""
    if deploys_itself(host):
        return "a host that deploys itself is not rebooted: deploy it from a control host, or reboot it by hand"
    if POLICY.here().policy == "never":
        return "the host is not rebooted (reboot.policy is 'never')"
    if why := disruption.why_not(Disruption.REBOOT, of_nics=True):
        return f"the host is not rebooted now: {why}"
    return "the host is rebooted (reboot.policy is 'allow')"
