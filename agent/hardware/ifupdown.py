"""The netdevs of ifupdown, ifupdown2 and ifupdown-ng: what interfaces(5) says to each of them, and which are up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from posixpath import dirname, join, split

from agent.hardware.sysfs import names_in, read_or
from agent.machine import Files

INTERFACES = "/etc/network/interfaces"
STATE = "/run/network"
# What a file is called that `source-directory` takes.
PLAIN = re.compile(r"[a-zA-Z0-9_-]+")


def up(files: Files) -> set[str]:
    """The netdevs that ifup has configured: lines of `ifstate`, in later versions each in a file of its own."""
    places = (f"{STATE}/{file}" for file in names_in(files, STATE) if file.startswith("ifstate"))
    return {line.partition("=")[0] for place in places for line in read_or(files, place, "").split()}


def stanzas(files: Files) -> Iterator[tuple[str, str, str]]:
    """Each file, netdev and method; ifupdown2 and ifupdown-ng can do without a family and a method."""
    for place in _places(files):
        for words in _lines(files, place):
            match words:
                case ["iface", netdev, *rest]:
                    yield place, netdev, rest[1] if len(rest) > 1 else ""


def _places(files: Files) -> list[str]:
    """The files that are read: the first, and what it and they name."""
    places = [INTERFACES]
    for place in places:
        for words in _lines(files, place):
            places += [each for each in _sourced(files, dirname(place), words) if each not in places]
    return places


def _sourced(files: Files, base: str, words: list[str]) -> Iterator[str]:
    match words:
        case ["source", *patterns]:
            for folder, pattern in (split(join(base, each)) for each in patterns):
                yield from (f"{folder}/{name}" for name in names_in(files, folder) if fnmatchcase(name, pattern))
        case ["source-directory", *folders]:
            for folder in (join(base, each).rstrip("/") for each in folders):
                yield from (f"{folder}/{name}" for name in names_in(files, folder) if PLAIN.fullmatch(name))


def _lines(files: Files, place: str) -> Iterator[list[str]]:
    with suppress(IsADirectoryError):
        yield from (line.split() for line in read_or(files, place, "").splitlines())
