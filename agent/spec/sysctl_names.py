"""Names of kernel parameters below /proc/sys, as sysctl(8) accepts them, and which names are the same parameter."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress

from agent.spec.ranges import parse_ranges

SYSCTL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_@:-]*([./][A-Za-z0-9_@:-]+)+")

FLOW_ENTRIES = "net/core/rps_sock_flow_entries"
"""The :func:`identity` of the sysctl for the size of the node's receive flow steering table."""

# Pairs of files that set the same variable, some in different units: nf_conntrack_standalone.c, devinet.c, mm/hugetlb.c,
# net/ipv4/route.c, net/ipv6/route.c, fs/notify/inotify/inotify_user.c and fanotify/fanotify_user.c beside kernel/ucount.c.
_SAME = {
    "fs/fanotify/max_user_groups": "user/max_fanotify_groups",
    "fs/fanotify/max_user_marks": "user/max_fanotify_marks",
    "fs/inotify/max_user_instances": "user/max_inotify_instances",
    "fs/inotify/max_user_watches": "user/max_inotify_watches",
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

# Module parameters, and the sysctl that sets the same variable of the kernel (module_param or core_param, and ctl_table).
_ONE_VARIABLE = {
    ("ipmi_poweroff", "poweroff_powercycle"): "dev/ipmi/poweroff_powercycle",
    ("kernel", "panic"): "kernel/panic",
    ("kernel", "panic_on_warn"): "kernel/panic_on_warn",
    ("kernel", "panic_print"): "kernel/panic_print",
    ("lockd", "nlm_grace_period"): "fs/nfs/nlm_grace_period",
    ("lockd", "nlm_tcpport"): "fs/nfs/nlm_tcpport",
    ("lockd", "nlm_timeout"): "fs/nfs/nlm_timeout",
    ("lockd", "nlm_udpport"): "fs/nfs/nlm_udpport",
    ("lockd", "nsm_use_hostnames"): "fs/nfs/nsm_use_hostnames",
    ("nfs", "callback_tcpport"): "fs/nfs/nfs_callback_tcpport",
    ("nfs", "nfs_idmap_cache_timeout"): "fs/nfs/idmap_cache_timeout",
    ("nfs", "nfs_mountpoint_expiry_timeout"): "fs/nfs/nfs_mountpoint_timeout",
    ("nf_conntrack", "hashsize"): "net/netfilter/nf_conntrack_buckets",
    ("scsi_mod", "scsi_logging_level"): "dev/scsi/logging_level",
    ("sunrpc", "max_resvport"): "sunrpc/max_resvport",
    ("sunrpc", "min_resvport"): "sunrpc/min_resvport",
    ("sunrpc", "tcp_max_slot_table_entries"): "sunrpc/tcp_max_slot_table_entries",
    ("sunrpc", "tcp_slot_table_entries"): "sunrpc/tcp_slot_table_entries",
    ("sunrpc", "udp_slot_table_entries"): "sunrpc/udp_slot_table_entries",
}

# Parameters that set those of every netdev, too: addrconf_disable_ipv6, addrconf_fixup_forwarding and
# addrconf_fixup_linkdown (net/ipv6/addrconf.c), devinet_copy_dflt_conf (devinet.c), neigh_copy_dflt_parms (neighbour.c).
_OF_EVERY_NETDEV = (
    re.compile(r"(net/ipv6/conf)/all/(?:disable_ipv6|forwarding|ignore_routes_with_linkdown)"),
    # Not forwarding (devinet_sysctl_forward). What a neighbour table has in two units is left out.
    re.compile(
        r"(net/ipv4/conf|net/ipv[46]/neigh)/default/(?!(?:forwarding|retrans_time|base_reachable_time|unres_qlen)$).+"
    ),
)
_FORWARD = "net/ipv4/ip_forward"

_OF_NETDEV = re.compile(r"net/ipv[46]/(?:conf|neigh)/([^/]+)/.+")

# A list whose order does not matter, and a key in hexadecimal digits without 0x.
_LIST, _KEY = "net/ipv4/tcp_allowed_congestion_control", "net/ipv4/tcp_fastopen_key"

# Masks of CPUs: hexadecimal without 0x, and as many digits as the node has CPUs (cpumask_parse, %*pb).
_MASKS = frozenset({"net/core/rps_default_mask", "net/core/flow_limit_cpu_bitmap"})

_NUMBERS = re.compile(r"[0-9]+([,-][0-9]+)*")
_OCTAL = re.compile(r"(?<![0-9])0[0-9]")

_SWAPPED = str.maketrans("./", "/.")


def path(name: str) -> str:
    """A parameter's file. If the first separator is a dot, dots separate and a slash stands for a dot (sysctl.d(5))."""
    first = next((character for character in name if character in "./"), ".")
    swapped = name.translate(_SWAPPED) if first == "." else name
    return f"/proc/sys/{swapped}"


def identity(name: str) -> str:
    """The path below /proc/sys that identifies a parameter: if it has two files, always the same one of them."""
    own = path(name).removeprefix("/proc/sys/")
    if (neighbour := _NEIGHBOUR.fullmatch(own)) is not None:
        return neighbour[1] + neighbour[2]
    return _SAME.get(own, own)


def finest(name: str) -> str:
    """The name of a parameter, with dots. If it has two files, the one with the finer unit."""
    own = identity(name)
    if (neighbour := re.fullmatch(r"(net/ipv[46]/neigh/.+/)(\w+)", own)) is not None:
        own = neighbour[1] + _FINER.get(neighbour[2], neighbour[2])
    elif own.endswith("/route/gc_min_interval"):
        own += "_ms"
    return own.translate(_SWAPPED)


def either(name: str) -> tuple[str, str] | None:
    """A ratio and an amount, if ``name`` is one of them. When one of the two is written, the kernel sets the other to 0."""
    pairs = ((ratio, amount) for amount, ratio in _EITHER.items() if identity(name) in (ratio, amount))
    ratio, amount = next(pairs, ("", ""))
    return (ratio.translate(_SWAPPED), amount.translate(_SWAPPED)) if ratio else None


def zeroed_by(name: str, value: str) -> str:
    """The :func:`identity` of the parameter that the kernel sets to 0 when ``name`` gets ``value``; empty if there is none."""
    own, pair = identity(name), either(name)
    return next((identity(each) for each in pair or () if identity(each) != own and not _is_zero(value)), "")


def folders_along(name: str) -> list[str]:
    """The folder below /proc/sys with a folder for each place of which the kernel sets a value when ``name`` is written."""
    if (own := identity(name)) == _FORWARD:
        return ["net/ipv4/conf"]
    return [match[1] for pattern in _OF_EVERY_NETDEV if (match := pattern.fullmatch(own)) is not None]


def values_along(name: str, value: str, place: str) -> dict[str, str]:
    """The values that the kernel sets at a place (a netdev, ``default`` or ``all``) when ``name`` gets ``value``."""
    own, number = identity(name), str(_plain(value))
    along = {f"{folder}/{place}/{own.rpartition('/')[2]}": number for folder in folders_along(name)}
    if own == _FORWARD:
        # inet_forward_change (net/ipv4/devinet.c). That of all is ip_forward itself.
        along = {f"net/ipv4/conf/{place}/forwarding": number}
        if place == "all":
            along = {"net/ipv4/conf/all/accept_redirects": str(int(number == "0"))}
    along.pop(own, None)
    return along if place != "all" or own == _FORWARD else {}


def _plain(value: str) -> int | str:
    try:
        return int(value, 0)
    except ValueError:
        return " ".join(value.split())


def netdevs(names: Iterable[str]) -> frozenset[str]:
    """The netdevs to which some of these parameters belong."""
    of_netdevs = (_OF_NETDEV.fullmatch(identity(name)) for name in names)
    return frozenset(match[1] for match in of_netdevs if match) - {"all", "default"}


def meaning(name: str, value: str) -> Hashable:
    """What the kernel makes of a value: equal for all notations of it.

    The kernel shows ``0x403`` as ``1027`` (proc_dointvec), and ``30000-30000,30001`` as ``30000-30001`` (proc_do_large_bitmap).
    """
    if identity(name) in _MASKS:
        with suppress(ValueError):
            return int(value.replace(",", ""), 16)
    if identity(name) == _LIST:
        return frozenset(value.split())
    if identity(name) == _KEY:
        return value.lower()
    return tuple(_meaning(word) for word in value.split())


def _meaning(word: str) -> Hashable:
    with suppress(ValueError):
        return (int(word, 0),)
    if _NUMBERS.fullmatch(word):
        with suppress(ValueError):
            return parse_ranges(word)
    return word


def of_module_parameter(module: str, parameter: str) -> str:
    """The :func:`identity` of the sysctl that sets the same variable as a module's parameter; empty if there is none."""
    return _ONE_VARIABLE.get((module.replace("-", "_"), parameter.replace("-", "_")), "")


def faults(key: str, sysctls: Mapping[str, str]) -> Iterator[str]:
    """The faults of a mapping of sysctls; ``key`` is its place in the spec."""
    seen: dict[str, str] = {}
    for name, value in sorted(sysctls.items()):
        if not SYSCTL.fullmatch(name):
            yield f"{key}: {name!r} is not a sysctl; write it as sysctl -a prints it"
        elif not value.strip() or len(value.splitlines()) != 1:
            yield f"{key}.{name}: {value!r} is not a value; give one line of text"
        elif identity(name) not in (*_MASKS, _KEY) and any(
            _NUMBERS.fullmatch(w) and _OCTAL.search(w) for w in value.split()
        ):
            yield f"{key}.{name}: the kernel reads a number in {value!r} as octal; leave leading zeros out"
        elif identity(name) == FLOW_ENTRIES and not _is_power_of_two(value):
            yield f"{key}.{name}: the kernel rounds {value!r} up to a power of two; give 0 or one"
        elif (own := identity(name)) in seen:
            yield f"{key}[{seen[own]!r}] and {key}[{name!r}] are the same parameter; keep one"
        seen.setdefault(identity(name), name)
    for one, other in _EITHER.items():
        if one in seen and other in seen and not _is_zero(sysctls[seen[one]]) ^ _is_zero(sysctls[seen[other]]):
            yield (
                f"{key}[{seen[one]!r}] and {key}[{seen[other]!r}]: the kernel sets one of them to 0 when the other is "
                "given; keep one"
            )
    yield from _watchdogs(key, sysctls, seen)


def _watchdogs(key: str, sysctls: Mapping[str, str], seen: Mapping[str, str]) -> Iterator[str]:
    """The switch of both watchdogs reads 0 if both are off, and both read 0 while it is off (kernel/watchdog.c)."""
    switch, each = seen.get("kernel/watchdog"), [seen.get(f"kernel/{name}_watchdog") for name in ("nmi", "soft")]
    if switch is None:
        return
    given = [one for one in each if one is not None]
    on = [one for one in given if not _is_zero(sysctls[one])]
    if _is_zero(sysctls[switch]):
        for one in on:
            yield f"{key}[{one!r}] and {key}[{switch!r}]: the second one turns the first one off; keep one"
    elif len(given) == len(each) and not on:
        names = " and ".join(f"{key}[{one!r}]" for one in given)
        yield f"{names} and {key}[{switch!r}]: the third one is off if the first two are; keep two of them, or switch one on"


def _is_power_of_two(value: str) -> bool:
    try:
        number = int(value, 0)
    except ValueError:
        return True  # the kernel refuses it, and the agent says so
    return not number & (number - 1)


def _is_zero(value: str) -> bool:
    return value.strip() == "0"
