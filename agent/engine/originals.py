"""What values were before the agent first changed them: what leaves the spec gets its original value back.

Only for kinds with ``readings`` or ``reading`` (agent/kinds), and only within a boot: the file lies in /run, as volatile as the
values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from attrs import define, evolve, field, frozen

from agent.hardware.functions import Function, Wanted, WantedNic
from agent.kinds import Kind, Reading
from agent.machine import Machine
from agent.report.records import HOST, Change, Value
from agent.spec.nic import Nic, Selector
from agent.state.snapshot import Snapshot

ORIGINALS = "originals.jsonl"
"""The file's name in /run/trackbed."""

Key = tuple[str, str, str]
"""A change's kind, target and field."""


@frozen
class _Original:
    """``value``: before the first change; ``ours``: what was written last."""

    value: Value
    ours: Value


@define
class Originals:
    """The originals of this boot; kept in a file to which a line is added for each, so that a crash loses none."""

    _path: Path | None = None
    _found: dict[Key, _Original] = field(factory=dict)
    _returning: set[Key] = field(factory=set)
    _replaced: tuple[Key, _Original] | None = None
    _file: TextIO | None = None

    @classmethod
    def load(cls, path: Path, keep: bool = True) -> Originals:
        """Read what an agent of this boot has kept in a file; lines that cannot be read are left out.

        :param keep: write to it, too; else nothing is touched.
        """
        originals = cls(path if keep else None)
        try:
            lines = path.read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            try:
                kind, target, name, value, ours = json.loads(line)
            except ValueError:
                continue  # written half when the agent was killed
            originals._found[kind, target, name] = _Original(value, ours)
        for key in [key for key, original in originals._found.items() if original.value == original.ours]:
            del originals._found[key]
        return originals

    def keep(self, kind: Kind, change: Change) -> None:
        """Remember what a change replaces; called before it is made.

        One that gives a value back replaces nothing: it is forgotten once the value is read as it was.
        """
        self._replaced = None
        if change.original or change.before is None or not (hasattr(kind, "readings") or hasattr(kind, "reading")):
            return
        key = (change.kind, change.target, change.field)
        known = self._found.get(key)
        if known is not None:
            self._replaced = key, known
        self._remember(key, _Original(change.before if known is None else known.value, change.after))

    def not_made(self) -> None:
        """The change that was kept last failed: what we wrote before it is still ours."""
        if self._replaced is not None:
            self._remember(*self._replaced)

    def give_up(self, change: Change) -> None:
        """A value that the device cannot have any more (channels that its VFs have now) is not given back."""
        if change.original:
            self._remember((change.kind, change.target, change.field), _Original(change.after, change.after))

    def returning(
        self, machine: Machine, kind: Kind, want: Wanted, have: Snapshot, left: bool = False, whole: bool = True
    ) -> list[Change]:
        """The changes that give back what no longer is in the spec; only values that still are as we wrote them.

        :param left: ``want`` is what :meth:`left` gave.
        :param whole: look for what has left the spec; else only at what is being given back already, which costs nothing.
        """
        keys = self._found if whole else self._returning
        # What belongs to no device leaves with the spec, never with a device.
        mine = {key: self._found[key] for key in keys if key[0] == kind.NAME and not (left and key[1] == HOST)}
        if not mine:
            return []
        readings = {(reading.target, reading.field): reading for reading in read(kind, want, have)}
        changes = []
        for key, original in sorted(mine.items(), key=lambda item: item[0]):
            _, target, name = key
            reading = readings.get((target, name))
            if reading is None:
                reading = read_one(machine, kind, want, Change(*key, original.value, original.ours))
            if reading is None and target == HOST and not hasattr(kind, "reading"):
                # What belongs to no device is read only while the spec has it.
                reading = Reading(target, name, original.ours, wanted=False)
            if reading is None or (reading.wanted and not left):
                continue
            if reading.value != original.ours or original.ours == original.value:
                self._remember(key, _Original(original.value, original.value))
                continue
            back = Change(*key, original.ours, original.value, reading.disruption, required=False, original=True)
            changes.append(evolve(back, yields=reading.yields))
            self._returning.add(key)
        return changes

    def left(self, want: Wanted, functions: tuple[Function, ...]) -> Wanted:
        """The devices that have left the spec and still have values of ours, as NICs of which nothing is wanted."""
        if want.missing:
            return Wanted(want.spec)  # one of them may be a NIC of the spec that cannot be told for the moment
        devices = {target.partition("#")[0] for _, target, _ in self._found} - want.nics.keys()
        nics = {
            function.address: WantedNic(
                Nic(function.address.replace(":", "-"), Selector(pci=function.address), required=False), function
            )
            for function in functions
            if function.address in devices and not function.hung
        }
        return Wanted(want.spec, nics)

    def _remember(self, key: Key, original: _Original) -> None:
        if self._found.get(key) == original:
            return
        if original.value == original.ours:
            self._found.pop(key, None)
            self._returning.discard(key)
        else:
            self._found[key] = original
        if self._path is not None:
            if self._file is None:
                self._file = self._path.open("a", buffering=1)
            self._file.write(json.dumps([*key, original.value, original.ours]) + "\n")


def read(kind: Kind, want: Wanted, have: Snapshot) -> list[Reading]:
    """What a kind tells of its values; nothing if their originals are of no use."""
    readings = getattr(kind, "readings", None)
    return list(readings(want, have)) if readings else []


def read_one(machine: Machine, kind: Kind, want: Wanted, kept: Change) -> Reading | None:
    """What a kind that observes no more than the spec gives tells of one value; None: it cannot be told now."""
    reading = getattr(kind, "reading", None)
    try:
        found: Reading | None = reading(machine, want, kept) if reading else None
    except OSError:
        return None  # a device that is gone, or has nothing of the kind for the moment
    return found
