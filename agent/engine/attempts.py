"""Makes a kind's changes one after the other: decides whether each may be made now, and writes it. Links come up last."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from attrs import evolve

from agent.engine.contention import REMADE, Write
from agent.engine.context import PassContext
from agent.engine.observation import observed
from agent.engine.users import User, is_owned, may_disturb, with_affected
from agent.hardware.functions import ifindex_now, link_of
from agent.kinds import Kind, by_name, ethtool, links, vf_links
from agent.machine import Machine
from agent.report.disruption_policy import allowed
from agent.report.reasons import UNREADABLE_DEVICE
from agent.report.records import HOST, Change, Disruption, Outcome
from agent.state.scope import alone
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

ENOTSUPP = 524
"""The kernel's own number for EOPNOTSUPP (include/linux/errno.h), which some drivers let out."""

# A driver that runs an XDP program refuses large MTUs, some numbers of channels and some features. If it says why, then in the
# kernel's log: mlx5e_change_mtu (drivers/net/ethernet/mellanox/mlx5/core/en_main.c), ena_set_channels
# (drivers/net/ethernet/amazon/ena/ena_ethtool.c).
_OF_DRIVER = (links.NAME, vf_links.NAME, *(each.name for each in (ethtool.CHANNELS, ethtool.RINGS, ethtool.OFFLOADS)))

WRITES = 2
"""How often one pass writes a value that the driver accepts, but that reads back unchanged."""


def make(
    context: PassContext,
    want: Wanted,
    have: Snapshot,
    kind: Kind,
    changes: list[Change],
    plan: Callable[[Kind, Wanted, Snapshot], list[Change]],
) -> tuple[Wanted, Snapshot, list[Outcome]]:
    """Make a kind's changes; those that bring a link up come last, after the settings that are free until then.

    :param plan: the changes of any kind.
    :returns: also what is wanted and read, with the links as they are now.
    """
    others = [change for change in changes if not brings_up(change)]
    outcomes = attempts(context, want, have, kind, kind.arranged(others))
    if ups := [change for change in changes if brings_up(change)]:
        outcomes += _set_while_down(context, want, have, frozenset(change.target for change in ups), plan)
        brought_up = attempts(context, want, have, kind, ups)
        context.memory.failures.came_up({o.change.target for o in brought_up if o.result == "applied"})
        outcomes += brought_up
    moved = frozenset(alone(o.change.target) for o in outcomes if o.result == "applied" and sets_state(o.change))
    if moved:
        # Later kinds judge by the state of the link what their changes disturb.
        read = observed(context.cache.machine, kind, want, have, moved)
        want, have = read.want, read.have
    return want, have, outcomes


def _set_while_down(
    context: PassContext,
    want: Wanted,
    have: Snapshot,
    targets: frozenset[str],
    plan: Callable[[Kind, Wanted, Snapshot], list[Change]],
) -> list[Outcome]:
    """Make the settings of netdevs that are about to be brought up: some drivers take a link that is up down for them.

    What cannot be read or made now comes up again in the kind's own turn. Some drivers refuse while the link is down
    (qlcnic_set_intr_coalesce, drivers/net/ethernet/qlogic/qlcnic/qlcnic_ethtool.c); then it is tried again with the link up.
    """
    outcomes: list[Outcome] = []
    for kind in by_name().values():
        if not kind.BEFORE_UP:
            continue
        context.callbacks.doing(kind.NAME, "read")
        read = observed(context.cache.machine, kind, want, have, frozenset(map(alone, targets)))
        changes = [change for change in plan(kind, read.want, read.have) if change.target in targets]
        made = attempts(context, read.want, read.have, kind, kind.arranged(changes))
        outcomes += [outcome for outcome in made if outcome.result == "applied"]
    return outcomes


def sets_state(change: Change) -> bool:
    """Whether a change brings a link up or takes it down."""
    return change.kind in (links.NAME, vf_links.NAME) and change.field == "state"


def brings_up(change: Change) -> bool:
    """Whether a change brings a link up."""
    return sets_state(change) and change.after == "up"


