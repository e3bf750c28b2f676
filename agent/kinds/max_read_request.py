"""The largest PCIe read request of a NIC (MRRS). Too small a value limits NICs of 200 Gb/s and more.

It is a field of the Device Control register of the physical function, and counts for its VFs as well. A reset or the driver
may set another value.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from agent.hardware.config_space import device_control, max_read_request, with_max_read_request
from agent.hardware.functions import device_path
from agent.kinds import Reading
from agent.machine import Machine
from agent.report.records import Change
from agent.state.scope import Scope, pfs_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "max_read_request"
AFTER = ("vfs",)
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "function"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, int | None]]:
    """The value in bytes of each PF for which the spec gives one, by target; empty without a PCI Express capability.

    None if only root may read it.
    """
    sizes: dict[str, dict[str, int | None]] = {}
    for address in pfs_in_scope(want, scope):
        if want.nics[address].nic.max_read_request is None:
            continue
        try:
            register = device_control(machine.files, address)
        except FileNotFoundError:
            continue
        except PermissionError:
            sizes[address] = {address: None}
            continue
        sizes[address] = {address: max_read_request(register[1])} if register else {}
    return sizes


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The PFs whose value differs."""
    changes = []
    for address, nic in sorted(want.nics.items()):
        after = nic.nic.max_read_request
        if after is None or address not in have[NAME]:
            continue
        state: Mapping[str, int | None] = have[NAME][address]
        before = state.get(address)
        if address in state and before is None:
            change = Change(NAME, address, "bytes", None, after, blocker="only root may read it", remedy="run as root")
            changes.append(change)
        elif before is None:
            blocker = "it has no PCI Express capability"
            remedy = f"take max_read_request out of NIC {nic.nic.name}"
            changes.append(Change(NAME, address, "bytes", None, after, blocker=blocker, remedy=remedy))
        elif before != after:
            remedy = f"see whether the device takes another value: setpci -s {address} CAP_EXP+8.w"
            changes.append(Change(NAME, address, "bytes", before, after, remedy=remedy))
    return changes


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """A PF's value as it is now."""
    nic = want.nics.get(kept.device)
    if nic is None:
        return None
    if nic.nic.max_read_request is not None:
        return Reading(kept.target, kept.field, kept.after, wanted=True)
    register = device_control(machine.files, kept.device)
    return Reading(kept.target, kept.field, max_read_request(register[1]), wanted=False) if register else None


def apply(machine: Machine, change: Change) -> None:
    """Write the register's two bytes; its other fields keep their present values."""
    register = device_control(machine.files, change.device)
    if register is None:
        raise FileNotFoundError(errno.ENOENT, f"{change.device} no longer has a PCI Express capability")
    at, control = register
    made = with_max_read_request(control, change.number)
    try:
        machine.files.write_at(f"{device_path(change.device)}/config", at, made.to_bytes(2, "little"))
    except PermissionError as error:
        raise OSError(errno.EOPNOTSUPP, "the kernel is locked down (Secure Boot), which forbids writing it") from error
