"""Finds software that was installed past the package manager: packages of the same software would be mixed with it."""

from __future__ import annotations

from pyinfra.api.command import StringCommand
from pyinfra.context import host

from tasks.common.facts import FactBase

SNAPS = ("/snap", "/var/lib/snapd/snap")
"""The folders of snaps: the second one where distributions follow the file hierarchy standard, as the RHEL family."""


class ThereAlready(FactBase[list[str]]):
    """Which of these paths exist."""

    default = list

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Test each of them; a link counts, too, wherever it leads."""
        return self.script('for path; do if [ -e "$path" ] || [ -L "$path" ]; then echo "$path"; fi; done', *paths)

    def process(self, output: list[str]) -> list[str]:
        """Take a path from each line."""
        return output


def is_snap(name: str) -> bool:
    """For an operation: whether the node has a snap of this name."""
    return bool(host.get_fact(ThereAlready, paths=tuple(f"{folder}/{name}/current" for folder in SNAPS)))
