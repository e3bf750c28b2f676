"""The sysfs of other network namespaces, without a mount point.

A sysfs mount shows the netdevs of the namespace in which it was mounted (fs/sysfs/mount.c). So the agent enters the namespace
(setns(2)), mounts sysfs without a mount point (fsopen(2), fsmount(2)), returns, and opens paths below the mount's descriptor.
The mount ends when the descriptor is closed. On a kernel before Linux 5.2 no other namespace is read.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from pyroute2.netlink.rtnl import RTM_GETNSID
from pyroute2.netlink.rtnl.nsidmsg import nsidmsg

from agent.linux import mount
from agent.linux.files import opened, read_all, write_all
from agent.linux.messages import S32, U32, ask, attribute, attributes, decoder, layout, numbers
from agent.machine import Attributes, Namespace

CLONE_NEWNET = 0x40000000

OWN = "/proc/thread-self/ns/net"
MOUNTS = "/proc/self/mountinfo"
PROCESSES = "/proc"
SYSFS = "/sys/"

RTGENMSG = layout(nsidmsg.fields)
_NETNSA = numbers(nsidmsg)
NETNSA_NSID, NETNSA_FD = _NETNSA["NETNSA_NSID"], _NETNSA["NETNSA_FD"]


class LinuxNamespaces:
    """The namespaces that are mounted somewhere (by container runtimes, `ip netns`), or that a process is in."""

    def __init__(self, processes: str = PROCESSES) -> None:
        self._processes = processes
        self._seen: dict[str, Namespace] = {}
        self._searchable: bool | None = None

    def searchable(self) -> bool:
        if self._searchable is None:
            self._searchable = False
            with suppress(OSError):
                os.close(mount.detached("sysfs"))
                self._searchable = True
        return self._searchable

    def holding(self, functions: Collection[str]) -> dict[str, Namespace]:
        """Search the namespaces in which the functions were last, then mounted ones, then those of processes."""
        missing = set(functions)
        namespaces: dict[str, Namespace] = {}
        looked: set[int] = {os.stat(OWN).st_ino}  # noqa: PTH116
        for namespace in self._candidates(sorted(missing)):
            if not missing:
                break
            if namespace.inode in looked:
                continue
            # Skip a namespace that cannot be entered: it is gone, or belongs to another user namespace.
            with suppress(OSError), self.files(namespace) as files:
                here = {function for function in missing if _has_netdev(files, function)}
                namespaces |= dict.fromkeys(sorted(here), namespace)
                missing -= here
                looked.add(namespace.inode)
        for function in functions:
            self._seen.pop(function, None)
        self._seen |= namespaces
        return namespaces

    def _candidates(self, functions: list[str]) -> Iterator[Namespace]:
        yield from (self._seen[function] for function in functions if function in self._seen)
        yield from every_namespace(self._processes)

    @contextmanager
    def files(self, namespace: Namespace) -> Iterator[Attributes]:
        """Mount its sysfs without a mount point. The mount does not keep the namespace or its devices alive."""
        with inside(namespace):
            sysfs = mount.detached("sysfs")
        try:
            yield _Below(sysfs)
        finally:
            os.close(sysfs)


@contextmanager
def inside(namespace: Namespace) -> Iterator[int]:
    """Have this thread in another network namespace for a `with` block, which gets a descriptor of the own namespace.

    :raises OSError: the other namespace is gone, or cannot be entered.
    """
    with opened(OWN) as own:
        with opened(namespace.path) as there:
            # Another process may have the number of this path by now, or another mount hides the one of the namespace.
            if os.fstat(there).st_ino != namespace.inode:
                raise FileNotFoundError(errno.ENOENT, "the network namespace is gone", namespace.path)
            _enter(there)
        try:
            yield own
        finally:
            _return(own)


def _return(own: int) -> None:
    try:
        _enter(own)
    except OSError as error:
        # From here on, every change would be made in a pod's namespace.
        raise SystemExit(f"cannot come back to the host's network namespace: {error}") from error


def _enter(namespace: int) -> None:
    if mount.LIBC.setns(namespace, CLONE_NEWNET):
        raise mount.last_error("setns")


def every_namespace(processes: str = PROCESSES) -> Iterator[Namespace]:
    """The namespaces that are mounted, then those of processes. One of several processes comes several times."""
    yield from mounted(read_all(MOUNTS))
    for name in os.listdir(processes):  # noqa: PTH208  thousands of processes
        if name.isdigit():
            path = f"{processes}/{name}/ns/net"
            with suppress(OSError):
                if (inode := _inode(os.readlink(path))) is not None:  # noqa: PTH115
                    yield Namespace(inode, path)


def mounted(mountinfo: str) -> list[Namespace]:
    """The network namespaces that are mounted, from /proc/self/mountinfo (proc(5)): their root reads ``net:[INODE]``."""
    namespaces = []
    for line in mountinfo.split("\n"):
        fields = line.split(" ")
        if len(fields) > 4 and (inode := _inode(fields[3])) is not None:
            # Blanks in paths are written as \040.
            path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
            namespaces.append(Namespace(inode, path))
    return namespaces


def number(descriptor: int) -> int | None:
    """The number that the thread's namespace has given to another one, or to itself; None: it has given none."""
    body = RTGENMSG.pack(0) + attribute(NETNSA_FD, U32.pack(descriptor))
    return next(map(decode_number, ask(socket.NETLINK_ROUTE, RTM_GETNSID, body)), None)


