"""Reboots. A task requests a reboot and gives the reason; this module decides by policy whether and when a host reboots.

/var/lib/trackbed/reboots/TASK      a reboot request: the boot ID at which the task first made it, and the reason
/var/lib/trackbed/reboots/.drained  a deploy has cordoned the Node for a reboot, and not uncordoned it yet

A request of the current boot is due. If a task makes a request again that is from an earlier boot, that reboot did not help,
and the host is not rebooted for it again (docs/decisions/0017-what-a-reboot-is-for.md).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Literal

import gevent
from attrs import field, frozen
from gevent import Timeout
from paramiko import SSHException
from pyinfra.api.command import FunctionCommand, PyinfraCommand, QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.connectors.util import clear_askpass_cache
from pyinfra.context import host

from agent.report.names import STATE_FOLDER
from agent.report.records import Disruption
from agent.spec.validators import Within
from tasks import disruption, inhibitors
from tasks.common import answers
from tasks.common.commands import Commands, fail, refuse, script, warn
from tasks.common.connection import deploys_itself
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.common.replay import earlier_operations
from tasks.common.status import COMMAND, NodeStatus
from tasks.common.turns import share, turns_of
from tasks.kubernetes import maintenance
from tasks.readiness import MARGIN, TIMEOUT

FOLDER = f"{STATE_FOLDER}/reboots"

MAX_REBOOTS = 3
"""Reboots of a host in one deploy: for a kernel, for drivers built for it, and for what needs both."""

POLL_INTERVAL = 2
"""Seconds between two attempts to reach a host that reboots."""

ATTEMPT_TIMEOUT = 90
"""Seconds that one attempt may take. A host that has just booted answers slowly."""

SETTLE_TIMEOUT = 120
"""Seconds to wait for the services of a booted host. After that the deploy goes on in any case."""


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
KEYS = (POLICY,)


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

    def command(self) -> StringCommand:
        """Print the boot ID, then one line for each request."""
        return self.script(_REQUESTS, FOLDER)

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
            warn(host, f"reboot wanted: {task}: {reason}; {_consequence()}")
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


def by_policy() -> None:
    """Reboot the hosts with a due request, if the policy allows it: at most ``at_once``, until ``stop_at`` have failed.

    A rebooted host runs the deploy from its beginning again before its turn ends: the tasks then do what the new kernel needs,
    and judge their requests anew.
    """
    # Whatever the inventory sets: a host that failed in its turn gets no other, and is not brought back.
    strict: Any = {"_retries": 0, "_ignore_errors": False, "_continue_on_error": False}
    carry_out(name="Reboot", policy=POLICY.here(), ready_timeout=TIMEOUT.here(), **strict)


# A timer of systemd reboots the host, since the SSH session ends with the connection.
_REBOOT = f"{inhibitors.WAIT}systemd-run --quiet --on-active=1s --timer-property=AccuracySec=100ms systemctl reboot"

# is-system-running fails if any unit has failed, which does not matter here. --wait: RHEL 8's systemctl does not have it.
_SETTLED = 'timeout "$1" systemctl is-system-running --wait >/dev/null || true'


@operation()
def carry_out(policy: Reboot, ready_timeout: int) -> Commands:
    """Reboot the host while requests are due, once it is its turn. If it was ready, wait until it is ready again.

    :param ready_timeout: seconds until the host must be ready again.
    """
    have = _due(policy)
    if have is None:
        return
    if not host.state.is_executing:
        yield script(_REBOOT)
        return
    turns = turns_of(host.state.inventory.get_host(host.name), POLICY)
    when = turns.take(host.name)
    if when == "never":
        names = ", ".join(sorted(turns.failed))
        disruption.defer(
            "reboot", f"reboots in its group failed: {names} (reboot.stop_at); repair or exclude these hosts"
        )
        return
    succeeded: bool | None = None
    try:
        # Meanwhile a window may have ended, and somebody may have rebooted the host.
        have = _due(policy) if when == "later" else have
        if have is not None:
            host.log(f"reboots now, after {turns.done} other hosts")
            succeeded = False
            succeeded = yield from _reboots(have, policy, ready_timeout)
    finally:
        # Also when pyinfra leaves this generator, since a command has failed.
        turns.end(host.name, succeeded)


def return_to_service() -> None:
    """Uncordon a Node that was not in service before its reboot, or whose deploy was interrupted: now it is ready."""
    if maintenance.is_member():
        if (have := host.get_fact(NodeRebootRequests)) and have.drained:
            maintenance.note_cordoned()
        uncordon(name="Back in service")


@operation()
def uncordon() -> Commands:
    """Bring the Node back, if a deploy has cordoned it for a reboot."""
    have = host.get_fact(NodeRebootRequests)
    if have and have.drained and not deploys_itself(host):
        yield from _bring_back()
    else:
        host.noop("the Node is not cordoned for a reboot")


def _due(policy: Reboot) -> RebootRequests | None:
    """For an operation: the host's requests if a reboot is due, and allowed now. If it is due, say what follows."""
    have: RebootRequests | None = host.get_fact(NodeRebootRequests)
    if have is None or not have.due():
        disruption.settle("reboot")
        host.noop("no reboot is wanted")
        return None
    for each in have.due():
        warn(host, f"reboot wanted: {each}; {_consequence()}")
    if policy.policy == "never" or deploys_itself(host):
        return None

    def hindrance() -> str:
        return _users("node to drain") or "; ".join(maintenance.blockers(disruption.forced()))

    return None if disruption.deferred("reboot", Disruption.REBOOT, of_nics=True, hindrance=hindrance) else have


