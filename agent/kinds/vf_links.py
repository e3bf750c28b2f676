"""The netdevs of VFs: there, up, with their MTU. For the kinds after this one: every netdev of a NIC, and what is set on it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from attrs import evolve, frozen

from agent.hardware.functions import VFIO, ifindex, ifindex_of, netdev, pci_of
from agent.kinds import Reading, links, vf_attributes
from agent.machine import Machine, VfInfo
from agent.report.records import Change, Disruption, Value
from agent.state.scope import Scope, functions_in_scope, in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic
from agent.vendors import Vendor, vendor

NAME = "vf_links"
AFTER = ("bindings", "vf_names")
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "function"

Read = TypeVar("Read")

SETTLING = 5.0
"""Seconds that a VF's link may take to come up once its PF's is; the drivers' watchdogs look every two."""


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, links.LinkStatus]]:
    """The netdevs of each PF's VFs, by target."""
    return {
        address: {target: links.status(machine, vf) for target, vf in functions.items() if target != address}
        for address, functions in functions_in_scope(machine.files, want, scope).items()
    }


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The VFs' netdevs that differ."""
    changes: list[Change] = []
    for address, nic in links.usable(want, have):
        found: Mapping[str, links.LinkStatus] = have[NAME].get(address, {})
        told: Mapping[int, VfInfo] = have[vf_attributes.NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            target, wanted = f"{address}#{index}", nic.vf(index)
            status = found.get(target)
            if wanted.driver == VFIO:
                continue  # it makes no netdev
            differing = links.plan_link(NAME, target, status, wanted.mtu, wanted.state, wanted.txqueuelen)
            # One whose link the PF holds down has none for that reason.
            held = index in told and told[index].link_state == "disable"
            if status and not differing and not held and _is_stuck(status, have[links.NAME][address][address]):
                flap = Change(NAME, target, "carrier", "lost", "up", Disruption.LINK_FLAP, grace_period=SETTLING)
                differing.append(flap)
            changes += [evolve(change, skip_if_owned=wanted.owner != "trackbed") for change in differing]
    return changes


def _is_stuck(vf: links.LinkStatus, pf: links.LinkStatus) -> bool:
    """A VF that came up while its PF was being reset stays without carrier until it is brought up again (igbvf)."""
    if vf.link is None or pf.link is None:
        return False
    return pf.link.carrier and vf.link.up and not vf.link.carrier


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each VF's MTU, state and queue length."""
    found: list[Reading] = []
    for address, nic in sorted(want.nics.items()):
        statuses: Mapping[str, links.LinkStatus] = have[NAME].get(address, {})
        for target, status in statuses.items():
            wanted = nic.vf_wanted(int(target.partition("#")[2]))
            found += links.link_readings(target, status, wanted, skip_if_owned=True)
    return found


def transients(change: Change) -> list[Change]:
    """For its carrier a VF's link is down for a moment."""
    return [evolve(change, field="state", before="up", after="down")] if change.field == "carrier" else []


def apply(machine: Machine, change: Change) -> None:
    """Set a VF's netdev as :func:`links.apply` does; for its carrier, take it down and up."""
    if change.field != "carrier":
        links.apply(machine, change)
        return
    index = ifindex_of(machine.files, change.target)
    machine.netlink.set_link(index, up=False)
    machine.netlink.set_link(index, up=True)


@frozen
class Setting:
    """What the spec has ``given`` to the netdev of ``target``, what was ``read`` of it, and the netdev itself."""

    target: str
    given: Any
    read: Any
    status: links.LinkStatus
    nic: WantedNic

    def change(
        self,
        kind: str,
        field: str,
        before: Value,
        after: Value,
        flaps: bool = False,
        blocker: str = "",
        remedy: str = "",
    ) -> Change:
        """A change of it; ``flaps``: it takes the link down, if that is up. With a blocker it is not made at all."""
        up = self.status.link is not None and self.status.link.up
        disruption = Disruption.LINK_FLAP if flaps and up and not blocker else Disruption.NONE
        _, _, index = self.target.partition("#")
        skip_if_owned = bool(index) and self.nic.vf(int(index)).owner != "trackbed"
        return Change(
            kind, self.target, field, before, after, disruption, (), blocker, remedy, skip_if_owned=skip_if_owned
        )


def observe_settings(
    machine: Machine, want: Wanted, scope: Scope, key: str, read: Callable[[int], Read]
) -> Mapping[str, Mapping[str, Read | None]]:
    """What ``read`` says of each netdev, given its ifindex, to which the spec gives something under ``key``, by target.

    A netdev that is given nothing is not looked at; of one in another network namespace nothing is said (None).
    """
    given = {address: asked for address in in_scope(want, scope) if (asked := want.nics[address].settings(key))}
    # Most nodes are given nothing: for them not even the functions are listed.
    functions = functions_in_scope(machine.files, want, scope) if given else {}
    return {
        address: {target: _of(machine, pci, read) for target, pci in functions[address].items() if target in asked}
        for address, asked in given.items()
    }


def _of(machine: Machine, pci: str, read: Callable[[int], Read]) -> Read | None:
    name = netdev(machine.files, pci)
    index = ifindex(machine.files, name) if name else 0
    try:
        return read(index) if index else None
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise


def setting_now(
    machine: Machine,
    want: Wanted,
    kept: Change,
    given: Callable[[Any], bool],
    read: Callable[[int], Value],
    flaps: Callable[[Vendor], bool] = lambda vendor: False,
) -> Reading | None:
    """What ``read`` says of a netdev whose setting the agent has changed, for ``reading`` of the kinds of settings.

    :param given: whether what the spec has for the netdev includes it.
    :param flaps: whether the link goes down if it is changed.
    """
    nic = want.nics.get(kept.device)
    if nic is None:
        return None
    asked = nic.settings(kept.kind).get(kept.target)
    if asked is not None and given(asked):
        return Reading(kept.target, kept.field, kept.after, wanted=True)
    status = links.status(machine, pci_of(machine.files, kept.target))
    if status.link is None or not status.ready:
        return None
    costs = status.link.up and flaps(vendor(status.driver))
    disruption = Disruption.LINK_FLAP if costs else Disruption.NONE
    value = read(status.link.ifindex)
    return Reading(kept.target, kept.field, value, False, disruption, skip_if_owned="#" in kept.target)


def settings(want: Wanted, have: Snapshot, kind: str, key: str) -> Iterator[Setting]:
    """What ``kind`` has to compare: the netdevs that it observed, once udev is through with them."""
    for address, observed in sorted(have[kind].items()):
        netdevs = {**have[links.NAME].get(address, {}), **have[NAME].get(address, {})}
        nic = want.nics.get(address)
        given = nic.settings(key) if nic else {}
        for target, found in observed.items():
            status: links.LinkStatus | None = netdevs.get(target)
            if nic is not None and found is not None and target in given and status is not None and status.ready:
                yield Setting(target, given[target], found, status, nic)
