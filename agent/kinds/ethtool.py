"""The settings of netdevs that `ethtool` shows: channels (-l), rings (-g), coalescing (-c) and offloads (-k)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from attrs import evolve, fields, has

from agent.driver_families import family_of
from agent.hardware.functions import NET, device_path, driver, ifindex_of, netdev, pci_of
from agent.hardware.sysfs import names_in, numbered
from agent.kinds.settings import Asked, Observed, Read, Settings, beyond, is_ready, of_netdev
from agent.machine import Group, Machine
from agent.report.records import Change
from agent.spec.strict import did_you_mean
from agent.state.wanted import WantedNic

ADAPTIVE = ("adaptive_rx", "adaptive_tx")

# The ethtool command has its own names for some of the kernel's features (off_flag_def in its common.c).
ETHTOOL_NAMES = {
    "rx": "rx-checksum",
    "rx-checksumming": "rx-checksum",
    "tx": "tx-checksum-ip-generic",
    "tx-checksumming": "tx-checksum-ip-generic",
    "sg": "tx-scatter-gather",
    "scatter-gather": "tx-scatter-gather",
    "tso": "tx-tcp-segmentation",
    "tcp-segmentation-offload": "tx-tcp-segmentation",
    "gso": "tx-generic-segmentation",
    "generic-segmentation-offload": "tx-generic-segmentation",
    "gro": "rx-gro",
    "generic-receive-offload": "rx-gro",
    "lro": "rx-lro",
    "large-receive-offload": "rx-lro",
    "rxvlan": "rx-vlan-hw-parse",
    "rx-vlan-offload": "rx-vlan-hw-parse",
    "txvlan": "tx-vlan-hw-insert",
    "tx-vlan-offload": "tx-vlan-hw-insert",
    "ntuple": "rx-ntuple-filter",
    "ntuple-filters": "rx-ntuple-filter",
    "rxhash": "rx-hashing",
    "receive-hashing": "rx-hashing",
}


def given(key: str, names: Collection[str] = ()) -> Callable[[WantedNic], Mapping[str, Asked]]:
    """What the spec sets under a key for the netdevs of a PF and its VFs; only the settings with these names, if any."""

    def of_nic(nic: WantedNic) -> Mapping[str, Asked]:
        settings = nic.settings(key)
        # A thousand VFs share a few records.
        by_name = {id(each): _by_name(each, names) for each in settings.values()}
        return {target: asked for target, each in settings.items() if (asked := by_name[id(each)]) or not names}

    return of_nic


def _by_name(settings: Any, names: Collection[str]) -> Asked:
    if not has(type(settings)):
        return dict(sorted(settings.items()))
    values = ((each.name, getattr(settings, each.name)) for each in fields(type(settings)))
    return {name: value for name, value in values if value is not None and (not names or name in names)}


def _read(group: Group) -> Callable[[Machine, str, Collection[str]], Read | None]:
    def read(machine: Machine, pci: str, names: Collection[str]) -> Read | None:
        found = of_netdev(machine, pci, partial(machine.ethtool.settings, group))
        return None if found is None else found[1]

    return read


def _read_channels(machine: Machine, pci: str, names: Collection[str]) -> Read | None:
    """The numbers of channels. Before Linux 6.1 mlx5 shows twice as many while AF_XDP has a queue, and twice as many at most.

    It has no more transmit queues then (mlx5e_ethtool_get_channels, en_ethtool.c).
    """
    read = _read("channels")(machine, pci, names)
    if not read or "combined" not in read or not family_of(driver(machine.files, pci)).paired_queues:
        return read
    folder = f"{NET}/{netdev(machine.files, pci)}/queues"
    combined, transmit = read["combined"], numbered(names_in(machine.files, folder), "tx-")
    if not 0 < len(transmit) < int(combined.value or 0):
        return read
    value, most = int(combined.value or 0) // 2, (combined.maximum or 0) // 2
    return {**read, "combined": evolve(combined, value=value, maximum=most)}


def _write(group: Group) -> Callable[[Machine, str, Mapping[str, Any]], None]:
    """Sets settings of a target's netdev, after finding that again."""
    return lambda machine, target, given: machine.ethtool.set(group, ifindex_of(machine.files, target), given)


def _excluded(asked: Collection[str]) -> tuple[str, ...]:
    """The numbers of channels that are 0 if a netdev has those that the spec gives.

    A driver refuses both modes at once (bnxt_set_channels, drivers/net/ethernet/broadcom/bnxt/bnxt_ethtool.c). A number of
    separate channels alone excludes nothing: ice has it beside combined channels (ice_set_channels,
    drivers/net/ethernet/intel/ice/ice_ethtool.c).
    """
    if "combined" in asked:
        return ("rx", "tx")
    return ("combined",) if {"rx", "tx"} <= set(asked) else ()


def _most_channels(device: Observed, wanted: Asked) -> tuple[str, str]:
    if blocker := beyond(device, wanted):
        return blocker, "give at most that many (`ethtool -l`); a PF may have fewer while it has VFs"
    there = sorted(name for name, setting in device.read.items() if setting.value is not None)
    if there and not set(device.asked) <= set(there):
        # The driver refuses them (tg3 and gve have rx and tx channels only).
        return "", f"give {' and '.join(there)} channels instead: {device.driver} has no others here (`ethtool -l`)"
    return "", ""


