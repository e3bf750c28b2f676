"""Names of kernel parameters below /proc/sys, as sysctl(8) accepts them, and which names are the same parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

SYSCTL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_@:-]*([./][A-Za-z0-9_@:-]+)+")

# Files that set the same variable as another file, some in another unit: nf_conntrack_standalone.c, devinet.c, mm/hugetlb.c,
# net/ipv4/route.c, net/ipv6/route.c.
_SAME = {
    "net/nf_conntrack_max": "net/netfilter/nf_conntrack_max",
    "net/ipv4/conf/all/forwarding": "net/ipv4/ip_forward",
    "net/ipv4/route/gc_min_interval_ms": "net/ipv4/route/gc_min_interval",
    "net/ipv6/route/gc_min_interval_ms": "net/ipv6/route/gc_min_interval",
    "vm/nr_hugepages_mempolicy": "vm/nr_hugepages",
}

# The same for each netdev: NEIGH_SYSCTL_MS_JIFFIES_REUSED_ENTRY, NEIGH_SYSCTL_UNRES_QLEN_REUSED_ENTRY (net/core/neighbour.c).
_NEIGHBOUR = re.compile(r"(net/ipv[46]/neigh/.+/)(retrans_time|base_reachable_time|unres_qlen)(_ms|_bytes)")

_FINER = {
    "retrans_time": "retrans_time_ms",
    "base_reachable_time": "base_reachable_time_ms",
    "unres_qlen": "unres_qlen_bytes",
}

# Writing a value other than 0 to one sets the other to 0: mm/page-writeback.c, mm/util.c.
_EITHER = {
    "vm/dirty_bytes": "vm/dirty_ratio",
    "vm/dirty_background_bytes": "vm/dirty_background_ratio",
    "vm/overcommit_kbytes": "vm/overcommit_ratio",
}


_SWAPPED = str.maketrans("./", "/.")


def path(name: str) -> str:
    """A parameter's file. Dots separate and a slash stands for a dot, unless the first separator is a slash (sysctl.d(5))."""
    first = next((character for character in name if character in "./"), ".")
    swapped = name.translate(_SWAPPED) if first == "." else name
    return f"/proc/sys/{swapped}"


def identity(name: str) -> str:
    """The path below /proc/sys that identifies a parameter; if it has two files, that of one of them."""
    own = path(name).removeprefix("/proc/sys/")
    if (neighbour := _NEIGHBOUR.fullmatch(own)) is not None:
        return neighbour[1] + neighbour[2]
    return _SAME.get(own, own)


def finest(name: str) -> str:
    """The one name of a parameter, with dots; of its two files the one with the finer unit."""
    own = identity(name)
    if (neighbour := re.fullmatch(r"(net/ipv[46]/neigh/.+/)(\w+)", own)) is not None:
        own = neighbour[1] + _FINER.get(neighbour[2], neighbour[2])
    elif own.endswith("/route/gc_min_interval"):
        own += "_ms"
    return own.translate(_SWAPPED)


def faults(key: str, sysctls: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a mapping of sysctls; ``key`` is its place in the spec."""
    seen: dict[str, str] = {}
    for name, value in sorted(sysctls.items()):
        if not SYSCTL.fullmatch(name):
            yield f"{key}: {name!r} is not a sysctl; write it as sysctl -a prints it"
        elif not value.strip() or len(value.splitlines()) != 1:
            yield f"{key}.{name}: {value!r} is not a value; give one line of text"
        elif (own := identity(name)) in seen:
            yield f"{key}[{seen[own]!r}] and {key}[{name!r}] are the same parameter; keep one"
        seen.setdefault(identity(name), name)
    for one, other in _EITHER.items():
        if one in seen and other in seen and not _is_zero(sysctls[seen[one]]) ^ _is_zero(sysctls[seen[other]]):
            yield (
                f"{key}[{seen[one]!r}] and {key}[{seen[other]!r}]: the kernel sets one of them to 0 when the other is "
                "given; keep one"
            )
    for one in ("kernel/nmi_watchdog", "kernel/soft_watchdog"):
        # Both read 0 while this switch of both is off (lockup_detector_update_enable, kernel/watchdog.c).
        other = "kernel/watchdog"
        if one in seen and other in seen and _is_zero(sysctls[seen[other]]) and not _is_zero(sysctls[seen[one]]):
            yield f"{key}[{seen[one]!r}] and {key}[{seen[other]!r}]: the second one turns the first one off; keep one"


def _is_zero(value: str) -> bool:
    return value.strip() == "0"
