"""Receive packet steering on netdevs of others: those of the host's network namespace whose names match a pattern of the spec.

A container network plugin (CNI) makes a netdev for each pod and deletes it with the pod, so a netdev that is gone is no fault,
and no change here is required for the node to be ready. The netdevs of the spec's own NICs and of their VFs belong to
:mod:`agent.kinds.steering`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from attrs import evolve, frozen

from agent.hardware.functions import NET, function_of, ifindex, ifindex_now
from agent.hardware.placement import mask, pool
from agent.hardware.sysfs import names_in, whole
from agent.kinds import Reading, queues
from agent.machine import Files, Machine
from agent.report.reasons import UNREADABLE_DEVICE
from agent.report.records import HOST, Change
from agent.spec.node import SteeredNetdevs
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "rps_netdevs"
AFTER = (queues.RPS,)
OTHER_WRITERS = ("tuned",)
TARGETS_VANISH = True

MOST = 1024
"""The most netdevs that are read and set. A node runs a few hundred pods at most; the kubelet's own limit is 110."""


@frozen
class Steered:
    """A netdev that a pattern matches. ``rps``: the CPUs that process each receive queue's packets.

    ``unreadable``: the error of one of its files. The other netdevs are steered all the same.
    """

    ifindex: int
    rps: Mapping[int, frozenset[int]]
    unreadable: str = ""


@frozen
class Matching:
    """The netdevs that are kept, by name, at most :data:`MOST` of them; ``total``: how many match."""

    netdevs: Mapping[str, Steered]
    total: int


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Matching]:
    """Under HOST, the netdevs that the patterns match; nothing if the spec has no pattern."""
    if not host_in_scope(scope) or not want.spec.rps.netdevs:
        return {}
    ours = want.nics.keys() | want.left_alone
    names = [
        name
        for name in names_in(machine.files, NET)
        if _rule(want, name) and function_of(machine.files, name) not in ours
    ]
    read = {name: _read(machine.files, name) for name in names[:MOST]}
    there = {name: steered for name, steered in read.items() if steered.ifindex or steered.unreadable}
    return {HOST: Matching(there, len(names))}


def _rule(want: Wanted, name: str) -> SteeredNetdevs | None:
    return next((rule for rule in want.spec.rps.netdevs if rule.matches(name)), None)


def _read(files: Files, name: str) -> Steered:
    try:
        return Steered(ifindex(files, name), queues.receive_masks(files, name))
    except OSError as error:
        return Steered(0, {}, str(error))


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ from the entry's CPUs, or from all that may be used."""
    matching: Matching | None = have[NAME].get(HOST)
    if matching is None:
        return []
    changes = list(_too_many(matching.total))
    unusable = [rule for rule in want.spec.rps.netdevs if rule.cpus is not None and not _cpus(want, have, rule, 0)]
    for name, steered in matching.netdevs.items():
        rule = _rule(want, name)
        if rule is None or rule in unusable:
            continue  # it was read for another spec, or the kernel would refuse the mask
        if steered.unreadable:
            changes.append(_unreadable(name, steered.unreadable))
        after = _cpus(want, have, rule, len(steered.rps))
        for queue, before in sorted(steered.rps.items()):
            if before != after:
                change = Change(
                    NAME, HOST, f"{name}/rx-{queue}", format_ranges(before), format_ranges(after), required=False
                )
                changes.append(change)
    return changes + [_unusable(rule) for rule in unusable]


def _too_many(total: int) -> Iterator[Change]:
    if total > MOST:
        blocker = f"the patterns of rps.netdevs match {total} netdevs; {MOST} are steered"
        yield Change(NAME, HOST, "netdevs", total, MOST, blocker=blocker, remedy="narrow the patterns", required=False)


def _unusable(rule: SteeredNetdevs) -> Change:
    blocker = f"none of the CPUs {rule.cpus} is online and not isolated"
    remedy = f"correct cpus of {rule.match} in rps.netdevs"
    return Change(NAME, HOST, rule.match, None, rule.cpus, blocker=blocker, remedy=remedy, required=False)


def _unreadable(name: str, why: str) -> Change:
    blocker = f"it cannot be read: {why}"
    return Change(NAME, HOST, name, "unreadable", "readable", blocker=blocker, remedy=UNREADABLE_DEVICE, required=False)


def _cpus(want: Wanted, have: Snapshot, rule: SteeredNetdevs, receive_queues: int) -> frozenset[int]:
    """The CPUs of each mask. The kernel strips those that are offline or isolated from a mask, so they are left out here.

    So are those with an owner, except if the entry names no others.
    """
    owned = have.topology.owners.of.keys()
    if rule.cpus is not None:
        named = frozenset(have.topology.cpus) & frozenset(parse_ranges(rule.cpus)) - have.topology.isolated
        return named - owned or named
    usable = frozenset(pool(have.topology, -1, frozenset(parse_ranges(want.spec.irqs.exclude_cpus)))) - owned
    # A netdev that has a queue for each CPU needs no steering (Documentation/networking/scaling.rst).
    return frozenset() if receive_queues >= len(usable) else usable - have.topology.isolated


def netdev_index(have: Snapshot, change: Change) -> int:
    """The netdev's index. The name of a pod's netdev may return with the next pod."""
    matching: Matching | None = have[NAME].get(HOST)
    steered = matching.netdevs.get(change.field.rpartition("/")[0]) if matching else None
    return steered.ifindex if steered else 0


def steers(want: Wanted, have: Snapshot, ifindex: int) -> bool:
    """Whether this kind sets the netdev with this index."""
    matching: Matching | None = have[NAME].get(HOST)
    netdevs = matching.netdevs.items() if matching else ()
    return any(steered.ifindex == ifindex and _rule(want, name) is not None for name, steered in netdevs)


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The netdev's mask; as that of a NIC's queue if it was noted as that while the NIC was in the spec."""
    name, _, queue = change.field.rpartition("/")
    for kind, target, field in known:
        same = kind == queues.RPS and field == queue and ifindex_now(machine.files, target)
        if same and same == ifindex(machine.files, name):
            return [evolve(change, kind=kind, target=target, field=field)]
    return [change]


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """One queue's mask as it is now. A netdev that is gone reads as it was before, so that its original is forgotten."""
    name, _, queue = kept.field.rpartition("/")
    masks = queues.receive_masks(machine.files, name)
    number = whole(queue.removeprefix("rx-"))
    if number not in masks:
        return Reading(kept.before)
    function = function_of(machine.files, name)
    if function in want.left_alone:
        return None
    wanted = want.spec.rps.enable if function in want.nics else _rule(want, name) is not None
    return Reading(format_ranges(masks[number]), wanted)


def apply(machine: Machine, change: Change) -> None:
    """Write one queue's mask. ENOENT or ENODEV: the netdev is gone."""
    name, _, queue = change.field.rpartition("/")
    path = f"{queues.QUEUES.format(name=name)}/{queue}/rps_cpus"
    machine.files.write(path, mask(parse_ranges(str(change.after))))
