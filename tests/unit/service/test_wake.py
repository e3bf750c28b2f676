"""Which devices an event concerns."""

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

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
from agent.machine import Event, EventSource
from agent.report.records import HOST
from agent.service import inbox as inbox_module
from agent.service.activity import Activity, View
from agent.service.inbox import Inbox
from agent.service.wake import BURST, RATE, KnownDevices, Pace, known_devices, scope_of
from agent.spec.node import SteeredNetdevs, from_mapping
from tests.contract.asking import errno_of, soon
from tests.sim.service.running import Announced
from tests.sim.two_nics import PF0, PF1, two_nics

PF, VF = "0000:21:00.0", "0000:21:10.2"
KNOWN = KnownDevices(by_ifindex={7: PF}, by_address={PF: PF, VF: PF}, by_table={479100: PF})
REQUIRED = evolve(KNOWN, required=frozenset({PF}))
STEERED = evolve(KNOWN, steered=(SteeredNetdevs("cali*"), SteeredNetdevs("veth?")))
WITH_SYSCTLS = evolve(KNOWN, with_sysctls=frozenset({"ens1f0"}))
# A domain of five digits, whose end is the address of another function.
VMD = "10002:01:00.0"
WITH_VMD = KnownDevices({}, {VMD: VMD, VMD[1:]: "another"})
VMD_PATH = f"/devices/pci0000:e0/0000:e0:00.5/pci10002:00/10002:00:02.0/{VMD}"


@contextmanager
def listening(known: KnownDevices, *sources: EventSource, control: int | None = None) -> Iterator[tuple[Inbox, View]]:
    """An inbox of these sources, and what the supervisor sees of it."""
    view = View.new()
    inbox = Inbox(list(sources), Activity.at(view.descriptor), lambda: None, control)
    inbox.known = known
    yield inbox, view
    inbox.close()
    view.close()


@contextmanager
def announced() -> Iterator[Announced]:
    source = Announced()
    yield source
    os.close(source.descriptor)


@contextmanager
def of_a_socket() -> Iterator[tuple[NetlinkSource, socket.socket]]:
    """A source of link events, and the socket that they are sent to."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield NetlinkSource(ours, link_events), theirs


def scope(events: Iterable[Event], known: KnownDevices) -> set[str] | None:
    """What all of the events concern."""
    scopes = [scope_of(event, known) for event in events]
    return None if None in scopes else {name for scope in scopes for name in scope or ()}


def link_message(*ifindexes: int, attributes: bytes = b"") -> bytes:
    size = HEADER.size + IFINFOMSG.size + len(attributes)
    return b"".join(
        HEADER.pack(size, RTM_NEWLINK, 0, 0, 0) + IFINFOMSG.pack(0, 1, index, 0, 0) + attributes for index in ifindexes
    )


def named(ifindex: int, name: bytes) -> bytes:
    """RTM_NEWLINK as the kernel begins it: the name is the first attribute, then other ones."""
    return link_message(ifindex, attributes=attribute(3, name + b"\0") + attribute(13, struct.pack("=I", 1000)))


def child_of(address: str) -> bytes:
    """RTM_NEWLINK of a netdev whose parent is this function."""
    return link_message(3, attributes=attribute(IFLA_PARENT_DEV_NAME, address.encode() + b"\0"))


def ethtool_message(ifindex: int) -> bytes:
    """CHANNELS_NTF as Linux 6.18 sends it: the header's nest with index and name, then the numbers."""
    index = struct.pack("=HHI", 8, 1, ifindex)
    header = struct.pack("=HH", 20, 1 | 0x8000) + index + struct.pack("=HH4s", 7, 2, b"v0")
    attributes = header + struct.pack("=HHI", 8, 2, 4) + struct.pack("=HHI", 8, 6, 2)
    return HEADER.pack(20 + len(attributes), 21, 0, 0, 0) + b"\x13\x01\0\0" + attributes


def uevent(action: str, path: str, subsystem: str, udev: bool = False) -> Iterable[Event]:
    fields = f"ACTION={action}\0DEVPATH={path}\0SUBSYSTEM={subsystem}\0SEQNUM=1\0".encode()
    if not udev:
        return uevent_events(f"{action}@{path}\0".encode() + fields, False)
    head = b"libudev\0" + struct.pack("=IIIIIIII", 0xFEEDCAFE, 40, 40, len(fields), 0, 0, 0, 0)
    return uevent_events(head + fields, False)


