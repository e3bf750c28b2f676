"""Original values: the agent notes a value before it first changes it, and restores it when the spec no longer gives it.

Only kinds with ``readings`` or ``reading`` (agent/kinds) have originals. Originals last for one boot, as the values do: their
file is in /run.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from contextlib import suppress
from io import FileIO
from pathlib import Path

from attrs import define, evolve, field, frozen

from agent.hardware.functions import Function
from agent.kinds import ANY_VALUE, Kind, Reading
from agent.machine import Machine
from agent.report.names import RUN_FOLDER
from agent.report.records import HOST, Change, Condition, Value, to_plain, value_from_plain
from agent.report.target import device_of
from agent.runtime import journal, write_atomically
from agent.spec.nic import Nic
from agent.spec.selector import Selector
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

ORIGINALS = "originals.jsonl"
"""The file's name in the runtime directory."""

Key = tuple[str, str, str]
"""A change's kind, target and field."""

UNREADABLE = "originals that cannot be read"
"""Stands for a kind in the line of a rewritten file that says: the file before it had lines that could not be read."""

SPARE = 1000
"""How many superseded lines the file may have before it is rewritten."""


@frozen
class _Original:
    """``value``: the value before the first change. ``written``: the values that the agent may have written since, newest last.

    ``written`` has several values, or :data:`ANY_VALUE`, only while the result of a write is unknown, because the write failed
    or the agent was killed. An original without ``written`` values is forgotten.
    """

    value: Value
    written: tuple[Value, ...]


