"""Names of kernel parameters below /proc/sys. Each variable of the kernel has one name in a spec; others are refused."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress

from agent.spec.ranges import parse_ranges
from agent.spec.strict import Faults

SYSCTL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_@:-]*([./][A-Za-z0-9_@:-]+)+")

# Second files of a variable, and the sysctl to use: nf_conntrack_standalone.c, devinet.c, net/ipv4/route.c, net/ipv6/route.c,
# fs/notify/inotify/inotify_user.c and fanotify/fanotify_user.c beside kernel/ucount.c.
_SAME = {
    "net.ipv4.conf.all.forwarding": "net.ipv4.ip_forward",
    # Of the two units the finer one can say each value.
    "net.ipv4.route.gc_min_interval": "net.ipv4.route.gc_min_interval_ms",
    "net.ipv6.route.gc_min_interval": "net.ipv6.route.gc_min_interval_ms",
    "net.nf_conntrack_max": "net.netfilter.nf_conntrack_max",
    # Those below user are of the writer's user namespace.
    "user.max_fanotify_groups": "fs.fanotify.max_user_groups",
    "user.max_fanotify_marks": "fs.fanotify.max_user_marks",
    "user.max_inotify_instances": "fs.inotify.max_user_instances",
    "user.max_inotify_watches": "fs.inotify.max_user_watches",
}

# The same for each netdev: NEIGH_SYSCTL_MS_JIFFIES_REUSED_ENTRY, NEIGH_SYSCTL_UNRES_QLEN_REUSED_ENTRY (net/core/neighbour.c).
_NEIGHBOUR = re.compile(r"net\.ipv[46]\.neigh\.[^.]+\.(retrans_time|base_reachable_time|unres_qlen)")

# Sysctls of variables that another key sets.
_OTHER_KEYS = {
    # The sysctls of both are there only once nfsv4 is loaded, and its first mount reads them (fs/nfs/nfs4sysctl.c).
    "fs.nfs.idmap_cache_timeout": "module_parameters.nfs.nfs_idmap_cache_timeout",
    "fs.nfs.nfs_callback_tcpport": "module_parameters.nfs.callback_tcpport",
    # Only the parameter starts the timer anew (param_set_nfs_timeout, fs/nfs/namespace.c).
    "fs.nfs.nfs_mountpoint_timeout": "module_parameters.nfs.nfs_mountpoint_expiry_timeout",
    "net.core.rps_sock_flow_entries": "rfs.enable and rfs.entries",
    "vm.nr_hugepages": "hugepages",
    "vm.nr_hugepages_mempolicy": "hugepages",
}

# Module parameters, and the sysctl to use (module_param or core_param, and ctl_table). Both are there as soon as the module is
# loaded, and a sysctl shows a number where some of these parameters show Y or N.
_PARAMETERS = {
    ("ipmi_poweroff", "poweroff_powercycle"): "dev.ipmi.poweroff_powercycle",
    ("kernel", "panic"): "kernel.panic",
    ("kernel", "panic_on_warn"): "kernel.panic_on_warn",
    ("kernel", "panic_print"): "kernel.panic_print",
    ("lockd", "nlm_grace_period"): "fs.nfs.nlm_grace_period",
    ("lockd", "nlm_tcpport"): "fs.nfs.nlm_tcpport",
    ("lockd", "nlm_timeout"): "fs.nfs.nlm_timeout",
    ("lockd", "nlm_udpport"): "fs.nfs.nlm_udpport",
    ("lockd", "nsm_use_hostnames"): "fs.nfs.nsm_use_hostnames",
    ("nf_conntrack", "hashsize"): "net.netfilter.nf_conntrack_buckets",
    ("scsi_mod", "scsi_logging_level"): "dev.scsi.logging_level",
    ("sunrpc", "max_resvport"): "sunrpc.max_resvport",
    ("sunrpc", "min_resvport"): "sunrpc.min_resvport",
    ("sunrpc", "tcp_max_slot_table_entries"): "sunrpc.tcp_max_slot_table_entries",
    ("sunrpc", "tcp_slot_table_entries"): "sunrpc.tcp_slot_table_entries",
    ("sunrpc", "udp_slot_table_entries"): "sunrpc.udp_slot_table_entries",
}

# Writing a value other than 0 to one sets the other to 0: mm/page-writeback.c, mm/util.c.
_EITHER = {
    "vm.dirty_bytes": "vm.dirty_ratio",
    "vm.dirty_background_bytes": "vm.dirty_background_ratio",
    "vm.overcommit_kbytes": "vm.overcommit_ratio",
}

# Parameters that set those of every netdev, too: addrconf_disable_ipv6, addrconf_fixup_forwarding and
# addrconf_fixup_linkdown (net/ipv6/addrconf.c), devinet_copy_dflt_conf (devinet.c), neigh_copy_dflt_parms (neighbour.c).
_OF_EVERY_NETDEV = (
    re.compile(r"(net\.ipv6\.conf)\.all\.(?:disable_ipv6|forwarding|ignore_routes_with_linkdown)"),
    # Not forwarding (devinet_sysctl_forward). What a neighbour table has in two units is left out.
    re.compile(
        r"(net\.ipv4\.conf|net\.ipv[46]\.neigh)\.default\.(?!(?:forwarding|retrans_time_ms|base_reachable_time_ms|unres_qlen_bytes)$).+"
    ),
)
_FORWARD = "net.ipv4.ip_forward"

_OF_NETDEV = re.compile(r"net\.ipv[46]\.(?:conf|neigh)\.([^.]+)\..+")

# A list whose order does not matter, and a key in hexadecimal digits without 0x.
_LIST, _KEY = "net.ipv4.tcp_allowed_congestion_control", "net.ipv4.tcp_fastopen_key"

# Masks of CPUs: hexadecimal without 0x, and as many digits as the node has CPUs (cpumask_parse, %*pb).
_MASKS = frozenset({"net.core.rps_default_mask", "net.core.flow_limit_cpu_bitmap"})

_NUMBERS = re.compile(r"[0-9]+([,-][0-9]+)*")
_OCTAL = re.compile(r"(?<![0-9])0[0-9]")

_SWAPPED = str.maketrans("./", "/.")


def path(name: str) -> str:
    """A parameter's file. If the first separator is a dot, dots separate and a slash stands for a dot (sysctl.d(5))."""
    first = next((character for character in name if character in "./"), ".")
    swapped = name.translate(_SWAPPED) if first == "." else name
    return f"/proc/sys/{swapped}"


