"""The RDMA subsystem's own netlink (include/uapi/rdma/rdma_netlink.h, drivers/infiniband/core/nldev.c) and its configfs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.linux import mount
from agent.linux.messages import ask, attribute, attributes
from agent.machine import CmDefaults

NETLINK_RDMA = 20
# RDMA_NL_GET_TYPE(client, operation): RDMA_NL_NLDEV is 5.
NLDEV = 5 << 10
SYS_GET = 6
SYS_SET = 7
SYS_ATTR_NETNS_MODE = 66
MODES = ("exclusive", "shared")

CONFIGFS = Path("/sys/kernel/config")
# The kernel has one word for two types (gid_type_str, drivers/infiniband/core/cache.c).
ROCE_V1 = "IB/RoCE v1"


class LinuxRdma:
    """Netlink and configfs. Each netlink request opens a socket."""

    def __init__(self) -> None:
        self._configfs: Path | None = None

    def netns_mode(self) -> str | None:
        """Read it by RDMA_NLDEV_CMD_SYS_GET."""
        try:
            answers = ask(NETLINK_RDMA, NLDEV | SYS_GET, b"")
        except OSError as error:
            # ib_core is not loaded, or the kernel has no modes (before Linux 5.3).
            if error.errno in (errno.EPROTONOSUPPORT, errno.ECONNREFUSED, errno.EOPNOTSUPP, errno.EINVAL):
                return None
            raise
        modes = (
            payload[0] for answer in answers for kind, payload in attributes(answer) if kind == SYS_ATTR_NETNS_MODE
        )
        return next((MODES[bool(mode)] for mode in modes), None)

    def set_netns_mode(self, mode: str) -> None:
        """Set it by RDMA_NLDEV_CMD_SYS_SET, which needs CAP_NET_ADMIN."""
        ask(NETLINK_RDMA, NLDEV | SYS_SET, attribute(SYS_ATTR_NETNS_MODE, bytes([MODES.index(mode)])))

    def cm_defaults(self, device: str, port: int) -> CmDefaults | None:
        """Read default_roce_tos and default_roce_mode (cma_configfs.c)."""
        try:
            with self._cm_folder(device) as folder:
                mode = (folder / f"{port}/default_roce_mode").read_text().strip()
                tos = int((folder / f"{port}/default_roce_tos").read_text())
        except ValueError as error:
            raise OSError(errno.EPROTO, f"default_roce_tos of {device} has an unexpected value") from error
        except OSError as error:
            # There is no rdma_cm, device or configfs, the kernel has no fsopen(2), or this is not root.
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EPERM):
                return None
            raise
        return CmDefaults(tos, "RoCE v1" if mode == ROCE_V1 else mode)

    def set_cm_defaults(self, device: str, port: int, *, tos: int | None = None, mode: str | None = None) -> None:
        """Write default_roce_tos and default_roce_mode; EINVAL for a mode that the port does not have."""
        with self._cm_folder(device) as folder:
            if tos is not None:
                (folder / f"{port}/default_roce_tos").write_text(str(tos))
            if mode is not None:
                (folder / f"{port}/default_roce_mode").write_text(ROCE_V1 if mode == "RoCE v1" else mode)

    @contextmanager
    def _cm_folder(self, device: str) -> Iterator[Path]:
        """The `ports` folder of a device below configfs's rdma_cm. The kernel fills it when the device's folder is made.

        A folder that was made for this is removed again: it would keep rdma_cm from being unloaded. The values outlive it.
        """
        if self._configfs is None:
            self._configfs = _configfs()
        cm = self._configfs / "rdma_cm"
        if not cm.is_dir():
            raise FileNotFoundError(errno.ENOENT, "configfs has no rdma_cm; load it (kernel_modules: rdma_ucm)")
        folder = cm / device
        try:
            folder.mkdir()
        except FileExistsError:
            yield folder / "ports"
            return
        try:
            yield folder / "ports"
        finally:
            folder.rmdir()


def _configfs() -> Path:
    """The path of configfs. If it is not mounted, it is mounted without a mount point for the lifetime of this process.

    systemd mounts configfs at boot only if its module is loaded by then; rdma_cm may load it later.
    """
    if (CONFIGFS / "rdma_cm").is_dir():
        return CONFIGFS
    return Path(f"/proc/self/fd/{mount.detached('configfs')}")