def attempts(
    context: PassContext, want: Wanted, have: Snapshot, kind: Kind, changes: Sequence[Change]
) -> list[Outcome]:
    """Make those of a kind's changes that may be made now. A change that is left to the function's owner has no outcome."""
    context.users.planned = changes
    outcomes = (_attempt(context, want, have, kind, change) for change in changes)
    return [outcome for outcome in outcomes if outcome is not None]


def _attempt(context: PassContext, want: Wanted, have: Snapshot, kind: Kind, change: Change) -> Outcome | None:
    try:
        if change.skip_if_owned and is_owned(context.users.recent(want, change, complete=False), change.target):
            return None
        reason = _not_now(context, want, have, change)
        if reason is not None:
            return reason
        announce(context, want, change)
        # A user may have appeared since the change was planned: nothing but the write comes after this lookup.
        disturbs = may_disturb(change)
        if disturbs or change.skip_if_owned:
            users = context.users.now(want, change, complete=disturbs)
            if change.skip_if_owned and is_owned(users, change.target):
                return None
            change, deferred = _deferred(context, want, change, users) if disturbs else (change, None)
            if deferred is not None:
                return deferred
    except OSError as error:
        # As long as the users are unknown, nothing is disturbed.
        remedy = f"if the error is the kubelet's, see `systemctl status kubelet`, and reset nothing; else {UNREADABLE_DEVICE}"
        outcome = Outcome(change, "failed", f"its users cannot be determined: {error}", remedy)
        context.remember_failure(outcome)
        return outcome
    return _written_too_often(context, change) or _write(context, want, kind, change)


def _not_now(context: PassContext, want: Wanted, have: Snapshot, change: Change) -> Outcome | None:
    """Why a change is not made now. None: it may be made, as far as a recent lookup of users shows."""
    if change.blocker:
        outcome = Outcome(change, "blocked", change.blocker, change.remedy)
        if change.grace_period:
            context.remember_failure(outcome)
        return outcome
    failures, now = context.memory.failures, context.memory.clock()
    failures.wait(change, now)
    if (held := failures.held_back(change, now)) is not None:
        return evolve(held, change=change)
    if want.spec.mode == "observe":
        error, remedy = "mode: observe, nothing is written", "set mode to enforce once the plan is as you want it"
        return Outcome(change, "deferred", error, remedy)
    driver = partial(by_name()[change.kind].undone_by_driver, context.cache.machine, change)
    # By the index that the netdev has now: before vf_links the snapshot has none yet, or that of a netdev which is gone.
    write = write_of(partial(ifindex_now, context.cache.machine.files), have, change)
    contended = failures.contention.held_back(write, have.processes, now, driver)
    if contended is not None:
        return evolve(contended, change=evolve(change, required=change.required and contended.change.required))
    if may_disturb(change):
        return _deferred(context, want, change, context.users.recent(want, change, complete=True))[1]
    return None


def announce(context: PassContext, want: Wanted, change: Change) -> None:
    """Announce the first required change. Before the first disruptive one, wait until the node is published as not ready."""
    if context.announced is None and is_required(want, change) and _concerns_node(want, change):
        context.announced = change
        context.callbacks.announce(change)
    if context.announced and not context.published and change.disruption > Disruption.NONE:
        context.published = True
        context.callbacks.wait_until_published(context.announced)


def _concerns_node(want: Wanted, change: Change) -> bool:
    """Whether the node is not ready while a change is made. With granularity device, only its NIC is, if it disturbs nobody."""
    readiness, nic = want.spec.readiness, want.nics.get(change.device)
    if readiness.granularity == "node" or nic is None or change.disruption > Disruption.NONE:
        return True
    return nic.nic.name in readiness.these


