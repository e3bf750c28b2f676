"""Kernel parameters below /proc/sys, by the names that sysctl(8) takes.

Network parameters (``net.``) are those of the host's network namespace. Values are compared word by word, since the kernel
separates the words of ``net.ipv4.tcp_rmem`` by tabs, whatever was written.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping

from attrs import evolve, frozen

from agent.kinds import ANY_VALUE, Reading
from agent.kinds.host import hugepages
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.spec.sysctl_names import finest, identity, path
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "sysctls"
AFTER = ("vf_links",)  # net.ipv4.conf.NETDEV is there once the netdev is
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "device"
OTHER_WRITERS = ("tuned",)

# Seconds. A netdev's parameters appear with the netdev, and events about netdevs do not cause this kind to be read again.
GRACE_PERIOD = 5.0


@frozen
class Sysctl:
    """One parameter's value, None if the kernel does not have it; ``error`` says why it cannot be read."""

    value: str | None
    error: str = ""


def _words(text: str) -> str:
    return " ".join(text.split())


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Sysctl]]:
    """The wanted parameters' values, by name."""
    if not host_in_scope(scope):
        return {}
    return {HOST: {name: _read(machine, name) for name in want.spec.sysctls}}


def _read(machine: Machine, name: str) -> Sysctl:
    try:
        return Sysctl(_words(machine.files.read(path(name))))
    except (FileNotFoundError, NotADirectoryError):
        return Sysctl(None)
    except OSError as error:
        return Sysctl(None, f"it cannot be read ({error.strerror}): it is an action, or has no value yet")


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The parameters whose value differs."""
    changes = []
    parameters: Mapping[str, Sysctl] = have[NAME].get(HOST, {})
    for name, wanted in sorted(want.spec.sysctls.items()):
        now, after = parameters.get(name, Sysctl(None)), _words(wanted)
        if now.error:
            remedy = f"take {name} out of the spec"
            changes.append(Change(NAME, HOST, name, None, after, blocker=now.error, remedy=remedy))
        elif now.value is None:
            remedy = f"load the module that provides {name}, or take it out of the spec"
            changes.append(Change(NAME, HOST, name, None, after, remedy=remedy, grace_period=GRACE_PERIOD))
        elif now.value != after:
            changes.append(
                Change(NAME, HOST, name, now.value, after, remedy=f"see which values {name} accepts: sysctl(8)")
            )
    return changes


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """A parameter as it is now."""
    if identity(kept.field) in map(identity, want.spec.sysctls):
        return Reading(HOST, kept.field, kept.after, wanted=True)
    now = _read(machine, kept.field)
    return None if now.value is None else Reading(HOST, kept.field, now.value, wanted=False)


def noted_as(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The parameter by one of its names and in one unit, or by the name under which it was noted before."""
    own = identity(change.field)
    names = (field for kind, _, field in known if kind == NAME and identity(field) == own)
    name = next(names, "")
    if not name and own == hugepages.SYSCTL and (pool := hugepages.default_pool(machine.files)) is not None:
        return hugepages.noted_as(machine, Change(hugepages.NAME, HOST, pool.name, None, None), known)
    name = name or finest(change.field)
    if path(name) == path(change.field):
        return [evolve(change, field=name)]
    now = _read(machine, name)
    return [change] if now.value is None else [Change(NAME, HOST, name, now.value, ANY_VALUE)]


def apply(machine: Machine, change: Change) -> None:
    """Write one parameter."""
    try:
        machine.files.write(path(change.field), str(change.after))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no such parameter") from error
    except OSError as error:
        causes = {
            errno.EINVAL: f"the kernel does not accept the value {change.after!r}",
            errno.EACCES: "it is read-only",
            errno.EPERM: "it cannot be set to that before the next boot (some parameters can only be raised)",
        }
        raise OSError(error.errno, causes.get(error.errno or 0, str(error.strerror))) from error
