"""Reads the devices that DRA drivers publish for a node in ResourceSlices. DRA: Kubernetes' dynamic resource allocation.

Drivers name their devices as they like, so a device is found by its PCI address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

STANDARD_ADDRESS = "resource.kubernetes.io/pciBusID"
"""The attribute that Kubernetes defines for a device's PCI address (k8s.io/dynamic-resource-allocation, deviceattribute).
dra-driver-sriov has it; dranet has only its own, pciAddress."""


@frozen(order=True)
class Device:
    """A device as its driver publishes it; the pool has the Node's name. ``pci``: its address in lower case."""

    driver: str
    name: str
    pci: str


def read_devices(listing: Mapping[str, Any], node: str) -> tuple[list[Device], list[Device]]:
    """The devices with a PCI address in the API server's list of a node's ResourceSlices: in pools of its name, and in others.

    A driver that changes a pool writes slices of a higher generation, and those of before are out of date until it deletes them
    (ResourcePool, k8s.io/api/resource/v1).

    :raises KeyError, TypeError, AttributeError: it is something else.
    """
    own: list[Device] = []
    others: list[Device] = []
    slices = [(str(each["spec"]["driver"]), each["spec"]["pool"], each["spec"]) for each in listing["items"]]
    newest: dict[tuple[str, str], Any] = {}
    for driver, pool, _ in slices:
        newest[driver, pool["name"]] = max(newest.get((driver, pool["name"]), 0), pool.get("generation", 0))
    for driver, pool, spec in slices:
        if pool.get("generation", 0) < newest[driver, pool["name"]]:
            continue
        for device in spec.get("devices") or ():
            if pci := _address(driver, device.get("attributes") or {}):
                (own if pool["name"] == node else others).append(Device(driver, str(device["name"]), pci))
    return own, others


def _address(driver: str, attributes: Mapping[str, Any]) -> str:
    # An attribute without a domain is of the driver's own.
    names = (STANDARD_ADDRESS, f"{driver}/pciAddress", "pciAddress")
    values = (attributes[name].get("string") for name in names if name in attributes)
    return next((str(value).lower() for value in values if value), "")
