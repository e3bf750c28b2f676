"""What a distribution is that a node can look like."""

from collections.abc import Callable
from pathlib import Path

import attrs

from lab.debian import Debian


@attrs.frozen
class Lookalike:
    """A distribution, made of a Debian.

    ``packages``: of Debian, which its image has beside the lab's. ``lacks``: those of the lab's that its image does not have.
    ``disguise`` changes the root file system of the finished image. Its arguments: that folder, the kernel's release, the
    Debian, and the log.
    """

    name: str
    packages: tuple[str, ...]
    lacks: tuple[str, ...]
    disguise: Callable[[Path, str, Debian, Path], None]
