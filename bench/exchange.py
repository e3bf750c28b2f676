"""Small requests over TCP, their answers, and a program that spins beside them: the load of the benchmarks of tuning.

It needs only Python's standard library, because `bench.tuning` sends this file to the nodes: `answer ADDRESS` prints a line
once it listens, and answers until it is ended. `request ADDRESS SECONDS` and `spin SECONDS` print what they measured as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CONNECTIONS = 8
MESSAGE = bytes(64)
PORT = 7000
WAIT_S = 20
MILLISECOND = 1_000_000
ASK_BUSY = b"busy"
"""The message that is answered with the CPU time of the answering machine."""


def answer(address: str) -> None:
    """Send back whatever comes, until the process is ended."""
    listener = socket.create_server((address, PORT), backlog=CONNECTIONS)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    peers: dict[int, socket.socket] = {}
    print("listening", flush=True)  # noqa: T201
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                peer, _ = listener.accept()
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peers[peer.fileno()] = peer
                poll.register(peer, select.EPOLLIN)
            else:
                data = b""
                with suppress(ConnectionError):  # the client has ended
                    data = peers[number].recv(4096)
                    peers[number].sendall(repr(busy()).encode() if data == ASK_BUSY else data)
                if not data:
                    poll.unregister(number)


def request(address: str, seconds: float) -> dict[str, float]:
    """Send on each connection, wait for the answer, send again.

    :returns: ``rate``, requests a second; ``p99``, of their times in microseconds; ``cpu``, CPU microseconds of a request on
        the machines of both ends together. If both ends are on one machine, its time counts twice.
    :raises TimeoutError: the other end does not answer.
    """
    poll, sent, times = select.epoll(), {}, []
    peers = {}
    for _ in range(CONNECTIONS):
        peer = socket.create_connection((address, PORT), timeout=WAIT_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[peer.fileno()] = peer
    asked = next(iter(peers.values()))
    before = busy() + _busy_there(asked)
    for number in peers:
        poll.register(number, select.EPOLLIN)
    end = time.perf_counter_ns() + int(seconds * 1e9)
    for number, peer in peers.items():
        sent[number] = time.perf_counter_ns()
        peer.sendall(MESSAGE)
    waiting = len(peers)
    while waiting:
        ready = poll.poll(WAIT_S)
        if not ready:
            raise TimeoutError(f"{address} did not answer within {WAIT_S} s")
        for number, _ in ready:
            peers[number].recv(4096)
            now = time.perf_counter_ns()
            times.append(now - sent[number])
            if now < end:
                sent[number] = now
                peers[number].sendall(MESSAGE)
            else:
                waiting -= 1
    used = busy() + _busy_there(asked) - before
    return {"rate": len(times) / seconds, "p99": p99(times), "cpu": used * 1e6 / len(times)}


def spin(seconds: float) -> dict[str, float]:
    """Spin, and measure in each millisecond the longest time for which the program did not run.

    :returns: ``gap``, the p99 of these times in microseconds.
    """
    gc.disable()
    longest = []
    clock = time.perf_counter_ns
    last = clock()
    end = last + int(seconds * 1e9)
    while last < end:
        until, most = last + MILLISECOND, 0
        while last < until:
            now = clock()
            most = max(most, now - last)
            last = now
        longest.append(most)
    return {"gap": p99(longest)}


def p99(times: Sequence[int]) -> float:
    """The 99th percentile, in microseconds, of times in nanoseconds."""
    return statistics.quantiles(times, n=100)[98] / 1000 if len(times) > 1 else 0.0


def busy() -> float:
    """CPU seconds that all programs and the kernel have used: /proc/stat without idle and iowait."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _busy_there(peer: socket.socket) -> float:
    peer.sendall(ASK_BUSY)
    return float(peer.recv(4096))


def main(command: str, *words: str) -> None:
    """Run one end on a node, or the program that spins."""
    if command == "answer":
        answer(words[0])
    measured = spin(float(words[0])) if command == "spin" else request(words[0], float(words[1]))
    print(json.dumps(measured))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
