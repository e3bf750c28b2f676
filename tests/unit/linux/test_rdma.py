"""The RDMA subsystem's messages about queue pairs and connections, as drivers/infiniband/core/nldev.c writes them."""

import errno
import struct
from ipaddress import ip_address

import pytest

from agent.linux.messages import attribute
from agent.linux.rdma import decode_resources, named
from agent.machine import QueuePair

DEVICE = attribute(1, struct.pack("=I", 3)) + attribute(2, b"mlx5_0\0")
LQPN, STATE, TYPE, PID, KERN_NAME, DST_ADDR = 21, 27, 26, 28, 29, 34
RC, UD, GSI = 2, 4, 1


def number(value: int) -> bytes:
    return attribute(LQPN, struct.pack("=I", value))


def pair(value: int, type: int, owner: bytes) -> bytes:
    return number(value) + owner + attribute(TYPE, bytes([type])) + attribute(STATE, b"\3")


def kernel(module: str) -> bytes:
    return attribute(KERN_NAME, module.encode() + b"\0")


PROCESS = attribute(PID, struct.pack("=I", 4711))


def sockaddr(address: str) -> bytes:
    ip = ip_address(address)
    family, skipped = (2, b"") if ip.version == 4 else (10, bytes(4))
    return (struct.pack("=H", family) + struct.pack(">H", 4420) + skipped + ip.packed).ljust(128, b"\0")


def connection(value: int | None, owner: bytes, peer: str) -> bytes:
    own = b"" if value is None else number(value) + attribute(TYPE, bytes([RC]))
    return own + attribute(STATE, b"\5") + attribute(DST_ADDR, sockaddr(peer)) + owner


def table(kind: int, *entries: bytes) -> bytes:
    return DEVICE + attribute(kind, b"".join(attribute(kind + 1, entry) for entry in entries))


def test_the_kernel_s_queue_pairs_have_the_module_that_uses_them() -> None:
    pairs = table(
        19,
        pair(1, GSI, kernel("ib_core")),
        pair(11, UD, kernel("ib_ipoib")),
        pair(12, RC, kernel("ib_srp")),
        pair(13, RC, kernel("rdma_cm")),
        pair(14, RC, kernel("rdma_cm")),
        pair(15, RC, PROCESS),
        pair(16, RC, b""),  # of a process that has ended
    )
    connections = table(
        30,
        connection(None, kernel("nvmet_rdma"), "::"),  # it listens
        connection(13, kernel("nvme_rdma"), "10.0.0.9"),
        connection(14, kernel("rpcrdma"), "::ffff:10.0.0.8"),
        connection(15, PROCESS, "10.0.0.7"),
    )
    assert named(decode_resources(pairs), decode_resources(connections)) == (
        QueuePair("ib_core", "GSI"),
        QueuePair("ib_ipoib", "UD"),
        QueuePair("ib_srp", "RC"),
        QueuePair("nvme_rdma", "RC", "10.0.0.9"),
        QueuePair("rpcrdma", "RC", "10.0.0.8"),
    )


def test_the_rdma_cm_s_connections_are_known_also_if_the_driver_has_no_states_of_queue_pairs() -> None:
    connections = decode_resources(table(30, connection(13, kernel("nvme_rdma"), "10.0.0.9")))
    assert named(None, connections) == (QueuePair("nvme_rdma", "RC", "10.0.0.9"),)


def test_an_ipv6_peer_and_one_that_has_no_ip_address() -> None:
    other = attribute(DST_ADDR, struct.pack("=H", 27).ljust(128, b"\0"))  # AF_IB
    body = table(30, connection(13, kernel("ib_iser"), "fd00::9"), pair(14, RC, kernel("rds_rdma")) + other)
    assert [each.peer for each in decode_resources(body)] == ["fd00::9", ""]


def test_a_queue_pair_without_a_type_cannot_be_read() -> None:
    with pytest.raises(OSError, match="cannot be read") as refused:
        decode_resources(table(19, number(1) + kernel("ib_core")))
    assert refused.value.errno == errno.EPROTO
