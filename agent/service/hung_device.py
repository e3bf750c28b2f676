"""A device on which a call of the worker did not return, and when it is tried again."""

from __future__ import annotations

import subprocess

from attrs import define, field

from agent.runtime import doubling

LAST_RETRY = 3600.0
"""The longest time, in seconds, after which a device that hung is tried again. No process may hang in it then."""


@define
class HungDevice:
    """The state of one device. The device ``""`` stands for calls that concern no single device.

    ``written``: the write that hung last; empty if it was a read. ``abandoned``: processes that SIGKILL did not end, since they
    hang in the kernel.
    """

    times: int = 0
    avoided: bool = False
    retry_at: float = 0.0
    written: str = ""
    abandoned: list[subprocess.Popen[bytes]] = field(factory=list)

    def again(self, retry: float, now: float) -> None:
        """Note that it hung again. The wait before the next try is ``retry`` seconds at first, and doubles each time."""
        # After a long time without a hang, the count starts again.
        self.times = 1 if now > self.retry_at + LAST_RETRY else self.times + 1
        self.retry_at = now + doubling(retry, self.times, LAST_RETRY)

    def is_held(self) -> bool:
        """Whether a process still hangs in a call to it. SIGCHLD wakes the supervisor when that process ends."""
        return any(process.poll() is None for process in self.abandoned)

    def is_over(self, now: float) -> bool:
        """Whether the device may be tried again."""
        return self.avoided and now >= self.retry_at and not self.is_held()
