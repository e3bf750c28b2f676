"""rtnetlink on this machine's own kernel, in a network namespace of its own, compared with ip(8)."""

import errno
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pyroute2.netlink import NLM_F_DUMP, NLMSG_ERROR
from pyroute2.netlink.rtnl import RTM_GETLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.events import LinuxEvents
from agent.linux.messages import (
    HEADER,
    IFINFOMSG,
    IFLA_EXT_MASK,
    LARGEST,
    RTEXT_FILTER_VF,
    answers,
    attribute,
    attributes,
    numbers,
)
from agent.linux.netlink import IFLA_IFNAME, IFLA_MTU, IFLA_NUM_VF, IFLA_VFINFO_LIST, LinuxNetlink, decode_link
from agent.machine import Link, Route
from agent.spec.validators import MOST_VFS
from tests.contract.asking import errno_of
from tests.private_namespace import in_namespace, ip, sh

VF = numbers(ifinfmsg.vflist.vfinfo)

MADE = """
ip link set lo up
ip link add fab0 mtu 1400 txqueuelen 77 address 02:00:00:00:00:01 type veth peer name fab1
ip link property add dev fab0 altname rail0 altname a-name-of-more-than-15-characters
ip link set fab0 up
ip link set fab1 up
ip link add fab2 type veth peer name fab3
ip address add 10.1.0.1/24 dev fab0
ip address add 10.2.0.1 peer 10.2.0.2/32 dev fab1
ip -6 address add fd00::1/64 dev fab0 nodad
ip link set fab2 up
ip route add 10.9.0.0/16 via 10.1.0.9
ip route add 10.8.0.0/16 dev fab2
ip route add blackhole 10.12.0.0/16
ip route add prohibit 10.13.0.0/16
ip route add unreachable 10.14.0.0/16
"""


def _ip(*words: str) -> Any:
    return json.loads(subprocess.run(["ip", "-json", "-details", *words], capture_output=True, check=True).stdout)


@in_namespace(MADE)
def test_links_are_read_as_ip_prints_them() -> None:
    printed = _ip("link")
    links = [LinuxNetlink().link(each["ifname"]) for each in printed]
    assert LinuxNetlink().link("gone") is None
    assert [link and (link.name, link.ifindex, link.mtu, link.max_mtu, link.txqueuelen) for link in links] == [
        (each["ifname"], each["ifindex"], each["mtu"], each["max_mtu"], each["txqlen"]) for each in printed
    ]
    assert [link and (link.mac, link.up, link.carrier) for link in links] == [
        (each["address"], "UP" in each["flags"], "LOWER_UP" in each["flags"]) for each in printed
    ]
    assert [link and list(link.altnames) for link in links] == [each.get("altnames", []) for each in printed]


def _link(name: str, netlink: LinuxNetlink | None = None) -> Link:
    link = (netlink or LinuxNetlink()).link(name)
    assert link is not None
    return link


@in_namespace(MADE + "ip link add br0 type bridge\nip link set fab2 master br0")
def test_a_link_has_the_kind_of_its_master() -> None:
    """A bridge, since a kernel may have no VRFs: it fills in the kind of each master in the same way."""
    assert [_link(name).member_of for name in ("fab0", "fab2", "br0")] == ["", "bridge", ""]


@in_namespace(MADE)
def test_a_link_is_found_by_any_of_its_names_and_set_in_one_request() -> None:
    netlink, before = LinuxNetlink(), _link("rail0")
    assert (before.name, before.mtu, before.up) == ("fab0", 1400, True)
    assert before.altnames == ("rail0", "a-name-of-more-than-15-characters")
    netlink.set_link(before.ifindex, mtu=1300, up=False, txqueuelen=88)
    netlink.add_altname(before.ifindex, "rail1")
    netlink.remove_altname(before.ifindex, "a-name-of-more-than-15-characters")
    after = _link("fab0")
    assert (after.mtu, after.up, after.txqueuelen, after.altnames) == (1300, False, 88, ("rail0", "rail1"))


