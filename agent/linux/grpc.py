"""One gRPC call over a connected socket, and the strings in its answer.

gRPC is HTTP/2, with five bytes before each message and its status in the trailers (grpc/doc/PROTOCOL-HTTP2.md). h2 does
frames, header compression and flow control. grpcio would add 7 MB of compiled code, a wheel for each version of Python, and
threads.

A message of Protocol buffers is a series of fields, each a number and a wire type, then the value (protobuf.dev, "Encoding").
Only a few strings and lists of numbers are read, so this needs neither protobuf's compiled package nor generated classes.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from attrs import define, field
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

# The prefix of a message that is not compressed and has no bytes: no field is set.
EMPTY_MESSAGE = bytes(5)
PREFIX = 5

READ = 1 << 16

# Far more than a kubelet's answer. A server that sends without end must not fill the memory.
LARGEST = 64 << 20

CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
ERRNOS = {"UNIMPLEMENTED": errno.ENOSYS, "DEADLINE_EXCEEDED": errno.ETIMEDOUT, "RESOURCE_EXHAUSTED": errno.EBUSY}


VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED = {FIXED64: 8, FIXED32: 4}

# A varint has seven bits a byte, and at most 64 in all.
LONGEST_VARINT = 10

Schema = Mapping[int, "str | Schema"]
"""Which fields to read: by field number, the name for a string, or the schema of a nested message."""


def call(connection: socket.socket, method: str, timeout: float) -> bytes:
    """Call a method whose request is an empty message.

    :param method: as ``/package.Service/Method``.
    :param timeout: seconds for the whole answer.
    :returns: the answering message.
    :raises OSError: ETIMEDOUT: no whole answer in time; ENOSYS: there is no such method; EBUSY: the server has too many
        requests; EREMOTEIO: it answers with another error; EPROTO: the answer is not gRPC.
    """
    deadline = time.monotonic() + timeout
    http = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    http.initiate_connection()
    stream = http.get_next_available_stream_id()
    http.send_headers(stream, _headers(method, timeout))
    http.send_data(stream, EMPTY_MESSAGE, end_stream=True)
    answer = _Answer()
    try:
        while not answer.ended:
            for event in http.receive_data(_exchange(connection, http.data_to_send(), deadline)):
                answer.take(event)
                if isinstance(event, DataReceived):
                    # Without this the server stops after the first 64 KiB.
                    http.acknowledge_received_data(event.flow_controlled_length, stream)
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, f"no answer within {timeout:g} s") from None
    except H2Error as error:
        raise OSError(errno.EPROTO, f"the answer is not HTTP/2: {error}") from error
    return answer.message()


def _exchange(connection: socket.socket, data: bytes, deadline: float) -> bytes:
    """Send data, and return what the server sends next."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
    connection.sendall(data)
    received = connection.recv(READ)
    if not received:
        raise OSError(errno.EPROTO, "the connection was closed before the answer's end")
    return received


def _headers(method: str, timeout: float) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("grpc-timeout", f"{timeout * 1000:.0f}m"),
        ("content-type", "application/grpc"),
    ]


@define
class _Answer:
    """The part of an answer that has arrived."""

    headers: dict[bytes, bytes] = field(factory=dict)
    body: bytearray = field(factory=bytearray)
    ended: bool = False

    def take(self, event: Event) -> None:
        if isinstance(event, (ResponseReceived, TrailersReceived)):
            self.headers.update(event.headers)
        elif isinstance(event, DataReceived):
            self.body += event.data
            if len(self.body) > LARGEST:
                raise OSError(errno.EPROTO, f"the answer is longer than {LARGEST >> 20} MiB")
        elif isinstance(event, (StreamReset, ConnectionTerminated)):
            raise OSError(errno.EPROTO, f"the server ended the call: {event.error_code!r}")
        self.ended = self.ended or isinstance(event, StreamEnded)

    def message(self) -> bytes:
        if self.headers.get(b":status") != b"200" or not re.fullmatch(
            b"[0-9]{1,9}", self.headers.get(b"grpc-status", b"")
        ):
            raise OSError(errno.EPROTO, "the answer is HTTP/2, but not gRPC")
        if code := int(self.headers[b"grpc-status"]):
            name = CODES[code] if code < len(CODES) else str(code)
            message = unquote(self.headers.get(b"grpc-message", b"").decode("ascii", "replace"))
            raise OSError(ERRNOS.get(name, errno.EREMOTEIO), f"{name}: {message}")
        length = int.from_bytes(self.body[1:PREFIX], "big")
        if len(self.body) != PREFIX + length or self.body[0]:
            raise OSError(
                errno.EPROTO, f"the answer is not one uncompressed message: {len(self.body)} bytes of {length}"
            )
        return bytes(self.body[PREFIX:])


def strings(message: bytes, schema: Schema) -> Iterator[tuple[str, str]]:
    """The strings that the schema names, each with its name. Other fields are skipped, and so is what a field repeats.

    A kubelet may repeat a claim's devices 100,000 times, once for each time that it has prepared the claim.

    :raises ValueError: it is not a message.
    """
    for number, content in dict.fromkeys(fields(message)):
        wanted = schema.get(number)
        if isinstance(wanted, str):
            yield wanted, content.decode()
        elif wanted is not None:
            yield from strings(content, wanted)


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields that have a length (strings and messages), each with its number.

    :raises ValueError: it is not a message.
    """
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire = tag >> 3, tag & 7
        if wire == LENGTH_DELIMITED:
            length, start = _varint(message, position)
            position = start + length
            if position <= len(message):
                yield number, message[start:position]
        elif wire in FIXED:
            position += FIXED[wire]
        elif wire == VARINT:
            _, position = _varint(message, position)
        else:
            raise ValueError(f"field {number} has wire type {wire}, which does not exist")
        if position > len(message):
            raise ValueError(f"field {number} goes on beyond the message's end")


def numbers(content: bytes) -> Iterator[int]:
    """The numbers of a repeated field that has a length (``[packed=true]``, proto3's default).

    :raises ValueError: one has no end.
    """
    position = 0
    while position < len(content):
        number, position = _varint(content, position)
        yield number


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for index, byte in enumerate(message[position : position + LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError(f"a number at byte {position} has no end")
