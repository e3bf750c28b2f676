"""Shared memory in which the worker records its present call into the kernel. Recording a call costs no system call.

The supervisor cannot ask a worker that hangs in the kernel, and must not touch the device in which it hangs.
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
"""Seconds in which the worker reads a required device again after an event. If it takes longer, the node is not ready."""

# A sequence number, which is odd while the rest is being written. When the call began (seconds of CLOCK_MONOTONIC); a negative
# time is when the wait for events began. The length of the text.
_HEAD = struct.Struct("=QdI")
_SEQUENCE = struct.Struct("=Q")
# When the oldest unanswered event came (seconds of CLOCK_MONOTONIC; 0: there is none). Aligned, so that one store writes it.
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
    """The worker's end: it writes. :meth:`doing` describes all calls that follow, until it is called again."""

    _memory: mmap.mmap
    _prefix: str = "\nread\n"
    _sequence: int = 0

    @classmethod
    def at(cls, descriptor: int | None) -> Activity:
        """Map the supervisor's memory, or memory that nobody reads if there is no supervisor."""
        return cls(mmap.mmap(-1 if descriptor is None else descriptor, SIZE))

    def doing(self, kind: str, mode: Mode) -> None:
        """The calls that follow read or write ``kind``."""
        self._prefix = f"{kind}\n{mode}\n"

    def call(self, device: str, call: str) -> None:
        """A call begins."""
        self._store(
            time.monotonic(), f"{self._prefix}{device}\n{call}".encode(errors="replace")[: _WAITS_AT - _HEAD.size]
        )

    def idle(self) -> None:
        """The worker waits for a wake-up."""
        self._store(-time.monotonic(), b"")

    def waits(self, since: float) -> None:
        """Record when the oldest event came whose required device was not read since; 0: there is none."""
        _WAITS.pack_into(self._memory, _WAITS_AT, since)

    def _store(self, since: float, text: bytes) -> None:
        memory = self._memory
        _SEQUENCE.pack_into(memory, 0, self._sequence + 1)
        memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(memory, 0, self._sequence + 1, since, len(text))
        self._sequence += 2
        # Written last, so that a reader who sees an even number sees everything else.
        _SEQUENCE.pack_into(memory, 0, self._sequence)


@define
class View:
    """The supervisor's end: it reads."""

    descriptor: int
    _memory: mmap.mmap

    @classmethod
    def new(cls) -> View:
        """Create the memory. The worker inherits ``descriptor``."""
        descriptor = os.memfd_create("trackbed-activity", 0)
        os.ftruncate(descriptor, SIZE)
        return cls(descriptor, mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ))

    def step(self) -> Step | None:
        """The worker's present call. None while it waits for events, or is recording the next call."""
        sequence, since, length = _HEAD.unpack_from(self._memory)
        text = self._memory[_HEAD.size : _HEAD.size + length]
        if since <= 0 or sequence % 2 or _SEQUENCE.unpack_from(self._memory)[0] != sequence:
            return None
        words = text.decode(errors="replace").split("\n", 3)
        if len(words) < 4:
            return None
        kind, mode, device, call = words
        return Step(since, kind, "write" if mode == "write" else "read", device, call)

    def last(self) -> float:
        """When the latest call or the present wait for events began; 0: the worker has recorded nothing yet."""
        _, since, _ = _HEAD.unpack_from(self._memory)
        return float(abs(since))

    def waits(self) -> float:
        """When the oldest event came whose required device was not read since; 0: there is none."""
        (since,) = _WAITS.unpack_from(self._memory, _WAITS_AT)
        return float(since)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.descriptor)
