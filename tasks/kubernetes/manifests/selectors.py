"""Selectors for the configurations of device plugins: they select the wanted functions, and no other function of any node.

All nodes have one configuration, so a selector for a function of one node may also match an unwanted function of another. All
given keys of a selector must match: k8s-rdma-shared-dev-plugin v1.5.3, pkg/resources/device_selectors.go;
sriov-network-device-plugin, pkg/resources/deviceSelectors.go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.spec.ranges import format_ranges, parse_ranges
from tasks.kubernetes.manifests.discovered import SHARED, Discovered, SeenFunction

Nodes = Mapping[str, Discovered]
Chosen = Mapping[str, Sequence[SeenFunction]]
"""The functions that a resource is made of, by host name."""


def shared_rdma(nodes: Nodes, chosen: Chosen) -> dict[str, Any]:
    """Selectors of k8s-rdma-shared-dev-plugin: by PCI ID, and also by netdev where the PCI IDs would match unwanted functions.

    :raises ValueError: the plugin's selectors cannot exclude an unwanted function; with the reason and the remedy.
    """
    functions = [function for each in chosen.values() for function in each]
    # The plugin's IDs have no 0x.
    selector = {"vendors": _each(f.vendor for f in functions), "deviceIDs": _each(f.device for f in functions)}
    if not _unwanted(selector, nodes, chosen):
        return selector
    for name, each in chosen.items():
        for function in each:
            if function.netdev is None:
                other, unwanted = _unwanted(selector, nodes, chosen)[0]
                raise ValueError(
                    f"{called(name, function)} has no netdev by which the plugin could tell it from "
                    f"{called(other, unwanted)}, which is unwanted and has the same PCI ID; give it a netdev (on InfiniBand: "
                    "load ib_ipoib)"
                )
    selector["ifNames"] = _each(f.netdev for f in functions)
    _check(
        selector, nodes, chosen, "a netdev's name must stand for the same NIC on all hosts of a folder (systemd.link)"
    )
    return selector


def sriov(nodes: Nodes, chosen: Chosen, rdma: bool) -> dict[str, Any]:
    """Selectors of sriov-network-device-plugin: by PCI ID, driver and index below a PF.

    If those would match unwanted functions, they select by address, too.

    :raises ValueError: the plugin's selectors cannot exclude an unwanted function; with the reason and the remedy.
    """
    functions = [function for each in chosen.values() for function in each]
    indexes: dict[str, set[int]] = {}
    for function in functions:
        if function.pf is not None and function.index is not None:
            indexes.setdefault(function.pf, set()).add(function.index)
    selector: dict[str, Any] = {
        "vendors": _each(f.vendor for f in functions),
        "devices": _each(f.device for f in functions),
        "drivers": _each(f.driver for f in functions),
        "pfNames": [f"{name}#{format_ranges(indexes[name])}" for name in sorted(indexes)],
    }
    if rdma:
        selector["isRdma"] = True
    if _unwanted(selector, nodes, chosen):
        selector["pciAddresses"] = _each(f.address for f in functions)
        _check(selector, nodes, chosen, "VFs of the same address must have the same use on all hosts of a folder")
    return selector


def _each(values: Iterator[str | None]) -> list[str]:
    return sorted({value for value in values if value is not None})


def _unwanted(selectors: Mapping[str, Any], nodes: Nodes, chosen: Chosen) -> list[tuple[str, SeenFunction]]:
    """The unwanted functions that the selectors match, with their hosts."""
    wanted = {name: set(functions) for name, functions in chosen.items()}
    return [
        (name, function)
        for name, node in nodes.items()
        for function in node.functions
        if function not in wanted.get(name, ()) and _selects(selectors, function)
    ]


def _selects(selectors: Mapping[str, Any], function: SeenFunction) -> bool:
    shared = "deviceIDs" in selectors
    if function.rdma not in SHARED if shared else selectors.get("isRdma") and function.rdma is None:
        return False
    have = {
        "vendors": function.vendor,
        "deviceIDs": function.device,
        "devices": function.device,
        "drivers": function.driver,
        "ifNames": function.netdev,
        "pciAddresses": function.address,
    }
    if not all(value in selectors[key] for key, value in have.items() if key in selectors):
        return False
    return shared or any(_below(each, function) for each in selectors["pfNames"])


def _below(selector: str, function: SeenFunction) -> bool:
    name, _, indexes = selector.partition("#")
    return function.pf == name and function.index in parse_ranges(indexes)


def _check(selectors: Mapping[str, Any], nodes: Nodes, chosen: Chosen, remedy: str) -> None:
    for name, function in _unwanted(selectors, nodes, chosen):
        raise ValueError(
            f"the plugin's selectors would also select {called(name, function)}, which is unwanted: on another host a NIC "
            f"of the same PCI ID has that name or address; {remedy}, or give one of the hosts a folder of its own"
        )


def called(name: str, function: SeenFunction) -> str:
    """A function of a host in an error's text."""
    what = f"NIC {function.nic}" if function.nic else "no NIC of the spec"
    netdev = f"{function.netdev}, " if function.netdev else ""
    return f"{function.address} of {name} ({netdev}{what})"
