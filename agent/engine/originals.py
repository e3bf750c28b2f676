"""What values were before the agent first changed them: what leaves the spec gets its original value back.

Only for kinds with ``readings`` or ``reading`` (agent/kinds), and only within a boot: the file lies in /run, as volatile as the
values.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from io import FileIO
from pathlib import Path

from attrs import define, evolve, field, frozen

from agent.hardware.functions import Function
from agent.kinds import Kind, Reading
from agent.machine import Machine
from agent.report.records import HOST, Change, Condition, Value
from agent.runtime import journal, write_atomically
from agent.spec.nic import Nic, Selector
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

ORIGINALS = "originals.jsonl"
"""The file's name in /run/trackbed."""

Key = tuple[str, str, str]
"""A change's kind, target and field."""


UNREADABLE = "originals that cannot be read"
"""In the place of a kind, in a line that says so of others: they were lost before the file was written anew."""

SPARE = 1000
"""Lines that the file may have beyond those that count, before it is written anew."""


@frozen
class _Original:
    """``value``: before the first change. ``ours``: what the agent may have written since, the last one last.

    It is several values only while the end of a write is not known: it failed, or the agent was killed.
    """

    value: Value
    ours: tuple[Value, ...]


@define
class Originals:
    """The originals of this boot.

    Each change is noted in a file before it is made, and once it was made, so that a crash at any time loses none and takes no
    value of ours for an original.
    """

    _path: Path | None = None
    _found: dict[Key, _Original] = field(factory=dict)
    _returning: set[Key] = field(factory=set)
    _file: FileIO | None = None
    _lines: int = 0
    _unreadable: bool = False
    _unwritten: str = ""

    @classmethod
    def load(cls, path: Path, keep: bool = True) -> Originals:
        """Read what an agent of this boot has kept in a file, and write the file anew, with what counts of it.

        A last line without an end was being written when the agent was killed: its change was not made yet. Any other line that
        cannot be read stands for an original that is lost.

        :param keep: write to it, too; else nothing is touched.
        """
        originals = cls(path if keep else None)
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return originals
        except OSError:
            lines = [b""]
        for line in lines:
            read = _read_line(line)
            if read is None or read[0][0] == UNREADABLE:
                originals._unreadable = True
            elif read[1].ours:
                originals._found[read[0]] = read[1]
            else:
                originals._found.pop(read[0], None)
        if keep:
            originals._write_anew()
        return originals

    @property
    def trouble(self) -> Condition | None:
        """What of the originals is lost, or would be if the agent were killed now; None: nothing."""
        if self._unwritten:
            message = f"{self._unwritten}; they are lost if the agent ends now: make room in /run"
            return Condition("OriginalsKept", "False", "NotWritten", message, severity="warn")
        if self._unreadable:
            message = (
                f"{ORIGINALS} in /run/trackbed has lines that cannot be read: values that the agent changed before, and that "
                "leave the spec, may stay as they are until the next boot; set those by hand"
            )
            return Condition("OriginalsKept", "False", "Unreadable", message, severity="warn")
        return None

    def keep(self, kind: Kind, change: Change) -> None:
        """Remember what a change replaces; called before it is made.

        One that gives a value back replaces nothing: it is forgotten once the value is read as it was.
        """
        for passing in kind.transients(change) if hasattr(kind, "transients") else ():
            self._replace(passing)
        if not change.original and (hasattr(kind, "readings") or hasattr(kind, "reading")):
            self._replace(change)

    def _replace(self, change: Change) -> None:
        key = _key(change)
        known = self._found.get(key)
        if known is not None:
            ours = (*(value for value in known.ours if value != change.after), change.after)
            self._remember(key, _Original(known.value, ours))
        elif change.before is not None and not self._unreadable:
            # With some originals lost, what is there now may be a value of ours: an original must not be made of it.
            self._remember(key, _Original(change.before, (change.after,)))

    def made(self, change: Change) -> None:
        """A change that was kept is made: what was ours before it is so no more."""
        known = self._found.get(_key(change))
        if known is not None and not change.original:
            ours = () if change.after == known.value else (change.after,)
            self._remember(_key(change), evolve(known, ours=ours))

    def give_up(self, change: Change) -> None:
        """A value that the device cannot have any more (channels that its VFs have now) is not given back."""
        if change.original:
            self._forget(_key(change))

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
                reading = read_one(machine, kind, want, Change(*key, original.value, original.ours[-1]))
            if reading is None and target == HOST and not hasattr(kind, "reading"):
                # What belongs to no device is read only while the spec has it.
                reading = Reading(target, name, original.ours[-1], wanted=False)
            if reading is None or (reading.wanted and not left):
                continue
            if reading.value == original.value or reading.value not in original.ours:
                self._forget(key)
                continue
            back = Change(*key, reading.value, original.value, reading.disruption, required=False, original=True)
            changes.append(evolve(back, skip_if_owned=reading.skip_if_owned))
            self._returning.add(key)
        return changes

    def left(self, want: Wanted, functions: tuple[Function, ...]) -> Wanted:
        """The devices that have left the spec and still have values of ours, as NICs of which nothing is wanted."""
        known = {function.address for function in functions if function.unreadable and function.vendor}
        if len(want.missing) > len(want.unreadable.keys() & known):
            return Wanted(want.spec)  # one of them may be a NIC of the spec that cannot be told for the moment
        devices = {target.partition("#")[0] for _, target, _ in self._found} - want.nics.keys()
        nics = {
            function.address: WantedNic(
                Nic(function.address.replace(":", "-"), Selector(pci=function.address), required=False), function
            )
            for function in functions
            if function.address in devices and not function.hung and not function.unreadable
        }
        return Wanted(want.spec, nics)

    def _forget(self, key: Key) -> None:
        known = self._found.get(key)
        if known is not None:
            self._remember(key, evolve(known, ours=()))

    def _remember(self, key: Key, original: _Original) -> None:
        """``ours`` empty: it is forgotten."""
        if self._found.get(key) == original:
            return
        if original.ours:
            self._found[key] = original
        else:
            self._found.pop(key, None)
            self._returning.discard(key)
        if self._path is None:
            return
        if self._file is None or self._unwritten or self._lines > SPARE + 2 * len(self._found):
            self._write_anew()
            return
        line = _line(key, original)
        try:
            # A full file system may take a part of it.
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._lines += 1
        except OSError as error:
            self._not_written(error)

    def _not_written(self, error: OSError) -> None:
        """Repairs go on; the journal says it once, and the condition as long as it lasts."""
        why = f"{self._path} cannot be written: {error.strerror}"
        if not self._unwritten:
            journal(f"{why}; until it can be, a restart of the agent forgets what values were before")
        self._unwritten = why

    def _write_anew(self) -> None:
        """The file with the lines that count, one for each original. That of a failed try is whole, or the one before."""
        assert self._path is not None  # noqa: S101  callers have seen to that
        lost = [_line((UNREADABLE, "", ""), _Original(None, ()))] if self._unreadable else []
        lines = [*lost, *(_line(key, original) for key, original in self._found.items())]
        try:
            if self._file is not None:
                self._file.close()
            write_atomically(self._path, b"".join(lines).decode())
            self._file = self._path.open("ab", buffering=0)
            self._lines, self._unwritten = len(lines), ""
        except OSError as error:
            self._not_written(error)


def _key(change: Change) -> Key:
    return change.kind, change.target, change.field


def _line(key: Key, original: _Original) -> bytes:
    text = json.dumps([*key, original.value, original.ours]).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_line(line: bytes) -> tuple[Key, _Original] | None:
    """What :func:`_line` has written; None: it is something else.

    The checksum is what tells a value with a byte changed from the value.
    """
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    kind, target, name, value, ours = json.loads(text)
    return (kind, target, name), _Original(value, tuple(ours))


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
