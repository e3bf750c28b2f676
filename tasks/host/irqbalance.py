"""Keeps irqbalance from moving the interrupts that the agent has placed."""

from __future__ import annotations

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.node import IrqbalancePolicy, Mode
from tasks.common import archive, systemd_reload, units
from tasks.common.commands import Commands, refuse, script
from tasks.common.facts import Lines, Yes
from tasks.common.texts import Texts, replace

UNIT = "irqbalance.service"
SCRIPT = "/usr/local/libexec/trackbed-irqbalance-policy"
SCRIPT_SOURCE = archive.ROOT / "templates" / "irqbalance-policy.sh"
DROP_IN = f"{units.FOLDER}/{UNIT}.d/trackbed.conf"
DROP_IN_SOURCE = archive.ROOT / "templates" / "irqbalance.conf"

LEFTOVERS = (SCRIPT,)

_COMMAND = """
pid=$(systemctl show --property=MainPID --value "$1")
if [ "${pid:-0}" != 0 ] && [ -r "/proc/$pid/cmdline" ]; then tr '\\0' '\\n' < "/proc/$pid/cmdline"; fi
"""


class IrqbalanceCommand(Lines):
    """The command line of the running irqbalance service; empty if it does not run."""

    shell = _COMMAND
    words = (UNIT,)


# What `semanage permissive -a irqbalance_t` installs (set_permissive in policycoreutils' seobject.py).
_CONFINED = """
[ "$(cat "$1/sys/fs/selinux/enforce" 2>/dev/null)" = 1 ] || exit 0
for module in "$1"/var/lib/selinux/*/active/modules/*/permissive_irqbalance_t; do [ ! -e "$module" ] || exit 0; done
echo confined
"""
_REFUSED = (
    "irqs.irqbalance: SELinux is enforcing on this node, and does not let irqbalance run the policy script of 'banned'; allow "
    "it (semanage permissive -a irqbalance_t), or give 'disabled'"
)


class Confined(Yes):
    """Whether SELinux keeps irqbalance from running a script (github.com/fedora-selinux/selinux-policy/issues/1582)."""

    shell = _CONFINED


def policy(wanted: IrqbalancePolicy, mode: Mode = "enforce") -> None:
    """Apply the spec's policy for irqbalance.

    `disabled` stops the service and disables it. `banned` gives it a policy script that bans the interrupts of the NICs in the
    spec. `untouched` leaves it alone, as does the mode `observe`.
    """
    if mode == "observe":
        return
    banned = wanted == "banned"
    if wanted == "disabled":
        off(name="irqbalance off")
    if banned:
        files.put(name="Policy script", src=str(SCRIPT_SOURCE), dest=SCRIPT, mode="755")
    use_script(name="irqbalance's drop-in", banned=banned)


@operation()
def off() -> Commands:
    """Stop the service now and at boot. A unit that does not exist is neither active nor enabled."""
    [state] = host.get_fact(units.UnitStates, units=(UNIT,)) or [""]
    if units.is_active(state):
        yield StringCommand("systemctl", "stop", UNIT)
    # systemctl has systemd read its units again when it disables one.
    if units.is_enabled(state) and not systemd_reload.deferred("irqbalance not started at boot"):
        yield script(f'{systemd_reload.LINKS}systemctl disable "$1"', UNIT)


_WITH_SCRIPT = """
if [ "$(systemctl show --property=LoadState --value "$1")" = loaded ]; then
  case $(systemctl show --property=ExecStart --value "$1") in
  *"--policyscript=$2 "*) systemctl try-restart "$1" ;;
  *)
    echo "irqs.irqbalance: $1 has no policy script of 'banned', since a later drop-in sets ExecStart; remove it there" \\
      "(\\`systemctl cat $1\\` shows which), or give another policy" >&2
    exit 1
    ;;
  esac
fi
"""


@operation()
def use_script(banned: bool) -> Commands:
    """Write the drop-in that names the policy script, or remove it. Restart the service if it runs without the script."""
    if banned and host.get_fact(Confined):
        yield refuse(_REFUSED)
        return
    have = host.get_fact(Texts, paths=(DROP_IN,))
    want = {DROP_IN: DROP_IN_SOURCE.read_text()} if banned else {}
    running = host.get_fact(IrqbalanceCommand)
    if have == want and running and banned and f"--policyscript={SCRIPT}" not in running:
        yield script(_WITH_SCRIPT, UNIT, SCRIPT)
    if have != want and systemd_reload.deferred("irqbalance's drop-in"):
        return
    yield from replace(
        have,
        want,
        systemd_reload.RELOAD + _WITH_SCRIPT if banned else systemd_reload.RELOAD + systemd_reload.RESTART,
        UNIT,
        SCRIPT,
    )
