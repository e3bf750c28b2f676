"""The netdevs of PFs and VFs, by `ip link`."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.evidence import Finding, Nic, Node, equal, judge

pytestmark = pytest.mark.links

Expected = tuple[str, dict[str, Any], int | None, str | None]


def netdevs(node: Node, nics: tuple[Nic, ...]) -> Iterator[Expected]:
    """Label, link, wanted MTU and wanted state of each netdev of the spec in the host's namespace."""
    for nic in nics:
        yield nic.label, node.links[nic.netdev], nic.want.mtu, nic.want.state
        for vf in nic.vfs:
            if vf.netdev is not None:
                yield vf.label, node.links[vf.netdev], vf.want.mtu, vf.want.state


def test_each_netdev_has_its_mtu(node: Node, nics: tuple[Nic, ...]) -> None:
    findings = [equal(label, "MTU", mtu, link["mtu"]) for label, link, mtu, _ in netdevs(node, nics) if mtu is not None]
    judge(node, findings, "its spec gives no MTU")


def test_each_netdev_has_its_state(node: Node, nics: tuple[Nic, ...]) -> None:
    findings = [
        equal(label, "state", state, "up" if "UP" in link["flags"] else "down")
        for label, link, _, state in netdevs(node, nics)
        if state is not None
    ]
    judge(node, findings, "its spec gives no state")


def test_each_netdev_has_its_alternative_names(node: Node, nics: tuple[Nic, ...]) -> None:
    findings = [
        Finding(nic.label, "altnames", name, ", ".join(have), name in have)
        for nic in nics
        for have in [node.links[nic.netdev].get("altnames", [])]
        for name in nic.want.altnames
    ]
    judge(node, findings, "its spec gives no altname")


def test_each_netdev_has_its_queue_length(node: Node, nics: tuple[Nic, ...]) -> None:
    wanted = [(nic.label, nic.netdev, nic.want.txqueuelen) for nic in nics]
    wanted += [
        (vf.label, vf.netdev, vf.want.txqueuelen or nic.want.txqueuelen) for nic in nics for vf in nic.vfs if vf.netdev
    ]
    findings = [
        equal(label, "txqueuelen", length, node.links[name]["txqlen"]) for label, name, length in wanted if length
    ]
    judge(node, findings, "its spec gives no txqueuelen")


def test_each_netdev_that_is_up_has_carrier(node: Node, nics: tuple[Nic, ...]) -> None:
    """Of what should be up."""

    def finding(label: str, link: dict[str, Any]) -> Finding:
        flags = link["flags"]
        state = f"{','.join(flags)}, operstate {link['operstate']}"
        return Finding(label, "carrier", "LOWER_UP", state, "LOWER_UP" in flags)

    findings = [finding(label, link) for label, link, _, state in netdevs(node, nics) if state == "up"]
    judge(node, findings, "its spec wants no netdev up")
