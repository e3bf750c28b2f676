"""Events of links while the own namespace has a number of itself, on this machine's own kernel."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from attrs import evolve
from pyroute2.netlink import NETLINK_LISTEN_ALL_NSID, SOL_NETLINK
from pyroute2.netlink.rtnl import RTM_GETLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.events import LinuxEvents, NetlinkSource
from agent.linux.messages import IFINFOMSG, S32, attribute, dump, numbers
from agent.linux.namespaces import own_number
from agent.machine import Event
from tests.private_namespace import in_namespace, ip, pod

MADE = "ip link add fab0 type veth peer name fab1"


@contextmanager
def pod_with_fab1() -> Iterator[str]:
    """A pod, by its process. Its namespace has the number 0 here."""
    with pod() as other:
        ip("link", "set", "fab1", "netns", other)
        yield other


def as_open_vswitch_lists() -> None:
    """List a pod's netdevs by its number. The kernel gives the own namespace a number, for the other end of the veth."""
    body = attribute(numbers(ifinfmsg)["IFLA_IF_NETNSID"], S32.pack(0))
    dump(socket.NETLINK_ROUTE, RTM_GETLINK, IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + body)


def links() -> NetlinkSource:
    source = LinuxEvents().subscribe()[0]
    assert isinstance(source, NetlinkSource)
    return source


def as_before_88b126b39f97(source: NetlinkSource, number: int) -> NetlinkSource:
    """The source on a kernel that marks the own events with this number."""

    def recvmsg(*given: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        message, ancillary, flags, sender = source.channel.recvmsg(*given)
        return message, ancillary or [(SOL_NETLINK, NETLINK_LISTEN_ALL_NSID, S32.pack(number))], flags, sender

    channel: Any = SimpleNamespace(recvmsg=recvmsg)
    return evolve(source, channel=channel)


def own(events: list[Event]) -> set[str]:
    return {event.netdev for event in events if event.netdev_of is None}


def elsewhere(events: list[Event]) -> int:
    return len([event for event in events if event.netdev_of is not None])


@in_namespace(MADE)
def test_own_events_are_own_also_if_another_program_had_the_kernel_number_the_own_namespace() -> None:
    with pod_with_fab1():
        as_open_vswitch_lists()
        number = own_number()
        assert number is not None
        for source in (links(), as_before_88b126b39f97(links(), number)):
            ip("link", "set", "fab0", "mtu", "1400")
            ip("link", "set", "fab0", "mtu", "1500")
            assert own(source.receive()[0]) == {"fab0"}


@in_namespace(MADE)
def test_a_number_that_is_given_while_events_wait_is_known_when_they_are_taken() -> None:
    with pod_with_fab1():
        # The kernel gives the lowest free number.
        source = as_before_88b126b39f97(links(), 1)
        ip("link", "set", "fab0", "mtu", "1400")
        as_open_vswitch_lists()
        assert own(source.receive()[0]) == {"fab0"}


@in_namespace(MADE)
def test_an_event_with_the_number_of_no_namespace_is_own() -> None:
    """Before Linux 70f8592ee905 the kernel may give -1, if a socket in another namespace hears the same event."""
    source = as_before_88b126b39f97(links(), -1)
    ip("link", "set", "fab0", "mtu", "1400")
    assert own(source.receive()[0]) == {"fab0"}


@in_namespace(MADE)
def test_an_event_of_a_pod_is_no_own_one_whether_the_own_namespace_has_a_number_or_not() -> None:
    source = links()
    with pod_with_fab1() as other:
        source.receive()
        for mtu in ("1400", "1500"):
            ip("link", "set", "fab1", "mtu", mtu, of=other)
            events, _ = source.receive()
            assert (own(events), elsewhere(events) > 0) == (set(), True)
            as_open_vswitch_lists()
