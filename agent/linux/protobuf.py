"""Protocol buffers' wire format, read as far as it takes to find a few strings.

A message is a row of fields, each a number and a type of wire, then the value (protobuf.dev, "Encoding"). protobuf's own
package would be compiled code and generated classes for the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED = {FIXED64: 8, FIXED32: 4}

# A varint has seven bits a byte, and at most 64 in all.
LONGEST_VARINT = 10

Schema = Mapping[int, "str | Schema"]
"""What to read of a message: by field number, what to call a string, or what to read of a nested message."""


def strings(message: bytes, schema: Schema) -> Iterator[tuple[str, str]]:
    """Every string that the schema names, with its name; what it does not name is skipped.

    :raises ValueError: it is no message.
    """
    for number, content in fields(message):
        wanted = schema.get(number)
        if isinstance(wanted, str):
            yield wanted, content.decode()
        elif wanted is not None:
            yield from strings(content, wanted)


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields that have a length (strings and messages), each with its number.

    :raises ValueError: it is no message.
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


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for index, byte in enumerate(message[position : position + LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError(f"a number at byte {position} has no end")
