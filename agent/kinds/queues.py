"""Observer: the receive and transmit queues of netdevs in any network namespace, read for rps, rfs and xps.

A VF's netdev may be in a pod's network namespace. Its queues are read and written there, since the node's agent remains
responsible for interrupts and steering.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

from attrs import frozen

from agent.driver_families import family_of
from agent.hardware.functions import NET, driver, function_of, is_away, netdev, pci_of
from agent.hardware.placement import from_mask, mask
from agent.hardware.sysfs import names_in, numbered, parsed, read_or, whole
from agent.kinds import Reading
from agent.machine import Attributes, Files, Machine, Namespace
from agent.report.records import Change
from agent.spec.node import NodeSpec
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "queues"
AFTER = ("irqs",)

RPS: Final = "rps"
"""The name of the kind that sets the RPS masks of the spec's NICs."""

Table = Literal["rps", "xps", "flows"]

_FILES: Mapping[Table, tuple[str, Callable[[str], Any]]] = {
    "rps": ("rps_cpus", from_mask),
    "xps": ("xps_cpus", from_mask),
    "flows": ("rps_flow_cnt", int),
}
"""For each table: the file in a queue's folder, and the function that parses its text."""

QUEUES = NET + "/{name}/queues"
# The node's RFS table. The file exists only in the host's network namespace and applies to all (sysctl_net_core.c).
ENTRIES = "/proc/sys/net/core/rps_sock_flow_entries"


@frozen
class Queues:
    """A netdev's queues by their numbers. Only the tables that the spec sets are read.

    ``rps``: the CPUs that process each receive queue's packets. ``flows``: the size of each receive queue's flow table.
    ``xps``: the CPUs that send through each transmit queue; empty if there is only one queue.
    """

    rps: Mapping[int, frozenset[int]]
    flows: Mapping[int, int]
    xps: Mapping[int, frozenset[int]]


NONE = Queues({}, {}, {})


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Queues]]:
    """The queues of each PF and its VFs, by target; empty for a netdev that cannot be reached."""
    spec = want.spec
    if not (spec.rps.enable or spec.xps.enable or spec.rfs.enable):
        return {}
    functions = functions_in_scope(machine.files, want, scope)
    away = [pci for of_pf in functions.values() for pci in of_pf.values() if is_away(machine.files, pci)]
    places = machine.namespaces.holding(away) if away else {}
    queues: dict[str, dict[str, Queues]] = {}
    for address, of_address in functions.items():
        queues[address] = {}
        paired = family_of(want.nics[address].function.driver).paired_queues
        for target in of_address:
            queues[address][target] = NONE
            # It may be in no namespace, or the namespace is gone; an event follows when the netdev is back.
            with suppress(FileNotFoundError), _opened(machine, target, places) as (files, folder):
                queues[address][target] = _read(files, folder, spec, paired)
    return queues


def _read(files: Attributes, folder: str, spec: NodeSpec, paired: bool) -> Queues:
    names = names_in(files, folder)
    receive, transmit = _receiving(files, folder, names, paired), numbered(names, "tx-")
    # With a single transmit queue the file exists, but reading it gives ENOENT (net-sysfs.c, xps_cpus_show).
    several = transmit if len(transmit) > 1 else {}
    return Queues(
        rps=_table(files, folder, "rps", receive if spec.rps.enable else {}),
        flows=_table(files, folder, "flows", receive if spec.rfs.enable else {}),
        xps=_table(files, folder, "xps", several if spec.xps.enable else {}),
    )


def _receiving(files: Attributes, folder: str, names: Collection[str], paired: bool) -> Mapping[int, str]:
    """The receive queues of a netdev that receive packets by themselves. ``paired``: ``paired_queues`` of its family.

    Before Linux 6.1 the second half of mlx5's are for AF_XDP only. There are fewer transmit queues then, unless the channels
    have several traffic classes (mlx5e_update_netdev_queues in en_main.c): those queues belong to no class by themselves.
    """
    receive = numbered(names, "rx-")
    last = max(receive, default=0)
    if paired and last and not read_or(files, f"{folder}/tx-{last}/traffic_class", ""):
        return {queue: name for queue, name in receive.items() if queue <= last // 2}
    return receive


def receive_masks(files: Files, name: str) -> dict[int, frozenset[int]]:
    """The RPS mask of each receive queue of a netdev of this namespace; empty if there is no such netdev."""
    folder, function = QUEUES.format(name=name), function_of(files, name)
    paired = function is not None and family_of(driver(files, function)).paired_queues
    return _table(files, folder, "rps", _receiving(files, folder, names_in(files, folder), paired))


def _table(files: Attributes, folder: str, table: Table, queues: Mapping[int, str]) -> dict[int, Any]:
    file, parse = _FILES[table]
    paths = {queue: f"{folder}/{name}/{file}" for queue, name in queues.items()}
    return {queue: parsed(parse, read_or(files, path, "0"), path) for queue, path in paths.items()}


def each(have: Snapshot) -> Iterator[tuple[str, str, Queues]]:
    """PF, target and queues of every netdev that was read, in a stable order."""
    for address, netdevs in sorted(have[NAME].items()):
        for target, queues in netdevs.items():
            yield address, target, queues


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change, table: Table, wanted: bool) -> Reading | None:
    """The value that a change's queue has in a table; None if the NIC is not wanted. ``wanted``: the spec sets this table.

    :raises OSError: there is no such netdev or queue.
    """
    if kept.device not in want.nics:
        return None
    observed: Queues = have[NAME].get(kept.device, {}).get(kept.target, NONE)
    value = getattr(observed, table).get(whole(kept.field.partition("-")[2]))
    if value is None:  # the table has left the spec
        file, parse = _FILES[table]
        with _opened(machine, kept.target) as (files, folder):
            path = f"{folder}/{kept.field}/{file}"
            value = parsed(parse, files.read(path), path)
    return Reading(value if isinstance(value, int) else format_ranges(value), wanted)


def write(machine: Machine, change: Change, table: Table) -> None:
    """Write the new value of a change's queue, in the network namespace that has the netdev now."""
    text = str(change.after) if table == "flows" else mask(parse_ranges(str(change.after)))
    with _opened(machine, change.target) as (files, folder):
        files.write(f"{folder}/{change.field}/{_FILES[table][0]}", text)


@contextmanager
def _opened(
    machine: Machine, target: str, places: Mapping[str, Namespace] | None = None
) -> Iterator[tuple[Attributes, str]]:
    """The files with a target's netdev, and the folder of its queues. ``places``: the namespaces, if they were searched."""
    pci = pci_of(machine.files, target)
    if (name := netdev(machine.files, pci)) is not None:
        yield machine.files, QUEUES.format(name=name)
        return
    namespace = (machine.namespaces.holding([pci]) if places is None else places).get(pci)
    if namespace is None:
        raise FileNotFoundError(
            errno.ENOENT, f"the netdev of {target} is in no network namespace that the agent can enter"
        )
    with machine.namespaces.files(namespace) as files:
        if (name := netdev(files, pci)) is None:
            raise FileNotFoundError(errno.ENOENT, f"the netdev of {target} has left its network namespace")
        yield files, QUEUES.format(name=name)
