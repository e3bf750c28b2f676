"""A proxy through which the API server reaches the kubelets: HTTP CONNECT on a unix socket, forwarded through each node's ssh.

This host has no route to the nodes' addresses, so `kubectl logs` and `kubectl exec` need the proxy.
"""

import asyncio
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab import fleet
from lab.errors import LabError
from lab.node import Node

CHUNK = 65536


def command(socket: Path, lab: str) -> list[str]:
    """The command that runs this module."""
    return [sys.executable, "-m", "lab.cluster.egress", str(socket), lab]


def configuration(socket: Path) -> dict[str, Any]:
    """The API server's EgressSelectorConfiguration for this proxy."""
    connection = {"proxyProtocol": "HTTPConnect", "transport": {"uds": {"udsName": str(socket)}}}
    return {
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": [{"name": "cluster", "connection": connection}],
    }


async def serve(socket: Path, lab: str) -> None:
    """Serve until killed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await _connect(lab, reader, writer)
        writer.close()

    socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(connected, socket)
    await server.serve_forever()


async def _connect(lab: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
    asked = re.match(r"CONNECT ([0-9.]+):(\d+) HTTP/1\.[01]\r\n", head)
    node = None if asked is None else _node(lab, asked[1])
    if asked is None or node is None:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
        await writer.drain()
        return
    words = ["-F", str(node.ssh_config), "-W", f"{asked[1]}:{asked[2]}", node.name]
    pipe = asyncio.subprocess.PIPE
    ssh = await asyncio.create_subprocess_exec("ssh", *words, stdin=pipe, stdout=pipe)
    assert ssh.stdin is not None  # noqa: S101 - asked for above
    assert ssh.stdout is not None  # noqa: S101
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    ways = [asyncio.ensure_future(_copy(reader, ssh.stdin)), asyncio.ensure_future(_copy(ssh.stdout, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        with suppress(ProcessLookupError):
            ssh.kill()
        await ssh.wait()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(CHUNK):
        sink.write(chunk)
        await sink.drain()


def _node(lab: str, address: str) -> Node | None:
    try:
        return next((node for node in fleet.nodes(lab) if node.machine.mgmt_ip == address), None)
    except LabError:
        return None


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