def own_number() -> int | None:
    """The number that the thread's namespace has given to itself; None: it has given none, as is usual."""
    with opened(OWN) as own:
        return number(own)


@decoder
def decode_number(body: bytes) -> int | None:
    """The number in an answer about a namespace (RTM_NEWNSID); None without one, which the kernel writes as -1."""
    values = dict(attributes(body, RTGENMSG.size))
    given = S32.unpack(values[NETNSA_NSID])[0] if NETNSA_NSID in values else -1
    return given if given >= 0 else None


def _inode(name: str) -> int | None:
    """The inode of a network namespace by its name, ``net:[4026531840]``; None for other names."""
    match = re.fullmatch(r"net:\[([0-9]{1,20})\]", name)
    return int(match[1]) if match else None


def _has_netdev(files: Attributes, function: str) -> bool:
    try:
        return bool(files.names(f"/sys/bus/pci/devices/{function}/net"))
    except FileNotFoundError:
        return False


class _Below:
    """The files of a sysfs without a mount point, by their usual paths below /sys."""

    def __init__(self, sysfs: int) -> None:
        self._sysfs = sysfs

    def _path(self, path: str) -> str:
        if not path.startswith(SYSFS):
            raise FileNotFoundError(errno.ENOENT, "only sysfs can be read in another network namespace", path)
        return path[len(SYSFS) :]

    def read(self, path: str) -> str:
        return read_all(self._path(path), self._sysfs)

    def write(self, path: str, text: str) -> None:
        """Write in one call.

        All mounts of a namespace's sysfs share one superblock. It is read-only if the container runtime mounted it first, as
        read-only; then it is made writable for this write. The runtime's own mounts stay read-only, by their mount flag.
        """
        try:
            write_all(self._path(path), text, self._sysfs)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            mount.reconfigure(self._sysfs, "rw")
            try:
                write_all(self._path(path), text, self._sysfs)
            finally:
                mount.reconfigure(self._sysfs, "ro")

    def names(self, path: str) -> list[str]:
        with opened(self._path(path), os.O_DIRECTORY, self._sysfs) as folder:
            return sorted(os.listdir(folder))  # noqa: PTH208

    def target(self, path: str) -> str:
        return os.readlink(self._path(path), dir_fd=self._sysfs).rpartition("/")[2]
