"""Which devices an event concerns."""

import errno
import os
import socket
import struct
import time
from collections.abc import Iterable

import pytest
from attrs import define, evolve
from pyroute2.netlink.rtnl import RTM_DELADDR, RTM_DELROUTE, RTM_NEWLINK

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.linux.events import (
    IFLA_PARENT_DEV_NAME,
    LinuxEvents,
    NetlinkSource,
    ethtool_events,
    link_events,
    routing_events,
    uevent_events,
)
from agent.linux.messages import HEADER, IFINFOMSG, attribute
from agent.machine import Event
from agent.report.records import HOST
from agent.service import inbox as inbox_module
from agent.service.activity import Activity, View
from agent.service.inbox import Inbox
from agent.service.wake import BURST, RATE, KnownDevices, Pace, known_devices, scope_of
from agent.spec.node import SteeredNetdevs, from_mapping
from tests.contract.asking import soon
from tests.sim.service.running import Announced
from tests.sim.two_nics import PF0, PF1, two_nics

PF, VF = "0000:21:00.0", "0000:21:10.2"
KNOWN = KnownDevices(by_ifindex={7: PF}, by_address={PF: PF, VF: PF})


def joined(events: Iterable[Event], known: KnownDevices) -> set[str] | None:
    """What all of the events concern."""
    scopes = [scope_of(event, known) for event in events]
    return None if None in scopes else {name for scope in scopes for name in scope or ()}


def link_scope(message: bytes, elsewhere: bool, known: KnownDevices) -> set[str] | None:
    return joined(link_events(message, elsewhere), known)


def ethtool_scope(message: bytes, elsewhere: bool, known: KnownDevices) -> set[str] | None:
    return joined(ethtool_events(message, elsewhere), known)


def uevent_scope(message: bytes, elsewhere: bool, known: KnownDevices) -> set[str] | None:
    return joined(uevent_events(message, elsewhere), known)


def link_message(*ifindexes: int) -> bytes:
    body = IFINFOMSG.size
    return b"".join(
        HEADER.pack(HEADER.size + body, RTM_NEWLINK, 0, 0, 0) + IFINFOMSG.pack(0, 1, index, 0, 0) for index in ifindexes
    )


def uevent(action: str, path: str, subsystem: str, udev: bool = False) -> bytes:
    fields = f"ACTION={action}\0DEVPATH={path}\0SUBSYSTEM={subsystem}\0SEQNUM=1\0".encode()
    if not udev:
        return f"{action}@{path}\0".encode() + fields
    return b"libudev\0" + struct.pack("=IIIIIIII", 0xFEEDCAFE, 40, 40, len(fields), 0, 0, 0, 0) + fields


def test_a_link_of_a_wanted_function_names_it() -> None:
    assert link_scope(link_message(3, 7), False, KNOWN) == {PF}


def test_events_of_links_outside_the_spec_wake_nobody() -> None:
    assert link_scope(link_message(1, 2, 3), False, KNOWN) == set()


def named_message(ifindex: int, name: bytes) -> bytes:
    """RTM_NEWLINK as the kernel begins it: the name is the first attribute, then other ones."""
    attributes = struct.pack("=HH", 4 + len(name) + 1, 3) + name + b"\0"
    attributes += bytes(-len(attributes) % 4) + struct.pack("=HHI", 8, 13, 1000)
    head = HEADER.pack(HEADER.size + IFINFOMSG.size + len(attributes), RTM_NEWLINK, 0, 0, 0)
    return head + IFINFOMSG.pack(0, 1, ifindex, 0, 0) + attributes


STEERED = evolve(KNOWN, steered=(SteeredNetdevs("cali*"), SteeredNetdevs("veth?")))


def test_a_new_netdev_that_the_spec_steers_concerns_the_host() -> None:
    assert link_scope(named_message(99, b"cali1f"), False, STEERED) == {HOST}
    assert link_scope(named_message(99, b"cali1f"), False, KNOWN) == set()
    assert link_scope(named_message(99, b"veth12"), False, STEERED) == set()
    assert link_scope(named_message(7, b"cali1f"), False, STEERED) == {PF}
    assert link_scope(named_message(99, b"cali1f"), True, STEERED) == set()


