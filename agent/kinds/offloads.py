"""The offloads of a netdev (`ethtool -k`): which of its features are on."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from attrs import evolve

from agent.driver_families import family_of
from agent.hardware.functions import ifindex_of
from agent.kinds import Reading, vf_links
from agent.machine import Feature, Machine
from agent.report.records import Change
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "offloads"
AFTER = ("coalescing",)
UNKNOWN_UNTIL = ("vfs", "bindings")
REACH = "function"
BEFORE_UP = True
OTHER_WRITERS = ("NetworkManager", "tuned")

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


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Mapping[str, Feature] | None]]:
    """The features of the netdevs for which the spec gives some, by target."""
    return vf_links.observe_settings(machine, want, scope, NAME, machine.ethtool.features)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Every feature that differs."""
    changes: list[Change] = []
    for setting in vf_links.settings(want, have, NAME, NAME):
        given: Mapping[str, bool] = setting.given
        known: Mapping[str, Feature] = setting.read
        changes += [_unknown(setting, name) for name in sorted(given.keys() - known.keys())]
        changes += _differing(
            setting, {name: on for name, on in given.items() if name in known and known[name].on != on}
        )
    return changes


def _unknown(setting: vf_links.Setting, name: str) -> Change:
    if not setting.read:
        return setting.change(
            NAME, name, None, setting.given[name]
        )  # nothing was read: apply reports the kernel's own error
    near = [ETHTOOL_NAMES[name]] if name in ETHTOOL_NAMES else difflib.get_close_matches(name, setting.read, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "see `ethtool -k` for those there are"
    blocker = f"this kernel knows no feature {name!r}"
    return setting.change(NAME, name, None, setting.given[name], blocker=blocker, remedy=remedy)


def _differing(setting: vf_links.Setting, wanted: Mapping[str, bool]) -> list[Change]:
    resets = family_of(setting.status.driver).offloads_flap
    features: Mapping[str, Feature] = setting.read
    # All were requested before and did not change: a further request would change nothing.
    stuck = all(features[name].changeable and features[name].requested == on for name, on in wanted.items())
    changes = []
    for name, on in sorted(wanted.items()):
        flaps = features[name].changeable and (resets is None or name in resets)
        kept = f"it was requested, but the driver or a feature that it depends on keeps it {'off' if on else 'on'}"
        blocker, remedy = (
            (kept, "see `ethtool -k`, and give the features that it depends on as well") if stuck else ("", "")
        )
        changes.append(setting.change(NAME, name, not on, on, flaps, blocker, remedy))
    return changes


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """Whether one feature that was switched is requested now."""
    return vf_links.setting_now(
        machine,
        want,
        kept,
        lambda given: kept.field in given,
        lambda ifindex: _requested(machine, ifindex, kept.field),
        lambda family: family.offloads_flap is None or kept.field in family.offloads_flap,
    )


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """Whether the feature is requested: the kernel keeps a requested one off while one that it depends on is off."""
    return [evolve(change, before=_requested(machine, ifindex_of(machine.files, change.target), change.field))]


def _requested(machine: Machine, ifindex: int, name: str) -> bool | None:
    feature = machine.ethtool.features(ifindex).get(name)
    return None if feature is None else feature.requested


def apply(machine: Machine, change: Change) -> None:
    """Request one feature, after finding the netdev again."""
    machine.ethtool.set_feature(ifindex_of(machine.files, change.target), change.field, bool(change.after))
