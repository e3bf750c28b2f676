"""Finds software that was installed past the package manager: packages of the same software would be mixed with it."""

from __future__ import annotations

from pyinfra.context import host

from tasks.common.present import Present

SNAPS = ("/snap", "/var/lib/snapd/snap")
"""The folders of snaps: the second one where distributions follow the file hierarchy standard, as the RHEL family."""


def is_snap(name: str) -> bool:
    """For an operation: whether the node has a snap of this name."""
    return bool(host.get_fact(Present, paths=tuple(f"{folder}/{name}/current" for folder in SNAPS)))
