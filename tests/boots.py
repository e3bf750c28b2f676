"""The boot ID of a node of a lab."""

from __future__ import annotations

from lab import Node


def boot_id(node: Node) -> str:
    """The ID that the kernel makes at each boot.

    :raises LabError: the node does not answer. A missing answer must not count as another boot.
    """
    return node.sh("cat /proc/sys/kernel/random/boot_id").strip()