def canonical(name: str) -> str:
    """The notation of a name that sysctl(8) prints: dots separate, and a slash stands for a dot."""
    return path(name).removeprefix("/proc/sys/").translate(_SWAPPED)


def name_to_use(name: str) -> str:
    """The sysctl that sets the variable of a sysctl: another one, or the same in its :func:`canonical` notation."""
    own = canonical(name)
    if (neighbour := _NEIGHBOUR.fullmatch(own)) is not None:
        return own + ("_bytes" if neighbour[1] == "unres_qlen" else "_ms")
    return _SAME.get(own, own)


def either(name: str) -> tuple[str, str] | None:
    """A ratio and an amount, if ``name`` is one of them. When one of the two is written, the kernel sets the other to 0."""
    return next(((ratio, amount) for amount, ratio in _EITHER.items() if name in (ratio, amount)), None)


def zeroed_by(name: str, value: str) -> str:
    """The parameter that the kernel sets to 0 when ``name`` gets ``value``; empty if there is none."""
    return next((each for each in either(name) or () if each != name and not _is_zero(value)), "")


def folders_along(name: str) -> list[str]:
    """The folder with a folder for each place of which the kernel sets a value when ``name`` is written; with dots."""
    if name == _FORWARD:
        return ["net.ipv4.conf"]
    return [match[1] for pattern in _OF_EVERY_NETDEV if (match := pattern.fullmatch(name)) is not None]


def values_along(name: str, value: str, place: str) -> dict[str, str]:
    """The values that the kernel sets at a place (a netdev, ``default`` or ``all``) when ``name`` gets ``value``."""
    number = str(_plain(value))
    along = {f"{folder}.{place}.{name.rpartition('.')[2]}": number for folder in folders_along(name)}
    if name == _FORWARD:
        # inet_forward_change (net/ipv4/devinet.c). That of all is ip_forward itself.
        along = {f"net.ipv4.conf.{place}.forwarding": number}
        if place == "all":
            along = {"net.ipv4.conf.all.accept_redirects": str(int(number == "0"))}
    along.pop(name, None)
    return along if place != "all" or name == _FORWARD else {}


