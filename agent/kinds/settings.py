"""Kinds of settings that a function or its netdev has by name: each is a row (:class:`Settings`), and one walk serves all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from attrs import evolve, frozen

from agent.driver_families import DriverFamily, family_of
from agent.hardware.functions import ifindex, netdev, pci_of
from agent.kinds import Kind, Reading, links, vf_links
from agent.machine import Machine, Setting
from agent.report.records import Change, Disruption, Numbers, Value
from agent.report.target import is_vf, vf_index
from agent.state.scope import Scope, functions_in_scope, in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

T = TypeVar("T")
Read = Mapping[str, Setting]
Asked = Mapping[str, Value]


@frozen
class Observed:
    """The settings of one function: those that the spec gives (``asked``) and those that it has (``read``)."""

    target: str
    asked: Asked
    read: Read
    status: links.LinkStatus | None
    nic: WantedNic

    @property
    def driver(self) -> str | None:
        """The function's driver, if that is known."""
        return self.status.driver if self.status is not None else None


def of_netdev(machine: Machine, pci: str, read: Callable[[int], T]) -> tuple[str, T] | None:
    """Call ``read`` with the index of a function's netdev.

    :returns: the netdev's name and what ``read`` returned; None if the netdev is not in the host's network namespace.
    """
    name = netdev(machine.files, pci)
    index = ifindex(machine.files, name) if name else 0
    try:
        return (name, read(index)) if name and index else None
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise


def is_ready(status: links.LinkStatus | None) -> bool:
    """Whether a netdev is there, and udev has initialised it."""
    return status is not None and status.ready


