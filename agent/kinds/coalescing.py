"""Interrupt coalescing of a netdev (`ethtool -c`)."""

from __future__ import annotations

from collections.abc import Mapping

from agent.hardware.functions import ifindex_of
from agent.kinds import Reading, vf_links
from agent.machine import Machine
from agent.report.records import Change
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "coalescing"
AFTER = ("rings",)
UNKNOWN_UNTIL = ("vfs", "bindings")
REACH = "function"
BEFORE_UP = True
OTHER_WRITERS = ("NetworkManager", "tuned")

ADAPTIVE = ("adaptive_rx", "adaptive_tx")
NUMBERS = ("rx_usecs", "rx_frames", "tx_usecs", "tx_frames")


def observe(
    machine: Machine, want: Wanted, scope: Scope
) -> Mapping[str, Mapping[str, Mapping[str, int | bool] | None]]:
    """The coalescing of the netdevs for which the spec gives some, by target."""
    return vf_links.observe_settings(machine, want, scope, NAME, machine.ethtool.coalescing)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Every value that differs."""
    changes = []
    for setting in vf_links.settings(want, have, NAME, NAME):
        for name in (*ADAPTIVE, *NUMBERS):
            before, after = setting.read.get(name), getattr(setting.given, name)
            if after is not None and before != after:
                changes.append(setting.change(NAME, name, before, after))
    return arranged(changes)


def arranged(changes: list[Change]) -> list[Change]:
    """Adaptive mode goes off first and on last: some drivers accept no numbers while it is on."""
    return sorted(changes, key=lambda change: 1 if change.field in NUMBERS else 2 if change.after else 0)


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """One value that was set, as it is now."""
    return vf_links.setting_now(
        machine,
        want,
        kept,
        lambda given: getattr(given, kept.field) is not None,
        lambda ifindex: machine.ethtool.coalescing(ifindex).get(kept.field),
    )


def apply(machine: Machine, change: Change) -> None:
    """Set one value, after finding the netdev again."""
    given = {change.field: change.after if isinstance(change.after, bool) else change.number}
    machine.ethtool.set_coalescing(ifindex_of(machine.files, change.target), given)
