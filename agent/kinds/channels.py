"""How many channels a netdev has (`ethtool -l`): its queues, and with them its interrupts."""

from __future__ import annotations

from collections.abc import Mapping

from agent.hardware.functions import ifindex_of
from agent.kinds import Reading, vf_links
from agent.machine import Machine, Quantity
from agent.report.records import Change
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted
from agent.vendors import vendor

NAME = "channels"
# A driver may choose its channels anew when VFs come or go (igb_sriov_reinit), and have fewer for the PF.
AFTER = ("vf_links",)
UNKNOWN_UNTIL = ("vfs", "bindings")
REACH = "function"

FIELDS = ("rx", "tx", "combined")
NONE = "none"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Mapping[str, Quantity] | None]]:
    """The channels of the netdevs for which the spec gives some, by target."""
    return vf_links.observe_settings(machine, want, scope, NAME, machine.ethtool.channels)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The netdevs whose numbers differ, each set in one step: from combined channels to separate ones there is no other way."""
    changes = []
    for setting in vf_links.settings(want, have, NAME, NAME):
        before, after = numbers(setting, FIELDS)
        if before == after:
            continue
        blocker = beyond(setting, FIELDS)
        remedy = "give at most that many (`ethtool -l`); a PF may have fewer while it has VFs" if blocker else ""
        flaps = NONE not in before and vendor(setting.status.driver).channels_flap
        changes.append(setting.change(NAME, NAME, before, after, flaps, blocker, remedy))
    return changes


def numbers(setting: vf_links.Setting, fields: tuple[str, ...]) -> tuple[str, str]:
    """Those of ``fields`` that the spec gives, as they are and as they should be, written ``rx=4 tx=4``."""
    given = {name: value for name in fields if (value := getattr(setting.given, name)) is not None}
    now = {name: setting.read[name].value if name in setting.read else NONE for name in given}
    return _written(now), _written(given)


def _written(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def parsed(text: object) -> dict[str, int]:
    """Read :func:`numbers` back."""
    return {name: int(value) for name, _, value in (part.partition("=") for part in str(text).split())}


def beyond(setting: vf_links.Setting, fields: tuple[str, ...]) -> str:
    """What the device cannot have so much of; empty if there is no such thing."""
    wanted = ((name, getattr(setting.given, name), setting.read.get(name)) for name in fields)
    return ", ".join(
        f"{name} is {quantity.maximum} at most, the spec wants {value}"
        for name, value, quantity in wanted
        if value is not None and quantity is not None and value > quantity.maximum
    )


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """Those numbers that were set, as they are now."""
    if NONE in str(kept.before):
        return None  # there is no way back to a kind of channels that the netdev had not
    return vf_links.setting_now(
        machine,
        want,
        kept,
        lambda given: any(getattr(given, name) is not None for name in FIELDS),
        lambda ifindex: written(kept, machine.ethtool.channels(ifindex)),
        lambda family: family.channels_flap,
    )


def written(kept: Change, read: Mapping[str, Quantity]) -> str:
    """The numbers that ``kept`` set, as they are now, written as there."""
    return _written({name: read[name].value if name in read else NONE for name in parsed(kept.after)})


def apply(machine: Machine, change: Change) -> None:
    """Set the numbers, after finding the netdev again."""
    machine.ethtool.set_channels(ifindex_of(machine.files, change.target), parsed(change.after))