RAIL_NET, RENAMED = f"/devices/pci0000:20/0000:20:00.0/{VF}/net/v1", "/devices/pci0000:20/0000:99:00.0/net/ens1f0"


@pytest.mark.parametrize(
    ("events", "known", "concerns"),
    # Lists, since mutmut runs the tests several times in one process.
    [
        (list(events), known, concerns)
        for events, known, concerns in (
            (link_events(link_message(3, 7), False), KNOWN, {PF}),
            (link_events(link_message(1, 2, 3), False), KNOWN, set()),
            # A new netdev that the spec steers.
            (link_events(named(99, b"cali1f"), False), STEERED, {HOST}),
            (link_events(named(99, b"cali1f"), False), KNOWN, set()),
            (link_events(named(99, b"veth12"), False), STEERED, set()),
            (link_events(named(7, b"cali1f"), False), STEERED, {PF}),
            (link_events(named(99, b"ens1f0"), False), WITH_SYSCTLS, {HOST}),
            (link_events(named(7, b"ens1f0"), False), WITH_SYSCTLS, {PF}),
            (link_events(named(99, b"ens1f0"), False), KNOWN, set()),
            # An event of another network namespace: only the parent, a PCI function, tells whose netdev it is.
            (link_events(named(99, b"cali1f"), True), STEERED, set()),
            (link_events(link_message(7), True), KNOWN, set()),
            (link_events(child_of(VF), True), KNOWN, {PF}),
            (link_events(child_of("0000:99:10.2"), True), KNOWN, set()),
            (link_events(child_of(VMD), True), WITH_VMD, {VMD}),
            (uevent("bind", VMD_PATH, "pci"), WITH_VMD, {VMD}),
            (uevent("add", f"{VMD_PATH}/net/ens1", "net", udev=True), WITH_VMD, {VMD}),
            (ethtool_events(ethtool_message(7), False), KNOWN, {PF}),
            (ethtool_events(ethtool_message(8), False), KNOWN, set()),
            # A VF's event is its PF's.
            (uevent("add", RAIL_NET, "net"), KNOWN, {PF}),
            (uevent("add", RAIL_NET, "net", udev=True), KNOWN, {PF}),
            (uevent("remove", f"/devices/pci0000:20/0000:20:00.0/{PF}/net/a/queues/rx-3", "queues"), KNOWN, {PF}),
            # A new PCI function, and a CPU that goes offline, may concern every device.
            (uevent("add", "/devices/pci0000:20/0000:99:00.0", "pci"), KNOWN, None),
            (uevent("offline", "/devices/system/cpu/cpu3", "cpu"), KNOWN, None),
            # It may be the name of a NIC that was not found.
            (uevent("move", RENAMED, "net", udev=True), KNOWN, set()),
            (uevent("move", RENAMED, "net", udev=True), evolve(KNOWN, incomplete=True), None),
            (uevent("add", f"/devices/pci0000:20/{PF}/block/sda", "block"), KNOWN, set()),
            (uevent("add", "/devices/virtual/net/veth0", "net"), KNOWN, set()),
            ([Event(table=479100)], KNOWN, {PF}),
            ([Event(table=254)], KNOWN, set()),
        )
    ],
)
def test_an_event_concerns_the_devices_that_may_have_changed(
    events: Iterable[Event], known: KnownDevices, concerns: set[str] | None
) -> None:
    assert scope(events, known) == concerns


@pytest.mark.parametrize(
    ("events", "whole", "needed"),
    [
        # Within the name.
        (link_events, named(99, b"cali1f"), HEADER.size + IFINFOMSG.size + 8),
        (link_events, link_message(7), HEADER.size + IFINFOMSG.size),
        (ethtool_events, ethtool_message(7), 29),
        *((routing_events, HEADER.pack(28, kind, 0, 0, 0) + bytes(12), 24) for kind in (RTM_DELADDR, RTM_DELROUTE)),
    ],
)
def test_a_message_that_is_cut_wakes_nobody(
    events: Callable[[bytes, bool], Iterable[Event]], whole: bytes, needed: int
) -> None:
    assert [scope(events(whole[:length], False), STEERED) for length in range(needed)] == [set()] * needed


def test_a_new_netdev_that_is_steered_does_not_withdraw_ready() -> None:
    known = evolve(STEERED, required=frozenset({PF}))
    with of_a_socket() as (source, theirs), listening(known, source) as (inbox, view):
        theirs.send(named(99, b"cali1f"))
        assert inbox.wait(0.0) == frozenset({HOST})
        assert not view.waits()


