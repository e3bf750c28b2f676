"""Which devices an event concerns."""

import socket
import struct

from agent.watch import IFINFOMSG, NLMSGHDR, RTM_NEWLINK, Known, _drain, _ethtool_scope, _link_scope, _uevent_scope

PF, VF = "0000:21:00.0", "0000:21:10.2"
KNOWN = Known(by_ifindex={7: PF}, by_address={PF: PF, VF: PF})


def link_message(*ifindexes: int) -> bytes:
    body = IFINFOMSG.size
    return b"".join(
        NLMSGHDR.pack(NLMSGHDR.size + body, RTM_NEWLINK, 0, 0, 0) + IFINFOMSG.pack(0, 1, index, 0, 0)
        for index in ifindexes
    )


def uevent(action: str, path: str, subsystem: str, udev: bool = False) -> bytes:
    fields = f"ACTION={action}\0DEVPATH={path}\0SUBSYSTEM={subsystem}\0SEQNUM=1\0".encode()
    if not udev:
        return f"{action}@{path}\0".encode() + fields
    return b"libudev\0" + struct.pack("=IIIIIIII", 0xFEEDCAFE, 40, 40, len(fields), 0, 0, 0, 0) + fields


def test_a_link_of_a_wanted_function_names_it() -> None:
    assert _link_scope(link_message(3, 7), KNOWN) == {PF}


def test_links_that_nobody_wants_wake_nobody() -> None:
    assert _link_scope(link_message(1, 2, 3), KNOWN) == set()


def test_a_truncated_message_is_no_reason_to_fail() -> None:
    assert _link_scope(link_message(7)[:20], KNOWN) == set()
    assert _link_scope(b"", KNOWN) == set()


def ethtool_message(ifindex: int) -> bytes:
    """CHANNELS_NTF as Linux 6.18 sends it: the header's nest with index and name, then the numbers."""
    index = struct.pack("=HHI", 8, 1, ifindex)
    header = struct.pack("=HH", 20, 1 | 0x8000) + index + struct.pack("=HH4s", 7, 2, b"v0")
    attributes = header + struct.pack("=HHI", 8, 2, 4) + struct.pack("=HHI", 8, 6, 2)
    return NLMSGHDR.pack(20 + len(attributes), 21, 0, 0, 0) + b"\x13\x01\0\0" + attributes


def test_a_change_by_ethtool_names_the_netdev_s_function() -> None:
    assert _ethtool_scope(ethtool_message(7), KNOWN) == {PF}
    assert _ethtool_scope(ethtool_message(8), KNOWN) == set()


def test_what_is_no_whole_ethtool_message_wakes_nobody() -> None:
    message = ethtool_message(7)
    assert [_ethtool_scope(message[:length], KNOWN) for length in range(29)] == [set()] * 29


def test_a_vf_s_event_names_its_pf() -> None:
    path = f"/devices/pci0000:20/0000:20:00.0/{VF}/net/enp33s0v1"
    assert _uevent_scope(uevent("add", path, "net"), KNOWN) == {PF}
    assert _uevent_scope(uevent("add", path, "net", udev=True), KNOWN) == {PF}


def test_a_new_function_concerns_everything() -> None:
    assert _uevent_scope(uevent("add", "/devices/pci0000:20/0000:99:00.0", "pci"), KNOWN) is None


def test_other_subsystems_wake_nobody() -> None:
    assert _uevent_scope(uevent("add", f"/devices/pci0000:20/{PF}/block/sda", "block"), KNOWN) == set()
    assert _uevent_scope(uevent("add", "/devices/virtual/net/veth0", "net"), KNOWN) == set()


def test_a_burst_is_one_wake_up() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        sent = 0
        try:
            while sent < 10_000:
                theirs.send(link_message(7))
                sent += 1
        except BlockingIOError:
            pass
        assert sent > 1
        assert _drain(ours, _link_scope, KNOWN) == {PF}
        assert _drain(ours, _link_scope, KNOWN) == set()
