"""The kubelet's answers: gRPC over HTTP/2, and the message in it; and its file of the CPUs of pods."""

import json
import socket
from collections.abc import Sequence
from contextlib import suppress

from h2.config import H2Configuration
from h2.connection import H2Connection

from agent.hardware.cpu_owners import assigned
from agent.linux.grpc import LARGEST, call
from agent.linux.kubelet import _by_device, _cpus_by_device
from tests.fuzz.targets import choose, chosen

TIMEOUT = 15.0


def _call(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(TIMEOUT)
        with suppress(OSError):  # more than the socket's buffer holds
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            assert len(call(ours, "/v1.PodResourcesLister/List", TIMEOUT)) <= LARGEST


def _message(data: bytes) -> None:
    with suppress(ValueError):
        _by_device(data)
    with suppress(ValueError):
        _cpus_by_device(data)


def _file(data: bytes) -> None:
    with suppress(ValueError):
        assert all(isinstance(cpu, int) for cpu in assigned(data.decode(errors="surrogateescape")))


def check(data: bytes) -> None:
    """Read an answer, or the message alone, or the file."""
    choose(data, (_call, _message, _file))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def seeds() -> Sequence[bytes]:
    """A pod with three devices; the same in a whole answer; an answer with an error; two files."""
    devices = b"".join(_field(2, _field(2, name)) for name in (b"0000:21:10.0", b"erdma_0/17", b"0000-3b-00-2"))
    claim = _field(5, _field(4, _field(1, _field(1, b"a/b=0000-3b-00-2")) + _field(4, b"0000-3b-00-2")))
    message = _field(
        1, _field(1, b"pod") + _field(2, b"team") + _field(3, devices + claim + b"\x18\x01") + _field(4, b"\x01")
    )
    state = (
        b'{"policyName":"static","defaultCpuSet":"0","entries":{"pod":{"app":"1-2"}},"podEntries":{"p":{"cpuSet":"3"}}}'
    )
    newest = json.dumps({"data": state.decode(), "dataChecksum": 1}).encode()
    answers = [chosen(1, message), chosen(0, _answer(message, b"0")), chosen(0, _answer(b"", b"12"))]
    return [*answers, chosen(2, state), chosen(2, newest)]


def _answer(message: bytes, status: bytes) -> bytes:
    client, server = H2Connection(H2Configuration(client_side=True)), H2Connection(H2Configuration(client_side=False))
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "x")])
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
    server.send_data(1, bytes(1) + len(message).to_bytes(4, "big") + message)
    server.send_headers(1, [("grpc-status", status.decode()), ("grpc-message", "why%20not")], end_stream=True)
    return server.data_to_send()
