"""The releases of Debian that nodes can run. TRACKBED_LAB_DEBIAN selects one; the default is 12."""

import attrs

from lab.choice import chosen

VARIABLE = "TRACKBED_LAB_DEBIAN"


@attrs.frozen
class Debian:
    """A release of Debian.

    ``version``: as the variable gives it. ``compiler``: the package of the compiler that its kernels are built with.
    ``backports``: the kernel is that of the release's backports.
    """

    version: str
    suite: str
    compiler: str
    backports: bool = False

    @property
    def name(self) -> str:
        """The release's part of file names."""
        return f"{self.suite}-backports" if self.backports else self.suite


DEBIANS = (
    Debian("12", "bookworm", "gcc-12"),
    Debian("12-backports", "bookworm", "gcc-12", backports=True),
    Debian("13", "trixie", "gcc-14"),
    Debian("13-backports", "trixie", "gcc-14", backports=True),
)

HOST = DEBIANS[0]
"""The release of the build host."""


def of_nodes() -> Debian:
    """The release for a new lab.

    :raises BadInput: the variable names a release that is not in the list.
    """
    return chosen(VARIABLE, {debian.version: debian for debian in DEBIANS}, "Debian") or HOST
