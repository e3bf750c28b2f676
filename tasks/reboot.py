"""Reboots: a task only says that it wants one and why; whether and when a host reboots is decided here, by policy.

/var/lib/trackbed/reboots/TASK  a wish: the id of the boot in which the task first asked for it, and its reason

A wish of this boot is due. A wish of an earlier one that its task still has to make was not met by a reboot: the host is
not rebooted for it again (docs/decisions/0017-what-a-reboot-is-for.md).
"""

from __future__ import annotations

import logging
import time
from itertools import takewhile
from typing import Any, Literal

from attrs import field, frozen
from gevent import Timeout
from paramiko import SSHException
from pyinfra import logger
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import FunctionCommand, QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.connectors.local import LocalConnector
from pyinfra.context import host

from agent.report.printable import printable
from agent.spec.validators import Within
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key
from tasks.common.data import record as parsed
from tasks.common.status import COMMAND, NodeStatus
from tasks.gate import MARGIN, TIMEOUT

FOLDER = "/var/lib/trackbed/reboots"

MOST = 3
"""Reboots of a host in one deploy: a kernel, then drivers for it, then what needs both. More is a wish that never settles."""

PAUSE = 2
"""Seconds between two looks at a host that reboots."""

PATIENCE = 90
"""Seconds that one look at it may take; a host that has just booted is slow."""

SETTLE = 120
"""Seconds that a booted host's own services may take before the deploy goes on all the same."""


@frozen
class Reboot:
    """The policy. ``timeout``: seconds that a host may take until it is back; a server's firmware takes minutes."""

    policy: Literal["never", "allow"] = "never"
    timeout: int = field(default=1800, validator=Within(30, 7200, "seconds"))


POLICY = Key("reboot", Reboot(), parsed(Reboot))
KEYS = (POLICY,)


@frozen
class Wish:
    """What a task wants a reboot for. ``boot_id``: of the boot in which it first asked."""

    task: str
    boot_id: str
    text: str

    def __str__(self) -> str:
        return f"{self.task}: {self.text}"


@frozen
class Wishes:
    """A node's wishes, and the id of its present boot."""

    boot_id: str
    wishes: tuple[Wish, ...] = ()

    def of(self, task: str) -> Wish | None:
        """The task's wish."""
        return next((wish for wish in self.wishes if wish.task == task), None)

    def due(self) -> list[Wish]:
        """Those that no boot has come after."""
        return [wish for wish in self.wishes if wish.boot_id == self.boot_id]


_WISHES = """
cat /proc/sys/kernel/random/boot_id
cd "$1" 2>/dev/null || exit 0
for task in *; do
  if [ -f "$task" ]; then printf '%s ' "$task"; tr '\\n' ' ' < "$task"; echo; fi
done
"""


class NodeWishes(FactBase[Wishes]):
    """The wishes that the node keeps, and its boot's id (/proc/sys/kernel/random/boot_id)."""

    def command(self) -> StringCommand:
        """The id, then one line a wish."""
        return script(_WISHES, FOLDER)

    def process(self, output: list[str]) -> Wishes:
        """Lines such as `boot BOOT-ID kernel argument iommu=pt is not in effect`."""
        found = (line.split(" ", 2) for line in output[1:])
        return Wishes(
            output[0], tuple(Wish(words[0], words[1], words[2].strip()) for words in found if len(words) == 3)
        )


# Under its name in one step: half a wish would be another one.
_RECORD = """
mkdir -p "$1"
printf '%s\\n%s\\n' "$(cat /proc/sys/kernel/random/boot_id)" "$3" > "$1/.$2.new"
mv -T "$1/.$2.new" "$1/$2"
"""


def record(task: str, wish: str) -> Commands:
    """For an operation: the task wants a reboot because of ``wish``; nothing if it has said so in this boot.

    If a reboot came after the same wish, and the task still has to make it, the host is refused: another reboot would not help.
    """
    wish = " ".join(wish.split())
    have = host.get_fact(NodeWishes)
    policy = POLICY.here().policy
    known = have.of(task) if have else None
    if known is None or known.text != wish:
        if not host.state.is_executing:
            _warn(f"reboot wanted: {task}: {wish}; {_what_follows(policy)}")
        yield script(_RECORD, FOLDER, task, wish)
    elif known.boot_id != have.boot_id:
        unmet = (
            f"{known}: so it is after a reboot, too, and the host is not rebooted for it again. "
            f"Find out what keeps it from taking effect; removing {FOLDER}/{task} on the host allows one more reboot"
        )
        if policy == "never":
            _warn(unmet)
        else:
            yield refuse(unmet)


def withdraw(task: str) -> Commands:
    """For an operation: the task has no wish, or it is met."""
    have = host.get_fact(NodeWishes)
    if have is None or have.of(task):
        yield StringCommand("rm", "-f", QuoteString(f"{FOLDER}/{task}"))


def expire(task: str) -> Commands:
    """For an operation: whatever the task wished for, any boot gives it; withdrawn if one came after the wish."""
    have = host.get_fact(NodeWishes)
    if have is None or ((known := have.of(task)) and known.boot_id != have.boot_id):
        yield StringCommand("rm", "-f", QuoteString(f"{FOLDER}/{task}"))


