"""The number of channels of a netdev (`ethtool -l`): its queues, each with an interrupt."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from attrs import evolve

from agent.driver_families import DriverFamily, family_of
from agent.hardware.functions import device_path, driver, ifindex_of, pci_of
from agent.hardware.sysfs import names_or_none
from agent.kinds import Reading, vf_links
from agent.machine import Machine, Quantity
from agent.report.records import Change, Numbers, Value
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "channels"
# A driver may reset its channels when VFs are created or removed (igb_sriov_reinit), and may allow the PF fewer.
AFTER = ("vf_links",)
UNKNOWN_UNTIL = ("vfs", "bindings")
REACH = "function"
BEFORE_UP = True
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
        flaps = len(before.present) == len(after.present) and family_of(setting.status.driver).channels_flap
        changes.append(setting.change(NAME, NAME, before, after, flaps, blocker, remedy))
    return changes


def numbers(setting: vf_links.Setting, fields: tuple[str, ...]) -> tuple[Numbers, Numbers]:
    """Those of ``fields`` that the spec gives, as they are and as they should be; with 0 for those of the other mode."""
    given = {name: value for name in fields if (value := getattr(setting.given, name)) is not None}
    others = _other_mode(given)
    if all(name in setting.read and setting.read[name].value for name in others):
        given |= dict.fromkeys(others, 0)
    return _read(setting.read, given), Numbers.of(given)


def _other_mode(given: Collection[str]) -> tuple[str, ...]:
    """The numbers that are 0 if a netdev has those that the spec gives.

    A driver refuses both modes at once (bnxt_set_channels, drivers/net/ethernet/broadcom/bnxt/bnxt_ethtool.c). A number of
    separate channels alone excludes nothing: ice has it beside combined channels (ice_set_channels,
    drivers/net/ethernet/intel/ice/ice_ethtool.c).
    """
    if "combined" in given:
        return ("rx", "tx")
    return ("combined",) if {"rx", "tx"} <= set(given) else ()


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
    """One number that was set, as it is now."""
    return number_now(machine, want, kept, machine.ethtool.channels, lambda family: family.channels_flap)


def number_now(
    machine: Machine,
    want: Wanted,
    kept: Change,
    read: Callable[[int], Mapping[str, Quantity]],
    flaps: Callable[[DriverFamily], bool],
) -> Reading | None:
    """:func:`vf_links.setting_now` for one of the numbers that are set in one step."""
    found: dict[str, Quantity] = {}

    def value(ifindex: int) -> int | None:
        found.update(read(ifindex))
        return found[kept.field].value if kept.field in found else None

    def decided(asked: Any) -> bool:
        given = [name for name in FIELDS if getattr(asked, name, None) is not None]
        # An original of the other mode waits until the spec's numbers leave.
        return kept.field in given or (bool(kept.before) and kept.field in _other_mode(given))

    now = vf_links.setting_now(machine, want, kept, decided, value, flaps)
    most = found[kept.field].maximum if kept.field in found else 0
    if now is None or not isinstance(kept.before, int) or kept.before <= most:
        return now
    # In one request with the spec's own numbers it would have these refused, too.
    return evolve(now, blocker=f"{kept.field} is {most} at most now")


def arranged(changes: list[Change]) -> list[Change]:
    """One change for each netdev: its numbers are set in one step, those that are restored too."""
    by_target: dict[str, list[Change]] = {}
    for change in changes:
        by_target.setdefault(f"{change.target} {change.blocker}", []).append(change)
    return [_joined(together) for together in by_target.values()]


def _joined(changes: list[Change]) -> Change:
    """The changes of one netdev as one. A number that is restored is a change of its own in ``changes``."""
    before: dict[str, int | None] = {}
    after: dict[str, int | None] = {}
    for change in changes:
        before |= change.before.values if isinstance(change.before, Numbers) else {change.field: _number(change.before)}
        after |= change.after.values if isinstance(change.after, Numbers) else {change.field: _number(change.after)}
    return evolve(
        changes[0],  # the spec's own, if it has one
        field=changes[0].kind,
        before=Numbers.of(before),
        after=Numbers.of(after),
        disruption=max(change.disruption for change in changes),
    )


def _number(value: Value) -> int | None:
    return value if isinstance(value, int) else None


def given(change: Change) -> dict[str, int]:
    """The numbers that a change sets."""
    return change.after.present if isinstance(change.after, Numbers) else {}


def apply(machine: Machine, change: Change) -> None:
    """Set the numbers, after finding the netdev again."""
    try:
        machine.ethtool.set_channels(ifindex_of(machine.files, change.target), given(change))
    except OSError as error:
        if error.errno == errno.EBUSY and _is_held_by_rdma(machine, change.target):
            message = (
                "EBUSY: ice changes channels only while no RDMA driver has the NIC; unload irdma (`modprobe -r irdma`) and "
                "keep it from being loaded (boot.arguments: module_blacklist=irdma), or leave the channels out of the spec"
            )
            raise OSError(errno.EBUSY, message) from error
        raise


def _is_held_by_rdma(machine: Machine, target: str) -> bool:
    """Whether this is why ice refuses (ice_set_channels in ice_ethtool.c, since Linux 6.3), which it says only in dmesg."""
    function = pci_of(machine.files, target)
    devices = names_or_none(machine.files, f"{device_path(function)}/infiniband")
    return driver(machine.files, function) == "ice" and bool(devices)