def test_a_netdev_with_sysctls_that_comes_back_concerns_the_host() -> None:
    known = evolve(KNOWN, with_sysctls=frozenset({"ens1f0"}))
    assert link_scope(named_message(99, b"ens1f0"), False, known) == {HOST}
    assert link_scope(named_message(7, b"ens1f0"), False, known) == {PF}
    assert link_scope(named_message(99, b"ens1f0"), False, KNOWN) == set()


def test_a_message_that_is_cut_within_the_name_wakes_nobody() -> None:
    whole = named_message(99, b"cali1f")
    first = HEADER.size + IFINFOMSG.size
    assert [link_scope(whole[:length], False, STEERED) for length in range(first + 8)] == [set()] * (first + 8)


def test_a_new_netdev_that_is_steered_does_not_withdraw_ready() -> None:
    known = evolve(STEERED, required=frozenset({PF}))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(named_message(99, b"cali1f"))
        view = View.new()
        inbox = Inbox([NetlinkSource(ours, link_events)], Activity.at(view.descriptor), lambda: None)
        inbox.known = known
        assert inbox.wait(0.0) == frozenset({HOST})
        assert not view.waits()
        inbox.close()
        view.close()


def test_an_index_of_another_namespace_is_not_ours() -> None:
    assert link_scope(link_message(7), True, KNOWN) == set()


def test_a_vf_in_another_namespace_is_known_by_its_parent() -> None:
    parent = attribute(IFLA_PARENT_DEV_NAME, VF.encode() + b"\0")
    size = HEADER.size + IFINFOMSG.size + len(parent)
    message = HEADER.pack(size, RTM_NEWLINK, 0, 0, 0) + IFINFOMSG.pack(0, 1, 3, 0, 0) + parent
    assert link_scope(message, True, KNOWN) == {PF}
    assert link_scope(message.replace(VF.encode(), b"0000:99:10.2"), True, KNOWN) == set()


VMD = "10002:01:00.0"


def test_a_function_in_a_domain_of_five_digits_is_not_taken_for_another_one() -> None:
    known = KnownDevices({}, {VMD: VMD, VMD[1:]: "another"})
    path = f"/devices/pci0000:e0/0000:e0:00.5/pci10002:00/10002:00:02.0/{VMD}"
    assert uevent_scope(uevent("bind", path, "pci"), False, known) == {VMD}
    assert uevent_scope(uevent("add", f"{path}/net/ens1", "net", udev=True), False, known) == {VMD}
    parent = attribute(IFLA_PARENT_DEV_NAME, VMD.encode() + b"\0")
    size = HEADER.size + IFINFOMSG.size + len(parent)
    message = HEADER.pack(size, RTM_NEWLINK, 0, 0, 0) + IFINFOMSG.pack(0, 1, 3, 0, 0) + parent
    assert link_scope(message, True, known) == {VMD}


def test_a_table_that_lost_a_route_names_its_nic() -> None:
    known = evolve(KNOWN, by_table={479100: PF})
    assert scope_of(Event(table=479100), known) == {PF}
    assert scope_of(Event(table=254), known) == set()


def test_a_table_that_is_no_number_is_the_one_of_the_header() -> None:
    body = bytes([2, 24, 0, 0, 7, 0, 0, 1]) + bytes(4) + attribute(15, b"\1\2")
    message = HEADER.pack(HEADER.size + len(body), RTM_DELROUTE, 0, 0, 0) + body
    assert [event.table for event in routing_events(message, False)] == [7]


def test_a_message_of_routing_without_its_whole_header_wakes_nobody() -> None:
    for kind in (RTM_DELADDR, RTM_DELROUTE):
        whole = HEADER.pack(HEADER.size + 12, kind, 0, 0, 0) + bytes(12)
        assert [list(routing_events(whole[:length], False)) for length in range(24)] == [[]] * 24
        assert list(routing_events(HEADER.pack(HEADER.size, kind, 0, 0, 0) + bytes(12), False)) == []