def _plain(value: str) -> int | str:
    try:
        return int(value, 0)
    except ValueError:
        return " ".join(value.split())


def netdevs(names: Iterable[str]) -> frozenset[str]:
    """The netdevs to which some of these parameters belong."""
    of_netdevs = map(_OF_NETDEV.fullmatch, names)
    return frozenset(match[1].translate(_SWAPPED) for match in of_netdevs if match) - {"all", "default"}


def meaning(name: str, value: str) -> Hashable:
    """What the kernel makes of a value: equal for all notations of it.

    The kernel shows ``0x403`` as ``1027`` (proc_dointvec), and ``30000-30000,30001`` as ``30000-30001`` (proc_do_large_bitmap).
    """
    if name in _MASKS:
        with suppress(ValueError):
            return int(value.replace(",", ""), 16)
    if name == _LIST:
        return frozenset(value.split())
    if name == _KEY:
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
    """The sysctl to use instead of a module's parameter; empty if there is none."""
    return _PARAMETERS.get((module, parameter), "")


def parsed(given: Mapping[str, str]) -> dict[str, str]:
    """The sysctls of a spec or of a boot by their :func:`canonical` names.

    :raises Faults: with every fault.
    """
    sysctls: dict[str, str] = {}
    faults = []
    for name, value in sorted(given.items()):
        own = canonical(name)
        if own in sysctls:
            faults.append(f"sysctls[{own!r}] and sysctls[{name!r}] are the same parameter; keep one")
        elif fault := _fault(name, own, value):
            faults.append(f"sysctls{fault}")
        sysctls.setdefault(own, value)
    if faults := [*faults, *_exclusive(sysctls)]:
        raise Faults(faults)
    return sysctls


def _fault(name: str, own: str, value: str) -> str:
    if not SYSCTL.fullmatch(name):
        return f": {name!r} is not a sysctl; write it as sysctl -a prints it"
    if own in _OTHER_KEYS:
        return f".{name}: use {_OTHER_KEYS[own]}"
    if (use := name_to_use(own)) != own:
        return f".{name}: write it as {use}"
    if not value.strip() or len(value.splitlines()) != 1:
        return f".{name}: {value!r} is not a value; give one line of text"
    if own not in (*_MASKS, _KEY) and any(_NUMBERS.fullmatch(w) and _OCTAL.search(w) for w in value.split()):
        return f".{name}: the kernel reads a number in {value!r} as octal; leave leading zeros out"
    return ""


def _exclusive(sysctls: Mapping[str, str]) -> Iterator[str]:
    for one, other in _EITHER.items():
        if one in sysctls and other in sysctls and not _is_zero(sysctls[one]) ^ _is_zero(sysctls[other]):
            yield (
                f"sysctls[{one!r}] and sysctls[{other!r}]: the kernel sets one of them to 0 when the other is given; keep one"
            )
    yield from _watchdogs(sysctls)


def _watchdogs(sysctls: Mapping[str, str]) -> Iterator[str]:
    """The switch of both watchdogs reads 0 if both are off, and both read 0 while it is off (kernel/watchdog.c)."""
    switch, each = "kernel.watchdog", ("kernel.nmi_watchdog", "kernel.soft_watchdog")
    if switch not in sysctls:
        return
    given = [one for one in each if one in sysctls]
    on = [one for one in given if not _is_zero(sysctls[one])]
    if _is_zero(sysctls[switch]):
        for one in on:
            yield f"sysctls[{one!r}] and sysctls[{switch!r}]: the second one turns the first one off; keep one"
    elif len(given) == len(each) and not on:
        names = " and ".join(f"sysctls[{one!r}]" for one in given)
        yield (
            f"{names} and sysctls[{switch!r}]: the third one is off if the first two are; keep two of them, or switch one on"
        )


def _is_zero(value: str) -> bool:
    return value.strip() == "0"
