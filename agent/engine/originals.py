"""Original values: the agent notes a value before it first changes it, and restores it when the spec no longer gives it.

Only kinds with ``reading`` (agent/kinds) have originals. Originals last for one boot, as the values do: their
file is in /run.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections import Counter
from contextlib import suppress
from io import FileIO
from pathlib import Path

from attrs import define, evolve, field, frozen

from agent.hardware.functions import Function
from agent.kinds import ANY_VALUE, Kind
from agent.machine import Machine
from agent.report.names import RUN_FOLDER
from agent.report.reasons import condition
from agent.report.records import HOST, Change, Condition, Numbers, Place, Value, to_plain, value_from_plain
from agent.report.target import device_of
from agent.runtime import journal, write_atomically
from agent.spec.nic import Nic
from agent.spec.selector import Selector
from agent.state.selection import may_be, unfilled
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

ORIGINALS = "originals.jsonl"
"""The file's name in the runtime directory."""

UNREADABLE = "originals that cannot be read"
"""The kind that a rewritten file gives in a line of its own if lines of the file before it could not be read."""

SPARE = 1000
"""How many superseded lines the file may have before it is rewritten."""


LOOKS = 3
"""After so many full passes a value that reads as before is forgotten, also if no reading has shown what the agent wrote."""


@frozen
class _Original:
    """``value``: the value before the first change. ``written``: the values that the agent may have set since, newest last.

    They are several until a reading has shown the newest: the write may have failed, may take effect late, or the agent was
    killed. :data:`ANY_VALUE` among them: several writes make the change. An original without ``written`` values is forgotten.
    """

    value: Value
    written: tuple[Value, ...]

    @property
    def seen(self) -> bool:
        """Whether a reading has shown what the agent wrote last."""
        return len(self.written) == 1 and self.written[0] != ANY_VALUE


