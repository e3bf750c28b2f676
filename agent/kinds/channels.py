"""The number of channels of a netdev (`ethtool -l`): its queues, each with an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from agent.hardware.functions import ifindex_of
from agent.kinds import Reading, vf_links
from agent.machine import Machine, Quantity
from agent.report.records import Change, Numbers
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted
from agent.vendors import Vendor, vendor

NAME = "channels"
# A driver may reset its channels when VFs are created or removed (igb_sriov_reinit), and may allow the PF fewer.
AFTER = ("vf_links",)
UNKNOWN_UNTIL = ("vfs", "bindings")
REACH = "function"
# NetworkManager: a connection has ethtool.* (nm-settings-nmcli(5)). tuned: a profile has [net] (its plugin_net.py).
OTHER_WRITERS = ("NetworkManager", "tuned")

FIELDS = ("rx", "tx", "combined")


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Mapping[str, Quantity] | None]]:
    """The channels of the netdevs for which the spec gives some, by target."""
    return vf_links.observe_settings(machine, want, scope, NAME, machine.ethtool.channels)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """One change for each netdev whose numbers differ. Going from combined to separate channels takes a single request."""
    changes = []
    for setting in vf_links.settings(want, have, NAME, NAME):
        before, after = numbers(setting, FIELDS)
        if before == after:
            continue
        blocker = beyond(setting, FIELDS)
        remedy = "give at most that many (`ethtool -l`); a PF may have fewer while it has VFs" if blocker else ""
        flaps = len(before.present) == len(after.present) and vendor(setting.status.driver).channels_flap
        changes.append(setting.change(NAME, NAME, before, after, flaps, blocker, remedy))
    return changes


def numbers(setting: vf_links.Setting, fields: tuple[str, ...]) -> tuple[Numbers, Numbers]:
    """Those of ``fields`` that the spec gives, as they are and as they should be."""
    given = {name: value for name in fields if (value := getattr(setting.given, name)) is not None}
    return _read(setting.read, given), Numbers.of(given)


def _read(read: Mapping[str, Quantity], names: Iterable[str]) -> Numbers:
    return Numbers.of({name: read[name].value if name in read else None for name in names})


def beyond(setting: vf_links.Setting, fields: tuple[str, ...]) -> str:
    """Which wanted numbers exceed the device's maximum; empty if none does."""
    wanted = ((name, getattr(setting.given, name), setting.read.get(name)) for name in fields)
    return ", ".join(
        f"{name} is {quantity.maximum} at most, the spec wants {value}"
        for name, value, quantity in wanted
        if value is not None and quantity is not None and value > quantity.maximum
    )


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """Those numbers that were set, as they are now."""
    return numbers_now(machine, want, kept, FIELDS, machine.ethtool.channels, lambda family: family.channels_flap)


def numbers_now(
    machine: Machine,
    want: Wanted,
    kept: Change,
    fields: tuple[str, ...],
    read: Callable[[int], Mapping[str, Quantity]],
    flaps: Callable[[Vendor], bool],
) -> Reading | None:
    """:func:`vf_links.setting_now` for numbers that are set in one step."""
    before, after = kept.before, kept.after
    if (
        not isinstance(before, Numbers)
        or not isinstance(after, Numbers)
        or before.present.keys() != after.present.keys()
    ):
        return None  # a netdev cannot be given back a kind of channels that it did not have
    return vf_links.setting_now(
        machine,
        want,
        kept,
        lambda given: any(getattr(given, name) is not None for name in fields),
        lambda ifindex: _read(read(ifindex), after.present),
        flaps,
    )


def given(change: Change) -> dict[str, int]:
    """The numbers that a change sets."""
    return change.after.present if isinstance(change.after, Numbers) else {}


def apply(machine: Machine, change: Change) -> None:
    """Set the numbers, after finding the netdev again."""
    machine.ethtool.set_channels(ifindex_of(machine.files, change.target), given(change))
