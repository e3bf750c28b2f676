"""In a lab of three nodes, the frames of a NIC reach both other nodes: the splitter, tested with sockets in place of QEMU."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import companions
from lab.node import wait

FRAME = b"frame"


def nic(path: Path) -> socket.socket:
    """The socket of another node's NIC."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.settimeout(60)
    made.bind(str(path))
    return made


@pytest.fixture
def outlet(state: Path, qemu: subprocess.Popen[bytes]) -> Iterator[socket.socket]:
    """Where the node's QEMU sends; the NICs of the others are state/b and state/c."""
    path = state / "a"
    companions.start_splitter({path: [state / "b", state / "c"]}, qemu.pid, state / "log")
    wait(path.exists, 60, "the splitter")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.settimeout(60)
        made.connect(str(path))
        yield made


def test_each_frame_reaches_all_others_in_order(state: Path, outlet: socket.socket) -> None:
    frames = [bytes([number]) * 9000 for number in range(200)]
    with nic(state / "b") as one, nic(state / "c") as other:
        for frame in frames:
            outlet.send(frame)
            # A node that reads late does not delay the other node.
            assert one.recv(10000) == frame
        # More wait than the kernel keeps for a socket.
        assert [other.recv(10000) for _ in frames] == frames


def test_a_node_that_is_off_or_started_again_holds_up_no_other(state: Path, outlet: socket.socket) -> None:
    with nic(state / "b") as one:
        outlet.send(FRAME)
        assert one.recv(100) == FRAME
        with nic(state / "c") as other:
            outlet.send(FRAME)
            assert one.recv(100) == other.recv(100) == FRAME
        # QEMU's end leaves the socket's file, and its next start replaces it.
        outlet.send(FRAME)
        assert one.recv(100) == FRAME
        (state / "c").unlink()
        with nic(state / "c") as other:
            outlet.send(b"again")
            assert one.recv(100) == b"again"
            # It may have been started again before the frame that was sent while it was off was dropped.
            wait(lambda: other.recv(100) == b"again", 60, "the frame")


def test_the_splitter_ends_with_qemu(state: Path, outlet: socket.socket, qemu: subprocess.Popen[bytes]) -> None:
    qemu.kill()
    qemu.wait()

    def refused() -> bool:
        try:
            outlet.send(FRAME)
        except ConnectionRefusedError:
            return True
        return False

    wait(refused, 60, "the end")
    assert (state / "log").read_text() == ""
