"""Copies what a NIC of a node sends to the NICs of that name on all other nodes, as long as the node's QEMU runs.

QEMU connects a NIC to one socket. In a lab of two nodes that is the other node's, in a larger one it is this process's.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_WAITING = 256
"""Frames that may wait for a node that reads none now (while it is saved, or its host is busy). More are dropped."""

LONGEST = 1 << 17
"""Bytes; a frame has less."""


def start(copies: Mapping[Path, Sequence[Path]], qemu: int, log: Path) -> None:
    """Start a process that copies from each socket to those of the other nodes until QEMU has ended."""
    named = {str(one): [str(other) for other in others] for one, others in copies.items()}
    # setsid --fork: it outlives this command, and is nobody's child to wait for.
    words = ["setsid", "--fork", sys.executable, "-I", __file__, json.dumps(named), str(qemu)]
    with log.open("a") as messages:
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, check=True)


class Receiver:
    """The NIC of another node: its socket, which is another one after each start of its QEMU."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.socket = _socket()
        self.waiting: deque[bytes] = deque()

    def take(self, frame: bytes) -> None:
        """Send a frame after those that wait."""
        if len(self.waiting) < MOST_WAITING:
            self.waiting.append(frame)
        self.send()

    def send(self) -> None:
        """Send the waiting frames that the node can receive now. Frames for a node that is off are dropped."""
        try:
            while self.waiting:
                try:
                    self.socket.send(self.waiting[0])
                except BlockingIOError:
                    return
                except OSError:
                    self.socket.close()
                    self.socket = _socket()
                    self.socket.connect(self.path)
                    self.socket.send(self.waiting[0])
                self.waiting.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.waiting.clear()


def copy(copies: Mapping[str, Sequence[str]], qemu: int) -> None:
    """Copy until the process has ended."""
    ended = os.pidfd_open(qemu)
    inlets: dict[int, tuple[socket.socket, list[Receiver]]] = {}
    for path, others in copies.items():
        Path(path).unlink(missing_ok=True)
        inlet = _socket()
        inlet.bind(path)
        inlets[inlet.fileno()] = inlet, [Receiver(other) for other in others]
    everyone = [each for _, receivers in inlets.values() for each in receivers]
    while True:
        waiting = {each.socket.fileno(): each for each in everyone if each.waiting}
        readable, writable, _ = select.select([*inlets, ended], [*waiting], [])
        if ended in readable:
            return
        for number in writable:
            waiting[number].send()
        for number in readable:
            inlet, receivers = inlets[number]
            frame = inlet.recv(LONGEST)
            for each in receivers:
                each.take(frame)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


if __name__ == "__main__":
    try:
        copy(json.loads(sys.argv[1]), int(sys.argv[2]))
    except OSError as error:
        sys.exit(f"the node's NICs reach no other node: {error}")
