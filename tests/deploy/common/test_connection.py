"""How nodes are connected to."""

from __future__ import annotations

import runpy
import socket
from typing import Any

from tasks.common import archive
from tasks.common.connection import NoDelay


def test_a_connection_does_not_wait_for_acknowledgements() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        transport = NoDelay()(client, gss_kex=False)
        assert transport.sock is client
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_channel_that_is_not_a_socket_is_used_unchanged() -> None:
    class Bastion:
        def settimeout(self, seconds: float) -> None:
            pass

    bastion: Any = Bastion()
    assert NoDelay()(bastion).sock is bastion


def test_every_host_gets_such_a_connection() -> None:
    data = runpy.run_path(str(archive.ROOT / "group_data" / "all.py"))
    assert data["ssh_paramiko_connect_kwargs"] == {"transport_factory": NoDelay()}
