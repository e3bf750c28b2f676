"""The largest PCIe read request of a NIC (MRRS). Too small a value limits NICs of 200 Gb/s and more.

It is a field of the Device Control register of the physical function, and counts for its VFs as well. A reset or the driver
may set another value.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Any

from agent.hardware.config_space import device_control, max_read_request, with_max_read_request
from agent.hardware.functions import device_path
from agent.kinds.settings import Asked, Observed, Read, Settings
from agent.machine import Machine, Setting
from agent.state.wanted import WantedNic

BYTES = "bytes"


def _given(nic: WantedNic) -> Mapping[str, Asked]:
    size = nic.nic.max_read_request
    return {} if size is None else {nic.function.address: {BYTES: size}}


def _read(machine: Machine, address: str, names: Collection[str]) -> Read | None:
    try:
        register = device_control(machine.files, address)
    except FileNotFoundError:
        return None
    except PermissionError:
        return {BYTES: Setting(None, unreadable="only root may read it")}
    return {BYTES: Setting(max_read_request(register[1]))} if register else {}


def _limit(device: Observed, wanted: Asked) -> tuple[str, str]:
    now = device.read[BYTES]
    if now.value is not None:
        return "", f"see whether the device takes another value: setpci -s {device.target} CAP_EXP+8.w"
    if now.unreadable:
        return now.unreadable, "run as root"
    return "it has no PCI Express capability", f"take max_read_request out of NIC {device.nic.nic.name}"


def _write(machine: Machine, address: str, given: Mapping[str, Any]) -> None:
    """Write the register's two bytes; its other fields keep their present values."""
    register = device_control(machine.files, address)
    if register is None:
        raise FileNotFoundError(errno.ENOENT, f"{address} no longer has a PCI Express capability")
    at, control = register
    made = with_max_read_request(control, given[BYTES])
    try:
        machine.files.write_at(f"{device_path(address)}/config", at, made.to_bytes(2, "little"))
    except PermissionError as error:
        raise OSError(errno.EOPNOTSUPP, "the kernel is locked down (Secure Boot), which forbids writing it") from error


MAX_READ_REQUEST = Settings(
    name="max_read_request",
    after=("vfs",),
    given=_given,
    read=_read,
    write=_write,
    usable=lambda status: True,
    limit=_limit,
)
KINDS = (MAX_READ_REQUEST.kind(),)
