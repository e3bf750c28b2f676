"""The lab's nodes get this host's time: the time source, asked by an NTP client."""

import socket
import subprocess
import time
from pathlib import Path

import pytest

from lab import companions, time_source
from lab.node import wait
from lab.time_source import EPOCH, HEADER

QUESTION = 0x1234_5678_9ABC_DEF0
"""The transmit timestamp of a client's request: chronyd sends random bits, and accepts only an answer with the same bits."""


def question(first: int = 4 << 3 | 3) -> bytes:
    return HEADER.pack(first, 0, 4, 0, 0, 0, b"", 0, 0, 0, QUESTION)


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked(port: int) -> bytes:
    """The answer; empty if nobody answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(1.0)
        # On 127.0.0.1 the kernel may choose the very port that is asked, and the client would hear itself.
        client.bind(("127.0.0.2", 0))
        client.connect(("127.0.0.1", port))
        try:
            client.send(question())
            return client.recv(512)
        except (ConnectionRefusedError, TimeoutError):
            return b""


def test_the_time_source_answers_while_qemu_runs(qemu: subprocess.Popen[bytes], tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    before = time.time()
    companions.start_time_source(port, qemu.pid, log)
    answers: list[bytes] = []

    def answered() -> bool:
        answers.append(asked(port))
        return answers[-1] != b""

    wait(answered, 60, "an answer")
    # `up` may ask for it again.
    companions.start_time_source(port, qemu.pid, log)
    first, stratum, *_, origin, received, sent = HEADER.unpack(answers[-1])
    assert (first & 7, stratum, origin) == (4, 10, QUESTION)
    assert before <= received / 2**32 - EPOCH <= sent / 2**32 - EPOCH <= time.time()
    qemu.kill()
    qemu.wait()
    wait(lambda: asked(port) == b"", 60, "the end")
    assert log.read_text() == ""


def test_a_taken_port_is_in_the_log(qemu: subprocess.Popen[bytes], tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        companions.start_time_source(other.getsockname()[1], qemu.pid, tmp_path / "log")
        wait(lambda: (tmp_path / "log").read_text() != "", 60, "a line of the log")
    assert "the node gets no time from this host: " in (tmp_path / "log").read_text()


@pytest.mark.parametrize("packet", [b"", b"x" * 47, question(4 << 3 | 4), question(4 << 3 | 6)])
def test_other_packets_get_no_answer(packet: bytes) -> None:
    assert time_source.answer(packet, 0.0) == b""
