"""Who uses a function: read for the other kinds, whose disruptive changes name these as victims. Nothing to plan."""

from __future__ import annotations

from collections.abc import Mapping

from agent.change import Change
from agent.kinds import in_scope
from agent.machine import Machine, read_or
from agent.nics import Wanted, driver, netdev, targets
from agent.snapshot import Scope, Snapshot

NAME = "users"
AFTER: tuple[str, ...] = ()
UNKNOWN_UNTIL: tuple[str, ...] = ()

# Drivers that make no netdev: without one such a VF has not been moved anywhere.
NO_NETDEV = frozenset({"vfio-pci", "uio_pci_generic", "igb_uio"})


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """For each PF, the users of it and of its VFs by target; those without users are left out."""
    routed = machine.netlink.default_route_ifindexes()
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for address in in_scope(want, scope):
        found[address] = {
            target: users
            for target, pci in targets(machine.files, address).items()
            if (users := _users(machine, pci, target, routed))
        }
    return found


def _users(machine: Machine, pci: str, target: str, routed: frozenset[int]) -> tuple[str, ...]:
    name = netdev(machine.files, pci)
    if name is not None:
        ifindex = int(read_or(machine.files, f"/sys/class/net/{name}/ifindex", "0"))
        return (f"default route of {name} ({target})",) if ifindex in routed else ()
    bound = driver(machine.files, pci)
    if bound is None:
        return ()
    if bound in NO_NETDEV:
        return (f"{bound} ({target})",)
    # A bound network driver whose netdev the host does not see: a container runtime has moved it.
    return (f"another network namespace ({target})",)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Nothing: users are observed, not wanted."""
    return []


def apply(machine: Machine, change: Change) -> None:
    """Never called, since nothing is planned."""
    raise NotImplementedError(change.kind)


def of(have: Snapshot, target: str) -> tuple[str, ...]:
    """Who uses a VF (``ADDRESS#N``), or a PF (``ADDRESS``) and any of its VFs."""
    address, _, index = target.partition("#")
    users: Mapping[str, tuple[str, ...]] = have[NAME].get(address, {})
    if index:
        return users.get(target, ())
    return tuple(user for key in sorted(users) for user in users[key])