def by_policy() -> None:
    """Reboot the hosts that a task wants rebooted, if the policy allows it: one after the other, none after one that failed.

    A host that has booted is taken through the deploy from its beginning again, before the next one reboots: what the tasks
    do for a new kernel is done, and their wishes are judged anew.
    """
    carry_out(name="Reboot", policy=POLICY.here(), patience=TIMEOUT.here(), _serial=True)


# systemd's, not the session's, which ends with the connection.
_REBOOT = "systemd-run --quiet --on-active=1s --timer-property=AccuracySec=100ms systemctl reboot"

# RHEL 8's systemctl has no --wait. A unit that has failed is none of our business here.
_SETTLED = 'timeout "$1" systemctl is-system-running --wait >/dev/null || true'


@operation()
def carry_out(policy: Reboot, patience: int) -> Commands:
    """Reboot the host as often as there are new wishes, and let it become ready again if it was.

    :param patience: seconds that it may take to become ready.
    """
    for _ in range(MOST):
        have = host.get_fact(NodeWishes)
        due = have.due() if have else []
        if not due:
            host.noop("no reboot is wanted")
            return
        itself = isinstance(host.connector, LocalConnector)
        for wish in due:
            _warn(f"reboot wanted: {wish}; {_what_follows(policy.policy, itself)}")
        if policy.policy == "never" or itself:
            return
        if host.state.is_executing and (fallen := _fallen()):
            yield refuse(
                f"not rebooted, since {fallen} failed at its own reboot; repair or exclude it, and deploy again"
            )
            return
        status = host.get_fact(NodeStatus)
        was_ready = status is not None and status.ready
        yield script(_REBOOT)
        yield FunctionCommand(_until_back, (have.boot_id, policy.timeout), {})
        yield script(_SETTLED, str(SETTLE))
        yield from _from_the_beginning()
        if was_ready:
            yield StringCommand(COMMAND, "wait", "--timeout", QuoteString(str(patience)), _timeout=patience + MARGIN)
    have = host.get_fact(NodeWishes)
    if have and have.due():
        wishes = "; ".join(map(str, have.due()))
        yield refuse(f"rebooted {MOST} times in this deploy, and still another reboot is wanted: {wishes}")


def _what_follows(policy: str, itself: bool = False) -> str:
    if itself:
        return "a host that deploys itself is not rebooted: deploy it from a control host, or reboot it by hand"
    if policy == "never":
        return "the host is not rebooted (reboot.policy is 'never')"
    return "the host is rebooted (reboot.policy is 'allow')"


def _warn(line: str) -> None:
    host.log_styled(printable(line), fg="yellow", log_func=logger.warning)
    host.state.increment_warning_counter()


def _fallen() -> str | None:
    """A host at which this very operation has failed."""
    everybody = host.state.ops.items()
    made = {
        other.name: found.operation_meta for other, ops in everybody if (found := ops.get(str(host.current_op_hash)))
    }
    return next((name for name, meta in made.items() if meta.is_complete() and not meta.did_succeed()), None)


def _until_back(state: State, host: Host, before: str, timeout: int) -> bool:
    """Wait until the host answers with another boot id than ``before``.

    pyinfra's own server.reboot compares uptimes, and a host that is still going down, or boots slowly, passes for rebooted.
    """
    end = time.monotonic() + timeout
    now = None
    # It logs a traceback for each connection that a booting machine does not answer.
    paramiko, level = logging.getLogger("paramiko"), logging.getLogger("paramiko").level
    paramiko.setLevel(logging.CRITICAL)
    try:
        while time.monotonic() < end:
            now = _boot_id(host)
            if now not in (None, before):
                return True
            time.sleep(PAUSE)
    finally:
        paramiko.setLevel(level)
    went = "did not go down" if now == before else "did not come back"
    message = f"the host {went} within {timeout} s of its reboot; look at its console (reboot.timeout is the limit)"
    host.log_styled(message, fg="red", log_func=logger.error)
    return False


def _boot_id(host: Host) -> str | None:
    """The boot id; None while the host does not answer. By a connection of its own: one to a machine that went away hangs.

    So does one to a machine that goes away while it is made: paramiko waits without a limit for the answer to its request to
    run a command, and nothing comes any more.
    """
    host.disconnect()
    try:
        with Timeout(PATIENCE):
            host.connector.connect()
            host.connected = True
            read, said = host.run_shell_command(StringCommand("cat", "/proc/sys/kernel/random/boot_id"))
    except (Timeout, ConnectError, OSError, EOFError, SSHException):
        return None
    return said.stdout.strip() if read else None


def _from_the_beginning() -> Commands:
    """The commands of all operations before this one, as they are needed now."""
    ours = host.current_op_hash
    # Each operation sets these for itself, and clears them in the end; facts are read by them.
    kept = {name: getattr(host, name) for name in _OF_AN_OPERATION}
    for op_hash in takewhile(lambda op_hash: op_hash != ours, list(host.op_hash_order)):
        earlier = host.state.get_op_data_for_host(host, op_hash)
        given: dict[str, Any] = {k: v for k, v in earlier.global_arguments.items() if k in CONNECTOR_ARGUMENT_KEYS}
        for command in earlier.command_generator():
            arguments: Any = given | dict(command.connector_arguments)
            command.connector_arguments = arguments
            yield command
        for name, value in kept.items():
            setattr(host, name, value)


_OF_AN_OPERATION = ("in_op", "current_op_hash", "current_op_global_arguments", "current_op_deploy_data")
