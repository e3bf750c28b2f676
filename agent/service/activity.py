"""Shared memory in which the worker records its present call into the kernel. Recording a call costs no system call.

The supervisor cannot ask a worker that hangs in the kernel, and must not touch the device in which it hangs.
"""

from __future__ import annotations

import mmap
import os
import time

from attrs import define, frozen

from agent.report.records import Mode

SIZE = 4096

ANSWERED_WITHIN = 0.5
"""Seconds in which the worker reads a required device again after an event. If it takes longer, the node is not ready."""

# The memory as words of eight bytes, each written by one store: a sequence number, which is odd while the rest is being
# written; when the call began (seconds of CLOCK_MONOTONIC), or, as a negative number, when the wait for events began; the
# length of the text, which follows; in the last word, when the oldest unanswered event came (0: there is none).
# struct.pack_into() would not do: it sets all bytes to 0 first, so that a reader may see a time of 0 and an even number.
_SEQUENCE, _SINCE, _LENGTH, _WAITS = 0, 1, 2, SIZE // 8 - 1
_TEXT_AT = 24
_TEXT_END = _WAITS * 8


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
    _words: memoryview[int]
    _times: memoryview[float]
    _prefix: str = "\nread\n"
    _sequence: int = 0

    @classmethod
    def at(cls, descriptor: int | None) -> Activity:
        """Map the supervisor's memory, or memory that nobody reads if there is no supervisor."""
        memory = mmap.mmap(-1 if descriptor is None else descriptor, SIZE)
        return cls(memory, memoryview(memory).cast("Q"), memoryview(memory).cast("d"))

    def doing(self, kind: str, mode: Mode) -> None:
        """The calls that follow read or write ``kind``."""
        self._prefix = f"{kind}\n{mode}\n"

    def call(self, device: str, call: str) -> None:
        """A call begins."""
        text = f"{self._prefix}{device}\n{call}".encode("utf-8", "replace")
        self._store(time.monotonic(), text[: _TEXT_END - _TEXT_AT])

    def idle(self) -> None:
        """The worker waits for a wake-up."""
        self._store(-time.monotonic(), b"")

    def waits(self, since: float) -> None:
        """Record when the oldest event came whose required device was not read since; 0: there is none."""
        self._times[_WAITS] = since

    def _store(self, since: float, text: bytes) -> None:
        words = self._words
        words[_SEQUENCE] = self._sequence + 1
        self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._times[_SINCE] = since
        words[_LENGTH] = len(text)
        self._sequence += 2
        # Written last, so that a reader who sees the same even number before and after has seen one record.
        words[_SEQUENCE] = self._sequence


@define
class View:
    """The supervisor's end: it reads."""

    descriptor: int
    _memory: mmap.mmap
    _words: memoryview[int]
    _times: memoryview[float]
    _last: float = 0.0

    @classmethod
    def new(cls) -> View:
        """Create the memory. The worker inherits ``descriptor``."""
        descriptor = os.memfd_create("trackbed-activity", 0)
        os.ftruncate(descriptor, SIZE)
        memory = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
        return cls(descriptor, memory, memoryview(memory).cast("Q"), memoryview(memory).cast("d"))

    def step(self) -> Step | None:
        """The worker's present call. None while it waits for events, or if it was stopped while it was recording a call."""
        record = self._record()
        if record is None or record[0] <= 0:
            return None
        words = record[1].decode(errors="replace").split("\n", 3)
        if len(words) < 4:
            return None
        kind, mode, device, call = words
        return Step(record[0], kind, "write" if mode == "write" else "read", device, call)

    def last(self) -> float:
        """When the latest call or the present wait for events began; 0: the worker has recorded nothing yet.

        If the worker was stopped while it was recording a call: the result before.
        """
        record = self._record()
        if record is not None:
            self._last = abs(record[0])
        return self._last

    def _record(self) -> tuple[float, bytes] | None:
        """A record's time and text. None: the worker began to write them and did not end within 50 ms, so it does not run."""
        for _ in range(50):
            sequence = self._words[_SEQUENCE]
            since = self._times[_SINCE]
            text = self._memory[_TEXT_AT : min(_TEXT_AT + self._words[_LENGTH], _TEXT_END)]
            if sequence % 2 == 0 and self._words[_SEQUENCE] == sequence:
                return since, text
            # This process may have taken the worker's CPU.
            time.sleep(0.001)
        return None

    def waits(self) -> float:
        """When the oldest event came whose required device was not read since; 0: there is none."""
        return float(self._times[_WAITS])

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._times.release()
        self._memory.close()
        os.close(self.descriptor)