def test_a_truncated_message_is_ignored() -> None:
    assert link_scope(link_message(7)[:20], False, KNOWN) == set()
    assert link_scope(b"", False, KNOWN) == set()


def ethtool_message(ifindex: int) -> bytes:
    """CHANNELS_NTF as Linux 6.18 sends it: the header's nest with index and name, then the numbers."""
    index = struct.pack("=HHI", 8, 1, ifindex)
    header = struct.pack("=HH", 20, 1 | 0x8000) + index + struct.pack("=HH4s", 7, 2, b"v0")
    attributes = header + struct.pack("=HHI", 8, 2, 4) + struct.pack("=HHI", 8, 6, 2)
    return HEADER.pack(20 + len(attributes), 21, 0, 0, 0) + b"\x13\x01\0\0" + attributes


def test_a_change_by_ethtool_names_the_netdev_s_function() -> None:
    assert ethtool_scope(ethtool_message(7), False, KNOWN) == {PF}
    assert ethtool_scope(ethtool_message(8), False, KNOWN) == set()


def test_an_incomplete_ethtool_message_wakes_nobody() -> None:
    message = ethtool_message(7)
    assert [ethtool_scope(message[:length], False, KNOWN) for length in range(29)] == [set()] * 29


def test_a_vf_s_event_names_its_pf() -> None:
    path = f"/devices/pci0000:20/0000:20:00.0/{VF}/net/enp33s0v1"
    assert uevent_scope(uevent("add", path, "net"), False, KNOWN) == {PF}
    assert uevent_scope(uevent("add", path, "net", udev=True), False, KNOWN) == {PF}


def test_a_channel_change_names_its_device() -> None:
    path = f"/devices/pci0000:20/0000:20:00.0/{PF}/net/enp33s0/queues/rx-3"
    assert uevent_scope(uevent("remove", path, "queues"), False, KNOWN) == {PF}


def test_a_new_function_concerns_everything() -> None:
    assert uevent_scope(uevent("add", "/devices/pci0000:20/0000:99:00.0", "pci"), False, KNOWN) is None


def test_a_netdev_that_gets_its_name_may_be_that_of_a_nic_that_was_not_found() -> None:
    event = uevent("move", "/devices/pci0000:20/0000:99:00.0/net/ens1f0", "net", udev=True)
    assert uevent_scope(event, False, KNOWN) == set()
    assert uevent_scope(event, False, evolve(KNOWN, incomplete=True)) is None


def test_a_cpu_that_comes_or_goes_concerns_everything() -> None:
    assert uevent_scope(uevent("offline", "/devices/system/cpu/cpu3", "cpu"), False, KNOWN) is None


def test_other_subsystems_wake_nobody() -> None:
    assert uevent_scope(uevent("add", f"/devices/pci0000:20/{PF}/block/sda", "block"), False, KNOWN) == set()
    assert uevent_scope(uevent("add", "/devices/virtual/net/veth0", "net"), False, KNOWN) == set()


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
        inbox = Inbox([NetlinkSource(ours, link_events)], Activity.at(None), lambda: None)
        inbox.known = KNOWN
        assert inbox.wait(0.0) == frozenset({PF})
        assert inbox.wait(0.0) == frozenset()
        inbox.close()


def test_a_storm_is_a_few_passes_at_once_and_then_a_bounded_rate() -> None:
    pace, now, wakes = Pace(), 100.0, 0
    assert pace.pause(now) == 0.0
    while now < 101.0:
        now += pace.pause(now) + 0.001
        wakes += 1
    assert wakes <= BURST + RATE + 2
    assert wakes >= RATE


def test_after_a_quiet_time_the_first_event_is_taken_at_once() -> None:
    pace = Pace()
    for _ in range(100):
        pace.pause(0.0)
    assert pace.pause(0.0) > 0
    assert pace.pause(100.0 / RATE + 1) == 0.0


