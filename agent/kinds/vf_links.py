"""The netdevs of VFs: present, up, with the wanted MTU and queue length."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import evolve

from agent.driver_families import VFIO, family_of
from agent.hardware.functions import ifindex_of
from agent.kinds import Reading, bindings, links, vf_attributes
from agent.machine import Machine, VfInfo
from agent.report.records import Change, Disruption
from agent.report.target import device_of, is_vf, vf_index, vf_target
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "vf_links"
AFTER = ("bindings", "vf_names")
OTHER_WRITERS = ("NetworkManager", "systemd-networkd", "tuned")

SETTLING = 5.0
"""Seconds within which a VF's link follows its PF's; the drivers' watchdogs run every two seconds."""


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, links.LinkStatus]]:
    """The netdevs of each PF's VFs, by target."""
    statuses = {
        address: {target: links.status(machine, vf) for target, vf in functions.items() if target != address}
        for address, functions in functions_in_scope(machine.files, want, scope).items()
    }
    away = [status.pci for of_pf in statuses.values() for status in of_pf.values() if links.is_away(status)]
    search = bool(away) and machine.namespaces.searchable()
    nowhere = set(away) - machine.namespaces.holding(away).keys() if search else set()
    missing = {vf for vf in nowhere if not links.has_rdma(machine.files, vf)}
    for of_pf in statuses.values():
        of_pf.update({at: evolve(status, missing=True) for at, status in of_pf.items() if status.pci in missing})
    return statuses


def index(have: Snapshot, target: str) -> int:
    """The index of the netdev of a PF or VF; 0 if it has none that was read."""
    statuses = have[NAME if is_vf(target) else links.NAME].get(device_of(target), {})
    status: links.LinkStatus | None = statuses.get(target)
    return status.link.ifindex if status is not None and status.link is not None else 0


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The VFs' netdevs that differ."""
    changes: list[Change] = []
    for address, nic in links.usable(want, have):
        statuses: Mapping[str, links.LinkStatus] = have[NAME].get(address, {})
        granted: Mapping[int, VfInfo] = have[vf_attributes.NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            target, wanted = vf_target(address, index), nic.vf(index)
            status = statuses.get(target)
            if wanted.driver == VFIO:
                continue  # vfio-pci creates no netdev
            if status is not None and status.missing:
                continue  # its netdev may come back by itself: see agent/probes/vf_netdevs.py
            differing = links.plan_link(NAME, target, status, wanted)
            # A VF whose link_state is "disable" has no carrier for that reason.
            held = index in granted and granted[index].link_state == "disable"
            if status and not differing and not held and _is_stuck(status, have[links.NAME][address][address]):
                flap = Change(NAME, target, "carrier", "lost", "up", Disruption.LINK_FLAP, grace_period=SETTLING)
                differing.append(flap)
            changes += [evolve(change, skip_if_owned=wanted.owner != "trackbed") for change in differing]
    return changes


def _is_stuck(vf: links.LinkStatus, pf: links.LinkStatus) -> bool:
    """Whether a VF has no carrier although its PF has, and its driver is known to miss it.

    With other drivers the VF's representor may be down (switchdev mode), which no flap of the VF changes.
    """
    if vf.link is None or pf.link is None or not family_of(pf.driver).vfs_miss_carrier:
        return False
    return pf.link.carrier and vf.link.up and not vf.link.carrier


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """A VF's MTU, state or queue length."""
    nic, status = want.nics.get(kept.device), have[NAME].get(kept.device, {}).get(kept.target)
    if nic is None or status is None:
        return None
    return links.link_reading(status, nic.vf_wanted(vf_index(kept.target)), kept, skip_if_owned=True)


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The value; nothing of a lost carrier, which nobody wants back."""
    return [] if change.field == "carrier" else [change]


def transients(machine: Machine, want: Wanted, change: Change) -> list[Change]:
    """To regain its carrier, a VF's link is taken down and up."""
    return [evolve(change, field="state", before="up", after="down")] if change.field == "carrier" else []


def lifted_by(change: Change) -> str:
    """A VF's netdev comes with its driver."""
    return bindings.NAME


def apply(machine: Machine, change: Change) -> None:
    """Set one value as :func:`links.apply` does; for ``carrier``, take the link down and up."""
    if change.field != "carrier":
        links.apply(machine, change)
        return
    index = ifindex_of(machine.files, change.target)
    machine.netlink.set_link(index, up=False)
    machine.netlink.set_link(index, up=True)
