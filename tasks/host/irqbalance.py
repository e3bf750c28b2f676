"""Keeps irqbalance from moving the interrupts that the agent has placed."""

from __future__ import annotations

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files, systemd

from agent.spec.node import IrqbalancePolicy, Mode
from tasks.common import archive
from tasks.common.commands import Commands, changes, script
from tasks.common.facts import FactBase

UNIT = "irqbalance.service"
SCRIPT = "/usr/local/libexec/trackbed-irqbalance-policy"
SCRIPT_SOURCE = archive.ROOT / "templates" / "irqbalance-policy.sh"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/trackbed.conf"
DROP_IN_SOURCE = archive.ROOT / "templates" / "irqbalance.conf"

LEFTOVERS = (SCRIPT,)

_COMMAND = """
pid=$(systemctl show --property=MainPID --value "$1")
if [ "${pid:-0}" != 0 ] && [ -r "/proc/$pid/cmdline" ]; then tr '\\0' '\\n' < "/proc/$pid/cmdline"; fi
"""


class IrqbalanceCommand(FactBase[list[str]]):
    """The command line of the running irqbalance service; empty if it does not run."""

    default = list

    def command(self) -> StringCommand:
        """Get the process from systemd, and its command line from the kernel."""
        return script(_COMMAND, UNIT)

    def process(self, output: list[str]) -> list[str]:
        """Take one argument from each line."""
        return output


def policy(wanted: IrqbalancePolicy, mode: Mode = "enforce") -> None:
    """Apply the spec's policy for irqbalance.

    `disabled` stops the service and disables it. `banned` gives it a policy script that bans the interrupts of the NICs in the
    spec. `untouched` leaves it alone, as does the mode `observe`.
    """
    if mode == "observe":
        return
    banned = wanted == "banned"
    if wanted == "disabled":
        # This also works if the unit does not exist: then it is neither running nor enabled.
        systemd.service(name="irqbalance off", service=UNIT, running=False, enabled=False)
    if banned:
        files.put(name="Policy script", src=str(SCRIPT_SOURCE), dest=SCRIPT, mode="755")
        drop_in = files.put(name="Drop-in", src=str(DROP_IN_SOURCE), dest=DROP_IN, mode="644")
    else:
        drop_in = files.file(name="No drop-in", path=DROP_IN, present=False)
    restart(name="irqbalance restarted", banned=banned, drop_in=drop_in)


@operation()
def restart(banned: bool, drop_in: OperationMeta) -> Commands:
    """Make systemd read a changed drop-in, and restart the service if it runs with another command line."""
    changed = changes(drop_in)
    running = host.get_fact(IrqbalanceCommand)
    if changed:
        yield StringCommand("systemctl", "daemon-reload")
    if changed or (running and banned and f"--policyscript={SCRIPT}" not in running):
        yield StringCommand("systemctl", "try-restart", UNIT)
