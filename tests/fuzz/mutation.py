"""Changed copies of seeds, by random choices that follow from a number: the same number gives the same cases."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice

WORDS: tuple[bytes, ...] = (
    *(b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"-1", b"1e999", b"NaN"),
    *(
        b"9" * 5000,
        b"\xc2\xb2",
        b"\\ud800",
        b"[" * 2000,
        b'{"a":' * 2000,
        b"null",
        b"{}",
        b"[]",
        b'""',
        b"\n",
        b"\x1b[2J",
    ),
    b"../" * 8,
)
LONGEST = 1 << 16


def cases(seeds: Sequence[bytes], seed: int, count: int) -> Iterator[bytes]:
    """The seeds themselves, then ``count`` changed copies of them."""
    yield from seeds
    yield from islice(_changed(random.Random(seed), seeds), count)  # noqa: S311  no secret


def _changed(choose: random.Random, seeds: Sequence[bytes]) -> Iterator[bytes]:
    while True:
        data = bytearray(choose.choice(seeds))
        for _ in range(choose.choice((1, 1, 1, 2, 4, 16))):
            at = choose.randrange(len(data) + 1)
            end = min(len(data), at + choose.choice((1, 1, 2, 4, 16, 256)))
            match choose.randrange(6):
                case 0:
                    data[at:end] = choose.randbytes(end - at)
                case 1:
                    del data[at:end]
                case 2:
                    data[at:at] = choose.choice(WORDS)
                case 3:
                    data[at:end] = choose.choice(WORDS)
                case 4:
                    other = choose.choice(seeds)
                    start = choose.randrange(len(other) + 1)
                    data[at:end] = other[start : start + choose.choice((4, 16, 256))]
                case _:
                    data[at:at] = data[at:end] * choose.choice((1, 2, 64))
        yield bytes(data[:LONGEST])