def _deferred(
    context: PassContext, want: Wanted, change: Change, users: Mapping[str, tuple[User, ...]]
) -> tuple[Change, Outcome | None]:
    """The change with the users whom it would disturb, and its outcome if the policy or these users forbid it now."""
    change = with_affected(change, want, users)
    nic = want.nics.get(change.device)
    own = nic.nic.disruption if nic else None
    asked, only = context.goal.asked()
    asked = asked if only in ("", nic.nic.name if nic else HOST) else None
    policy = allowed(want.spec.disruption, own, asked, context.goal.time_of_day())
    if change.disruption > policy.level:
        error = f"{change.disruption} is not allowed now (at most {policy.level}{policy.until})"
        remedy = change.remedy or f"allow it: trackbed apply --allow {change.disruption}"
        return change, Outcome(change, "deferred", error, remedy)
    if change.affected and not policy.force:
        error = f"it would disturb {', '.join(change.affected)}"
        return change, Outcome(change, "deferred", error, "move them away; it is done within a minute after that")
    return change, None


def _written_too_often(context: PassContext, change: Change) -> Outcome | None:
    """The failure of a change that this pass has written :data:`WRITES` times without effect; None: it may be written."""
    if context.writes[change.key] < WRITES:
        return None
    error = f"written {WRITES} times, and it still reads {change.before}"
    # Older ixgbe report no link_state, sfc no spoofchk. qede ignores a max_tx_rate of 0, and reports its link's speed then.
    others = "see who else sets it, and the kernel's log; if the driver rounds it, give what it reads; if it does not report it"
    remedy = change.remedy or f"{others}, take {change.field} out of the spec"
    outcome = Outcome(change, "failed", error, remedy)
    context.remember_failure(outcome)
    return outcome


def _write(context: PassContext, want: Wanted, kind: Kind, change: Change) -> Outcome | None:
    """Make a change. None: its target is gone, and the kind's targets are made and deleted by others."""
    originals = context.memory.originals
    context.cache.forget()
    context.callbacks.doing(kind.NAME, "write")
    try:
        originals.keep(context.machine, want, kind, change)
        kind.apply(context.machine, change)
    except OSError as refusal:
        error = _known(refusal)
        if kind.TARGETS_VANISH and error.errno in (errno.ENOENT, errno.ENODEV):
            return None
        originals.failed(context.machine, kind, change)
        unsupported = error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
        message = error.strerror or str(error)
        remedy = _remedy(context.machine, error, kind, change)
        outcome = Outcome(change, "unsupported" if unsupported else "failed", message, remedy)
        context.remember_failure(outcome)
        return outcome
    context.writes[change.key] += 1
    if change.grace_period:
        context.memory.failures.made(change, context.memory.clock())
    return Outcome(change, "applied")


def _known(refusal: OSError) -> OSError:
    if refusal.errno != ENOTSUPP:
        return refusal
    unknown, known = os.strerror(ENOTSUPP), os.strerror(errno.EOPNOTSUPP)
    return OSError(errno.EOPNOTSUPP, (refusal.strerror or unknown).replace(unknown, known))


def write_of(index: Callable[[str], int], have: Snapshot, change: Change) -> Write:
    """A change with the index of the netdev to which it is made; ``index`` returns that of a PF or VF."""
    kind = by_name().get(change.kind)
    if kind is not None and change.device == HOST:
        return change, kind.netdev_index(have, change)
    if kind is not None and change.field in kind.REMAKES_NETDEV:
        # The VF's netdev is created again: its index changes with each write.
        return change, REMADE
    return change, index(change.target)


def _remedy(machine: Machine, error: OSError, kind: Kind, change: Change) -> str:
    if change.remedy:
        return change.remedy
    if kind.NAME in _OF_DRIVER and _has_xdp(machine, change.target):
        return (
            "the netdev has an XDP program (`ip link`), with which its driver may refuse this; detach it by the program that "
            f"attached it, or take {change.field} out of the spec"
        )
    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
        without = f"give {kind.OFF}" if kind.OFF else f"take {change.field} out of the spec"
        return f"{without}, or mark the NIC required: false"
    return "it is tried again; see the kernel's log (dmesg) for the driver's reason"


def _has_xdp(machine: Machine, target: str) -> bool:
    with suppress(OSError):
        return link_of(machine, target).xdp
    return False


def is_required(want: Wanted, change: Change) -> bool:
    """Whether the node is unready as long as a change is not made."""
    resolved = want.nics.get(change.device)
    nic = resolved.nic if resolved is not None else want.unreadable.get(change.device)
    return change.required and (nic is None or nic.required)
