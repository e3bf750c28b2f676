"""Netdevs of other network namespaces on top of one of the own, on this machine's own kernel."""

import os
import socket
import subprocess

import pytest

from agent.linux.messages import IFINFOMSG, S32, U32, attribute
from agent.linux.namespaces import OWN, own_number
from agent.linux.netlink import LinuxNetlink
from agent.linux.uppers import IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINK, IFLA_LINK_NETNSID, IFLA_LINKINFO, Upper, _decoded
from tests.private_namespace import in_namespace, ip, pod, sh

MADE = "ip link add fab0 type veth peer name fab1; ip link add fab2 type veth peer name fab3"


@in_namespace(f"{MADE}; mount -t sysfs sysfs /mnt")
def test_a_macvlan_that_was_moved_away_or_made_there_is_found_and_the_ends_of_pairs_are_not() -> None:
    netlink = LinuxNetlink()
    assert netlink.uppers_elsewhere() == {}
    with pod() as one, pod() as other:
        ip("link", "add", "net1", "link", "fab0", "netns", one, "type", "macvlan", "mode", "bridge")
        ip("link", "set", "fab3", "netns", one)
        ip("link", "add", "net2", "link", "fab0", "type", "macvlan", "mode", "bridge")
        ip("link", "set", "net2", "netns", other)
        # A netdev that is on top of one of the pod's own.
        ip("link", "add", "net3", "link", "fab3", "type", "macvlan", "mode", "bridge", of=one)
        below = socket.if_nametoindex("fab0")
        assert netlink.uppers_elsewhere() == {below: ("net1", "net2")}
        assert not [name for name in os.listdir("/mnt/class/net/fab0") if name.startswith("upper_")]  # noqa: PTH208
        ip("link", "delete", "net2", of=other)
        assert netlink.uppers_elsewhere() == {below: ("net1",)}
        assert own_number() is None, "the search gives the own namespace no number of itself"


@in_namespace(MADE)
def test_in_a_namespace_without_a_number_a_macvlan_is_found_and_none_of_the_namespace_s_own() -> None:
    netlink = LinuxNetlink()
    below = socket.if_nametoindex("fab0")
    with pod() as one:
        ip("link", "add", "net1", "link", "fab0", "netns", one, "type", "macvlan", "mode", "bridge")
        ip("link", "add", "in0", "type", "veth", "peer", "name", "in1", of=one)
        ip("link", "add", "net2", "link", "in0", "type", "macvlan", "mode", "bridge", of=one)
        here = os.readlink(OWN)  # noqa: PTH115
        assert netlink.uppers_elsewhere() == {below: ("net1",)}
        numbered = subprocess.run(["ip", "netns", "list-id"], check=True, capture_output=True, text=True)
        assert numbered.stdout == "", "the search gives no numbers"
        assert os.readlink(OWN) == here  # noqa: PTH115
    assert netlink.uppers_elsewhere() == {}


@in_namespace(f"mount -t tmpfs tmpfs /mnt; {MADE}")
def test_a_namespace_whose_mount_is_hidden_by_another_one_is_left_out() -> None:
    with pod() as one:
        sh(f"touch /mnt/net; mount --bind /proc/{one}/ns/net /mnt/net; mount -t tmpfs tmpfs /mnt; touch /mnt/net")
        ip("link", "add", "net1", "link", "fab0", "netns", one, "type", "macvlan", "mode", "bridge")
        netlink = LinuxNetlink()
        below = socket.if_nametoindex("fab0")
        assert netlink.uppers_elsewhere() == {below: ("net1",)}


@in_namespace(MADE)
def test_a_pair_whose_end_is_in_a_namespace_of_a_namespace_is_not_taken_for_an_upper() -> None:
    with pod() as one, pod() as other:
        ip("link", "set", "fab3", "netns", one)
        ip("link", "add", "in0", "type", "veth", "peer", "name", "in1", of=one)
        ip("link", "set", "in1", "netns", other, of=one)
        ip("link", "add", "mv0", "link", "in0", "type", "macvlan", of=one)
        ip("link", "set", "mv0", "netns", other, of=one)
        assert LinuxNetlink().uppers_elsewhere() == {}


@in_namespace(MADE)
def test_a_tunnel_is_on_top_of_nothing_also_if_its_index_is_that_of_a_netdev_of_the_host() -> None:
    """Of a tunnel that was made from here the kernel says that it is on top of its own index (nla_put_iflink)."""
    netlink = LinuxNetlink()
    below = socket.if_nametoindex("fab0")
    with pod() as one, pod() as other:
        ip("link", "set", "fab1", "netns", one)
        ip("link", "set", "fab3", "netns", other)
        there = ("index", str(below), "netns")
        ip("link", "add", "vx0", *there, one, "type", "vxlan", "id", "5", "remote", "192.0.2.1", "dstport", "4789")
        assert netlink.uppers_elsewhere() == {}
        ip("link", "add", "net1", "link", "fab0", *there, other, "type", "macvlan", "mode", "bridge")
        assert netlink.uppers_elsewhere() == {below: ("net1",)}


@pytest.mark.parametrize(("kind", "found"), [(b"macvlan", (Upper("net1", 7, 2),)), (b"vxlan", ())])
def test_before_linux_5_10_a_netdev_with_the_index_of_the_one_below_says_nothing_of_that(
    kind: bytes, found: tuple[Upper, ...]
) -> None:
    body = IFINFOMSG.pack(0, 1, 7, 1, 0) + attribute(IFLA_IFNAME, b"net1\0")
    body += attribute(IFLA_LINK_NETNSID, S32.pack(2))
    assert _decoded([body + attribute(IFLA_LINKINFO, attribute(IFLA_INFO_KIND, kind + b"\0"))]) == list(found)


@pytest.mark.parametrize(("parent_s_index", "found"), [(9, [Upper("net1", 7, None)]), (7, [])])
def test_a_child_of_ipoib_is_on_top_of_a_netdev_of_another_namespace_unless_its_parent_is_there(
    parent_s_index: int, found: list[Upper]
) -> None:
    def link(index: int, name: bytes, *more: bytes) -> bytes:
        kind = attribute(IFLA_LINKINFO, attribute(IFLA_INFO_KIND, b"ipoib\0"))
        return IFINFOMSG.pack(0, 32, index, 1, 0) + attribute(IFLA_IFNAME, name) + kind + b"".join(more)

    child = link(5, b"net1\0", attribute(IFLA_LINK, U32.pack(7)))
    assert _decoded([link(parent_s_index, b"ib1\0"), child]) == found
