"""Pure functions: which DeviceTaintRules a node should have by its report, and what must be written for that.

A DeviceTaintRule taints one device that a driver of DRA (Kubernetes' dynamic resource allocation) publishes in a ResourceSlice,
so that no new claim gets it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import frozen

from agent.report.dra_devices import Device
from agent.report.names import EVICT_AFTER, OF_NODE, QUARANTINE
from agent.report.records import NicVerdict
from agent.reporter.settings import Quarantine

MOST = 1000
"""Rules of a node. Their names end with a number below this, so that stolen credentials cannot fill the API server."""


@frozen(order=True)
class Rule:
    """A rule of this node at the API server. ``evict_after``: its label; empty if it has none. ``owner``: its Node's uid."""

    name: str
    uid: str
    device: Device
    effect: str
    evict_after: str
    owner: str

    def follows(self, policy: Quarantine, owner: str) -> bool:
        """Whether it says what the policy asks for. An effect that `trackbed fleet sweep` has raised stays."""
        allowed = {policy.effect} | ({"NoExecute"} if policy.evict_after is not None else set())
        return (self.effect in allowed, self.evict_after, self.owner) == (True, _evict_after(policy), owner)


@frozen
class Judged:
    """The functions of a report by PCI address: True is good, False bad. None is unknown: their rules stay as they are.

    ``whole``: every NIC and VF is known and good. Only then is a rule removed whose device is not in the report: its NIC has
    left the spec, or its VF is gone. A function that is away for now has no address.
    """

    functions: Mapping[str, bool | None]
    whole: bool

    def bad(self, device: Device) -> bool:
        """Whether a device must be tainted."""
        return self.functions.get(device.pci) is False

    def good(self, device: Device) -> bool:
        """Whether a device must not be tainted."""
        return self.functions.get(device.pci, self.whole or None) is True


def judged(nics: Sequence[NicVerdict]) -> Judged:
    """What a report says of each function."""
    functions: dict[str, bool | None] = {}
    for nic in nics:
        verdict = None if nic.certainty == "unknown" else nic.ready
        functions |= {pci.lower(): verdict for pci in (nic.pci, *nic.vfs) if pci}
        for vf in nic.faulty_vfs:
            if pci := nic.vfs[vf.index] if vf.index < len(nic.vfs) else "":
                functions[pci.lower()] = None if vf.certainty == "unknown" else False
    away = any(not nic.pci or not all(nic.vfs) for nic in nics)
    return Judged(functions, all(functions.values()) and not away)


@frozen
class Writes:
    """The rules to create, and then those to delete. In this order a device that is still bad is always tainted.

    ``left``: why some bad devices are not tainted, in sentences.
    """

    create: tuple[dict[str, Any], ...] = ()
    delete: tuple[Rule, ...] = ()
    left: tuple[str, ...] = ()


def writes(
    node: str,
    owner: str,
    policy: Quarantine | None,
    verdicts: Judged,
    devices: Collection[Device],
    rules: Collection[Rule],
    taken: Collection[str] = (),
) -> Writes:
    """What must be written so that exactly the bad devices are tainted.

    :param node: the Node's name.
    :param owner: its uid. The garbage collector deletes its rules with it.
    :param devices: those that the node's drivers publish in pools of its name.
    :param rules: the node's present rules.
    :param taken: names that other rules have.
    """
    if policy is None:
        return Writes(delete=tuple(sorted(rules)))
    kept: dict[Device, Rule] = {}
    surplus = []
    for rule in sorted(rules):
        if verdicts.good(rule.device):
            surplus.append(rule)
        elif rule.follows(policy, owner) and rule.device not in kept:
            kept[rule.device] = rule
    wanted = sorted(device for device in set(devices) if verdicts.bad(device) and device not in kept)
    taken = {*taken, *(rule.name for rule in rules)}
    free = wanted[: MOST - len(taken)]
    create = []
    for device in free:
        name = _free_name(node, device, taken)
        taken.add(name)
        create.append(_document(name, node, owner, policy, device))
    covered = {*kept, *free}
    outdated = [rule for rule in sorted(rules) if rule.device in covered and rule not in kept.values()]
    over = len(wanted) - len(free)
    left = (f"{over} devices more than {MOST} are not quarantined",) if over else ()
    return Writes(tuple(create), tuple(dict.fromkeys([*surplus, *outdated])), left)


def _free_name(node: str, device: Device, taken: Collection[str]) -> str:
    """The name of a device's rule: always the same, unless another device's rule has it."""
    first = zlib.crc32(f"{device.driver}/{device.name}".encode())
    names = (f"{node}.{(first + step) % MOST}" for step in range(MOST))
    return next(name for name in names if name not in taken)


def _document(name: str, node: str, owner: str, policy: Quarantine, device: Device) -> dict[str, Any]:
    labels = {OF_NODE: node, EVICT_AFTER: _evict_after(policy)}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceTaintRule",
        "metadata": {
            "name": name,
            "labels": {key: value for key, value in labels.items() if value},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": owner}],
        },
        "spec": {
            "deviceSelector": {"driver": device.driver, "pool": node, "device": device.name},
            "taint": {"key": QUARANTINE, "value": device.pci.replace(":", "-"), "effect": policy.effect},
        },
    }


def _evict_after(policy: Quarantine) -> str:
    return "" if policy.evict_after is None else str(policy.evict_after)


def read_rules(listing: Mapping[str, Any], node: str) -> list[Rule]:
    """The rules that the reporter made for the node, from the API server's list.

    A rule is left out if somebody has copied it under another name, or changed it so that it selects no single device.

    :raises KeyError, TypeError, AttributeError: it is something else.
    """
    rules = []
    for each in listing["items"]:
        metadata, taint = each["metadata"], each["spec"]["taint"]
        selector = each["spec"].get("deviceSelector") or {}
        owners = [owner["uid"] for owner in metadata.get("ownerReferences") or ()]
        own = str(metadata["name"]).startswith(f"{node}.") and selector.get("pool") == node
        if own and selector.get("driver") and selector.get("device"):
            pci = str(taint.get("value", "")).replace("-", ":")
            device = Device(str(selector["driver"]), str(selector["device"]), pci)
            evict_after = str(metadata.get("labels", {}).get(EVICT_AFTER, ""))
            owner = owners[0] if len(owners) == 1 else ""
            rules.append(
                Rule(str(metadata["name"]), str(metadata["uid"]), device, str(taint["effect"]), evict_after, str(owner))
            )
    return rules
