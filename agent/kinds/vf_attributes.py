"""The VF attributes that are set through the PF: those of which agent/spec/vf_attributes has a record."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from agent.driver_families import family_of
from agent.hardware.functions import driver, ifindex_of, link_of, links_to_vfs, netdev, netdev_of
from agent.kinds import Observer, Reading, links, vfs
from agent.machine import Machine, VfInfo
from agent.report.records import Change, Disruption, Value
from agent.report.target import is_vf, vf_index, vf_target
from agent.spec import vf_attributes as attributes
from agent.spec.nic import VfAttributes
from agent.spec.vf_attributes import Refusal, VfAttribute
from agent.spec.vf_attributes.guids import GUIDS
from agent.state.scope import Scope, functions_in_scope, pfs_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

NAME = "vf_attributes"
AFTER = ("vfs", "vf_drivers")
OTHER_WRITERS = ("sriov-network-config-daemon", "libvirtd", "virtqemud", "NetworkManager", "systemd-networkd")
REMAKES_NETDEV = tuple(attribute.name for attribute in attributes.ordered() if attribute.remakes_netdev)

RESETTING = 1.0
"""Seconds that a VF's reset may take (ice, i40e): so it is looked at again soon."""

NOT_DERIVED = {"mac": "vfs.derive_macs: false", **dict.fromkeys(GUIDS, "vfs.derive_guids: false")}
"""By the name of an address: the key and value of the spec with which the agent derives none."""

_NAMES = tuple(attributes.by_name())
_MAY_BE_LAST = tuple((attribute.name, attribute.last) for attribute in attributes.ordered() if attribute.last)


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[int, VfInfo]]:
    """Each PF's VFs by index, as the PF reports them. A PF without VFs or without a netdev is left out."""
    reported = {}
    for address in pfs_in_scope(want, scope):
        if not links_to_vfs(machine.files, address):
            continue  # a request for the link costs twenty times as much
        name = netdev(machine.files, address)
        link = machine.netlink.link(name) if name else None
        if link is not None:
            reported[address] = {vf.index: vf for vf in link.vfs}
    return reported


def _observe_drivers(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, bool]]:
    """Whether each VF has a driver, by target. A PF whose driver resets no VF to set an attribute is left out."""
    return {
        address: {
            target: driver(machine.files, vf) is not None for target, vf in functions.items() if target != address
        }
        for address, functions in functions_in_scope(machine.files, want, scope).items()
        if family_of(want.nics[address].function.driver).vf_resets
    }


DRIVERS = "vf_drivers"
KINDS = (Observer(NAME=DRIVERS, AFTER=("vfs",), observe=_observe_drivers),)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Every attribute that differs from what the PF reports, also for VFs that do not exist yet."""
    changes = []
    for address, nic in links.usable(want, have):
        reported: Mapping[int, VfInfo] = have[NAME].get(address, {})
        count: vfs.VfCount | None = have[vfs.NAME].get(address)
        there = count.count if count else 0
        for index in range(nic.vf_count() or 0):
            wanted = nic.vf(index)
            for name in _in_order(wanted, reported.get(index)):
                after: Value = getattr(wanted, name)
                before: Value = getattr(reported[index], name) if index in reported else None
                if after is not None and before != after:
                    change = Change(
                        NAME,
                        vf_target(address, index),
                        name,
                        before,
                        after,
                        _disruption(nic, have, index, name),
                        remedy=_remedy(nic, index, name),
                        skip_if_owned=wanted.owner != "trackbed",
                    )
                    if index not in reported:
                        change = _unreported(change, nic, not reported) if index < there else vfs.absent(change)
                    changes.append(change)
    return changes


def _unreported(change: Change, nic: WantedNic, nor_another: bool) -> Change:
    """The change, blocked while the PF's driver reports nothing of the VF. ``nor_another``: it reports no VF at all."""
    remedy = "see the kernel log (dmesg) if that lasts"
    if nor_another:
        # The kernel reports no VF of a driver without ndo_get_vf_config (rtnl_fill_vf, net/core/rtnetlink.c): idpf, EF100.
        off = NOT_DERIVED[change.field] if _is_derived(nic, vf_index(change.target), change.field) else ""
        leave = f"give {off}" if off else f"take {change.field} out of the spec"
        remedy += f"; if its driver never reports VFs, {leave}"
    return evolve(
        change,
        blocker="its PF reports nothing of it now, as while it resets the VF",
        remedy=remedy,
        grace_period=RESETTING,
    )


