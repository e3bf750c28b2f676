"""What a distribution is that a node can look like."""

from collections.abc import Callable
from pathlib import Path

import attrs

from lab.apt import Apt


@attrs.frozen
class Lookalike:
    """A distribution, made of a Debian.

    ``packages`` of Debian that its image has beside the lab's, and those of the lab's that it lacks. ``disguise`` changes the
    root file system of the finished image: its arguments are that folder, the kernel's release, an apt of that Debian, and the
    log.
    """

    name: str
    packages: tuple[str, ...]
    lacks: tuple[str, ...]
    disguise: Callable[[Path, str, Apt, Path], None]
