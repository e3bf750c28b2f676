"""The connection to a node. SSH connections are made without Nagle's algorithm (RFC 896), which saves 40 ms for each command.

paramiko sends a command in several small packets. With Nagle's algorithm the kernel holds the second packet back until the
first is acknowledged, and the peer delays its acknowledgement. OpenSSH's client disables the algorithm, too.
"""

from __future__ import annotations

import socket
from typing import Any

from attrs import frozen
from paramiko import Transport
from pyinfra.api.host import Host
from pyinfra.connectors.local import LocalConnector


def deploys_itself(host: Host) -> bool:
    """Whether the deploy runs on the node itself, as in pull mode."""
    return isinstance(host.connector, LocalConnector)


@frozen
class NoDelay:
    """A ``transport_factory`` for paramiko, to be set in pyinfra's `ssh_paramiko_connect_kwargs`."""

    def __call__(self, sock: Any, **settings: Any) -> Transport:
        """Make a transport over a socket, or over paramiko's channel through a bastion."""
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Transport(sock, **settings)

    def to_json(self) -> str:
        """The text that `pyinfra INVENTORY debug-inventory` shows."""
        return "without delay"
