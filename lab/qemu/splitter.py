"""Copies what a NIC of a node sends to the NICs of that name on all other nodes, as long as the node's QEMU runs.

QEMU connects a NIC to one socket: in a lab of two nodes to the other node's, in a larger lab to this process's.
`lab/companions.py` starts this file by itself, so it imports nothing of the lab.
"""

import json
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_WAITING = 256
"""The most frames that wait for a node that does not read (while it is saved, or if its host is busy). Others are dropped."""

LONGEST = 1 << 17
"""More bytes than a frame can have."""


class Receiver:
    """The NIC of another node. Each start of its QEMU makes a new socket at the same path."""

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
