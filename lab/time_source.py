"""Answers a node's NTP client with this host's clock, as long as the node's QEMU runs.

QEMU's user network forwards what a node sends to its gateway to this host's loopback. So a node needs no time server on the
internet, and this host needs none of its own. `lab/companions.py` starts this file by itself, so it imports nothing of the lab.
"""

import os
import select
import socket
import struct
import sys
import time

GATEWAY = "10.0.2.2"
"""The address at which a node reaches this host's loopback."""

# RFC 5905, 7.3: leap, version and mode; stratum; poll; precision; root delay; root dispersion; reference; four timestamps.
HEADER = struct.Struct("!BBbbII4sQQQQ")
CLIENT, SERVER = 3, 4
STRATUM = 10  # as chronyd's `local`: the host's own clock may be synchronised or not
PRECISION = -20  # 2^-20 s, about a microsecond
EPOCH = 2_208_988_800  # seconds from 1900, where NTP's time begins, to 1970


def setting(port: int) -> str:
    """The line of chronyd's configuration for a node whose source answers on this port."""
    return f"server {GATEWAY} port {port} iburst minpoll 4 maxpoll 6\n"


def serve(port: int, qemu: int) -> None:
    """Answer until the process has ended."""
    ended = os.pidfd_open(qemu)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.bind(("127.0.0.1", port))
        while True:
            readable, _, _ = select.select([asked.fileno(), ended], [], [])
            if ended in readable:
                return
            request, client = asked.recvfrom(512)
            if reply := answer(request, time.time()):
                asked.sendto(reply, client)


def answer(request: bytes, received: float) -> bytes:
    """The reply to a packet that was received at this time; empty if the packet is not a client's request."""
    if len(request) < HEADER.size:
        return b""
    first, _, poll, *_, transmitted = HEADER.unpack_from(request)
    version, mode = first >> 3 & 7, first & 7
    if mode != CLIENT:
        return b""
    came = _timestamp(received)
    head = (version << 3 | SERVER, STRATUM, poll, PRECISION, 0, 0, b"LOCL")
    return HEADER.pack(*head, came, transmitted, came, _timestamp(time.time()))


def _timestamp(seconds: float) -> int:
    return int((seconds + EPOCH) * 2**32)


if __name__ == "__main__":
    try:
        serve(int(sys.argv[1]), int(sys.argv[2]))
    except OSError as error:
        sys.exit(f"the node gets no time from this host: {error}")
