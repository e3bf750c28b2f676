"""Public reports about the names of VFs' netdevs."""

import pytest

from tests.sim.engine.one_nic import Node, is_settled, left, vf
from tests.sim.kernel import no_fault
from tests.sim.two_nics import NAME0, NAME1, PF1


@pytest.mark.parametrize(
    "held_by",
    [
        pytest.param([1, 0, 2], id="systemd-2657"),
        pytest.param([1, 2, 0], id="systemd-29957"),
        pytest.param([2, 1, 0], id="systemd-16665"),
    ],
)
def test_vfs_that_have_each_other_s_names_get_their_own(node: Node, held_by: list[int]) -> None:
    """Neither name is free; an older udev gives no alternative names, which would keep others from them."""
    vfs = {"vfs": {"count": 3}}
    node.follow(vfs)
    named = [[vf(node, index), f"swap{index}"] for index in range(3)]
    for function, name in (*named, *((vf(node, index), f"{NAME0}v{held}") for index, held in enumerate(held_by))):
        ifindex = node.kernel.netdev(function).ifindex
        node.kernel.netlink.set_link(ifindex, up=False)
        node.kernel.netlink.rename(ifindex, name)
        for altname in node.kernel.netdev(function).altnames:
            node.kernel.netlink.remove_altname(ifindex, altname)
    assert node.kernel.netdev(vf(node, 0)).name == f"{NAME0}v{held_by[0]}"
    result = node.follow(vfs, passes=1)
    assert is_settled(result), left(result)
    assert [node.kernel.netdev(vf(node, index)).name for index in range(3)] == [f"{NAME0}v{n}" for n in range(3)]


def test_a_name_that_another_netdev_has_for_a_while_is_given_later(node: Node) -> None:
    """While it boots a DPU has the name for a moment (https://github.com/sonic-net/sonic-buildimage/pull/29545)."""
    name = f"{NAME0}v0"
    node.follow({"vfs": {"count": 1}})
    other, own = (node.kernel.netdev(function).ifindex for function in (PF1, vf(node, 0)))
    for ifindex, taken in ((own, "eth3"), (other, name)):
        node.kernel.netlink.set_link(ifindex, up=False)
        for altname in node.kernel.netdev(vf(node, 0)).altnames:
            node.kernel.netlink.remove_altname(own, altname)
        node.kernel.netlink.rename(ifindex, taken)
    said = [error for field, _, error in left(node.follow({"vfs": {"count": 1}})) if field == "name"]
    assert [name in error for error in said] == [True]
    assert node.kernel.netdev(PF1).name == name
    node.kernel.netlink.rename(other, "eth9")
    assert is_settled(node.follow({"vfs": {"count": 1}}))
    assert node.kernel.netdev(vf(node, 0)).name == name


def test_a_name_that_is_another_netdev_s_alternative_name_is_called_that(node: Node) -> None:
    """udev adds alternative names to netdevs that have been renamed (lxd 12274)."""
    node.follow({"vfs": {"count": 1}})
    name = f"{NAME0}v0"
    other, own = (node.kernel.netdev(function).ifindex for function in (PF1, vf(node, 0)))
    node.kernel.netlink.set_link(own, up=False)
    node.kernel.netlink.rename(own, "eth3")
    for altname in node.kernel.netdev(vf(node, 0)).altnames:
        node.kernel.netlink.remove_altname(own, altname)
    node.kernel.netlink.add_altname(other, name)
    said = [error for field, _, error in left(node.follow({"vfs": {"count": 1}})) if field == "name"]
    assert [f"ip link property del dev {NAME1} altname {name}" in error for error in said] == [True]
    node.kernel.netlink.remove_altname(other, name)
    assert is_settled(node.follow({"vfs": {"count": 1}}))


def test_a_vf_that_another_program_renames_at_the_same_moment_is_renamed_once(node: Node) -> None:
    """An "attempt of already renamed device" (https://github.com/canonical/cloud-init/issues/5075)."""
    node.follow({"vfs": {"count": 1}})
    name = f"{NAME0}v0"
    ifindex = node.kernel.netdev(vf(node, 0)).ifindex
    node.kernel.netlink.set_link(ifindex, up=False)
    node.kernel.netlink.rename(ifindex, "eth3")

    def meanwhile(operation: str, where: str, value: str) -> None:
        if operation == "rename":
            node.kernel.fault = no_fault
            node.kernel.netlink.rename(ifindex, "eth4")

    node.kernel.fault = meanwhile
    assert is_settled(node.follow({"vfs": {"count": 1}}))
    assert node.kernel.netdev(vf(node, 0)).name == name


def test_vfs_that_udev_names_by_another_rule_keep_these_names(node: Node) -> None:
    """The names of a PF's VFs have nothing in common with it (systemd 25545)."""
    node.follow({"vfs": {"count": 2}})
    for index in range(2):
        ifindex, name = node.kernel.netdev(vf(node, index)).ifindex, f"enp37s1{index}v4"
        node.kernel.netlink.set_link(ifindex, up=False)
        node.kernel.netlink.rename(ifindex, name)
        entry = f"/run/udev/data/n{ifindex}"
        node.kernel.tree.put(entry, node.kernel.tree.files[entry].replace(f"{NAME0}v{index}", name))
    assert is_settled(node.follow({"mtu": 9000, "vfs": {"count": 2, "defaults": {"vlan": 7}}}))
    netdevs = [node.kernel.netdev(vf(node, index)) for index in range(2)]
    assert [(each.name, each.mtu) for each in netdevs] == [("enp37s10v4", 9000), ("enp37s11v4", 9000)]