@define
class Originals:
    """The originals of this boot.

    A file notes each change before it is made, and again afterwards. So a crash at any time loses no original, and the agent
    never takes a value that it wrote for an original.
    """

    _path: Path | None = None
    _originals: dict[Key, _Original] = field(factory=dict)
    _restoring: set[Key] = field(factory=set)
    _file: FileIO | None = None
    _lines: int = 0
    _unreadable: bool = False
    _unwritten: str = ""

    @classmethod
    def load(cls, path: Path, keep: bool = True) -> Originals:
        """Read the originals that an agent of this boot has noted, and rewrite the file without superseded lines.

        The agent was killed while it wrote a last line that has no line end: that line's change was not made yet. Any other
        line that cannot be read is an original that is lost.

        :param keep: note changes in the file; False never writes to it.
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
            elif read[1].written:
                originals._originals[read[0]] = read[1]
            else:
                originals._originals.pop(read[0], None)
        if keep:
            originals._rewrite()
        return originals

    @property
    def condition(self) -> Condition | None:
        """``OriginalsKept`` if originals are lost, or would be if the agent were killed now; else None."""
        if self._unwritten:
            message = f"{self._unwritten}; they are lost if the agent ends now"
            return Condition(
                "OriginalsKept", "False", "NotWritten", message, severity="warn", remedy="make room in /run"
            )
        if self._unreadable:
            message = (
                f"{ORIGINALS} in {RUN_FOLDER} has lines that cannot be read: values that the agent changed before, and that "
                "leave the spec, may stay as they are until the next boot"
            )
            remedy = "set those by hand"
            return Condition("OriginalsKept", "False", "Unreadable", message, severity="warn", remedy=remedy)
        return None

    def keep(self, machine: Machine, want: Wanted, kind: Kind, change: Change) -> None:
        """Note the value that a change replaces. Call it before the change is made.

        A change that restores an original needs no note: the original is forgotten when its value is read back.

        :raises OSError: that value cannot be read.
        """
        for transient in kind.transients(machine, want, change):
            self._replace(transient)
        if not change.original and (kind.readings is not None or kind.reading is not None):
            for noted in kind.originals_of(machine, change, self._originals.keys()):
                self._replace(noted)

    def _replace(self, change: Change) -> None:
        """Note that a change may replace its ``before`` by its ``after``."""
        key = _key(change)
        known = self._originals.get(key)
        if known is not None:
            written = (*(value for value in known.written if value != change.after), change.after)
            self._remember(key, _Original(known.value, written))
        elif change.before is not None and not self._unreadable:
            # If originals were lost, the agent may have written the present value itself. Then it is no original.
            self._remember(key, _Original(change.before, (change.after,)))

    def made(self, machine: Machine, kind: Kind, change: Change) -> None:
        """Note that a change was made: of the values that the agent wrote, only the newest is there."""
        if change.original:
            return
        # If the value cannot be read now, each value that may have been written stays noted until the next write.
        with suppress(OSError):
            for noted in kind.originals_of(machine, change, self._originals.keys()):
                self._written(noted, noted.before if noted.after == ANY_VALUE else noted.after)

    def not_made(self, machine: Machine, kind: Kind, change: Change) -> None:
        """Note that a change failed: a value that others set from now on is not the agent's."""
        with suppress(OSError):
            for noted in () if change.original else kind.originals_of(machine, change, self._originals.keys()):
                if noted.after == ANY_VALUE:
                    self._written(noted, noted.before)

    def _written(self, noted: Change, value: Value) -> None:
        """Note the one value of the agent's that is there now."""
        known = self._originals.get(_key(noted))
        if known is not None:
            self._remember(_key(noted), evolve(known, written=() if value == known.value else (value,)))

    def give_up(self, change: Change) -> None:
        """Forget an original that the device cannot have any more, such as channels that its VFs use now."""
        if change.original:
            self._forget(_key(change))

    def restoring(
        self, machine: Machine, kind: Kind, want: Wanted, have: Snapshot, device_left: bool = False, whole: bool = True
    ) -> list[Change]:
        """The changes that restore values that the spec no longer gives. A value that others have changed is not restored.

        :param device_left: ``want`` comes from :meth:`removed_devices`.
        :param whole: look at all originals. False: look only at those whose restoring has begun, usually none.
        """
        if not (keys := self._originals if whole else self._restoring):
            return []
        # A value of the host leaves the spec, but never with a device.
        mine = sorted(key for key in keys if key[0] == kind.NAME and not (device_left and key[1] == HOST))
        if not mine:
            return []
        readings = {(reading.target, reading.field): reading for reading in read(kind, want, have)}
        changes = []
        for key in mine:
            original = self._originals[key]
            _, target, name = key
            reading = readings.get((target, name))
            if reading is None:
                reading = read_one(machine, kind, want, Change(*key, original.value, original.written[-1]))
            if reading is None or (reading.wanted and not device_left):
                continue
            if reading.value == original.value or not {reading.value, ANY_VALUE} & set(original.written):
                self._forget(key)
                continue
            restore = Change(*key, reading.value, original.value, reading.disruption, required=False, original=True)
            changes.append(evolve(restore, skip_if_owned=reading.skip_if_owned))
            self._restoring.add(key)
        return changes

    def removed_devices(self, want: Wanted, functions: tuple[Function, ...]) -> Wanted:
        """The devices that are no longer in the spec, and have values that the agent wrote, as NICs without settings."""
        known = {function.address for function in functions if function.unreadable and function.vendor}
        if len(want.missing) > len(want.unreadable.keys() & known):
            return Wanted(want.spec)  # a device that seems to have left may be a NIC that is missing now
        devices = {device_of(target) for _, target, _ in self._originals} - want.nics.keys()
        nics = {
            function.address: WantedNic(
                Nic(function.address.replace(":", "-"), Selector(pci=function.address), required=False), function
            )
            for function in functions
            if function.address in devices and not function.hung and not function.unreadable
        }
        return Wanted(want.spec, nics)

    def _forget(self, key: Key) -> None:
        known = self._originals.get(key)
        if known is not None:
            self._remember(key, evolve(known, written=()))

    def _remember(self, key: Key, original: _Original) -> None:
        """Note an original, or forget it if its ``written`` is empty."""
        if self._originals.get(key) == original:
            return
        if original.written:
            self._originals[key] = original
        else:
            del self._originals[key]
            self._restoring.discard(key)
        if self._path is None:
            return
        if self._file is None or self._unwritten or self._lines > SPARE + 2 * len(self._originals):
            self._rewrite()
            return
        line = _line(key, original)
        try:
            # A full file system may accept only a part of the line.
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._lines += 1
        except OSError as error:
            self._not_written(error)

    def _not_written(self, error: OSError) -> None:
        """Report the error once in the journal, and in the condition as long as it lasts. Repairs go on."""
        why = f"{self._path} cannot be written: {error.strerror}"
        if not self._unwritten:
            journal(f"{why}; until it can be, a restart of the agent forgets what values were before")
        self._unwritten = why

    def _rewrite(self) -> None:
        """Rewrite the file with one line for each original. If that fails, the file is as before."""
        assert self._path is not None  # noqa: S101  callers check it
        lost = [_line((UNREADABLE, "", ""), _Original(None, ()))] if self._unreadable else []
        lines = [*lost, *(_line(key, original) for key, original in self._originals.items())]
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
    text = json.dumps([*key, to_plain(original.value), to_plain(original.written)]).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_line(line: bytes) -> tuple[Key, _Original] | None:
    """Read a line that :func:`_line` has written; None for any other line.

    The checksum shows that no byte was changed. Another version of the agent may have written lines of another form.
    """
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        kind, target, name, value, written = json.loads(text)
        read = _Original(value_from_plain(value), tuple(map(value_from_plain, written)))
    except (ValueError, TypeError):
        return None
    return (str(kind), str(target), str(name)), read


def read(kind: Kind, want: Wanted, have: Snapshot) -> list[Reading]:
    """The readings of a kind's values; empty if the kind has no originals."""
    return [] if kind.readings is None else list(kind.readings(want, have))


def read_one(machine: Machine, kind: Kind, want: Wanted, kept: Change) -> Reading | None:
    """The reading of one value of a kind that observes only what the spec gives; None if the value cannot be read now."""
    try:
        return None if kind.reading is None else kind.reading(machine, want, kept)
    except OSError:
        return None  # the device is gone, or does not have such a value now
