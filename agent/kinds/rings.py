"""The sizes of a netdev's rings in descriptors (`ethtool -g`)."""

from __future__ import annotations

from collections.abc import Mapping

from agent.driver_families import DriverFamily, family_of
from agent.hardware.functions import ifindex_of
from agent.kinds import Reading, channels, vf_links
from agent.machine import Machine, Quantity
from agent.report.records import Change, Numbers
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "rings"
AFTER = ("channels",)
UNKNOWN_UNTIL = ("vfs", "bindings")
REACH = "function"
BEFORE_UP = True
OTHER_WRITERS = ("NetworkManager", "tuned")

FIELDS = ("rx", "tx")


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Mapping[str, Quantity] | None]]:
    """The rings of the netdevs for which the spec gives sizes, by target."""
    return vf_links.observe_settings(machine, want, scope, NAME, machine.ethtool.rings)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """One change for each netdev whose sizes differ: both are set in one step, so the link goes down only once."""
    changes = []
    for setting in vf_links.settings(want, have, NAME, NAME):
        before, after = channels.numbers(setting, FIELDS)
        if before == after:
            continue
        family = family_of(setting.status.driver)
        flaps = len(before.present) == len(after.present) and family.rings_flap
        blocker, remedy = _impossible(setting, after, family)
        changes.append(setting.change(NAME, NAME, before, after, flaps, blocker, remedy))
    return changes


def _impossible(setting: vf_links.Setting, after: Numbers, family: DriverFamily) -> tuple[str, str]:
    """Why the driver would not set the wanted sizes, and the remedy; both empty if it would."""
    if blocker := channels.beyond(setting, FIELDS):
        return blocker, "give at most that many descriptors (`ethtool -g`)"
    wanted = after.present
    made = {name: family.ring_size(size) for name, size in wanted.items()}
    if made == wanted:
        return "", ""
    sizes = " and ".join(f"{name} {size}" for name, size in made.items())
    return f"{setting.status.driver} would round it to {sizes}", f"give {sizes}"


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """One size that was set, as it is now."""
    return channels.number_now(machine, want, kept, machine.ethtool.rings, lambda family: family.rings_flap)


def arranged(changes: list[Change]) -> list[Change]:
    """One change for each netdev."""
    return channels.arranged(changes)


def apply(machine: Machine, change: Change) -> None:
    """Set the sizes, after finding the netdev again."""
    machine.ethtool.set_rings(ifindex_of(machine.files, change.target), channels.given(change))
