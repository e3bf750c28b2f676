"""How long a node may take to answer. A host that takes longer fails, and the deploy of the others goes on.

pyinfra 3.10 has no limit of its own, and no host begins an operation before all hosts have ended the one before. So a command
that never ends, such as a modprobe that waits in the kernel, would stop the deploy of all hosts for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

from attrs import field, frozen
from gevent import Timeout
from pyinfra.api.host import Host

from agent.spec.validators import Within
from tasks.common import answers
from tasks.common.commands import fail
from tasks.common.data import Key, record

T = TypeVar("T")

LONGEST = 86400
MARGIN = 10
"""Seconds that a command may take beyond its limit, in which pyinfra itself ends the reading of the answer."""


@frozen
class TimeLimits:
    """Seconds. ``fact``: for the answer to a question. ``command``: for each command of an operation, and for each file.

    ``build``: for a command that installs or builds drivers. On the node the command that took too long goes on.
    """

    fact: int = field(default=300, validator=Within(1, LONGEST, "seconds"))
    command: int = field(default=1800, validator=Within(1, LONGEST, "seconds"))
    build: int = field(default=7200, validator=Within(1, LONGEST, "seconds"))


LIMITS = Key("time_limits", TimeLimits(), record(TimeLimits))


@cache
def of(host: Host) -> TimeLimits:
    """A host's limits."""
    return LIMITS.read(host.data.dict(), host.name)  # type: ignore[no-untyped-call]


def within(limit: int, call: Callable[[], T]) -> T:
    """Make the call.

    :raises TimeoutError: it took longer than its limit.
    """
    with Timeout(limit + MARGIN, TimeoutError):
        return call()


def bounded(host: Host, limit: int, call: Callable[[], T]) -> T:
    """Make the call. If it takes longer than its limit, say so: pyinfra then fails the host.

    :raises TimeoutError: it took longer.
    """
    try:
        return within(limit, call)
    except TimeoutError:
        fact = answers.being_read(host)
        asked = f" to {fact.__name__}" if fact else ""
        fail(
            host,
            f"no answer{asked} within {limit} s, so the deploy goes on without this host; log in, and see what hangs (ps -eo "
            f"pid,stat,wchan,args); if it only takes long, raise {LIMITS.name}",
        )
        raise


def transferring(transfer: Callable[..., bool]) -> Callable[..., bool]:
    """Host.get_file, or Host.put_file: a file has the limit of a command."""

    @wraps(transfer)
    def in_time(self: Host, *arguments: Any, **named: Any) -> bool:
        return bounded(self, of(self).command, lambda: transfer(self, *arguments, **named))

    return in_time
