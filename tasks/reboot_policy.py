"""Decides by policy whether and when a host reboots for the requests of its tasks (tasks/reboot.py)."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Literal

import gevent
from attrs import evolve
from gevent import Timeout
from paramiko import SSHException
from pyinfra.api.command import FunctionCommand, PyinfraCommand, QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.connectors.util import clear_askpass_cache
from pyinfra.context import host

from agent.report.records import Disruption
from tasks import disruption
from tasks.common import answers
from tasks.common.commands import Commands, fail, refuse, script, warn
from tasks.common.connection import deploys_itself
from tasks.common.data import task_keys, this_host
from tasks.common.replay import earlier_operations
from tasks.common.status import COMMAND, NodeStatus
from tasks.common.turns import turns_of
from tasks.host.kernel import NextKernel, would_not_boot
from tasks.kubernetes import maintenance
from tasks.readiness import MARGIN, TIMEOUT
from tasks.reboot import FOLDER, POLICY, NodeRebootRequests, Reboot, RebootRequests, consequence
from tasks.reboot_users import RebootUsers

MAX_REBOOTS = 3
"""Reboots of a host in one deploy: for a kernel, for drivers built for it, and for what needs both."""

POLL_INTERVAL = 2
"""Seconds between two attempts to reach a host that reboots."""

ATTEMPT_TIMEOUT = 90
"""Seconds that one attempt may take. A host that has just booted answers slowly."""

SETTLE_TIMEOUT = 120
"""Seconds to wait for the services of a booted host. After that the deploy goes on in any case."""


def by_policy() -> None:
    """Reboot the hosts with a due request, if the policy allows it: at most ``at_once``, until ``stop_at`` have failed.

    A rebooted host runs the deploy from its beginning again before its turn ends: the tasks then do what the new kernel needs,
    and judge their requests anew.
    """
    # Whatever the inventory sets: a host that failed in its turn gets no other, and is not brought back.
    strict: Any = {"_retries": 0, "_ignore_errors": False, "_continue_on_error": False}
    carry_out(name="Reboot", policy=POLICY.here(), ready_timeout=TIMEOUT.here(), **strict)


# A program may forbid a reboot by a lock of logind (systemd-inhibit(1)). apt has one while dpkg runs. Before systemd 257, root
# reboots a host in spite of it, which cuts the program off. Since then logind refuses that, and nobody would hear of it.
_UNTIL_ALLOWED = r"""
forbidden() {
  busctl call org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager ListInhibitors 2>/dev/null |
    grep -oE '"[a-z:-]*" ("([^"\\]|\\.)*" ){2}"block" [0-9]+ [0-9]+' |
    sed -nE 's/^"([a-z:-]*:)?shutdown(:[a-z:-]*)?" (".*") (".*") "block" [0-9]+ ([0-9]+)$/\3 (process \5): \4/p'
}
left=60
while why=$(forbidden) && [ -n "$why" ]; do
  left=$((left - 1))
  if [ "$left" = 0 ]; then
    printf 'the host is not rebooted, since a program forbids it: %s; wait until it has ended, and deploy again\n' "$why" >&2
    exit 1
  fi
  sleep 5
done
"""

# A timer of systemd reboots the host, since the SSH session ends with the connection. Since systemd 255, systemctl would start
# a kernel that kexec has loaded, or a root file system in /run/nextroot (ENVIRONMENT.md in systemd): then no firmware is reset,
# and the boot loader's arguments do not count.
_REBOOT = f"""{_UNTIL_ALLOWED}
systemd-run --quiet --on-active=1s --timer-property=AccuracySec=100ms \\
  --setenv=SYSTEMCTL_SKIP_AUTO_KEXEC=1 --setenv=SYSTEMCTL_SKIP_AUTO_SOFT_REBOOT=1 systemctl reboot
"""

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
    if (following := host.get_fact(NextKernel)) and (why := would_not_boot(following)):
        yield refuse(f"not rebooted: {why}")
        return
    turns = turns_of(this_host(), POLICY)
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
    """For an operation: the host's requests if a reboot is due, and allowed now. If it is due, say what follows.

    The request of a task whose key has left the inventory does not count: nobody wants what it is for.
    """
    have: RebootRequests | None = host.get_fact(NodeRebootRequests)
    gone = {key.name for key in task_keys() if key.here() is None}
    have = have and evolve(have, requests=tuple(each for each in have.requests if each.task not in gone))
    if have is None or not have.due():
        disruption.settle("reboot")
        host.noop("no reboot is wanted")
        return None
    for each in have.due():
        warn(host, f"reboot wanted: {each}; {consequence()}")
    if policy.policy == "never" or deploys_itself(host):
        return None

    def hindrance() -> str:
        return _users("node to drain") or "; ".join(maintenance.blockers(disruption.forced()))

    return None if disruption.deferred("reboot", Disruption.REBOOT, of_nics=True, hindrance=hindrance) else have


def _users(of: Literal["node to drain", "drained node"]) -> str:
    """For an operation: who uses the host, but for pods that a drain ends. Without policy and cluster nobody is asked for."""
    if disruption.forced() or not (disruption.is_given() or maintenance.is_member()):
        return ""
    users = host.get_fact(RebootUsers, of=of if maintenance.is_member() else "host")
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