@pytest.mark.parametrize(
    ("refused", "number", "why"),
    [
        pytest.param(
            lambda netlink, ifindex: netlink.set_link(ifindex, mtu=1),
            errno.EINVAL,
            "set mtu 1: Invalid argument: mtu less than device minimum",
            id="mtu",
        ),
        pytest.param(
            lambda netlink, ifindex: netlink.set_link(ifindex, mtu=1 << 20),
            errno.EINVAL,
            "set mtu 1048576: Invalid argument: mtu greater than device maximum",
            id="netlink-731",
        ),
        pytest.param(
            lambda netlink, ifindex: netlink.add_route(Route("10.20.0.0/16", 100, ifindex, gateway="10.99.0.1")),
            errno.ENETUNREACH,
            "add the route to 10.20.0.0/16 in table 100: Network is unreachable: Nexthop has invalid gateway",
            id="systemd-5038",
        ),
    ],
)
@in_namespace(MADE)
def test_a_refusal_has_the_reason_that_the_kernel_gives(
    refused: Callable[[LinuxNetlink, int], None], number: int, why: str
) -> None:
    with pytest.raises(OSError) as caught:
        refused(LinuxNetlink(), _link("fab0").ifindex)
    assert (caught.value.errno, caught.value.strerror) == (number, why)


@in_namespace(MADE)
def test_a_netdev_takes_its_own_alternative_name_and_keeps_it_when_the_new_name_is_refused() -> None:
    netlink, ifindex = LinuxNetlink(), _link("fab0").ifindex
    netlink.set_link(ifindex, up=False)
    netlink.rename(ifindex, "rail0")
    assert _link("rail0").altnames == ("a-name-of-more-than-15-characters",)
    assert errno_of(lambda: netlink.rename(ifindex, "fab2")) == errno.EEXIST
    assert (_link("rail0").ifindex, _link("rail0").name) == (ifindex, "rail0")


@in_namespace(MADE)
def test_the_netdev_of_a_route_is_the_one_that_the_kernel_would_use() -> None:
    names: dict[int | None, str] = dict(socket.if_nameindex())
    for address, through in (
        *(("10.1.0.77", "fab0"), ("10.8.1.1", "fab2"), ("fd00::2", "fab0"), ("192.0.2.1", None), ("fd99::1", None)),
        *(("10.12.0.1", None), ("10.13.0.1", None), ("10.14.0.1", None)),
    ):
        assert names.get(LinuxNetlink().route_ifindex(address)) == through, address


@in_namespace(MADE)
def test_addresses_are_read_as_ip_prints_them() -> None:
    assert {ifindex: sorted(addresses) for ifindex, addresses in LinuxNetlink().addresses().items()} == {
        each["ifindex"]: sorted(f"{address['local']}/{address['prefixlen']}" for address in each["addr_info"])
        for each in _ip("address")
        if each["addr_info"]
    }


def _with_gateways() -> set[str]:
    names = dict(socket.if_nameindex())
    return {names[ifindex] for ifindex in LinuxNetlink().gateway_ifindexes()}


@pytest.mark.parametrize(
    ("more", "through"),
    [
        ("true", {"fab0"}),
        ("ip route add default dev fab2", {"fab0", "fab2"}),
        ("ip route add default table 77 via 10.2.0.2", {"fab0", "fab1"}),
        ("ip -6 route add default via fe80::9 dev fab2", {"fab0", "fab2"}),
        ("ip route add 10.7.0.0/16 nexthop via 10.1.0.8 nexthop via 10.2.0.2", {"fab0", "fab1"}),
        (
            "ip -6 route add fd07::/16 nexthop via fe80::8 dev fab2 nexthop via fe80::9 dev fab1",
            {"fab0", "fab1", "fab2"},
        ),
        ("ip route add unreachable default", {"fab0"}),
        ("ip route add 10.6.0.0/16 via inet6 fe80::9 dev fab2", {"fab0", "fab2"}),
    ],
    ids=["gateway", "default", "other-table", "ipv6", "multipath", "ipv6-multipath", "unreachable", "via"],
)
@in_namespace(MADE)
def test_netdevs_of_gateways_are_found(more: str, through: set[str]) -> None:
    sh(more)
    assert _with_gateways() == through