@define
class Originals:
    """The originals of this boot.

    A file notes each change before it is made, and again afterwards. So a crash at any time loses no original, and the agent
    never takes a value that it wrote for an original.
    """

    _path: Path | None = None
    _originals: dict[Place, _Original] = field(factory=dict)
    _restoring: set[Place] = field(factory=set)
    _looks: Counter[Place] = field(factory=Counter)
    _undecided: dict[str, list[str]] = field(factory=dict)
    _distinct: set[tuple[str, Selector]] = field(factory=set)
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
            if read is None or read[0].kind == UNREADABLE:
                originals._unreadable = True
                continue
            key, original = read
            originals._originals.pop(key, None)
            if original.written:
                originals._originals[key] = original
        if keep:
            originals._rewrite()
        return originals

    @property
    def condition(self) -> Condition | None:
        """``OriginalsKept`` if originals are or may get lost, or wait for a missing NIC; else None."""
        if self._unwritten:
            message = f"{self._unwritten}; they are lost if the agent ends now"
            return condition("OriginalsKept", "NotWritten", message, severity="warn")
        if self._unreadable:
            message = (
                f"{ORIGINALS} in {RUN_FOLDER} has lines that cannot be read: values that the agent changed before, and that "
                "leave the spec, may stay as they are until the next boot"
            )
            return condition("OriginalsKept", "Unreadable", message, severity="warn")
        if self._undecided:
            return self._waiting()
        return None

    def _waiting(self) -> Condition:
        devices = Counter(device_of(target) for _, target, _ in self._originals)
        each = (
            f"{address} may be NIC {' or '.join(entries)}, which is missing or left alone: "
            f"{devices[address]} values that the agent set there stay"
            for address, entries in sorted(self._undecided.items())
        )
        return condition("OriginalsKept", "NicMissing", "; ".join(each), severity="warn")

    def keep(self, machine: Machine, want: Wanted, kind: Kind, change: Change) -> None:
        """Note the values that a change replaces. Call it before the change is made.

        :raises OSError: such a value cannot be read.
        """
        noted = self._noted(machine, kind, change)
        for transient in kind.transients(machine, want, change):
            self._replace(transient, new=True)
            # What is set in passing is restored by the passes for the events of this change, too.
            self._restoring |= {transient.place} & self._originals.keys()
        # What an earlier change has set along is no original now. Nor is that of a netdev that was made since.
        first = not change.original and not any(each.place in self._originals for each in noted)
        for along in kind.set_along(machine, want, change):
            self._replace(along, new=first)
        for each in noted:
            after = ANY_VALUE if kind.in_steps(change) else each.after
            self._replace(evolve(each, after=after), new=not change.original)

    def _noted(self, machine: Machine, kind: Kind, change: Change) -> list[Change]:
        """The values that a change sets, as changes of one value each."""
        if kind.reading is None:
            return []
        noted = [change] if change.original else kind.originals_of(machine, change, self._originals.keys())
        return [single for each in noted for single in _singles(each)]

    def _replace(self, change: Change, new: bool) -> None:
        """Note that a change may replace its ``before`` by its ``after``. ``new``: also if no original is known."""
        key = change.place
        known = self._originals.get(key)
        del self._looks[key]  # of this write no effect was looked for yet
        # A value that was back, and differs now, is another program's.
        unknown = known is None or (known.written == (known.value,) and change.before != known.value)
        if unknown and new and change.before is not None and not self._unreadable:
            # If originals were lost, the agent may have written the present value itself. Then it is no original.
            known = _Original(change.before, (change.before,))
        if known is not None:
            written = (*(value for value in known.written if value != change.after), change.after)
            self._remember(key, evolve(known, written=written))

    def failed(self, machine: Machine, kind: Kind, change: Change) -> None:
        """Note that a change failed: a value that others set from now on is not the agent's."""
        with suppress(OSError):
            for each in self._noted(machine, kind, change):
                known = self._originals.get(each.place)
                if known is not None and each.after == ANY_VALUE:
                    others = (value for value in known.written if value not in (ANY_VALUE, each.before))
                    self._remember(each.place, evolve(known, written=(*others, each.before)))

    def seen(self, machine: Machine, kind: Kind, change: Change) -> None:
        """Note that a reading has shown a change that was made: of the agent's values, only the newest is there."""
        # If the value cannot be read now, each value that may have been written stays noted until the next change.
        with suppress(OSError):
            for each in self._noted(machine, kind, change):
                known = self._originals.get(each.place)
                value = each.before if each.after == ANY_VALUE else each.after
                if known is not None:
                    self._remember(each.place, evolve(known, written=(value,)))

    def restoring(
        self, machine: Machine, kind: Kind, want: Wanted, have: Snapshot, device_left: bool = False, whole: bool = True
    ) -> list[Change]:
        """The changes that restore values that the spec no longer gives. A value that others have changed is not restored.

        :param device_left: ``want`` comes from :meth:`removed_devices`.
        :param whole: look at all originals. False: look only at those whose restoring has begun, usually none.
        """
        keys = self._originals if whole else self._restoring
        if kind.reading is None or not keys:
            return []
        avoided = {function.address for function in have.functions if function.hung or function.unreadable}
        # A value of the host leaves the spec, but never with a device.
        mine = sorted(
            key
            for key in keys
            if key.kind == kind.NAME
            and device_of(key.target) not in avoided
            and not (device_left and key.target == HOST)
        )
        if not mine:
            return []
        changes: list[Change] = []
        over: list[Place] = []
        for key in mine:
            original = self._originals[key]
            reading = None
            with suppress(OSError):  # the device is gone, or does not have such a value now
                reading = kind.reading(machine, want, have, Change(*key, original.value, original.written[-1]))
            if reading is None or reading.value is None or (reading.wanted and not device_left):
                continue
            value = original.value if reading.instead is None else reading.instead
            if reading.value == value:
                over += [key] if reading.instead is None and self._is_restored(key, original, whole) else []
            elif {reading.value, ANY_VALUE}.isdisjoint(original.written):
                over.append(key)
            else:
                restore = Change(*key, reading.value, value, reading.disruption, required=False, original=True)
                changes.append(evolve(restore, skip_if_owned=reading.skip_if_owned, blocker=reading.blocker))
                self._restoring.add(key)
        if over:
            # What a change of another value sets along with it is not over before that one is.
            kept = [Change(*key, None, original.value) for key, original in self._originals.items() if key not in over]
            along = {a.place for each in kept if each.kind == kind.NAME for a in kind.set_along(machine, want, each)}
            for key in over:
                if key not in along:
                    self._remember(key, evolve(self._originals[key], written=()))
        return changes

    def _is_restored(self, key: Place, original: _Original, whole: bool) -> bool:
        """Whether a value that reads as it was before will stay so: no write of the agent's can still take effect."""
        self._looks[key] += whole
        return original.seen or original.written[-1] == original.value or self._looks[key] >= LOOKS

    def removed_devices(self, want: Wanted, functions: tuple[Function, ...]) -> Wanted:
        """The devices that are no longer in the spec, and have values that the agent wrote, as NICs without settings.

        A device that may be a NIC of the spec is left alone, and :attr:`condition` says so.
        """
        devices = {device_of(target) for _, target, _ in self._originals} - want.nics.keys()
        left = {
            function.address: function
            for function in functions
            if function.address in devices and not function.hung and not function.unreadable
        }
        # An entry that lacks its NIC beside another one of the spec does not mean that one.
        self._distinct |= {
            (address, entry.entry.select) for entry in unfilled(want.spec, functions) for address in want.nics
        }
        self._undecided = {}
        nics = {}
        for address, function in left.items():
            entries = may_be(want.spec, functions, function)
            if names := [entry.name for entry in entries if (address, entry.select) not in self._distinct]:
                self._undecided[address] = names
                continue
            nic = Nic(address.replace(":", "-"), Selector(pci=address), required=False)
            nics[address] = WantedNic(nic, function)
        return Wanted(want.spec, nics)

    def _remember(self, key: Place, original: _Original) -> None:
        """Note an original, or forget it if its ``written`` is empty."""
        if self._originals.get(key) == original:
            return
        if original.written:
            self._originals[key] = original
        else:
            del self._originals[key], self._looks[key]
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
        lost = [_line(Place(UNREADABLE, "", ""), _Original(None, ()))] if self._unreadable else []
        lines = [*lost, *(_line(key, original) for key, original in self._originals.items())]
        try:
            if self._file is not None:
                self._file.close()
            write_atomically(self._path, b"".join(lines).decode())
            self._file = self._path.open("ab", buffering=0)
            self._lines, self._unwritten = len(lines), ""
        except OSError as error:
            self._not_written(error)


def _singles(change: Change) -> list[Change]:
    """A change of one value for each number that a change sets in one step; else the change itself."""
    if not isinstance(change.after, Numbers):
        return [change]
    before = change.before.present if isinstance(change.before, Numbers) else {}
    return [
        evolve(change, field=name, before=before.get(name), after=after)
        for name, after in sorted(change.after.present.items())
    ]


def _line(key: Place, original: _Original) -> bytes:
    text = json.dumps([*key, to_plain(original.value), to_plain(original.written)]).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_line(line: bytes) -> tuple[Place, _Original] | None:
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
    return Place(str(kind), str(target), str(name)), read
