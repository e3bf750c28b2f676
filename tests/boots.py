"""Boots of a node of a lab."""

import time
from contextlib import suppress

from lab import LabError, Node


def boot_id(node: Node) -> str:
    """The ID that the kernel makes at each boot.

    :raises LabError: the node does not answer. A missing answer must not count as another boot.
    """
    return node.sh("cat /proc/sys/kernel/random/boot_id").strip()


def reboot(node: Node) -> None:
    """Have systemd reboot the node, and wait until it answers in another boot.

    :raises LabError: it does not.
    """
    before = boot_id(node)
    # The command must not hold the connection: if the shutdown ends without closing it, ssh waits for minutes.
    node.run(["sh", "-c", "setsid systemctl reboot >/dev/null 2>&1 &"])
    limit = node.accelerator.boot_s
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        with suppress(LabError):
            if boot_id(node) != before:
                return
        time.sleep(1.0)
    raise LabError(f"{node.name} did not come back from a reboot within {limit:.0f} s")