OBJECTS = """
ip link set fab3 up
ip route flush root 10.9.0.0/16
ip nexthop add id 7 via 10.1.0.9 dev fab0
ip nexthop add id 8 via 10.2.0.2 dev fab1
ip nexthop add id 9 group 7/8,3
ip nexthop add id 10 dev fab2
ip nexthop add id 11 via fe80::9 dev fab2
ip nexthop add id 12 blackhole
"""


@pytest.mark.parametrize("names_netdevs", ["0", "1"], ids=["object", "netdev"])
@pytest.mark.parametrize(
    ("more", "through"),
    [
        ("ip route add 10.7.0.0/16 nhid 7", {"fab0"}),
        ("ip route add 10.7.0.0/16 nhid 9", {"fab0", "fab1"}),
        ("ip route add 10.7.0.0/16 nhid 10", set()),
        ("ip route add default nhid 10", {"fab2"}),
        ("ip -6 route add fd07::/16 nhid 11", {"fab2"}),
        ("ip route add default nhid 12", set()),
    ],
    ids=["gateway", "group", "on-link", "default", "ipv6", "blackhole"],
)
@in_namespace(MADE + OBJECTS)
def test_netdevs_of_nexthop_objects_are_found(more: str, through: set[str], names_netdevs: str) -> None:
    sh(f"echo {names_netdevs} > /proc/sys/net/ipv4/nexthop_compat_mode; {more}")
    assert _with_gateways() == through


# Without link-local addresses, which the kernel announces once more when nobody else has them.
@in_namespace("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode" + MADE)
def test_removed_addresses_routes_and_rules_are_announced() -> None:
    fab0, sources = _link("fab0").ifindex, LinuxEvents().subscribe()

    def heard(words: str) -> list[tuple[int, int]]:
        ip(*words.split())
        # The kernel has queued its messages before the command has ended.
        events = [event for source in sources for event in source.receive()[0]]
        # Those of links have the name of the netdev, and come late.
        told = [event for event in events if event.table or (event.ifindex and not event.netdev)]
        return sorted({(event.ifindex, event.table) for event in told})

    assert heard("address add 10.3.0.1/24 dev fab0") == [(fab0, 0)]
    assert (fab0, 0) in heard("-6 address del fd00::1/64 dev fab0")
    assert heard("route add 10.3.0.0/24 dev fab0 table 479100") == []
    assert heard("rule add from 10.3.0.1 lookup 479100") == []
    assert heard("-6 rule add from fd00::1 lookup 479101") == []
    assert heard("route del 10.3.0.0/24 dev fab0 table 479100") == [(0, 479100)]
    assert heard("rule del from 10.3.0.1 lookup 479100") == [(0, 479100)]
    assert heard("-6 rule del from fd00::1 lookup 479101") == [(0, 479101)]


def _message(*more: bytes, vfs: int = 0) -> bytes:
    """The kernel's message of fab0, with further attributes."""
    names = [(IFLA_IFNAME, b"fab0\0"), (IFLA_MTU, struct.pack("=I", 9000)), (IFLA_NUM_VF, struct.pack("=I", vfs))]
    return IFINFOMSG.pack(0, 1, 7, 1, 0) + b"".join([*(attribute(kind, value) for kind, value in names), *more])


PERMANENT = attribute(54, bytes.fromhex("020000000001"))


