"""TCP connections: the same assertions on the fake and, in a network namespace, on this machine's own kernel."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import pytest
from attrs import define, field

from agent import linux
from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.users import User, users
from agent.hardware.functions import PCI, discover, ifindex_of
from agent.machine import Machine, Route, Rule
from agent.spec.node import from_mapping
from agent.state.wanted import resolve
from bench.namespace import ADDRESS, devices
from tests.private_namespace import in_namespace, ip, pod, sh
from tests.sim.kernel import Kernel

OWN, OWN6, PEER, PEER6, PORT = "198.51.100.7", "2001:db8:77::7", "198.51.100.9", "2001:db8:77::9", 7000
NETDEV = "fab0"


class World(Protocol):
    """A machine with a NIC that has both own addresses, on one network with the peer."""

    machine: Machine

    def listen(self) -> None:
        """Have a process here listen at each address."""

    def connect(self, local: str, peer: str) -> str:
        """Connect with PORT of an address; the process that does."""

    def close(self) -> None:
        """Close the connections."""


def bare(address: str) -> str:
    """An address as it is listed: without the prefix of an IPv4 address that is mapped to IPv6."""
    return address.removeprefix("::ffff:")


# --- the cases --------------------------------------------------------------------------------------------


def each_established_connection_is_listed_with_both_ends(world: World) -> None:
    assert world.machine.netlink.connections() == ()
    for local, peer in ((OWN, PEER), (OWN6, PEER6), (f"::ffff:{OWN}", f"::ffff:{PEER}")):
        process = world.connect(local, peer)
        found = world.machine.netlink.connections()
        (new,) = [each for each in found if (each.local, each.peer) == (bare(local), bare(peer))]
        assert (new.peer_port, new.ifindex) == (PORT, 0)
        assert new.local_port > 1023
        assert world.machine.processes.holders(frozenset({new.socket})) == {new.socket: (process,)}
        world.close()


def a_socket_that_listens_is_no_connection_and_one_with_an_own_address_has_both_its_ends_here(world: World) -> None:
    world.listen()
    assert world.machine.netlink.connections() == ()
    world.connect(OWN, OWN)
    ends = {(each.local, each.peer) for each in world.machine.netlink.connections()}
    assert ends == {(OWN, OWN)}
    assert world.machine.netlink.route_ifindex(OWN, OWN) == 1


def a_connection_with_a_neighbour_uses_the_nic_and_one_with_an_own_address_does_not(world: World) -> None:
    want = resolve(
        from_mapping({"node_name": "n1", "nics": [{"name": "rail0", "select": {"pci": ADDRESS}}]}),
        discover(world.machine),
    )
    world.listen()
    world.connect(OWN, OWN)
    assert users(world.machine, want, ADDRESS) == {}
    for local, peer, named in (
        (f"::ffff:{OWN}", f"::ffff:{PEER}", f"{PEER}:{PORT}"),
        (OWN6, PEER6, f"[{PEER6}]:{PORT}"),
    ):
        process = world.connect(local, peer)
        assert users(world.machine, want, ADDRESS) == {ADDRESS: (User(f"{process}, connected with {named}"),)}
        world.close()


def an_mtu_that_flaps_the_link_waits_until_the_connection_ends(world: World) -> None:
    jumbo = from_mapping({"node_name": "n1", "nics": [{"name": "rail0", "select": {"pci": ADDRESS}, "mtu": 9000}]})
    process = world.connect(OWN, PEER)
    for open in (True, False):
        result = converge(world.machine, Goal(jumbo), Memory(lambda: 0.0))
        (mtu,) = [outcome for outcome in result.outcomes if outcome.change.field == "mtu"]
        user = f"{process}, connected with {PEER}:{PORT} ({ADDRESS})"
        assert (mtu.result, mtu.change.affected) == (("deferred", (user,)) if open else ("applied", ()))
        world.close()
    link = world.machine.netlink.link(NETDEV)
    assert link is not None
    assert link.mtu == 9000


def a_rule_for_the_source_decides_before_the_main_table(world: World) -> None:
    netlink, index = world.machine.netlink, ifindex_of(world.machine.files, ADDRESS)
    far = "203.0.113.9"
    netlink.add_route(Route("203.0.113.0/24", 479163, index, PEER))
    assert netlink.route_ifindex(far, OWN) is None
    netlink.add_rule(Rule(OWN, 479163, 24791))
    assert (netlink.route_ifindex(far), netlink.route_ifindex(far, OWN)) == (None, index)
    assert netlink.route_ifindex(PEER, OWN) == index
    assert netlink.route_ifindex(PEER, "198.51.100.99") is None, "it is no own address"


CASES = (
    each_established_connection_is_listed_with_both_ends,
    a_socket_that_listens_is_no_connection_and_one_with_an_own_address_has_both_its_ends_here,
    a_connection_with_a_neighbour_uses_the_nic_and_one_with_an_own_address_does_not,
    an_mtu_that_flaps_the_link_waits_until_the_connection_ends,
    a_rule_for_the_source_decides_before_the_main_table,
)


# --- the fake ---------------------------------------------------------------------------------------------


@define
class Simulated:
    kernel: Kernel = field(factory=Kernel)
    machine: Machine = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.kernel.add_nic(ADDRESS, NETDEV, "02:00:00:00:01:00")
        self.machine = self.kernel.machine()
        index = self.kernel.netdev(ADDRESS).ifindex
        self.machine.netlink.set_link(index, up=True)
        for address in (f"{OWN}/24", f"{OWN6}/64"):
            self.machine.netlink.add_address(index, address)

    def listen(self) -> None:
        for address in (OWN, OWN6):
            self.kernel.connect(f"{address}:{PORT}", ":::0", "nginx (pid 9)", state="LISTEN")

    def connect(self, local: str, peer: str) -> str:
        own, other = bare(local), bare(peer)
        self.kernel.connect(f"{own}:40000", f"{other}:{PORT}", "curl (pid 7)")
        if own == other:
            self.kernel.connect(f"{other}:{PORT}", f"{own}:40000", "nginx (pid 9)")
        return "curl (pid 7)"

    def close(self) -> None:
        self.kernel.sockets = [(each, "TIME_WAIT") for each, _ in self.kernel.sockets]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_fake_behaves_as_the_kernel(case: Callable[[World], None]) -> None:
    case(Simulated())


# --- this kernel ------------------------------------------------------------------------------------------

LISTEN = f"""
import socket
listener = socket.create_server(("", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    connection.recv(1)
    connection.close()
"""
MADE = f"""
ip link set lo up
ip link add {NETDEV} type veth peer name fab1
ip address add {OWN}/24 dev {NETDEV}
ip address add {OWN6}/64 dev {NETDEV} nodad
ip link set {NETDEV} up
"""
OF_PEER = f"""
ip address add {PEER}/24 dev fab1
ip address add {PEER6}/64 dev fab1 nodad
ip link set fab1 up
"""


@define
class Real:
    machine: Machine
    _stack: ExitStack
    _connections: list[socket.socket] = field(factory=list)

    def listen(self) -> None:
        for family, address in ((socket.AF_INET, OWN), (socket.AF_INET6, OWN6)):
            self._stack.enter_context(socket.create_server((address, PORT), family=family))

    def connect(self, local: str, peer: str) -> str:
        made = self._stack.enter_context(socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET))
        made.bind((local, 0))
        made.connect((peer, PORT))
        self._connections.append(made)
        return f"{Path('/proc/self/comm').read_text().strip()} (pid {os.getpid()})"

    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()


@contextmanager
def a_peer() -> Iterator[None]:
    """A process with fab1 in a network namespace of its own, which answers at PORT."""
    with pod() as namespace:
        ip("link", "set", "fab1", "netns", namespace)
        sh(f"nsenter -t {namespace} -n sh -euc '{OF_PEER}'")
        command = ["nsenter", "-t", namespace, "-n", sys.executable, "-c", LISTEN]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
            assert peer.stdout is not None
            assert peer.stdout.readline() == b"listens\n"
            yield
            peer.kill()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@in_namespace(MADE)
def test_this_kernel_behaves_as_the_contract_says(case: Callable[[World], None]) -> None:
    with a_peer(), devices({ADDRESS: NETDEV}), ExitStack() as stack:
        # igb sets an MTU by taking the link down.
        driver = Path(f"{PCI}/{ADDRESS}/driver")
        driver.unlink()
        driver.symlink_to("../drivers/igb")
        case(Real(linux.machine(), stack))
