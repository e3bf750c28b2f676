"""How long a node may take to answer. A host that takes longer fails, and the deploy of the others goes on.

pyinfra 3.10 has no limit of its own, and no host begins an operation before all hosts have ended the one before. So a command
that never ends, such as a modprobe that waits in the kernel, would stop the deploy of all hosts for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from attrs import field, frozen
from gevent import Timeout
from pyinfra.api.host import Host

from agent.spec.validators import Within
from tasks.common.commands import fail
from tasks.common.data import Key, record

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
KEYS = (LIMITS,)

_known: WeakKeyDictionary[Host, TimeLimits] = WeakKeyDictionary()


def bound_all() -> None:
    """For config.py: give each fact, command and file its limit, unless the call has its own `_timeout`."""
    get_fact, run = Host.get_fact, Host.run_shell_command

    @wraps(get_fact)
    def get_fact_in_time(self: Host, *arguments: Any, **named: Any) -> Any:
        return get_fact(self, *arguments, **{"_timeout": _limits(self).fact, **named})

    @wraps(run)
    def run_in_time(self: Host, *arguments: Any, **named: Any) -> Any:
        limit = named.get("_timeout") or _limits(self).command
        return _bounded(self, limit, lambda: run(self, *arguments, **{**named, "_timeout": limit}))

    Host.get_fact = get_fact_in_time  # type: ignore[method-assign]
    Host.run_shell_command = run_in_time  # type: ignore[method-assign]
    Host.put_file = _file_in_time(Host.put_file)  # type: ignore[method-assign]
    Host.get_file = _file_in_time(Host.get_file)  # type: ignore[method-assign]


def _file_in_time(transfer: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(transfer)
    def in_time(self: Host, *arguments: Any, **named: Any) -> bool:
        return bool(_bounded(self, _limits(self).command, lambda: transfer(self, *arguments, **named)))

    return in_time


def _limits(host: Host) -> TimeLimits:
    if host not in _known:
        _known[host] = LIMITS.read(host.data.dict(), host.name)  # type: ignore[no-untyped-call]
    return _known[host]


def _bounded(host: Host, limit: int, call: Callable[[], Any]) -> Any:
    """Make the call. If it takes longer than its limit, say so: pyinfra then fails the host.

    :raises TimeoutError: it took longer.
    """
    try:
        with Timeout(limit + MARGIN, TimeoutError):
            return call()
    except TimeoutError:
        fail(
            host,
            f"no answer within {limit} s, so the deploy goes on without this host; log in, and see what hangs (ps -eo "
            f"pid,stat,wchan,args); if it only takes long, raise {LIMITS.name}",
        )
        raise