def _disruption(nic: WantedNic, have: Snapshot, index: int, name: str) -> Disruption:
    """What it costs to set an attribute. A VF without a driver is reset, too, but nothing can use it."""
    function = nic.function
    bound = have[DRIVERS].get(function.address, {}).get(vf_target(function.address, index))
    return Disruption.REBIND if bound and name in family_of(function.driver).vf_resets else Disruption.NONE


def _remedy(nic: WantedNic, index: int, name: str) -> str:
    """What to do if the driver refuses a GUID that the spec does not give."""
    derived = name in GUIDS and _is_derived(nic, index, name)
    return f"give {NOT_DERIVED[name]}, or mark the NIC required: false" if derived else ""


def _is_derived(nic: WantedNic, index: int, name: str) -> bool:
    """Whether the spec does not give this address of the VF."""
    vfs = nic.nic.vfs
    return name in NOT_DERIVED and vfs is not None and getattr(vfs.attributes(index), name) is None


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """An attribute of a VF, except its MAC, which is not restored."""
    nic, name = want.nics.get(kept.device), kept.field
    if nic is None or not is_vf(kept.target) or name == "mac" or name not in _NAMES:
        return None
    index = vf_index(kept.target)
    vf: VfInfo | None = have[NAME].get(kept.device, {}).get(index)
    if vf is None:
        return None
    given = getattr(nic.vf_wanted(index), name) is not None
    return Reading(getattr(vf, name), given, _disruption(nic, have, index, name), skip_if_owned=True)


def _in_order(wanted: VfAttributes, reported: VfInfo | None) -> tuple[str, ...]:
    late = tuple(name for name, last in _MAY_BE_LAST if reported is not None and last(wanted, reported))
    return (*(name for name in _NAMES if name not in late), *late) if late else _NAMES


def lifted_by(change: Change) -> str:
    """A VF that is not there comes with the number of VFs."""
    return vfs.NAME


def apply(machine: Machine, change: Change) -> None:
    """Set one attribute through the PF's netdev, with the present values of those that are written together with it."""
    index, attribute = vf_index(change.target), attributes.by_name()[change.field]
    present: dict[str, Any] = {}
    if attribute.together is not None:
        reported = _reported(machine, change.device, index)
        present = {name: getattr(reported, name) for name in attribute.together.defaults}
    given = {**present, change.field: change.after}
    try:
        machine.netlink.set_vf(ifindex_of(machine.files, change.device), index, **given)
    except OSError as error:
        refusal = Refusal(
            errno=error.errno or errno.EIO,
            value=change.after,
            present=present,
            netdev=netdev_of(machine.files, change.device),
        )
        raise OSError(*_explain(error, attribute, refusal)) from error


def _reported(machine: Machine, address: str, index: int) -> VfInfo:
    link = link_of(machine, address)
    reported = next((vf for vf in link.vfs if vf.index == index), None)
    if reported is None:
        raise FileNotFoundError(errno.ENOENT, f"{link.name} reports no VF {index}; it is gone, or is being reset")
    return reported


def _explain(error: OSError, attribute: VfAttribute, refusal: Refusal) -> tuple[int, str]:
    if (explained := attribute.explain(refusal)) is not None:
        return explained
    if refusal.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT):  # the latter is mlx4's (mlx4_set_vf_spoofchk, cmd.c)
        return errno.EOPNOTSUPP, f"the driver of {refusal.netdev} cannot set {attribute.name} of a VF"
    return refusal.errno, error.strerror or str(error)