@frozen(kw_only=True)
class Settings:
    """One kind of settings.

    ``given``: what the spec gives, by target and name. ``read`` gets the function's PCI address and the names that are asked
    for, and returns None while the function or its netdev is gone. ``write`` gets the target and the values.
    ``usable``: whether the settings can be made now. ``flaps``: whether a driver takes the link down to change one.
    ``limit``: why wanted values cannot be set, and the remedy; the remedy alone if they may be refused.
    ``one_request``: all numbers of a function are set at once. ``excluded``: the numbers that are 0 if a function has those
    that are asked for. ``order``: the turn of a change among those of its kind.
    """

    name: str
    after: tuple[str, ...]
    given: Callable[[WantedNic], Mapping[str, Asked]]
    read: Callable[[Machine, str, Collection[str]], Read | None]
    write: Callable[[Machine, str, Mapping[str, Any]], None]
    usable: Callable[[links.LinkStatus | None], bool]
    flaps: Callable[[DriverFamily, str], bool] = lambda family, name: False
    limit: Callable[[Observed, Asked], tuple[str, str]] = lambda device, wanted: ("", "")
    one_request: bool = False
    excluded: Callable[[Collection[str]], tuple[str, ...]] = lambda asked: ()
    order: Callable[[Change], int] = lambda change: 0

    def observe(self, machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Read | None]]:
        """The settings of each function for which the spec gives some, by target; None for one that is away."""
        given = {address: asked for address in in_scope(want, scope) if (asked := self.given(want.nics[address]))}
        # Most specs give none: for them not even the functions are listed.
        functions = functions_in_scope(machine.files, want, scope) if given else {}
        return {
            address: {
                target: self._read(machine, pci, asked[target])
                for target, pci in functions[address].items()
                if target in asked
            }
            for address, asked in given.items()
        }

    def _read(self, machine: Machine, pci: str, asked: Asked) -> Read | None:
        read = self.read(machine, pci, asked)
        return None if read is None else {**dict.fromkeys(asked, Setting(None)), **read}

    def plan(self, want: Wanted, have: Snapshot) -> list[Change]:
        """Every setting that differs; one change for each function whose numbers are set in one request."""
        changes = [change for device in self._observed(want, have) for change in self._planned(device)]
        return changes if self.one_request else self.arranged(changes)

    def _observed(self, want: Wanted, have: Snapshot) -> Iterator[Observed]:
        for address, observed in sorted(have[self.name].items()):
            nic = want.nics.get(address)
            statuses = {**have[links.NAME].get(address, {}), **have[vf_links.NAME].get(address, {})}
            asked = self.given(nic) if nic is not None else {}
            for target, read in observed.items():
                status: links.LinkStatus | None = statuses.get(target)
                if nic is not None and read is not None and target in asked and self.usable(status):
                    yield Observed(target, asked[target], read, status, nic)

    def _planned(self, device: Observed) -> Iterator[Change]:
        read, wanted = device.read, dict(device.asked)
        excluded = self.excluded(wanted)
        if all(name in read and read[name].value for name in excluded):
            # Going from one mode to the other takes a single request.
            wanted |= dict.fromkeys(excluded, 0)
        differing = {name: after for name, after in wanted.items() if name in read and read[name].value != after}
        if differing and self.one_request:
            before = _numbers({name: read[name].value for name in wanted})
            yield self._change(device, self.name, before, _numbers(wanted), wanted)
        elif not self.one_request:
            for name, after in differing.items():
                yield self._change(device, name, read[name].value, after, {name: after})

    def _change(self, device: Observed, field: str, before: Value, after: Value, wanted: Asked) -> Change:
        blocker, remedy = self.limit(device, wanted)
        is_up = device.status is not None and device.status.link is not None and device.status.link.up
        changeable = all(device.read[name].value is not None and device.read[name].changeable for name in wanted)
        flaps = is_up and changeable and not blocker and self.flaps(family_of(device.driver), field)
        disruption = Disruption.LINK_FLAP if flaps else Disruption.NONE
        owned = is_vf(device.target) and device.nic.vf(vf_index(device.target)).owner != "trackbed"
        return Change(
            self.name, device.target, field, before, after, disruption, (), blocker, remedy, skip_if_owned=owned
        )

    def reading(self, machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
        """One setting that the agent has changed, as it is now."""
        nic = want.nics.get(kept.device)
        asked = self.given(nic).get(kept.target, {}) if nic is not None else {}
        # An original of the other mode waits until the spec's numbers leave.
        if nic is None or kept.field in asked or (bool(kept.before) and kept.field in self.excluded(asked)):
            return None
        pci = pci_of(machine.files, kept.target)
        status = links.status(machine, pci)
        if not self.usable(status):
            return None
        now = (self.read(machine, pci, [kept.field]) or {}).get(kept.field, Setting(None))
        costs = status.link is not None and status.link.up and self.flaps(family_of(status.driver), kept.field)
        disruption = Disruption.LINK_FLAP if costs else Disruption.NONE
        most, before = now.maximum, kept.before
        # In one request with the spec's own numbers it would have these refused, too.
        blocker = f"{kept.field} is {most} at most now" if _exceeds(before, most) else ""
        value = now.value if now.requested is None else now.requested
        return Reading(value, False, disruption, is_vf(kept.target), blocker)

    def arranged(self, changes: list[Change]) -> list[Change]:
        """In the order of the kind; one change for each function whose numbers are set in one request, restored ones too."""
        if not self.one_request:
            return sorted(changes, key=self.order)
        by_target: dict[str, list[Change]] = {}
        for change in changes:
            by_target.setdefault(f"{change.target} {change.blocker}", []).append(change)
        return [_joined(together) for together in by_target.values()]

    def requested(self, machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
        """``originals_of`` of a kind whose settings are requested: the request is the original.

        The kernel keeps a requested feature off while one that it depends on is off.
        """
        now = (self.read(machine, pci_of(machine.files, change.target), [change.field]) or {}).get(change.field)
        return [evolve(change, before=now.requested if now is not None else None)]

    def apply(self, machine: Machine, change: Change) -> None:
        """Set one setting, or the numbers of one request, after finding the function again."""
        values = change.after.present if isinstance(change.after, Numbers) else {change.field: change.after}
        self.write(machine, change.target, values)

    def kind(self, **parts: Any) -> Kind:
        """The kind of this row; ``parts``: others of its parts."""
        return Kind(
            NAME=self.name,
            AFTER=self.after,
            observe=self.observe,
            plan=self.plan,
            apply=self.apply,
            reading=self.reading,
            arranged=self.arranged,
            **parts,
        )


def _exceeds(value: Value, most: int | None) -> bool:
    return isinstance(value, int) and most is not None and value > most


def _number(value: Value) -> int | None:
    return value if isinstance(value, int) else None


def _numbers(values: Asked) -> Numbers:
    return Numbers.of({name: _number(value) for name, value in values.items()})


def _joined(changes: Sequence[Change]) -> Change:
    """The changes of one function as one. A number that is restored is a change of its own in ``changes``."""
    before: dict[str, int | None] = {}
    after: dict[str, int | None] = {}
    for change in changes:
        before |= change.before.values if isinstance(change.before, Numbers) else {change.field: _number(change.before)}
        after |= change.after.values if isinstance(change.after, Numbers) else {change.field: _number(change.after)}
    return evolve(
        changes[0],  # the spec's own, if it has one
        field=changes[0].kind,
        before=Numbers.of(before),
        after=Numbers.of(after),
        disruption=max(change.disruption for change in changes),
    )


def beyond(device: Observed, wanted: Asked) -> str:
    """Which wanted numbers exceed the device's maximum; empty if none does."""
    settings = ((name, value, device.read[name].maximum) for name, value in wanted.items())
    return ", ".join(
        f"{name} is {most} at most, the spec wants {value}" for name, value, most in settings if _exceeds(value, most)
    )
