"""Words to systemd."""

from __future__ import annotations

import os
import socket


def notify(message: str) -> None:
    """Tell systemd (sd_notify(3)); nothing outside of a unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as made:
            made.connect("\0" + address[1:] if address.startswith("@") else address)
            made.send(message.encode())
