"""What the worker is doing, told to its parent through memory that both have mapped: a step costs no system call.

The parent must not ask the worker, which may hang in the kernel, and must not look where it hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Literal

from attrs import define, frozen

Mode = Literal["read", "write"]

SIZE = 4096

ANSWERED_WITHIN = 0.5
"""Seconds within which a pass answers an event about a required device; a node that was ready is not, if it takes longer."""

# A sequence number, odd while the rest is being written; since when (seconds of CLOCK_MONOTONIC, 0 is idle); the text's length.
_HEAD = struct.Struct("=QdI")
_SEQUENCE = struct.Struct("=Q")
# Since when an event waits (seconds of CLOCK_MONOTONIC, 0: none does). It is aligned, so one store writes it whole.
_WAITS = struct.Struct("@d")
_WAITS_AT = SIZE - _WAITS.size


@frozen
class Step:
    """One call into the kernel. ``since``: seconds of CLOCK_MONOTONIC; ``device``: a PCI address, or empty for no device."""

    since: float
    kind: str
    mode: Mode
    device: str
    call: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.call}" + (f" (device {self.device})" if self.device else "")


@define
class Activity:
    """The worker's end. What :meth:`doing` says holds for all calls until it says otherwise."""

    _memory: mmap.mmap
    _prefix: str = "\nread\n"
    _sequence: int = 0

    @classmethod
    def at(cls, descriptor: int | None) -> Activity:
        """Map the memory that the parent has made; memory that nobody reads if there is no parent."""
        return cls(mmap.mmap(-1 if descriptor is None else descriptor, SIZE))

    def doing(self, kind: str, mode: Mode) -> None:
        """From here on, calls are made for ``kind``, to read or to write."""
        self._prefix = f"{kind}\n{mode}\n"

    def call(self, device: str, call: str) -> None:
        """A call begins."""
        self._store(time.monotonic(), f"{self._prefix}{device}\n{call}".encode()[: _WAITS_AT - _HEAD.size])

    def idle(self) -> None:
        """The worker waits for a wake-up."""
        self._store(0.0, b"")

    def waits(self, since: float) -> None:
        """An event about a required device has waited for its reading since then; 0: none waits."""
        _WAITS.pack_into(self._memory, _WAITS_AT, since)

    def _store(self, since: float, text: bytes) -> None:
        memory = self._memory
        _SEQUENCE.pack_into(memory, 0, self._sequence + 1)
        memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(memory, 0, self._sequence + 1, since, len(text))
        self._sequence += 2
        # Last and by itself: whoever reads it finds all the rest written.
        _SEQUENCE.pack_into(memory, 0, self._sequence)


@define
class View:
    """The parent's end."""

    descriptor: int
    _memory: mmap.mmap

    @classmethod
    def new(cls) -> View:
        """Make the memory; the worker inherits ``descriptor``."""
        descriptor = os.memfd_create("trackbed-activity", 0)
        os.ftruncate(descriptor, SIZE)
        return cls(descriptor, mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ))

    def step(self) -> Step | None:
        """What the worker is in now; None while it waits, or while it is just changing over to the next step."""
        sequence, since, length = _HEAD.unpack_from(self._memory)
        text = self._memory[_HEAD.size : _HEAD.size + length]
        if not since or sequence % 2 or _SEQUENCE.unpack_from(self._memory)[0] != sequence:
            return None
        words = text.decode(errors="replace").split("\n", 3)
        if len(words) < 4:
            return None
        kind, mode, device, call = words
        return Step(since, kind, "write" if mode == "write" else "read", device, call)

    def waits(self) -> float:
        """Since when an event about a required device has waited for its reading; 0: none waits."""
        (since,) = _WAITS.unpack_from(self._memory, _WAITS_AT)
        return float(since)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        os.close(self.descriptor)
