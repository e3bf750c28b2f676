"""Kernel parameters that depend on each other: files of one variable, and pairs where a write to one sets the other to 0."""

from __future__ import annotations

import errno
import fnmatch
import re
from typing import TYPE_CHECKING

from attrs import frozen

from agent.spec.ranges import format_ranges, parse_ranges
from tests.sim.tree import error

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

VM = "/proc/sys/vm"
RESERVED_PORTS = "/proc/sys/net/ipv4/ip_local_reserved_ports"
NEIGHBOUR = "/proc/sys/net/ipv4/neigh/default/base_reachable_time_ms"


@frozen
class _Pair:
    """Two files; one of them always reads 0: mm/page-writeback.c and mm/util.c (6.18).

    ``least``: the smallest amount that is accepted; ``by_change``: only a new value sets the other one to 0.
    """

    ratio: str
    amount: str
    boot: str
    least: int
    by_change: bool


_PAIRS = (
    _Pair(f"{VM}/dirty_ratio", f"{VM}/dirty_bytes", "20", 8192, True),
    _Pair(f"{VM}/dirty_background_ratio", f"{VM}/dirty_background_bytes", "10", 1, False),
    _Pair(f"{VM}/overcommit_ratio", f"{VM}/overcommit_kbytes", "50", 0, False),
)

# A module's parameter that is a bool: it reads Y or N, whatever was written (param_get_bool, kernel/params.c).
_BOOL = "/sys/module/nfs/parameters/nfs4_disable_idmapping"


# Of all netdevs: a write of another value sets each netdev's, too (addrconf_disable_ipv6, inet_forward_change).
_OF_ALL = {
    "/proc/sys/net/ipv6/conf/all/disable_ipv6": "/proc/sys/net/ipv6/conf/*/disable_ipv6",
    "/proc/sys/net/ipv4/ip_forward": "/proc/sys/net/ipv4/conf/*/forwarding",
}
_AT_BOOT = {
    "/proc/sys/net/ipv6/conf/lo/disable_ipv6": "0",
    "/proc/sys/net/ipv6/conf/default/disable_ipv6": "0",
    "/proc/sys/net/ipv4/conf/enp33s0/forwarding": "0",
    "/proc/sys/net/ipv4/conf/default/forwarding": "0",
    "/proc/sys/net/ipv4/conf/all/accept_redirects": "1",
}


def boot(kernel: Kernel) -> None:
    for pair in _PAIRS:
        kernel.tree.put(pair.ratio, pair.boot)
        kernel.tree.put(pair.amount, "0")
    for path, value in {**dict.fromkeys(_OF_ALL, "0"), **_AT_BOOT}.items():
        kernel.tree.put(path, value)
    kernel.tree.put(_BOOL, "Y")
    kernel.tree.put("/proc/sys/net/core/somaxconn", "4096")
    kernel.tree.put(RESERVED_PORTS, "")
    kernel.tree.put(NEIGHBOUR, "30500")


def write(kernel: Kernel, path: str, text: str) -> bool:
    """Write a parameter that hangs together with others. :returns: whether it is one."""
    for pair in _PAIRS:
        if path in (pair.ratio, pair.amount):
            _write_pair(kernel, pair, path, text)
            return True
    if path in _OF_ALL and kernel.tree.read(path) != text:
        for each in [path, *fnmatch.filter(kernel.tree.files, _OF_ALL[path])]:
            kernel.tree.put(each, text)
        if path == "/proc/sys/net/ipv4/ip_forward":
            kernel.tree.put("/proc/sys/net/ipv4/conf/all/accept_redirects", str(int(text == "0")))
        return True
    if path == _BOOL:
        kernel.tree.put(_BOOL, {"1": "Y", "0": "N"}.get(text, text))
        return True
    return False


def _write_pair(kernel: Kernel, pair: _Pair, path: str, text: str) -> None:
    if path == pair.amount and int(text) < pair.least:
        raise error(errno.EINVAL, path)
    if kernel.files.read(path) != text or not pair.by_change:
        kernel.tree.put(pair.ratio if path == pair.amount else pair.amount, "0")
    kernel.tree.put(path, text)


def shown(path: str, before: str, text: str) -> str:
    """What a parameter reads after a write: proc_dointvec() and proc_do_large_bitmap() of kernel/sysctl.c (6.18)."""
    if not text:
        return before
    if path == RESERVED_PORTS:
        if text == "\n":
            return ""
        if " " in text:
            raise error(errno.EINVAL, path)
        try:
            return format_ranges(parse_ranges(text))
        except ValueError:
            raise error(errno.EINVAL, path) from None
    words, numbers = text.split(), before.split()
    if not numbers or not all(re.fullmatch("-?[0-9]+", number) for number in numbers):
        return text
    # Of a vector, as many numbers are set as are given. Further words are not read.
    for place, word in enumerate(words[: len(numbers)]):
        numbers[place] = str(_number(path, word))
    return "\t".join(numbers)


def _number(path: str, word: str) -> int:
    if re.fullmatch("-?(0x[0-9a-fA-F]+|[0-9]+)", word) is None or re.fullmatch("-?0[0-9]*[89][0-9]*", word):
        raise error(errno.EINVAL, path)
    return int(word, 8 if re.fullmatch("-?0[0-9]+", word) else 0)