def test_a_table_that_is_no_number_is_the_one_of_the_header() -> None:
    body = bytes([2, 24, 0, 0, 7, 0, 0, 1]) + bytes(4) + attribute(15, b"\1\2")
    message = HEADER.pack(HEADER.size + len(body), RTM_DELROUTE, 0, 0, 0) + body
    assert [event.table for event in routing_events(message, False)] == [7]


@pytest.mark.parametrize("kind", [RTM_DELADDR, RTM_DELROUTE])
def test_a_message_of_routing_that_says_it_ends_with_its_header_wakes_nobody(kind: int) -> None:
    assert list(routing_events(HEADER.pack(HEADER.size, kind, 0, 0, 0) + bytes(12), False)) == []


def test_a_burst_is_one_wake_up() -> None:
    with of_a_socket() as (source, theirs), listening(KNOWN, source) as (inbox, _):
        sent = 0
        with suppress(BlockingIOError):
            while sent < 10_000:
                theirs.send(link_message(7))
                sent += 1
        assert sent > 1
        assert inbox.wait(0.0) == frozenset({PF})
        assert inbox.wait(0.0) == frozenset()


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
    with listening(KNOWN, *LinuxEvents().subscribe(), control=read) as (inbox, _):
        for _ in range(int(600 * RATE)):
            inbox._pace.pause(time.monotonic())
        os.write(write, b"reload\n")
        began = time.monotonic()
        assert inbox.gather() is None
        assert inbox.reload
        assert time.monotonic() - began < 60.0
    os.close(write)
    os.close(read)


def test_events_that_come_while_the_next_pass_is_put_off_are_judged_again_after_it() -> None:
    with announced() as source, listening(KNOWN, source) as (inbox, _):
        for _ in range(BURST + 5):
            inbox._pace.pause(time.monotonic())
        source.announce(Event(ifindex=8))
        assert inbox.gather() == frozenset()
        inbox.known = evolve(KNOWN, by_ifindex={8: PF})
        assert inbox.wait(0.0) == frozenset({PF})


def test_after_events_were_lost_everything_is_read_again_once() -> None:
    with announced() as source, listening(REQUIRED, source) as (inbox, view):
        source.lost = True
        source.announce(Event(ifindex=8))
        assert inbox.wait(0.0, ends=False) is None
        assert view.waits()
        assert inbox.wait(0.0) == frozenset()


def test_more_events_than_can_be_kept_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MOST_KEPT", 3)
    scopes = []
    with announced() as source, listening(KNOWN, source) as (inbox, _):
        for index in (11, 12, 13, 14):
            source.announce(Event(ifindex=index))
            scopes.append(inbox.wait(0.0, ends=False))
    assert scopes == [frozenset()] * 3 + [None]


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
    with listening(KNOWN, source) as (inbox, _):
        with inbox.in_pass():
            soon(lambda: source.asked or None, "event")
        assert soon(lambda: errno_of(lambda: inbox.wait(0.0)), "error") == errno.ENOMEM
    os.close(source.descriptor)


@define
class Clock:
    """What the inbox takes for the module ``time``."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("later", "again"), [(0.0, False), (0.2, False), (0.499, True), (0.5, True), (3.0, True)])
def test_a_result_is_sent_again_if_the_supervisor_may_still_see_that_an_event_waits(
    monkeypatch: pytest.MonkeyPatch, later: float, again: bool
) -> None:
    """At 0.5 s the supervisor withdraws Ready if it still sees the event. What the worker writes may reach it late."""
    clock = Clock()
    monkeypatch.setattr(inbox_module, "time", clock)
    with announced() as source, listening(REQUIRED, source) as (inbox, view):
        assert not inbox.answered()
        source.announce(Event(ifindex=7))
        assert inbox.wait(0.0) == frozenset({PF})
        assert view.waits()
        clock.now += later
        assert inbox.answered() is again
        assert not inbox.answered() and not view.waits()


def test_what_comes_during_a_pass_still_waits_after_the_events_before_it_are_answered() -> None:
    with announced() as source, listening(REQUIRED, source) as (inbox, view):
        with inbox.in_pass():
            source.announce(Event(ifindex=7))
            came = soon(lambda: view.waits() or None, "event")
            inbox.answered()
            assert view.waits() == came
        assert inbox.wait(0.0) == frozenset({PF})
        inbox.answered()
        assert not view.waits()


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
