"""VFs: how many there are, and what their PF grants them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.evidence import Finding, Nic, Node, Vf, equal, judge

pytestmark = pytest.mark.sriov

NO_VFS = "its spec gives no NIC a number of VFs"


def wanted_vfs(nics: tuple[Nic, ...]) -> Iterator[tuple[Nic, Vf]]:
    return ((nic, vf) for nic in nics for vf in nic.vfs if nic.want.vfs and vf.index < nic.want.vfs.count)


def granted(node: Node, nic: Nic, vf: Vf) -> dict[str, Any]:
    entries = node.links[nic.netdev].get("vfinfo_list", [])
    return next((entry for entry in entries if entry["vf"] == vf.index), {})


def test_the_device_has_its_number_of_vfs(node: Node, nics: tuple[Nic, ...]) -> None:
    """By the SR-IOV capability in the PF's configuration space."""

    def findings() -> Iterator[Finding]:
        for nic in nics:
            if nic.want.vfs is not None:
                counts = re.findall(r"Number of VFs: (\d+)", node.run('lspci -vvs "$1"', nic.pci))
                yield equal(nic.label, "Number of VFs (lspci)", [str(nic.want.vfs.count)], counts)

    judge(node, findings(), NO_VFS)


def test_the_kernel_has_its_number_of_vfs(node: Node, nics: tuple[Nic, ...]) -> None:
    def findings() -> Iterator[Finding]:
        for nic in nics:
            if nic.want.vfs is not None:
                wanted = list(range(nic.want.vfs.count))
                yield equal(nic.label, "VFs (virtfn links)", wanted, [vf.index for vf in nic.vfs])
                indexes = sorted(entry["vf"] for entry in node.links[nic.netdev].get("vfinfo_list", []))
                yield equal(nic.label, "VFs (ip link)", wanted, indexes)

    judge(node, findings(), NO_VFS)


def test_addresses_are_unique(node: Node, nics: tuple[Nic, ...]) -> None:
    macs = [granted(node, nic, vf).get("address") for nic, vf in wanted_vfs(nics)]
    findings = [
        equal(vf.label, f"VFs with the MAC {mac}", 1, macs.count(mac))
        for (_, vf), mac in zip(wanted_vfs(nics), macs, strict=True)
    ]
    judge(node, findings, NO_VFS)


@pytest.mark.parametrize(
    "attribute",
    [
        *("mac", "vlan", "qos", "trust", "spoofchk", "link_state", "min_tx_rate", "max_tx_rate"),
        *("node_guid", "port_guid"),
    ],
)
def test_each_vf_is_granted_its_attributes(node: Node, nics: tuple[Nic, ...], attribute: str) -> None:
    """The address as given, or derived from the PF's permanent one. GUIDs were not run on InfiniBand."""

    def value_of(entry: dict[str, Any]) -> object:
        # What is 0, ip leaves out.
        if attribute in ("vlan", "qos"):
            return entry.get("vlan_list", [{}])[0].get(attribute, 0)
        if attribute.endswith("_tx_rate"):
            return entry.get("rate", {}).get(attribute.removesuffix("_rate"), 0)
        # iproute2's names of GUIDs since 5.5, by its source.
        names = {"mac": "address", "node_guid": "node guid", "port_guid": "port guid"}
        return entry.get(names.get(attribute, attribute))

    findings = [
        equal(vf.label, f"{attribute} (ip link)", getattr(vf.want, attribute), value_of(granted(node, nic, vf)))
        for nic, vf in wanted_vfs(nics)
        if getattr(vf.want, attribute) is not None and vf.taken is None
    ]
    judge(node, findings, f"its spec gives no VF of the host's a value for {attribute}")


def test_each_vf_is_bound(node: Node, nics: tuple[Nic, ...]) -> None:
    """To vfio-pci if that is wanted, and otherwise to any driver."""

    def finding(vf: Vf) -> Finding:
        driver = node.drivers.get(vf.pci, "none")
        if vf.want.driver == "vfio-pci":
            return equal(vf.label, "driver (lspci)", "vfio-pci", driver)
        return Finding(vf.label, "driver (lspci)", "one", driver, vf.pci in node.drivers)

    judge(node, [finding(vf) for _, vf in wanted_vfs(nics)], NO_VFS)


def test_each_vf_has_a_netdev(node: Node, nics: tuple[Nic, ...]) -> None:
    """In the host's network namespace, or in that of a pod that took it; vfio-pci makes none."""
    findings = [
        Finding(vf.label, "netdev", "one, in some namespace", vf.netdev or vf.taken, bool(vf.netdev or vf.taken))
        for _, vf in wanted_vfs(nics)
        if node.drivers.get(vf.pci) != "vfio-pci"
    ]
    judge(node, findings, NO_VFS)


def test_each_vf_netdev_has_its_address(node: Node, nics: tuple[Nic, ...]) -> None:
    findings = [
        equal(vf.label, "MAC (ip link)", vf.want.mac, node.links[vf.netdev]["address"])
        for _, vf in wanted_vfs(nics)
        if vf.want.mac is not None and vf.netdev is not None
    ]
    judge(node, findings, "no VF of its spec has a netdev here, and an address")
