"""Reads a kind's state. A device that cannot be read is left out; the others are read all the same."""

from __future__ import annotations

from attrs import evolve, frozen

from agent.kinds import Observer
from agent.machine import Machine
from agent.report.reasons import UNREADABLE_DEVICE
from agent.report.records import HOST, Change, Outcome
from agent.report.target import device_of
from agent.state.scope import Scope, in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, resolve


@frozen
class Observed:
    """What is wanted and what was read, without unreadable devices. ``fault``: the error, if no device could be read."""

    want: Wanted
    have: Snapshot
    fault: OSError | None = None


def observed(machine: Machine, kind: Observer, want: Wanted, have: Snapshot, scope: Scope) -> Observed:
    """Read a kind's state of the devices in ``scope``. A device that cannot be read loses its state of all kinds."""
    try:
        return Observed(want, have.merged(kind.NAME, scope, kind.observe(machine, want, scope)))
    except OSError:
        return _one_by_one(machine, kind, want, have, scope)


def _one_by_one(machine: Machine, kind: Observer, want: Wanted, have: Snapshot, scope: Scope) -> Observed:
    """Read each device by itself, after reading all of them at once has failed."""
    try:
        # First the host's part of the state. If that fails, the cause is not a device.
        state = dict(kind.observe(machine, evolve(want, nics={}), frozenset({HOST})))
    except OSError as error:
        return Observed(want, have.merged(kind.NAME, scope, {}), error)
    faults: dict[str, str] = {}
    for address in in_scope(want, scope):
        alone = evolve(want, nics={address: want.nics[address]})
        named = {name for name in scope or {address} if device_of(name) == address}
        try:
            state |= kind.observe(
                machine, alone, frozenset(named | ({HOST} if scope is None or HOST in scope else set()))
            )
        except OSError as error:
            faults[address] = f"{kind.NAME}: {error}"
    have = have.merged(kind.NAME, scope, state)
    for address, why in faults.items():
        have = have.without(address, why)
    return Observed(quarantined(want, have), have)


def quarantined(want: Wanted, have: Snapshot) -> Wanted:
    """``want`` with the unreadable devices moved to ``missing``."""
    resolved = resolve(want.spec, have.functions)
    failed = {function.address for function in have.functions if function.unreadable}
    nics = {address: nic for address, nic in want.nics.items() if address not in failed}
    return evolve(resolved, nics=nics)


def unreadable(want: Wanted, have: Snapshot) -> list[Outcome]:
    """A failure for each NIC of the spec that cannot be read."""
    why = {function.address: function.unreadable for function in have.functions}
    return [
        _failed(Change("devices", address, "state", "unreadable", "readable", required=nic.required), why[address])
        for address, nic in sorted(want.unreadable.items())
    ]


def not_observed(kind: Observer, error: OSError) -> Outcome:
    """The failure of a kind whose state cannot be read at all."""
    return _failed(Change(kind.NAME, HOST, "state", "unreadable", "readable"), str(error))


def _failed(change: Change, why: str) -> Outcome:
    return Outcome(change, "failed", why, UNREADABLE_DEVICE)
