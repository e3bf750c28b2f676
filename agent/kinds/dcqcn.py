"""RoCE congestion control (DCQCN) of ConnectX: the DSCP of notification packets (CNP), and the algorithm's parameters.

Two drivers, two ways: MLNX_OFED's and DOCA-OFED's mlx5 has files below the netdev (``ecn/roce_np``, ``ecn/roce_rp``; en_sysfs.c
of mlnx-ofa_kernel). The in-tree mlx5_ib has files in debugfs, if the firmware allows both to query and to modify them
(drivers/infiniband/hw/mlx5/cong.c). From the drivers' sources and vendor documents: not run on such a NIC.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Any

from agent.hardware.functions import NET, netdev
from agent.hardware.sysfs import names_in, parsed, read_or
from agent.kinds.links import can_have_vfs
from agent.kinds.settings import Asked, Read, Settings
from agent.machine import Files, Machine, Setting
from agent.spec.dcqcn import DCQCN_PARAMETERS
from agent.state.wanted import WantedNic

DEBUGFS = "/sys/kernel/debug/mlx5"
CNP_DSCP = "cnp_dscp"
# The notification point's parameters, by MLNX_OFED's names; all others are the reaction point's.
NOTIFICATION = ("min_time_between_cnps", CNP_DSCP, "cnp_802p_prio")
# The names in debugfs that differ from the rule: MLNX_OFED's name without rpg_, with rp_ or np_ in front.
IN_DEBUGFS = {"clamp_tgt_rate_after_time_inc": "rp_clamp_tgt_rate_ati", "cnp_802p_prio": "np_cnp_prio"}


def _given(nic: WantedNic) -> Mapping[str, Asked]:
    """The parameters that the spec gives, by MLNX_OFED's names."""
    roce = nic.nic.roce
    if roce is None:
        return {}
    given = {CNP_DSCP: roce.cnp_dscp} | {name: getattr(roce.dcqcn, name, None) for name in DCQCN_PARAMETERS}
    asked = {name: int(value) for name, value in given.items() if value is not None}
    return {nic.function.address: asked} if asked else {}


def _path(files: Files, address: str, name: str) -> str | None:
    """The parameter's file; None if the driver has neither."""
    role = "np" if name in NOTIFICATION else "rp"
    device = netdev(files, address)
    folder = f"{NET}/{device}/ecn/roce_{role}"
    if device is not None and name in names_in(files, folder):
        return f"{folder}/{name}"
    folder = f"{DEBUGFS}/{address}/cc_params"
    called = IN_DEBUGFS.get(name, f"{role}_{name.removeprefix('rpg_')}")
    return f"{folder}/{called}" if called in names_in(files, folder) else None


def _read(machine: Machine, address: str, names: Collection[str]) -> Read:
    return {name: Setting(_read_one(machine.files, address, name)) for name in names}


def _read_one(files: Files, address: str, name: str) -> int | None:
    try:
        path = _path(files, address, name)
        text = read_or(files, path, "") if path is not None else ""
    except PermissionError:
        return None  # a locked-down kernel refuses debugfs also to root (fs/debugfs/file.c)
    return parsed(int, text, path or "") if text else None


def _write(machine: Machine, address: str, given: Mapping[str, Any]) -> None:
    """Write each parameter; EOPNOTSUPP if the driver has no file for it, or the kernel does not let it be written."""
    for name, value in given.items():
        try:
            path = _path(machine.files, address, name)
            if path is None:
                message = (
                    f"{address} has neither MLNX_OFED's ecn/roce_* below its netdev nor {DEBUGFS}/{address}/cc_params: load "
                    "mlx5_ib, mount debugfs, or install OFED (the key `ofed`)"
                )
                raise OSError(errno.EOPNOTSUPP, message)
            machine.files.write(path, str(value))
        except PermissionError as error:
            refused = f"the kernel refuses {error.filename or DEBUGFS} (lockdown, as with Secure Boot)"
            message = f"{refused}; install OFED (the key `ofed`)"
            raise OSError(errno.EOPNOTSUPP, message) from error


DCQCN = Settings(name="dcqcn", after=("roce",), given=_given, read=_read, write=_write, usable=can_have_vfs)
KINDS = (DCQCN.kind(),)
