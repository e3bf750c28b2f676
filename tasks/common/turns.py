"""Has hosts take turns in an operation, although pyinfra runs it on all of them at the same time.

Few begin, and more follow once those have succeeded: 1, then 10 %, then 25 % of the hosts, never more than allowed.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import gevent
from attrs import Attribute, define, field
from gevent import Greenlet
from gevent.event import Event
from pyinfra.api.host import Host
from pyinfra.api.state import State

from tasks.common.data import Key, overrides_of

GROWTH = (1, "10%", "25%")
_PERCENT = re.compile(r"([1-9][0-9]?|100)%")


def share(_: object, attribute: Attribute[Any], value: object) -> None:
    """Validate a field: a number of hosts, or a percentage."""
    is_number = type(value) is int and value >= 1
    if not is_number and not (isinstance(value, str) and _PERCENT.fullmatch(value)):
        raise ValueError(f'{attribute.name}: {value!r} is not valid; give a number of hosts, or a percentage as "25%"')


def hosts_of(value: int | str, hosts: int) -> int:
    """How many of these hosts a share is, at least one."""
    return value if isinstance(value, int) else max(1, hosts * int(value.rstrip("%")) // 100)


@define
class Turns:
    """The turns of so many hosts. None has one once ``stop_at`` have failed.

    At most ``at_once`` are away at the same time: those that have a turn, and those that failed in theirs.
    """

    hosts: int
    at_once: int
    stop_at: int
    done: int = 0
    failed: list[str] = field(factory=list)
    _running: set[str] = field(factory=set)
    _waiting: deque[str] = field(factory=deque)
    _changed: Event = field(factory=Event)

    @property
    def limit(self) -> int:
        """How many hosts may have a turn at the same time now."""
        left, before = self.at_once - len(self.failed), self.done
        for size in (hosts_of(each, self.hosts) for each in GROWTH):
            if before < size:
                return min(size, left)
            before -= size
        return left

    def take(self, name: str) -> Literal["at once", "later", "never"]:
        """Wait for a host's turn, first come, first served. Returns whether the host had to wait.

        "never": it gets no turn, since too many hosts have failed.
        """
        when: Literal["at once", "later"] = "at once"
        self._waiting.append(name)
        if isinstance(mine := gevent.getcurrent(), Greenlet):
            # It may be killed, and nothing closes its generators then.
            mine.link(lambda _: self._give_up(name))
        while len(self.failed) < min(self.stop_at, self.at_once):
            if self._waiting[0] == name and len(self._running) < self.limit:
                self._waiting.popleft()
                self._running.add(name)
                self._tell()
                return when
            when = "later"
            self._changed.wait()
        return "never"

    def end(self, name: str, succeeded: bool | None) -> None:
        """End a host's turn, if it has one. ``succeeded`` is None if the host did nothing in it."""
        if name not in self._running:
            return
        self._running.remove(name)
        self.done += succeeded is True
        if succeeded is False:
            self.failed.append(name)
        self._tell()

    def _give_up(self, name: str) -> None:
        """The host does not wait any more, and has no turn."""
        if name in self._waiting:
            self._waiting.remove(name)
        self.end(name, False)
        self._tell()

    def _tell(self) -> None:
        # A new event: those that wait on the old one are woken by it, and wait on the new one next.
        before, self._changed = self._changed, Event()
        before.set()


class _Shares(Protocol):
    @property
    def at_once(self) -> int | str: ...
    @property
    def stop_at(self) -> int | str: ...


T = TypeVar("T", bound=_Shares)

_turns: WeakKeyDictionary[State, dict[tuple[str, str, _Shares], Turns]] = WeakKeyDictionary()


def turns_of(one: Host, key: Key[T]) -> Turns:
    """The turns of the hosts that have the key's value from the same group as a host, in this deploy."""
    mine = (key.name, *_group(one, key))
    turns = _turns.setdefault(one.state, {})
    if mine not in turns:
        hosts = sum(_group(each, key) == mine[1:] for each in one.state.inventory.get_active_hosts())
        turns[mine] = Turns(hosts, hosts_of(mine[2].at_once, hosts), hosts_of(mine[2].stop_at, hosts))
    return turns[mine]


def _group(one: Host, key: Key[T]) -> tuple[str, T]:
    """The last of a host's groups that gives the key or its overrides, and the host's value."""
    names = {key.name, overrides_of(key.name)}
    groups = [group for group in one.groups if names & one.inventory.get_group_data(group).keys()]  # type: ignore[no-untyped-call]
    return groups[-1] if groups else "all", key.read(one.data.dict(), one.name)  # type: ignore[no-untyped-call]
