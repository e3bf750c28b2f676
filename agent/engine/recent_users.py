"""Caches the users of a device for a moment: a lookup is costly, and several changes of a pass need the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import define, field, frozen

from agent.engine.users import User, reaches, users
from agent.hardware.functions import driver, pci_of
from agent.machine import Machine
from agent.report.records import Change, Mode
from agent.state.wanted import Wanted

FRESH = 0.2
"""Seconds for which a lookup stays valid; longer where the lookup itself took longer."""


@frozen
class _Lookup:
    """The users that were found, by target. ``targets``: the functions that were looked at; None: all of the device.

    ``complete``: all users were looked for, not only owners. ``until``: the time up to which the lookup is valid.
    """

    until: float
    targets: frozenset[str] | None
    complete: bool
    users: Mapping[str, tuple[User, ...]]

    def answers(self, change: Change, complete: bool, now: float) -> bool:
        """Whether it is recent and covers every function that a change reaches."""
        covered = self.targets is None or reaches(change) in self.targets
        return covered and (self.complete or not complete) and now <= self.until


@define
class RecentUsers:
    """Looks up users of devices. ``planned``: the changes that come next; one lookup covers those of the same device."""

    _machine: Machine
    _clock: Callable[[], float]
    _doing: Callable[[str, Mode], None]
    planned: Sequence[Change] = field(default=(), init=False)
    _lookups: dict[str, _Lookup] = field(factory=dict, init=False)

    def forget(self) -> None:
        """Look up anew: the devices are read again."""
        self._lookups.clear()

    def recent(self, want: Wanted, change: Change, complete: bool) -> Mapping[str, tuple[User, ...]]:
        """The users of what a change reaches, as they were a moment ago.

        That is enough to defer a change, or to leave it to an owner. Call :meth:`now` too before the write.

        :param complete: look for all users. False: at least for the owners (containers and virtual machines that were given a
            function), which costs much less.
        """
        device = change.device
        lookup = self._lookups.get(device)
        if lookup is None or not lookup.answers(change, complete, self._clock()):
            reached = [reaches(each) for each in (change, *self.planned) if each.device == device]
            targets = None if None in reached else frozenset(target for target in reached if target)
            lookup = self._lookups[device] = self._look_up(want, device, complete, targets)
        return lookup.users

    def now(self, want: Wanted, change: Change, complete: bool) -> Mapping[str, tuple[User, ...]]:
        """As :meth:`recent`, looked up now. A VF without a driver, such as a new one, has no owner."""
        if not complete and not _has_driver(self._machine, change.target):
            return {}
        target = reaches(change)
        return self._look_up(want, change.device, complete, None if target is None else frozenset({target})).users

    def _look_up(self, want: Wanted, device: str, complete: bool, targets: frozenset[str] | None) -> _Lookup:
        if device not in want.nics:
            return _Lookup(0.0, targets, complete, {})
        self._doing("users", "read")
        began = self._clock()
        by_target = users(self._machine, want, device, targets, complete)
        ended = self._clock()
        return _Lookup(ended + max(FRESH, ended - began), targets, complete, by_target)


def _has_driver(machine: Machine, target: str) -> bool:
    try:
        return driver(machine.files, pci_of(machine.files, target)) is not None
    except FileNotFoundError:
        return False  # there is no such VF
