"""Kernel parameters below /proc/sys, by the names that sysctl(8) takes.

Network parameters (``net.``) are those of the host's network namespace. Values are compared by their meaning, since the kernel
shows a value in its own form, whatever was written: ``net.ipv4.tcp_rmem`` with tabs, and 0x403 as 1027.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping

from attrs import evolve, frozen

from agent.hardware.functions import NET, function_of
from agent.hardware.sysfs import names_in
from agent.kinds import ANY_VALUE, Reading, addresses
from agent.kinds.host import SYSCTLS
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.spec.sysctl_names import either, folders_along, meaning, netdevs, path, values_along
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = SYSCTLS
AFTER = ("vf_links",)  # net.ipv4.conf.NETDEV is there once the netdev is
KUBELETS = ("kubelet", "k3s-agent", "k3s-server", "kubelite")
"""The names of processes that are a kubelet, or have it inside (K3s, MicroK8s). Each kubelet that starts sets six parameters
(setupKernelTunables, pkg/kubelet/cm/container_manager_linux.go)."""

OTHER_WRITERS = ("cilium-agent", "kube-proxy", "tuned", *KUBELETS)

SEPARATOR = "+"
"""Stands between the names of a pair: when one of the two parameters is written, the kernel sets the other to 0. A pair has one
original, with both values."""

# Seconds. A netdev's parameters appear with the netdev, and events about netdevs do not cause this kind to be read again.
GRACE_PERIOD = 5.0


@frozen
class Sysctl:
    """One parameter's value, None if the kernel does not have it; ``error`` says why it cannot be read."""

    value: str | None
    error: str = ""


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


def _words(text: str) -> str:
    return " ".join(text.split())


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
            netdev = next(iter(netdevs([name])), None)
            advice = f"see whether the netdev {netdev} is there" if netdev else f"load the module that provides {name}"
            remedy = f"{advice}, or take the sysctl out of the spec"
            changes.append(Change(NAME, HOST, name, None, after, remedy=remedy, grace_period=GRACE_PERIOD))
        elif meaning(name, now.value) != meaning(name, after):
            changes.append(
                Change(NAME, HOST, name, now.value, after, remedy=f"see which values {name} accepts: sysctl(8)")
            )
    return changes


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """The present value of a parameter, or of both parameters of a pair. None if the agent leaves the netdev's device alone."""
    if any(function_of(machine.files, name) in want.left_alone for name in netdevs([kept.field])):
        return None
    if any(name in want.spec.sysctls or _is_of_rail(machine, want, name) for name in kept.field.split(SEPARATOR)):
        return None
    now = _read_each(machine, kept.field)
    if now is None and netdevs([kept.field]) - set(names_in(machine.files, NET)):
        now = str(kept.before)  # the netdev is gone: its next one begins with the kernel's values
    return None if now is None else Reading(now, instead=_set_along(want, kept.field))


def _set_along(want: Wanted, name: str) -> str | None:
    """The value that a parameter has because of another one in the spec; None if it has none."""
    place = name.rpartition(".")[0].rpartition(".")[2]
    along = (values_along(given, value, place).get(name) for given, value in want.spec.sysctls.items())
    return next((value for value in along if value is not None), None)


def _read_each(machine: Machine, names: str) -> str | None:
    """The value of a parameter; of a pair, both values with a space in between.

    :returns: None if a value cannot be read.
    """
    values = [_read(machine, name).value for name in names.split(SEPARATOR)]
    return None if None in values else " ".join(value or "" for value in values)


def _is_of_rail(machine: Machine, want: Wanted, name: str) -> bool:
    """Whether the addresses of a NIC set a parameter of its netdev."""
    return any(
        name == addresses.sysctl(machine.files, pf, field) for pf in want.nics for field in addresses.wanted(want, pf)
    )


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The parameter, or the pair; one of a rail's netdev as its addresses' if it was noted as that before."""
    for kind, target, field in known:
        if kind == addresses.NAME and change.field == addresses.sysctl(machine.files, target, field):
            return [evolve(change, kind=kind, target=target, field=field)]
    name = SEPARATOR.join(either(change.field) or [change.field])
    # The kernel may show another text than the one that is written, so each text that it shows after the write is the agent's.
    now = _read_each(machine, name)
    return [change] if now is None else [Change(NAME, HOST, name, now, ANY_VALUE)]


def in_steps(change: Change) -> bool:
    """A pair may take two writes."""
    return SEPARATOR in change.field


def set_along(machine: Machine, want: Wanted, change: Change) -> list[Change]:
    """The parameters that the kernel sets along with this one: ``disable_ipv6`` of all sets each netdev's."""
    changes = []
    for folder in folders_along(change.field):
        for place in names_in(machine.files, path(folder)):
            along = values_along(change.field, str(change.after), place.replace(".", "/"))
            for name, after in along.items():
                now = _read(machine, name).value
                if now is not None and not _is_of_rail(machine, want, name):
                    changes.append(Change(NAME, HOST, name, now, after))
    return changes


def apply(machine: Machine, change: Change) -> None:
    """Write one parameter; of a pair, the one that is not 0."""
    if SEPARATOR in change.field:
        _write_either(machine, change)
        return
    try:
        # A write of nothing is no write: proc_dostring() and proc_do_large_bitmap() take a line end for an empty value.
        machine.files.write(path(change.field), str(change.after) or "\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no such parameter") from error
    except OSError as error:
        causes = {
            errno.EINVAL: f"the kernel does not accept the value {change.after!r}",
            errno.EACCES: "it is read-only",
            errno.EPERM: "it cannot be set to that before the next boot (some parameters can only be raised)",
        }
        raise OSError(error.errno, causes.get(error.errno or 0, str(error.strerror))) from error


def _write_either(machine: Machine, change: Change) -> None:
    (ratio, percent), (amount, units) = zip(change.field.split(SEPARATOR), str(change.after).split(), strict=True)
    if units != "0":
        machine.files.write(path(amount), units)
        return
    if percent == "0":
        # The kernel refuses an amount of 0. It sets the amount to 0 when the ratio changes, so the ratio must change first.
        machine.files.write(path(ratio), "1")
    machine.files.write(path(ratio), percent)
