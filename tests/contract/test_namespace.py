"""The cases about addresses on this machine's own kernel, in a network namespace: they need a netdev, but no NIC."""

import ctypes
import errno
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent import linux
from agent.hardware.functions import ifindex_of
from agent.hardware.sysfs import numbered
from agent.linux.connections import AF_XDP
from agent.linux.files import LinuxFiles
from agent.machine import Machine
from bench.namespace import ADDRESS, devices
from tests.contract.asking import errno_of, soon
from tests.contract.cases import CASES, Case, addresses, napi
from tests.private_namespace import in_namespace

MADE = "ip link set lo up; ip link add fab0 type veth peer name fab1; ip link set fab1 up; ip link set fab0 up"
TWO = "numrxqueues 2 numtxqueues 2"
SOL_XDP = 283
HERE = [case for case in CASES if case.__module__ in (addresses.__name__, napi.__name__)]


@contextmanager
def this_kernel() -> Iterator[tuple[Machine, int]]:
    """The machine, and the index of fab0."""
    with devices({ADDRESS: "fab0"}):
        kernel = linux.machine()
        index = ifindex_of(kernel.files, ADDRESS)
        # With GRO a veth's queues have NAPI instances.
        kernel.ethtool.set("features", index, {"rx-gro": True})
        yield kernel, index


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.__name__)
@in_namespace(MADE)
def test_this_kernel_behaves_as_the_contract_says(case: Case) -> None:
    with this_kernel() as (kernel, _):
        case(kernel, ADDRESS)


@in_namespace(MADE)
def test_the_kernel_tells_no_interrupt_of_a_veth() -> None:
    with this_kernel() as (kernel, index):
        assert kernel.netlink.napis(index)
        assert kernel.netlink.queue_irqs(index) == {}
        assert not any("irq" in has for has in kernel.netlink.napis(index).values())


@in_namespace(MADE)
def test_a_netdev_is_found_by_an_alternative_name_that_is_too_long_for_a_name() -> None:
    with this_kernel() as (kernel, index):
        kernel.netlink.add_altname(index, "name_of_thirty_characters_here")
        found = kernel.netlink.link("name_of_thirty_characters_here")
        assert (found and found.ifindex, kernel.netlink.link("another_name_of_thirty_letters")) == (index, None)


@in_namespace(f"{MADE}; ip addr add 2001:db8:77::7/64 dev fab1 nodad; ip addr add 2001:db8:77::7/64 dev fab0")
def test_an_address_that_another_node_has_is_a_duplicate() -> None:
    with this_kernel() as (kernel, index):
        failed = soon(lambda: kernel.netlink.addresses(duplicate=True) or None, "duplicate")
        assert failed == {index: ("2001:db8:77::7/64",)}
        assert "2001:db8:77::7/64" not in kernel.netlink.addresses()[index]


def test_an_interrupt_that_the_kernel_places_has_no_write_bit_and_refuses() -> None:
    files = LinuxFiles()
    paths = [f"/proc/irq/{number}/smp_affinity_list" for number in numbered(files.names("/proc/irq")).values()]
    managed = [path for path in paths if not files.writable(path)]
    if os.geteuid() or not managed:
        pytest.skip("no interrupt of this machine is placed by the kernel, or not run as root")
    for path in managed:
        # EIO before Linux 6.12, where the mode says nothing.
        assert errno_of(lambda path=path: files.write(path, files.read(path))) == errno.EPERM  # type: ignore[misc]


@in_namespace(MADE.replace("fab0 type veth peer name fab1", f"fab0 {TWO} type veth peer name fab1 {TWO}"))
def test_an_af_xdp_socket_is_a_user_of_its_queue_which_the_kernel_does_not_remove() -> None:
    with this_kernel() as (kernel, index):
        assert kernel.netlink.queue_users(index) == ()
        with bound_to(index, queue=1):
            (user,) = kernel.netlink.queue_users(index)
            assert (user.queue, user.how) == (1, "AF_XDP")
            assert errno_of(lambda: kernel.ethtool.set("channels", index, {"rx": 1, "tx": 1})) == errno.EINVAL
        soon(lambda: True if kernel.netlink.queue_users(index) == () else None, "free queue")
        kernel.ethtool.set("channels", index, {"rx": 1, "tx": 1})


@contextmanager
def bound_to(ifindex: int, queue: int) -> Iterator[None]:
    """An AF_XDP socket with a queue. Python's sockets do not know the family's addresses (include/uapi/linux/if_xdp.h)."""
    with socket.socket(AF_XDP, socket.SOCK_RAW) as bound, mmap.mmap(-1, 1 << 16) as memory:
        frames = (ctypes.c_char * len(memory)).from_buffer(memory)
        bound.setsockopt(SOL_XDP, 4, struct.pack("=QQII8x", ctypes.addressof(frames), len(memory), 4096, 0))
        for ring in (2, 5, 6):
            bound.setsockopt(SOL_XDP, ring, 64)
        address = struct.pack("=HHIII", AF_XDP, 0, ifindex, queue, 0)
        assert ctypes.CDLL(None).bind(bound.fileno(), address, len(address)) == 0
        yield
        del frames
