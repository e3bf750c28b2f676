"""The RDMA subsystem's own netlink (include/uapi/rdma/rdma_netlink.h, drivers/infiniband/core/nldev.c) and its configfs."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address
from pathlib import Path

from attrs import frozen

from agent.linux import mount
from agent.linux.messages import U32, ask, attribute, attributes, decoder, dump, ignoring, text, u32
from agent.machine import CmDefaults, QueuePair

NETLINK_RDMA = 20
# RDMA_NL_GET_TYPE(client, operation): RDMA_NL_NLDEV is 5.
NLDEV = 5 << 10
GET, SYS_GET, SYS_SET, RES_QP_GET, RES_CM_ID_GET = 1, 6, 7, 10, 11
ATTR_DEV_INDEX, ATTR_DEV_NAME = 1, 2
ATTR_RES_QP, ATTR_RES_CM_ID = 19, 30
ATTR_RES_LQPN, ATTR_RES_TYPE, ATTR_RES_KERN_NAME, ATTR_RES_DST_ADDR = 21, 26, 29, 34
SYS_ATTR_NETNS_MODE = 66
MODES = ("exclusive", "shared")

# enum ib_qp_type, include/rdma/ib_verbs.h
TYPES = {0: "SMI", 1: "GSI", 2: "RC", 3: "UC", 4: "UD", 8: "RAW_PACKET", 9: "XRC_INI", 10: "XRC_TGT"}

CONFIGFS = Path("/sys/kernel/config")
# The kernel has one word for two types (gid_type_str, drivers/infiniband/core/cache.c).
ROCE_V1 = "IB/RoCE v1"


@frozen
class Resource:
    """A queue pair, or a connection of the rdma_cm with the number of its own. ``peer``: the other end of a connection."""

    number: int
    module: str
    type: int
    peer: str


class LinuxRdma:
    """Netlink and configfs. Each netlink request opens a socket."""

    def __init__(self) -> None:
        self._configfs: Path | None = None

    def netns_mode(self) -> str | None:
        # ib_core is not loaded, or the kernel has no modes (before Linux 5.3).
        with ignoring(errno.EPROTONOSUPPORT, errno.ECONNREFUSED, errno.EOPNOTSUPP, errno.EINVAL):
            values = (each for answer in ask(NETLINK_RDMA, NLDEV | SYS_GET, b"") for each in attributes(answer))
            return next((MODES[bool(value[0])] for kind, value in values if kind == SYS_ATTR_NETNS_MODE), None)
        return None

    def set_netns_mode(self, mode: str) -> None:
        ask(NETLINK_RDMA, NLDEV | SYS_SET, attribute(SYS_ATTR_NETNS_MODE, bytes([MODES.index(mode)])))

    def queue_pairs(self, device: str) -> tuple[QueuePair, ...]:
        """Dump the device's queue pairs and, to name the users of those of the rdma_cm, its connections."""
        index = _index(device)
        if index is None:
            return ()
        try:
            pairs = _queue_pairs(index)
            connections = [] if pairs == [] else _resources(RES_CM_ID_GET, index)
        except OSError as error:
            if error.errno == errno.EINVAL and _index(device) != index:
                return ()
            raise
        return named(pairs, connections)

    def cm_defaults(self, device: str, port: int) -> CmDefaults | None:
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


def _index(device: str) -> int | None:
    """The number that the subsystem gives a device; None if the thread's network namespace sees no such device."""
    for body in dump(NETLINK_RDMA, NLDEV | GET, b""):
        values = dict(attributes(body))
        if values.get(ATTR_DEV_NAME) == os.fsencode(device) + b"\0":
            return u32(values[ATTR_DEV_INDEX])
    return None


def _queue_pairs(index: int) -> list[Resource] | None:
    """The queue pairs; None if the driver cannot be asked for one's state, as mana_ib, which the kernel does for each."""
    with ignoring(errno.EOPNOTSUPP):
        return _resources(RES_QP_GET, index)
    return None


def _resources(command: int, index: int) -> list[Resource]:
    bodies = dump(NETLINK_RDMA, NLDEV | command, attribute(ATTR_DEV_INDEX, U32.pack(index)))
    return [resource for body in bodies for resource in decode_resources(body)]


@decoder
def decode_resources(body: bytes) -> list[Resource]:
    """The queue pairs, or the connections with one, that the kernel itself has.

    Those of a process have its number instead of a module (fill_res_name_pid, nldev.c).
    """
    tables = (rows for kind, rows in attributes(body) if kind in (ATTR_RES_QP, ATTR_RES_CM_ID))
    entries = (dict(attributes(entry)) for rows in tables for _, entry in attributes(rows))
    return [
        Resource(
            number=u32(entry[ATTR_RES_LQPN]),
            module=text(entry[ATTR_RES_KERN_NAME]),
            type=entry[ATTR_RES_TYPE][0],
            peer=_ip_address(entry.get(ATTR_RES_DST_ADDR, b"")),
        )
        for entry in entries
        if ATTR_RES_KERN_NAME in entry and ATTR_RES_LQPN in entry
    ]


def named(pairs: list[Resource] | None, connections: list[Resource]) -> tuple[QueuePair, ...]:
    """The queue pairs. Those that the rdma_cm has made (rdma_create_qp, cma.c) have the module of their connection.

    :param pairs: None: only those of the rdma_cm's connections are known.
    """
    by_number = {each.number: each for each in connections}
    users = [(pair.type, by_number.get(pair.number, pair)) for pair in (connections if pairs is None else pairs)]
    return tuple(QueuePair(user.module, TYPES.get(type, str(type)), user.peer) for type, user in users)


def _ip_address(address: bytes) -> str:
    """The IP address of a struct sockaddr_storage; empty for other families."""
    family = int.from_bytes(address[:2], sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[4:8])
    if family == socket.AF_INET6:
        ip = IPv6Address(address[8:24])
        return str(ip.ipv4_mapped or ip)
    return ""


def _configfs() -> Path:
    """The path of configfs. If it is not mounted, it is mounted without a mount point for the lifetime of this process.

    systemd mounts configfs at boot only if its module is loaded by then; rdma_cm may load it later.
    """
    if (CONFIGFS / "rdma_cm").is_dir():
        return CONFIGFS
    return Path(f"/proc/self/fd/{mount.detached('configfs')}")
