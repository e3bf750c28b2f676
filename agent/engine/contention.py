"""A value that somebody else puts back again and again: after a while we stop, and say who it may be.

A pass that has to make a device anew (its VFs, its driver, its link) writes what hangs on that as well; that is nobody's
doing. So only the first kind, in the order of kinds, that had to be put right on a device in a pass is counted, and a netdev
that came back under another index begins anew, unless that was done to give it the value (a VF's MAC).
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field, frozen

from agent.report.records import Change, Condition, Outcome, Value

LIMIT = 5
"""How often a value may be put back within :data:`WINDOW` before it is left so."""

WINDOW = 600.0
PAUSE = 3600.0
"""Seconds after which one more write is tried."""

SUSPECTS: dict[str, tuple[str, ...]] = {
    "irqs": ("irqbalance", "tuned"),
    "rps": ("tuned",),
    "rfs": ("tuned",),
    "xps": ("tuned",),
    "sysctls": ("tuned",),
    "links": ("NetworkManager", "systemd-networkd", "ifplugd", "netplan"),
    "vf_links": ("NetworkManager", "systemd-networkd"),
    "vfs": ("sriov-network-config-daemon", "NetworkManager"),
    "vf_attributes": ("sriov-network-config-daemon", "libvirtd", "virtqemud", "NetworkManager"),
    "bindings": ("sriov-network-config-daemon", "driverctl", "libvirtd", "virtqemud"),
}
"""Programs known to set what a kind sets, by the name of their process."""

Write = tuple[Change, int]
"""A change, and the index of the netdev that its target has (0: none)."""

Identity = tuple[str, str, str, Value, int]


def suspect(kind: str, processes: frozenset[str]) -> str:
    """Who may be at it: those of the known programs that run, else what else there could be."""
    running = [name for name in SUSPECTS.get(kind, ()) if name in processes]
    return " or ".join(running) if running else "a driver or a script: none of the programs known to do so runs"


@frozen
class _Fight:
    outcome: Outcome
    until: float


@define
class Contention:
    """What was written when (seconds of a monotonic clock), and what is left alone for now.

    ``limit`` 0 never stops: for measurements that break the same thing over and over.
    """

    limit: int = LIMIT
    _written: dict[Identity, list[float]] = field(factory=dict)
    _fights: dict[Identity, _Fight] = field(factory=dict)

    def wrote(self, writes: Iterable[Write], now: float) -> None:
        """Note what a pass has written, in the order of the writing."""
        first: dict[str, str] = {}
        counted = [write for write in writes if first.setdefault(write[0].device, write[0].kind) == write[0].kind]
        for identity in dict.fromkeys(map(_identity, counted)):
            self._written.setdefault(identity, []).append(now)
        # What nobody has put back for that long is forgotten.
        self._written = {
            identity: recent
            for identity, times in self._written.items()
            if (recent := [when for when in times if now - when <= WINDOW])
        }

    def held_back(self, write: Write, processes: frozenset[str], now: float) -> Outcome | None:
        """The outcome of a change that is left alone, because the same was put back too often."""
        change, identity = write[0], _identity(write)
        fight = self._fights.get(identity)
        if fight is not None and now < fight.until:
            return fight.outcome
        if fight is not None:
            # One more try: if it is put back as well, the pause begins anew.
            del self._fights[identity]
            self._written[identity] = [now] * (self.limit - 1)
            return None
        recent = [when for when in self._written.get(identity, ()) if now - when <= WINDOW]
        if not self.limit or len(recent) < self.limit:
            return None
        error = f"put back {len(recent)} times within {WINDOW / 60:.0f} minutes by {suspect(change.kind, processes)}"
        remedy = f"stop that, then: trackbed apply; else it is tried again after {PAUSE / 60:.0f} minutes"
        outcome = Outcome(change, "blocked", error, remedy)
        self._fights[identity] = _Fight(outcome, now + PAUSE)
        return outcome

    def forget(self) -> None:
        """Another spec, or somebody who says that it is settled: begin anew."""
        self._written.clear()
        self._fights.clear()

    def keep(self, remaining: Iterable[Write]) -> None:
        """Drop the fights about what is as it should be, or no longer wanted."""
        for identity in self._fights.keys() - {_identity(write) for write in remaining}:
            del self._fights[identity]
            self._written.pop(identity, None)

    def condition(self, required: Iterable[Write]) -> Condition:
        """``Uncontended``: False names the first value that is left alone, and who may be at it."""
        fights = [fight.outcome for write in required if (fight := self._fights.get(_identity(write))) is not None]
        if not fights:
            return Condition("Uncontended", "True", "NobodyInterferes")
        more = f" (and {len(fights) - 1} more)" if len(fights) > 1 else ""
        message = f"{fights[0].change}: {fights[0].error}; {fights[0].remedy}{more}"
        return Condition("Uncontended", "False", "Contended", message)


def _identity(write: Write) -> Identity:
    change, ifindex = write
    return change.kind, change.target, change.field, change.after, ifindex