@pytest.mark.parametrize("count", [0, 7, 334, 335, 1024, 4096])
def test_a_list_of_vfs_beyond_its_16_bit_length_is_read_whole(count: int) -> None:
    # As the kernel puts it together: 196 octets for each VF, then what follows the list.
    numbers = [index.to_bytes(4, "little") for index in range(count)]
    vfs = [
        attribute(1, number + bytes(32)) + attribute(2, number + bytes(8)) + attribute(99, bytes(132))
        for number in numbers
    ]
    entries = b"".join(attribute(1, vf) for vf in vfs)
    assert len(entries) == 196 * count
    long = (len(entries) + 4 & 0xFFFF).to_bytes(2, "little") + (22).to_bytes(2, "little") + entries
    link = decode_link(_message(long if count else b"", PERMANENT, vfs=count))
    assert (link.name, link.mtu, link.permanent_mac) == ("fab0", 9000, "02:00:00:00:00:01")
    assert [vf.index for vf in link.vfs] == list(range(count))


@pytest.mark.parametrize(
    ("attached", "by_driver"),
    [(b"", False), (b"\0", False), (b"\1", True), (b"\2", False), (b"\3", True), (b"\4", True)],
)
def test_a_link_has_xdp_if_its_driver_runs_a_program(attached: bytes, by_driver: bool) -> None:
    assert decode_link(_message(attribute(43, attribute(2, attached)) if attached else b"")).xdp is by_driver


