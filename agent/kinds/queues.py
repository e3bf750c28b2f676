"""Observer: the receive and transmit queues of netdevs in any network namespace, read for rps, rfs and xps.

A VF's netdev may be in a pod's network namespace. Its queues are read and written there, since the node's agent remains
responsible for interrupts and steering.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

from attrs import frozen

from agent.hardware.functions import NET, is_away, netdev, pci_of
from agent.hardware.placement import from_mask, mask
from agent.hardware.sysfs import names_in, number_or, numbered, parsed, read_or, whole
from agent.kinds import Reading
from agent.machine import Attributes, Machine
from agent.report.records import Change
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "queues"
AFTER = ("irqs",)

RPS: Final = "rps"
"""The name of the kind that sets the RPS masks of the spec's NICs."""

Masks = Literal["rps", "xps"]

QUEUES = NET + "/{name}/queues"
# The node's RFS table. The file exists only in the host's network namespace and applies to all (sysctl_net_core.c).
ENTRIES = "/proc/sys/net/core/rps_sock_flow_entries"


@frozen
class Queues:
    """A netdev's queues by their numbers.

    ``rps``: the CPUs that process each receive queue's packets. ``flows``: the size of each receive queue's flow table, read
    if the spec has RFS. ``xps``: the CPUs that send through each transmit queue; empty if there is only one queue.
    """

    rps: Mapping[int, frozenset[int]]
    flows: Mapping[int, int]
    xps: Mapping[int, frozenset[int]]


NONE = Queues({}, {}, {})


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Queues]]:
    """The queues of each PF and its VFs, by target; empty for a netdev that cannot be reached."""
    functions, flows = functions_in_scope(machine.files, want, scope), want.spec.rfs.enable
    away = [pci for of_pf in functions.values() for pci in of_pf.values() if is_away(machine.files, pci)]
    places = machine.namespaces.holding(away) if away else {}
    queues: dict[str, dict[str, Queues]] = {}
    for address, of_address in functions.items():
        queues[address] = {}
        for target, pci in of_address.items():
            queues[address][target] = NONE
            if (name := netdev(machine.files, pci)) is not None:
                queues[address][target] = _read(machine.files, QUEUES.format(name=name), flows)
            elif pci in places:
                try:
                    with machine.namespaces.files(places[pci]) as files:
                        if (name := netdev(files, pci)) is not None:
                            queues[address][target] = _read(files, QUEUES.format(name=name), flows)
                except FileNotFoundError:
                    continue  # the namespace is gone; an event follows when the netdev is back
    return queues


def _read(files: Attributes, folder: str, flows: bool) -> Queues:
    names = names_in(files, folder)
    receive = {queue: f"{folder}/{name}" for queue, name in numbered(names, "rx-").items()}
    transmit = {queue: f"{folder}/{name}" for queue, name in numbered(names, "tx-").items()}
    # With a single transmit queue the file exists, but reading it gives ENOENT (net-sysfs.c, xps_cpus_show).
    several = transmit if len(transmit) > 1 else {}
    return Queues(
        rps={q: _mask(files, f"{p}/rps_cpus") for q, p in receive.items()},
        flows={q: number_or(files, f"{p}/rps_flow_cnt", 0) for q, p in receive.items()} if flows else {},
        xps={q: _mask(files, f"{p}/xps_cpus") for q, p in several.items()},
    )


def receive_masks(files: Attributes, name: str) -> dict[int, frozenset[int]]:
    """The RPS mask of each receive queue of a netdev of this namespace; empty if there is no such netdev."""
    folder = QUEUES.format(name=name)
    receive = numbered(names_in(files, folder), "rx-")
    return {queue: _mask(files, f"{folder}/{name}/rps_cpus") for queue, name in receive.items()}


def _mask(files: Attributes, path: str) -> frozenset[int]:
    return parsed(from_mask, read_or(files, path, "0"), path)


def each(have: Snapshot) -> Iterator[tuple[str, str, Queues]]:
    """PF, target and queues of every netdev that was read, in a stable order."""
    for address, netdevs in sorted(have[NAME].items()):
        for target, queues in netdevs.items():
            yield address, target, queues


def mask_reading(want: Wanted, have: Snapshot, kept: Change, masks: Masks, wanted: bool) -> Reading | None:
    """A queue's RPS or XPS mask, of a netdev of a wanted NIC. ``wanted``: the spec has it set."""
    value = _observed(want, have, kept, masks)
    return None if value is None else Reading(format_ranges(value), wanted)


def flows(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> int:
    """The size of a receive queue's flow table. It is not observed once the spec has no RFS.

    :raises OSError: there is no such netdev or queue.
    """
    if (observed := _observed(want, have, kept, "flows")) is not None:
        return int(observed)
    with _opened(machine, kept.target) as (files, folder):
        path = f"{folder}/{kept.field}/rps_flow_cnt"
        return parsed(int, files.read(path), path)


def _observed(want: Wanted, have: Snapshot, kept: Change, table: str) -> Any:
    """What was read of the queue that a change names (``rx-0``); None if nothing was."""
    observed: Queues = have[NAME].get(kept.device, {}).get(kept.target, NONE)
    number = whole(kept.field.partition("-")[2])
    return getattr(observed, table).get(number) if kept.device in want.nics else None


def write_mask(machine: Machine, change: Change, masks: Masks) -> None:
    """Write the mask of a change's queue."""
    write(machine, change.target, f"{change.field}/{masks}_cpus", mask(parse_ranges(str(change.after))))


def write(machine: Machine, target: str, path: str, text: str) -> None:
    """Write one file (``rx-0/rps_cpus``) of a target's netdev, in the network namespace that has it now."""
    with _opened(machine, target) as (files, folder):
        files.write(f"{folder}/{path}", text)


@contextmanager
def _opened(machine: Machine, target: str) -> Iterator[tuple[Attributes, str]]:
    pci = pci_of(machine.files, target)
    if (name := netdev(machine.files, pci)) is not None:
        yield machine.files, QUEUES.format(name=name)
        return
    namespace = machine.namespaces.holding([pci]).get(pci)
    if namespace is None:
        raise FileNotFoundError(
            errno.ENOENT, f"the netdev of {target} is in no network namespace that the agent can enter"
        )
    with machine.namespaces.files(namespace) as files:
        if (name := netdev(files, pci)) is None:
            raise FileNotFoundError(errno.ENOENT, f"the netdev of {target} has left its network namespace")
        yield files, QUEUES.format(name=name)
