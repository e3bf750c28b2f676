"""What irqbalance must keep off, while it may balance all else (policy ``banned``).

irqbalance asks its policy script about each interrupt that it finds, so that a ban outlives restarts and new numbers. The
deploy makes it run with ours, and that looks a device up in the list that is kept here. SIGHUP makes irqbalance look again.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from agent.hardware.sysfs import read_or
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "irqbalance"
AFTER: tuple[str, ...] = ()
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "device"

PROCESS = "irqbalance"
SCRIPT = "/usr/local/libexec/trackbed-irqbalance-policy"
LIST = "/var/lib/trackbed/irqbalance-banned"


@frozen
class Bans:
    """The PFs that are listed; ``asked``: every irqbalance that runs asks our script (the last of several counts)."""

    functions: tuple[str, ...]
    asked: bool


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Bans]:
    """The list, and how irqbalance runs; nothing unless the policy is to ban."""
    if want.spec.irqs.irqbalance != "banned" or not host_in_scope(scope):
        return {}
    listed = tuple(read_or(machine.files, LIST, "").split())
    return {
        HOST: Bans(listed, all(_policy_script(command) == SCRIPT for command in machine.processes.arguments(PROCESS)))
    }


def _policy_script(command: tuple[str, ...]) -> str | None:
    given: str | None = None
    for option, value in zip(command, (*command[1:], ""), strict=True):
        if option in ("-l", "--policyscript"):
            given = value
        elif option.startswith("--policyscript="):
            given = option.partition("=")[2]
    return given


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """A list that is not that of the wanted NICs."""
    bans: Bans | None = have[NAME].get(HOST)
    if want.spec.irqs.irqbalance != "banned" or bans is None:
        return []
    wanted = tuple(sorted(want.nics))
    if bans.functions == wanted:
        return []
    return [Change(NAME, HOST, "banned", ",".join(bans.functions) or None, ",".join(wanted) or None)]


def apply(machine: Machine, change: Change) -> None:
    """Write the list, and make irqbalance ask again."""
    functions = str(change.after or "").split(",")
    machine.files.replace(LIST, "".join(f"{function}\n" for function in functions if function))
    machine.processes.hang_up(PROCESS)