class Cramped(socket.socket):
    """Answers a request for one link with its VFs as Linux 5.5 to 6.14 do if the VFs have many GUIDs (rtnl_getlink)."""

    refused = False

    def send(self, data: Any, flags: int = 0) -> int:
        _, kind, given, _, _ = HEADER.unpack_from(data)
        asked = dict(attributes(data, HEADER.size + IFINFOMSG.size)) if kind == RTM_GETLINK else {}
        mask = int.from_bytes(asked.get(IFLA_EXT_MASK, b""), sys.byteorder)
        self.refused = bool(mask & RTEXT_FILTER_VF) and given & NLM_F_DUMP != NLM_F_DUMP
        return len(data) if self.refused else super().send(data, flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        refusal = HEADER.pack(HEADER.size + 4, NLMSG_ERROR, 0, 1, 0) + struct.pack("=i", -errno.EMSGSIZE)
        return refusal if self.refused else super().recv(size, flags)


@in_namespace(MADE)
def test_a_link_whose_vfs_do_not_fit_into_an_answer_is_read_from_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _link("fab0")
    monkeypatch.setattr(socket, "socket", Cramped)
    assert (_link("fab0"), _link("rail0"), LinuxNetlink().link("nic0")) == (asked, asked, None)


@in_namespace(MADE)
def test_while_a_driver_hangs_such_a_link_is_read_without_its_vfs_since_a_dump_would_ask_that_driver_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoDump(Cramped):
        def send(self, data: Any, flags: int = 0) -> int:
            _, _, given, _, _ = HEADER.unpack_from(data)
            assert given & NLM_F_DUMP != NLM_F_DUMP
            return super().send(data, flags)

    monkeypatch.setattr(socket, "socket", NoDump)
    link = _link("fab0", LinuxNetlink(each_alone=True))
    assert (link.name, link.mtu, link.vfs) == ("fab0", 1400, ())


def test_a_kernel_without_ifla_perm_address_is_asked_by_ioctl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux 5.4, which has no such attribute. The netdevs that a test can make have no permanent address."""
    found = (LinuxNetlink().link(name) for _, name in socket.if_nameindex())
    links = [link for link in found if link is not None and link.permanent_mac]
    if not links:
        pytest.skip("no netdev of this machine has a permanent address")
    monkeypatch.setattr("agent.linux.netlink.IFLA_PERM_ADDRESS", 9999)
    for link in links:
        asked = LinuxNetlink().link(link.name)
        assert asked is not None
        assert asked.permanent_mac == link.permanent_mac


@pytest.mark.parametrize("reported", [[], [0, 2], [1, 2]])
@pytest.mark.parametrize("after", [PERMANENT, b""])
def test_a_vf_that_its_pf_is_resetting_is_missing_from_the_list(reported: list[int], after: bytes) -> None:
    """ice reports no VF that is in reset (ice_get_vf_cfg), and the kernel leaves it out (rtnl_fill_vfinfo)."""
    entries = (attribute(1, attribute(VF["IFLA_VF_MAC"], struct.pack("=I", index) + bytes(32))) for index in reported)
    link = decode_link(_message(attribute(IFLA_VFINFO_LIST, b"".join(entries)), after, vfs=3))
    assert [vf.index for vf in link.vfs] == reported
    assert link.permanent_mac == ("02:00:00:00:00:01" if after else "")


@pytest.mark.parametrize(("count", "size"), [(0xFFFFFFFF, 0), (0xFFFFFFFF, 4), (2, 3)])
def test_a_list_of_vfs_that_has_no_end_is_refused(count: int, size: int) -> None:
    entries = attribute(IFLA_VFINFO_LIST, struct.pack("=HH", size, 1) * 8)
    with pytest.raises(OSError, match="the kernel's answer cannot be read") as refused:
        decode_link(_message(entries, vfs=count))
    assert refused.value.errno == errno.EPROTO


def test_a_message_without_a_length_is_refused_and_not_read_for_ever() -> None:
    with pytest.raises(OSError, match="a message of 0 bytes"):
        answers(HEADER.pack(0, 16, 0, 0, 0))


def test_an_answer_that_does_not_fit_is_refused_and_not_believed_half() -> None:
    whole = HEADER.pack(16 + 800, 16, 0, 0, 0) + bytes(800)
    assert answers(whole)[0] == [bytes(800)]
    with pytest.raises(OSError, match="a message of 816 bytes, of which 815 are there") as refused:
        answers((whole + whole)[:-1])
    assert refused.value.errno == errno.EPROTO


def test_the_largest_answer_fits() -> None:
    assert LARGEST > 196 * MOST_VFS


def test_a_refusal_with_a_number_that_is_no_errno_is_an_error() -> None:
    with pytest.raises(OSError, match="the kernel's answer cannot be read: OverflowError") as refused:
        answers(HEADER.pack(20, 2, 0, 0, 0) + struct.pack("=i", -(2**31)))
    assert refused.value.errno == errno.EPROTO


def test_a_driver_s_nonsense_is_an_error_of_its_device() -> None:
    # A link state that is none of the kernel's three.
    vf = attribute(VF["IFLA_VF_MAC"], bytes(36)) + attribute(VF["IFLA_VF_LINK_STATE"], struct.pack("=II", 0, 9))
    with pytest.raises(OSError, match="the kernel's answer cannot be read: IndexError"):
        decode_link(_message(attribute(IFLA_VFINFO_LIST, attribute(1, vf)), vfs=1))


def test_a_process_that_has_used_netlink_ends_without_a_complaint() -> None:
    """pyroute2 leaves the event loop of a socket open, and Python's development mode names whatever is left open."""
    used = (
        "from contextlib import suppress\n"
        "from agent import linux\n"
        "machine = linux.machine()\n"
        "sources = machine.events.subscribe()\n"
        "lo = machine.netlink.link('lo')\n"
        "with suppress(OSError): machine.ethtool.settings('channels', lo.ifindex)\n"
        "print(lo.name, len(sources) > 2)\n"
    )
    ended = subprocess.run([sys.executable, "-X", "dev", "-c", used], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("lo True\n", "")


def test_sockets_are_closed_with_their_holder_and_wait_for_no_garbage_collection() -> None:
    """Garbage collection would be too late: it may come while the loop of another socket runs, and then the close fails."""
    used = (
        "import gc, os\n"
        "from contextlib import suppress\n"
        "from agent import linux\n"
        "gc.disable()\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "machine = linux.machine()\n"
        "sources = machine.events.subscribe()\n"
        "lo = machine.netlink.link('lo')\n"
        "with suppress(OSError): machine.ethtool.settings('features', lo.ifindex)\n"
        "opened = len(os.listdir('/proc/self/fd')) - before\n"
        "del machine, sources\n"
        "print(opened > 10, len(os.listdir('/proc/self/fd')) - before)\n"
    )
    ended = subprocess.run([sys.executable, "-c", used], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("True 0\n", "")
