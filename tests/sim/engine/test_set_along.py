"""What the kernel sets along with a value of the spec gets its own original back."""

import errno
from pathlib import Path
from typing import Any

import pytest

from agent.engine.dry_run import dry_run
from agent.engine.originals import ORIGINALS
from agent.report.verdict import is_ready
from tests.sim.engine.one_nic import Node, left, wanting
from tests.sim.kernel import Kernel, no_fault
from tests.sim.refusing import refusing
from tests.sim.two_nics import NAME0, PF0


@pytest.fixture
def node(kernel: Kernel, tmp_path: Path) -> Node:
    return Node(kernel, tmp_path / ORIGINALS)


@pytest.mark.parametrize("last", [{}, {"offloads": {"tx-scatter-gather": True}}], ids=["all leave", "one stays"])
def test_an_offload_that_the_kernel_switched_off_along_is_on_again(node: Node, last: dict[str, Any]) -> None:
    def on() -> dict[str, bool]:
        features = node.kernel.ethtool.settings("features", node.kernel.netdev(PF0).ifindex)
        return {name: bool(features[name].value) for name in ("tx-scatter-gather", "tx-tcp-segmentation")}

    node.follow({"offloads": {"tx-scatter-gather": False}})
    assert not any(on().values())
    node.follow({"offloads": {"tx-scatter-gather": True, "tx-tcp-segmentation": True}})
    node.follow({"offloads": {"tx-scatter-gather": False, "tx-tcp-segmentation": False}})
    node.follow(last)
    assert all(on().values())
    assert not dry_run(node.kernel.machine(), wanting(last), node.originals).changes


CONF6, CONF4 = "/proc/sys/net/ipv6/conf", "/proc/sys/net/ipv4/conf"
ALL6, ONE6 = "net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.lo.disable_ipv6"


@pytest.mark.parametrize("before", ["0", "1"])
@pytest.mark.parametrize(
    "sequence",
    [
        [{ALL6: "1"}],
        [{ALL6: "1"}, {ALL6: "1", ONE6: "0"}],
        [{ALL6: "1"}, {ONE6: "0"}],
        [{ALL6: "1", ONE6: "0"}, {ALL6: "1"}],
        [{ALL6: "1", ONE6: "0"}, {ALL6: "1", ONE6: "1"}],
        [{ONE6: "1"}, {ALL6: "1"}, {ALL6: "0", ONE6: "1"}],
    ],
    ids=str,
)
def test_what_is_set_along_for_netdevs_is_as_it_was(node: Node, before: str, sequence: list[dict[str, str]]) -> None:
    places = [f"{CONF6}/{place}/disable_ipv6" for place in ("all", "default", "lo", NAME0)]
    for path, value in zip(places, ("0", "0", before, "1"), strict=True):
        node.kernel.tree.put(path, value)
    for sysctls in sequence:
        assert is_ready(node.follow(None, sysctls=sysctls).conditions)
        wanted = {"lo": sysctls.get(ONE6, sysctls.get(ALL6))}
        assert wanted["lo"] in (None, node.kernel.files.read(places[2]))
    node.kernel.add_virtual("veth0")
    node.kernel.tree.put(f"{CONF6}/veth0/disable_ipv6", node.kernel.files.read(places[1]))
    assert left(node.follow(None, passes=5)) == []
    assert [node.kernel.files.read(path) for path in places] == ["0", "0", before, "1"]
    assert node.kernel.files.read(f"{CONF6}/veth0/disable_ipv6") == "0", (
        "a netdev that came later is as the kernel has it"
    )


def test_whether_redirects_are_accepted_is_as_it_was_before_the_node_was_a_router(node: Node) -> None:
    path = f"{CONF4}/all/accept_redirects"
    node.kernel.tree.put(path, "0")
    for sysctls in ({"net.ipv4.ip_forward": "1"}, {}):
        node.follow(None, passes=5, sysctls=sysctls)
        assert node.kernel.files.read(path) == "0"


def test_redirects_are_as_they_were_also_after_a_router_by_a_killed_agent(node: Node) -> None:
    path, router = f"{CONF4}/all/accept_redirects", {"net.ipv4.ip_forward": "1"}
    node.kernel.tree.put(path, "0")
    node.follow(None, sysctls=router)
    node.kernel.fault = refusing(errno.EBUSY, "ip_forward")
    node.follow(None)
    node.kernel.fault = no_fault
    for sysctls in ({}, router, {}):
        node.follow(None, passes=5, sysctls=sysctls)
    assert node.kernel.files.read(path) == "0"


def test_a_value_of_a_netdev_that_is_gone_is_forgotten(node: Node) -> None:
    node.kernel.add_virtual("veth0")
    node.kernel.tree.put(f"{CONF6}/veth0/disable_ipv6", "0")
    node.follow(None, sysctls={ALL6: "1"})
    node.kernel.remove_virtual("veth0")
    node.kernel.tree.remove(f"{CONF6}/veth0")
    node.follow(None, passes=5)
    node.kernel.add_virtual("veth0")
    node.kernel.tree.put(f"{CONF6}/veth0/disable_ipv6", "1")
    node.follow(None)
    assert node.kernel.files.read(f"{CONF6}/veth0/disable_ipv6") == "1", "the program that made this one wants that"
