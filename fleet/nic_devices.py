"""The devices that drivers of DRA publish for one NIC: their users, and the DeviceTaintRules that take them from their users.

Such a rule taints one device with NoExecute: Kubernetes deletes the pods that use the device, and gives it to no other pod. It
has the operator's own key and label, so a reporter and a sweep's quarantine leave it alone. It ends with its Node.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from attrs import field, frozen
from lightkube import ALL_NS, ApiError
from lightkube.resources.core_v1 import Pod

from agent.report import names
from agent.report.dra_devices import Device, read_devices
from fleet import device_rules
from fleet.api import ABSENT, FORBIDDEN, Api, Failed, code
from fleet.device_rules import EVICTS, DeviceRule, device_words
from fleet.eviction import CannotDrain, drain, forbidding, is_terminating
from fleet.inventory import Hosts
from fleet.objects import metadata_of
from fleet.pods import NodePods
from fleet.reading import PlainDeviceTaintRule, PlainPodDisruptionBudget, PlainResourceClaim, PlainResourceSlice, all_of

ANSWER = 180.0
"""Seconds for a node's answer about its NIC."""


@frozen
class Nic:
    """What a node's agent says of a NIC. ``settled``: it is ready, and no change of it waits.

    ``functions``: the PCI addresses of the NIC and its VFs, in lower case.
    """

    name: str
    ready: bool
    settled: bool
    functions: frozenset[str]


def ask(hosts: Hosts, node: str, name: str) -> Nic:
    """Ask the agent of a node about one NIC of the node's spec.

    :raises Failed: the node does not answer, or has no NIC of this name.
    """
    ran = hosts.run(node, [names.COMMAND, "status", "--device", name, "--json"], ANSWER)
    try:
        # The command's exit code is not 0 while a change of the NIC waits, and then pyinfra adds lines.
        document, _ = json.JSONDecoder().raw_decode(ran.output, max(ran.output.find("{"), 0))
        found = document["nic"]
        functions = frozenset(str(each).lower() for each in (found["pci"], *found["vfs"]) if each)
        nic = Nic(str(found["name"]), found["ready"] is True, document["faults"] == [], functions)
    except (ValueError, LookupError, TypeError):
        raise Failed(f"the node does not say what its NIC {name} is: {ran.output}") from None
    if nic.name != name:
        raise Failed(f"its NIC {name} is named {nic.name} in its spec; give --device {nic.name}")
    return nic


def is_good(hosts: Hosts, node: str, name: str) -> bool:
    """Whether a node's agent says that a NIC is ready."""
    try:
        return ask(hosts, node, name).ready
    except Failed:
        return False


def require(api: Api) -> None:
    """Check that this user may list DeviceTaintRules, before any node is changed.

    :raises Failed: the cluster has none.
    """
    try:
        device_rules.labelled(api, names.MAINTENANCE)
    except ApiError as error:
        if code(error) != ABSENT:
            raise
        raise Failed(
            "the cluster has no DeviceTaintRule of resource.k8s.io/v1 (Kubernetes 1.37): give no --device"
        ) from None


