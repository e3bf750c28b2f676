"""Receive flow steering: a packet goes to the CPU where the application last read from its flow.

There is one table for the node (net.core.rps_sock_flow_entries) and one for each receive queue (rps_flow_cnt). Writing a
table's size empties it, even if the size stays the same, so a size is written only when it differs.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.hardware.sysfs import number_or
from agent.kinds import Reading, queues
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.report.target import device_of
from agent.spec.ranges import format_ranges
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "rfs"
AFTER = ("queues", "rps")
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "device"
OTHER_WRITERS = ("tuned",)
OFF = "rfs.enable: false"

ENTRIES = "net.core.rps_sock_flow_entries"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, int]:
    """The size of the node's table; :mod:`agent.kinds.queues` reads those of the queues' tables."""
    return {HOST: _entries(machine)} if host_in_scope(scope) else {}


def _entries(machine: Machine) -> int:
    return number_or(machine.files, queues.ENTRIES, 0)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The tables whose size differs. The node's entries are divided evenly among the queues of each netdev."""
    wanted = want.spec.rfs
    entries: int | None = have[NAME].get(HOST)
    if not wanted.enable or entries is None:
        return []
    if have.topology.isolated and not wanted.isolated:
        isolated = format_ranges(have.topology.isolated)
        blocker = f"RFS steers packets to the CPUs where applications run, and CPUs {isolated} are isolated"
        remedy = "set rfs.isolated: true, or rfs.enable: false"
        return [Change(NAME, HOST, ENTRIES, entries, wanted.entries, blocker=blocker, remedy=remedy)]
    changes = []
    if entries != wanted.entries:
        changes.append(Change(NAME, HOST, ENTRIES, entries, wanted.entries))
    for address, target, observed in queues.each(have):
        share = _rounded(wanted.entries // max(1, len(observed.flows)))
        changes += [
            Change(NAME, target, f"rx-{queue}", flows, share)
            for queue, flows in sorted(observed.flows.items())
            if flows != share and address in want.nics
        ]
    return changes


def _rounded(flows: int) -> int:
    """Rounded up to a power of two, as store_rps_dev_flow_table_cnt() does."""
    return 1 << max(0, flows - 1).bit_length()


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """The size of each table."""
    wanted = want.spec.rfs.enable
    entries: int | None = have[NAME].get(HOST)
    return [
        *([] if entries is None else [Reading(HOST, ENTRIES, entries, wanted)]),
        *(
            Reading(target, f"rx-{queue}", flows, wanted)
            for address, target, observed in queues.each(have)
            if address in want.nics
            for queue, flows in sorted(observed.flows.items())
        ),
    ]


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """One table's size as it is now. The queues' tables are not observed once the node has none."""
    if kept.target == HOST:
        return Reading(HOST, kept.field, _entries(machine), want.spec.rfs.enable)
    if device_of(kept.target) not in want.nics:
        return None
    return Reading(kept.target, kept.field, queues.flows(machine, kept.target, kept.field), want.spec.rfs.enable)


def apply(machine: Machine, change: Change) -> None:
    """Write the size of one table."""
    if change.target == HOST:
        machine.files.write(queues.ENTRIES, str(change.after))
    else:
        queues.write(machine, change.target, f"{change.field}/rps_flow_cnt", str(change.after))