def _set_channels(machine: Machine, target: str, given: Mapping[str, Any]) -> None:
    try:
        _write("channels")(machine, target, given)
    except OSError as error:
        if error.errno == errno.EBUSY and _is_held_by_rdma(machine, target):
            message = (
                "EBUSY: ice changes channels only while no RDMA driver has the NIC; unload irdma (`modprobe -r irdma`) and "
                "keep it from being loaded (boot.arguments: module_blacklist=irdma), or leave the channels out of the spec"
            )
            raise OSError(errno.EBUSY, message) from error
        raise


def _is_held_by_rdma(machine: Machine, target: str) -> bool:
    """Whether this is why ice refuses (ice_set_channels in ice_ethtool.c, since Linux 6.3), which it says only in dmesg."""
    function = pci_of(machine.files, target)
    devices = names_in(machine.files, f"{device_path(function)}/infiniband")
    return driver(machine.files, function) == "ice" and bool(devices)


def _ring_sizes(device: Observed, wanted: Asked) -> tuple[str, str]:
    if blocker := beyond(device, wanted):
        return blocker, "give at most that many descriptors (`ethtool -g`)"
    family = family_of(device.driver)
    made = {name: family.ring_size(size) for name, size in wanted.items() if isinstance(size, int)}
    if made == wanted:
        return "", ""
    sizes = " and ".join(f"{name} {size}" for name, size in sorted(made.items()))
    return f"{device.driver} has no rings of this size, but {sizes}", f"give {sizes}"


def _adaptive_mode(change: Change) -> int:
    """Adaptive mode goes off first and on last: some drivers accept no numbers while it is on."""
    return 1 if change.field not in ADAPTIVE else 2 if change.after else 0


def _chosen_by_driver(device: Observed, wanted: Asked) -> tuple[str, str]:
    """ice, i40e and iavf refuse other usecs while they choose them, which they do by default; other drivers take them.

    ice_set_rc_coalesce (ice_ethtool.c), __i40e_set_coalesce (i40e_ethtool.c), iavf_set_itr_per_queue (iavf_ethtool.c).
    """
    ((name, _),) = wanted.items()
    adaptive = device.read.get(f"adaptive_{name[:2]}")
    if name in ADAPTIVE or device.read[name].value is None or adaptive is None or not adaptive.value:
        return "", ""
    return "", f"the driver chooses {name} itself (`ethtool -c`): give adaptive_{name[:2]}: false, or no {name}"


def _features(device: Observed, wanted: Asked) -> tuple[str, str]:
    ((name, on),) = wanted.items()
    read, known = device.read, [each for each, setting in device.read.items() if setting.value is not None]
    if not known:
        return "", ""  # nothing was read: the write reports the kernel's own error
    if name not in known:
        otherwise = "see `ethtool -k` for those there are"
        return f"this kernel knows no feature {name!r}", did_you_mean(ETHTOOL_NAMES.get(name, name), known, otherwise)
    differing = [(read[each], after) for each, after in device.asked.items() if each in known]
    differing = [(setting, after) for setting, after in differing if setting.value != after]
    # All were requested before and did not change: a further request would change nothing.
    if not all(setting.changeable and setting.requested == after for setting, after in differing):
        return "", ""
    kept = f"it was requested, but the driver or a feature that it depends on keeps it {'off' if on else 'on'}"
    return kept, "see `ethtool -k`, and give the features that it depends on as well"


def _row(name: str, after: str, group: Group, **parts: Any) -> Settings:
    """The settings of the spec's key ``name``, which are one of ethtool's groups."""
    common = {"given": given(name), "read": _read(group), "write": _write(group), "usable": is_ready}
    return Settings(name=name, after=(after,), **common | parts)


CHANNELS = _row(
    "channels",
    # A driver may reset its channels when VFs are created or removed (igb_sriov_reinit), and may allow the PF fewer.
    "vf_links",
    "channels",
    read=_read_channels,
    write=_set_channels,
    flaps=lambda family, _: family.channels_flap,
    limit=_most_channels,
    one_request=True,
    excluded=_excluded,
)
RINGS = _row(
    "rings", "channels", "rings", flaps=lambda family, _: family.rings_flap, limit=_ring_sizes, one_request=True
)
COALESCING = _row(
    "coalescing",
    "rings",
    "coalescing",
    flaps=lambda family, _: family.coalescing_flaps,
    limit=_chosen_by_driver,
    order=_adaptive_mode,
)
OFFLOADS = _row(
    "offloads",
    "coalescing",
    "features",
    flaps=lambda family, name: family.offloads_flap is None or name in family.offloads_flap,
    limit=_features,
)

_PARTS: dict[str, Any] = {
    "UNKNOWN_UNTIL": ("vfs", "bindings"),
    "BEFORE_UP": True,
    # NetworkManager: a connection has ethtool.* (nm-settings-nmcli(5)). tuned: a profile has [net] (its plugin_net.py).
    "OTHER_WRITERS": ("NetworkManager", "tuned"),
}
KINDS = (
    *(each.kind(**_PARTS) for each in (CHANNELS, RINGS, COALESCING)),
    OFFLOADS.kind(originals_of=OFFLOADS.requested, **_PARTS),
)