def test_a_command_is_taken_at_once_although_events_are_paced() -> None:
    read, write = os.pipe()
    inbox = Inbox(LinuxEvents().subscribe(), Activity.at(None), lambda: None, read)
    for _ in range(int(600 * RATE)):
        inbox._pace.pause(time.monotonic())
    os.write(write, b"reload\n")
    began = time.monotonic()
    assert inbox.gather() is None
    assert inbox.reload
    assert time.monotonic() - began < 60.0
    inbox.close()
    os.close(write)
    os.close(read)


@define
class Failing:
    """A source whose socket fails the first time."""

    descriptor: int
    asked: int = 0

    def fileno(self) -> int:
        return self.descriptor

    def receive(self) -> tuple[list[Event], bool]:
        self.asked += 1
        if self.asked == 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return [], False


def test_an_inbox_whose_thread_fails_raises_its_error_in_the_next_wait() -> None:
    """The worker ends with the error, and the next one listens."""
    source = Failing(os.eventfd(1, os.EFD_NONBLOCK))
    inbox = Inbox([source], Activity.at(None), lambda: None)
    with inbox.in_pass():
        soon(lambda: source.asked or None, "event")

    def fault() -> OSError | None:
        try:
            inbox.wait(0.0)
        except OSError as error:
            return error
        return None

    assert soon(fault, "error").errno == errno.ENOMEM
    inbox.close()
    os.close(source.descriptor)


@define
class Clock:
    """What the inbox takes for the module ``time``."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("later", "again"), [(0.0, False), (0.1, False), (0.499, True), (0.5, True), (3.0, True)])
def test_a_result_is_sent_again_if_the_supervisor_may_still_see_that_an_event_waits(
    monkeypatch: pytest.MonkeyPatch, later: float, again: bool
) -> None:
    """At 0.5 s the supervisor withdraws Ready if it still sees the event. What the worker writes may reach it late."""
    clock = Clock()
    monkeypatch.setattr(inbox_module, "time", clock)
    source = Announced()
    view = View.new()
    inbox = Inbox([source], Activity.at(view.descriptor), lambda: None)
    inbox.known = evolve(KNOWN, required=frozenset({PF}))
    assert not inbox.answered()
    source.announce(Event(ifindex=7))
    assert inbox.wait(0.0) == frozenset({PF})
    assert view.waits()
    clock.now += later
    assert inbox.answered() is again
    assert not inbox.answered() and not view.waits()
    inbox.close()
    view.close()
    os.close(source.descriptor)


def test_what_comes_during_a_pass_still_waits_after_the_events_before_it_are_answered() -> None:
    source, view = Announced(), View.new()
    inbox = Inbox([source], Activity.at(view.descriptor), lambda: None)
    inbox.known = evolve(KNOWN, required=frozenset({PF}))
    with inbox.in_pass():
        source.announce(Event(ifindex=7))
        came = soon(lambda: view.waits() or None, "event")
        inbox.answered()
        assert view.waits() == came
    assert inbox.wait(0.0) == frozenset({PF})
    inbox.answered()
    assert not view.waits()
    inbox.close()
    view.close()
    os.close(source.descriptor)


@pytest.mark.parametrize(("mode", "required"), [("enforce", {PF0}), ("observe", set())])
def test_in_observe_mode_no_event_takes_ready_back(mode: str, required: set[str]) -> None:
    """Nothing that the agent reads there is required of the node."""
    nics = [
        {"name": name, "select": {"pci": pf}, "required": pf == PF0} for name, pf in (("rail0", PF0), ("storage", PF1))
    ]
    spec = from_mapping({"node_name": "n1", "mode": mode, "nics": nics})
    known = known_devices(converge(two_nics().machine(), Goal(spec), Memory(lambda: 0.0)))
    assert known.required == required
    assert set(known.by_address) == {PF0, PF1}
