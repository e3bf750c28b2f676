"""The devices whose interrupts irqbalance must not move (policy ``banned``); it may balance all others.

irqbalance runs a policy script for each interrupt that it finds, so a ban survives restarts and new interrupt numbers. The
deploy installs the script, which looks a device up in the list that this kind writes. SIGHUP makes irqbalance ask again.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from agent.hardware.sysfs import read_or
from agent.machine import Machine
from agent.report.names import STATE_FOLDER
from agent.report.records import HOST, Change
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, absent_among

NAME = "irqbalance"

PROCESS = "irqbalance"
SCRIPT = "/usr/local/libexec/trackbed-irqbalance-policy"
LIST = f"{STATE_FOLDER}/irqbalance-banned"


@frozen
class Bans:
    """``functions``: the PFs on the list. ``asked``: every running irqbalance calls our script; its last option counts."""

    functions: tuple[str, ...]
    asked: bool


def read_for(want: Wanted) -> object:
    """The spec's policy for irqbalance."""
    return want.spec.irqs.irqbalance


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Bans]:
    """The list, and whether irqbalance uses the script; nothing unless the policy is ``banned``."""
    if want.spec.irqs.irqbalance != "banned" or not host_in_scope(scope):
        return {}
    listed = tuple(read_or(machine.files, LIST, "").split())
    return {
        HOST: Bans(listed, all(_policy_script(command) == SCRIPT for command in machine.processes.arguments(PROCESS)))
    }


def _policy_script(command: tuple[str, ...]) -> str | None:
    script: str | None = None
    for option, value in zip(command, (*command[1:], ""), strict=True):
        if option in ("-l", "--policyscript"):
            script = value
        elif option.startswith("--policyscript="):
            script = option.partition("=")[2]
    return script


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """One change if the list differs from the wanted NICs. A NIC that is missing now stays on the list."""
    bans: Bans | None = have[NAME].get(HOST)
    if want.spec.irqs.irqbalance != "banned" or bans is None:
        return []
    wanted = tuple(sorted(want.nics.keys() | absent_among(want, have.functions, bans.functions)))
    if bans.functions == wanted:
        return []
    return [Change(NAME, HOST, "banned", ",".join(bans.functions) or None, ",".join(wanted) or None)]


def apply(machine: Machine, change: Change) -> None:
    """Write the list, and make irqbalance ask again."""
    functions = str(change.after or "").split(",")
    machine.files.replace(LIST, "".join(f"{function}\n" for function in functions if function))
    machine.processes.hang_up(PROCESS)