@frozen
class NicDevices:
    """The devices of a NIC, and the pods of its node. ``uid``: the Node's.

    ``begun``: the NIC may be half changed, so users are no reason to refuse.

    ``_claims``: namespace and name of each claim that had one of the devices when all claims of the cluster were last read.
    ``_lasting``: why a taint does not free the device of a claim, by the uid of the pod or PodGroup that has it.
    """

    pods: NodePods
    uid: str
    nic: Nic
    begun: bool
    _claims: set[tuple[str, str]] = field(factory=set, init=False)
    _lasting: dict[str, str] = field(factory=dict, init=False)

    def take(self) -> tuple[str, str]:
        """Taint the devices that are not tainted yet; the pods that still use a device, and why.

        A driver may publish devices late, so this is called until no pod is left.

        :raises CannotDrain: the node's drivers publish no such device, or the eviction of its users is forbidden.
        """
        if self.nic.settled:
            self.pods.tell(f"{self.pods.node}: no change of {self.nic.name} waits, so nothing is tainted")
            return "", ""
        devices = self._published()
        tainted = {rule.device for rule in listed(self.pods.api, self.pods.node)}
        new = [device for device in devices if _words(device) not in tainted]
        if not devices and not tainted and not self.begun:
            raise CannotDrain(
                f"no driver of DRA publishes a device of {self.nic.name}; maintain the node without --device"
            )
        if new and not self.begun and (users := self._users(map(_words, new))):
            self._check(users, [pod for pod in self.pods.read() if metadata_of(pod).uid in users])
        for device in new:
            self.pods.api.client.create(PlainDeviceTaintRule.from_dict(self._rule(device)))
            self.pods.tell(f"{self.pods.node}: tainted {_words(device)}")
        # Also those that are not published for now: a driver that ends takes its ResourceSlices along, and pods go on.
        taken = {*tainted, *map(_words, devices)}
        # All claims of a large cluster take long, so they are read again only once these are free.
        left = self._users(taken, () if new else tuple(self._claims)) or self._users(taken)
        return ", ".join(sorted(left.values())), "they do not end"

    def _published(self) -> list[Device]:
        slices = self.pods.api.client.list(PlainResourceSlice, fields={"spec.nodeName": self.pods.node})
        own, others = read_devices({"items": list(slices)}, self.pods.node)
        if foreign := sorted({device.driver for device in others if device.pci in self.nic.functions}):
            raise CannotDrain(f"{', '.join(foreign)} publishes {self.nic.name} in a pool that is not named as the Node")
        return sorted({device for device in own if device.pci in self.nic.functions})

    def _users(self, devices: Iterable[str], among: Collection[tuple[str, str]] | None = None) -> dict[str, str]:
        """The pods for which claims of these devices are reserved, by their uid.

        The rule's condition EvictionInProgress does not suffice: it is False once the last pod is being deleted
        (countPendingPods, pkg/controller/devicetainteviction/device_taint_eviction.go), and does not count pods that tolerate
        the taint. A claim is reserved until its pod has ended.

        :param among: the claims to read; None: all of the cluster.
        """
        wanted = {(self.pods.node, device) for device in devices}
        client = self.pods.api.client

        def users(claims: Iterable[Mapping[str, Any]]) -> dict[str, str]:
            return {uid: name for claim in claims for uid, name in self._users_of(claim, wanted)}

        if among is None:
            self._claims.clear()
            return all_of(client, PlainResourceClaim, users, namespace=ALL_NS)
        return users(
            each
            for namespace, name in among
            for each in client.list(PlainResourceClaim, namespace=namespace, fields={"metadata.name": name})
        )

    def _users_of(self, claim: Mapping[str, Any], wanted: Collection[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        status = claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        taken = [each for each in results if (each["pool"], device_words(each["driver"], each["device"])) in wanted]
        namespace, name = claim["metadata"]["namespace"], claim["metadata"]["name"]
        for user in (taken and status.get("reservedFor")) or ():
            self._claims.add((namespace, name))
            if user.get("resource") == "podgroups":
                why = f"it is reserved for the PodGroup {user['name']}, and pods that come back get the same device"
                self._lasting[user["uid"]] = f"the claim {namespace}/{name} has a device: {why}"
            elif any(map(_tolerates, taken)):
                self._lasting[user["uid"]] = f"the claim {namespace}/{name} has a device: it tolerates each taint"
            yield user["uid"], f"{namespace}/{user['name']}"

    def _check(self, users: Mapping[str, str], pods: Collection[Pod]) -> None:
        """Refuse what a drain would refuse, since NoExecute asks nobody. Pods of DaemonSets are deleted, too."""
        lasting = dict.fromkeys(self._lasting[uid] for uid in users if uid in self._lasting)
        unknown = users.keys() - self._lasting.keys() - {metadata_of(pod).uid for pod in pods}
        ending = [pod for pod in pods if not is_terminating(pod)]
        refusals = [
            *(f"{why}; end its workload, or maintain the node without --device" for why in lasting),
            *(f"{user} uses a device, and is no pod of the node" for user in sorted(users[uid] for uid in unknown)),
            *drain(pods, self.pods.rules).blockers,
            *all_of(
                self.pods.api.client,
                PlainPodDisruptionBudget,
                lambda budgets: forbidding(budgets, ending),
                namespace=ALL_NS,
            ),
        ]
        if refusals:
            raise CannotDrain("; ".join(refusals))

    def _rule(self, device: Device) -> dict[str, Any]:
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceTaintRule",
            "metadata": {
                "generateName": f"{self.pods.node}.maintenance-",
                "labels": {names.MAINTENANCE: self.pods.node},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": self.pods.node, "uid": self.uid}],
            },
            "spec": {
                "deviceSelector": {"driver": device.driver, "pool": self.pods.node, "device": device.name},
                "taint": {"key": names.MAINTENANCE, "value": device.pci.replace(":", "-"), "effect": EVICTS},
            },
        }


def _tolerates(result: Mapping[str, Any]) -> bool:
    """Whether a device is allocated to a claim that keeps it in spite of a maintenance's taint.

    See claimEvictionTime in pkg/controller/devicetainteviction/device_taint_eviction.go.
    """
    return any(
        (each.get("effect"), each.get("operator"), each.get("tolerationSeconds")) == (EVICTS, "Exists", None)
        and each.get("key") in (None, "", names.MAINTENANCE)
        for each in result.get("tolerations") or ()
    )


def _words(device: Device) -> str:
    return device_words(device.driver, device.name)


def listed(api: Api, node: str) -> list[DeviceRule]:
    """The rules of a node's maintenance."""
    return [rule for rule in device_rules.labelled(api, names.MAINTENANCE) if rule.node == node]


def release(api: Api, node: str, recorded: bool) -> str:
    """Remove the rules of a node's maintenance; what was done, for a message.

    :param recorded: a maintenance of a NIC is recorded. Without one, the user may lack the right to list rules.
    """
    try:
        rules = listed(api, node)
    except ApiError as error:
        if code(error) == ABSENT:
            return ""
        if code(error) != FORBIDDEN or recorded:
            raise
        return "; this user may not list DeviceTaintRules, so some may be left (rights: docs/fleet.md)"
    for rule in rules:
        device_rules.remove(api, rule)
    return "".join(f"; {rule.device} is no longer tainted" for rule in rules)
