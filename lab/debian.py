"""Which Debian the nodes run: 12, or by TRACKBED_LAB_DEBIAN another one."""

import os

import attrs

from lab.errors import BadInput

VARIABLE = "TRACKBED_LAB_DEBIAN"


@attrs.frozen
class Debian:
    """A release of Debian. ``compiler``: the package of the compiler that its kernel is built with."""

    version: str
    suite: str
    compiler: str


DEBIANS = (Debian("12", "bookworm", "gcc-12"), Debian("13", "trixie", "gcc-14"))

HOST = DEBIANS[0]
"""The one that the build host runs."""


def of_nodes() -> Debian:
    """The one that a new lab gets.

    :raises BadInput: the variable names another.
    """
    wanted = os.environ.get(VARIABLE) or HOST.version
    for debian in DEBIANS:
        if debian.version == wanted:
            return debian
    raise BadInput(f"{VARIABLE}={wanted}: no such Debian", f"Give {', '.join(d.version for d in DEBIANS)}.")
