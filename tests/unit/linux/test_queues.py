"""The kernel's answers about a netdev's queues: as Linux 7.3 gave them for igb and igbvf, and of other drivers' forms."""

import struct

import pytest

from agent.linux import queues as of_kernel
from agent.linux.messages import attribute
from agent.linux.queues import GENL, NAPI_GET, QUEUE_GET, RX, TX, decode_napi, napis, served, users
from agent.machine import QueueIrq, QueueUser

IGB = (
    "0b0100000800020003200000080001000400000008000300310000000800080000000000080005000000000008000700000000000800060000000000",
    "0b0100000800020002200000080001000400000008000300300000000800080000000000080005000000000008000700000000000800060000000000",
)
IGB_NAPIS = [bytes.fromhex(each) for each in IGB]
FIRST, SECOND = 8194, 8195


def entry(command: int, **numbers: int) -> bytes:
    """An entry with attributes ``a1``, ``a2`` and so on."""
    packed = (attribute(int(name[1:]), struct.pack("=I", number)) for name, number in numbers.items())
    return GENL.pack(command, 1, 0) + b"".join(packed)


def queue(number: int, kind: int, napi: int | None = None) -> bytes:
    linked = {} if napi is None else {"a4": napi}
    return entry(QUEUE_GET, a1=number, a3=kind, a2=4, **linked)


@pytest.mark.parametrize(
    ("napis", "queues", "known"),
    [
        # A paired interrupt, and one that only receives.
        (
            IGB_NAPIS,
            [queue(0, RX, FIRST), queue(1, RX, SECOND), queue(0, TX, FIRST)],
            {48: QueueIrq(0, 0), 49: QueueIrq(1, None)},
        ),
        # Of several queues the first.
        (IGB_NAPIS, [queue(number, TX, FIRST) for number in (8, 16, 0)], {48: QueueIrq(None, 0)}),
        ([entry(NAPI_GET, a2=8202, a1=5)], [queue(0, RX), queue(0, TX)], {}),  # igbvf
        ([entry(NAPI_GET, a2=8193, a1=2)], [queue(0, RX, 8193), queue(0, TX)], {}),  # virtio_net
        ([], [], {}),  # a netdev that is down
        (IGB_NAPIS, [], {}),
    ],
)
def test_an_interrupt_s_queues_are_those_that_the_driver_has_linked(
    napis: list[bytes], queues: list[bytes], known: dict[int, QueueIrq]
) -> None:
    assert served(napis, queues) == known


def test_an_instance_without_an_id_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.13 (and 6.12.9) the kernel lists them, too."""
    without = entry(NAPI_GET, a1=4, a3=50)
    monkeypatch.setattr(of_kernel, "_dumped", lambda command, index, ifindex: [*IGB_NAPIS, without])
    assert napis(4).keys() == {FIRST, SECOND}
    assert served([without], [queue(0, TX)]) == {}


def test_each_use_of_a_queue_is_told_once() -> None:
    """Linux 6.18 shows AF_XDP on both queues of a number; the form of a lease is from Linux 7.3's source."""
    lease = attribute(8, attribute(2, attribute(1, struct.pack("=I", 0))) + attribute(1, struct.pack("=I", 9)))
    queues = [
        queue(0, RX),
        queue(1, RX) + attribute(7, b""),
        queue(2, RX) + attribute(5, struct.pack("=I", 3)) + lease,
        queue(3, RX) + attribute(6, attribute(1, struct.pack("=I", 4096))),
        queue(4, RX) + attribute(7, b""),
        queue(1, TX) + attribute(7, b""),
    ]
    named = QueueUser(4, "AF_XDP", "socket:[4711]")
    assert users(queues, [named]) == (
        QueueUser(1, "AF_XDP"),
        QueueUser(2, "a netkit lease"),
        QueueUser(2, "devmem TCP"),
        QueueUser(3, "io_uring zero copy"),
        named,
    )


def test_the_settings_of_an_instance_are_those_that_the_kernel_has() -> None:
    """Linux 7.3 has all four; before 6.13 there is none, and a timeout may take 8 bytes. A thread has its number since 6.8."""
    none = {"defer_hard_irqs": 0, "gro_flush_timeout": 0, "irq_suspend_timeout": 0, "threaded": 0}
    assert decode_napi(IGB_NAPIS[0]) == (8195, {"irq": 49, **none})
    assert decode_napi(entry(NAPI_GET, a1=4, a2=8193, a3=48, a4=4711)) == (8193, {"irq": 48, "pid": 4711})
    old = entry(NAPI_GET, a1=4, a2=8193)
    assert decode_napi(old) == (8193, {})
    long = attribute(6, struct.pack("=Q", 5_000_000_000))
    assert decode_napi(old + long) == (8193, {"gro_flush_timeout": 5_000_000_000})