def _users(of: Literal["node to drain", "drained node"]) -> str:
    """For an operation: who uses the host, but for pods that a drain ends. Without policy and cluster nobody is asked for."""
    # Not above: the drivers' tasks import this module.
    from tasks.reboot_users import RebootUsers

    if disruption.forced() or not (disruption.is_given() or maintenance.is_member()):
        return ""
    users = host.get_fact(RebootUsers, of=of if maintenance.is_member() else "host")
    if users is None:
        return "it is unknown who uses the host"
    return f"in use: {', '.join(users)}" if users else ""


def _reboots(have: RebootRequests, policy: Reboot, ready_timeout: int) -> Generator[PyinfraCommand, None, bool | None]:
    """Drain the host's Node and reboot it while requests are due; None: that is deferred, since it cannot be drained."""
    status = host.get_fact(NodeStatus)
    was_ready = status is not None and status.ready
    was_in_service = maintenance.is_member() and maintenance.is_in_service()
    if maintenance.is_member() and not (yield from _take_out()):
        return None
    due: RebootRequests | None = have
    for _ in range(MAX_REBOOTS):
        yield script(_REBOOT)
        yield FunctionCommand(_wait_for_boot, (have.boot_id, policy.timeout), {})
        yield script(_SETTLED, str(SETTLE_TIMEOUT))
        disruption.forget()
        yield from earlier_operations()
        due = _due(policy)
        if due is None:
            break
        have = due
    if due is not None:
        reasons = "; ".join(map(str, due.due()))
        yield refuse(f"rebooted {MAX_REBOOTS} times in this deploy, and another reboot is still wanted: {reasons}")
    if was_ready:
        timeout = QuoteString(str(ready_timeout))
        yield StringCommand(COMMAND, "wait", "--timeout", timeout, _timeout=ready_timeout + MARGIN)
    if was_in_service:
        yield from _bring_back()
    return True


_MARK = 'mkdir -p "$1"; touch "$1/.drained"'
_UNMARK = 'rm -f "$1/.drained"'


def _take_out() -> Generator[PyinfraCommand, None, bool]:
    """For an operation: cordon and drain the Node. False: that is deferred, and the Node is as it was."""
    # First: after a crash in between, the next deploy looks for what is to be undone.
    yield script(_MARK, FOLDER)
    result, why = maintenance.take_out(disruption.forced())
    if result == "done":
        if not (users := _users("drained node")):
            return True
        result, why = maintenance.give_back()
        why = why or users
    if result == "undone":
        yield script(_UNMARK, FOLDER)
        disruption.defer("reboot", why)
    else:
        yield refuse(f"not rebooted: {why}")
    return False


def _bring_back() -> Commands:
    # pyinfra runs this also to prepare the deploy.
    have = host.get_fact(NodeRebootRequests)
    result, why = maintenance.bring_back(have.boot_id) if host.state.is_executing else ("done", "")
    yield script(_UNMARK, FOLDER) if result == "done" else refuse(why)


def _consequence() -> str:
    """What follows from a request on the current host, for a message."""
    if deploys_itself(host):
        return "a host that deploys itself is not rebooted: deploy it from a control host, or reboot it by hand"
    if POLICY.here().policy == "never":
        return "the host is not rebooted (reboot.policy is 'never')"
    if why := disruption.why_not(Disruption.REBOOT, of_nics=True):
        return f"the host is not rebooted now: {why}"
    return "the host is rebooted (reboot.policy is 'allow')"


def _wait_for_boot(state: State, host: Host, before: str, timeout: int) -> bool:
    """Wait until the host answers with another boot ID than ``before``.

    pyinfra's own server.reboot compares uptimes. A host that had been up for a short time and boots slowly never satisfies it.
    """
    end = time.monotonic() + timeout
    now = None
    while time.monotonic() < end:
        now = _boot_id(host)
        if now not in (None, before):
            return True
        gevent.sleep(POLL_INTERVAL)
    problem = "did not shut down" if now == before else "did not come back"
    return fail(host, f"the host {problem} within {timeout} s of its reboot (reboot.timeout); look at its console")


def _boot_id(host: Host) -> str | None:
    """The boot ID, over a new connection; None if the host does not answer.

    The old connection would hang. A new one hangs, too, if the machine goes away while it is made: paramiko waits without a
    limit for the answer to its request to run a command. Hence the timeout.

    If sudo asks for a password, pyinfra has a program on the host that answers, and deletes it by the old connection when it
    disconnects. It makes another one when it finds none in its record, so that is cleared, as pyinfra's own server.reboot does.
    """
    clear_askpass_cache(host)
    host.disconnect()
    try:
        with Timeout(ATTEMPT_TIMEOUT):
            # pyinfra keeps it open. paramiko would then print an error when the booted host refuses the next packet on it.
            if (client := getattr(host.connector, "client", None)) is not None:
                client.close()
            host.connector.connect()
            host.connected = True
            succeeded, output, _ = answers.ask("cat /proc/sys/kernel/random/boot_id", host.run_shell_command)
    except (Timeout, ConnectError, OSError, EOFError, SSHException):
        return None
    return (succeeded and output.stdout.strip()) or None
