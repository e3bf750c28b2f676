"""An API server whose answers a test gives: HTTPS on the loopback address, and a function that answers each request."""

import base64
import datetime
import ipaddress
import itertools
import json
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.http_server import Request, serving

Answer = Callable[[str, str, Any], tuple[int, dict[str, Any]] | None]
"""Of method, path without query, and body: status and document; None: the connection ends without an answer."""


DAY = datetime.timedelta(days=1)
NUMBERS = itertools.count(1)


def certificates(folder: Path) -> tuple[Path, Path]:
    """An authority's, and the server's with its key: with no more in them than those of a managed cluster may have."""
    now = datetime.datetime.now(datetime.timezone.utc)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in ("cluster", "server")]
    extensions: list[x509.ExtensionType] = [
        x509.BasicConstraints(ca=True, path_length=None),
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
    ]
    made = [
        x509.CertificateBuilder(names[0], name, key.public_key(), number, now - DAY, now + DAY)
        .add_extension(extension, critical=False)
        .sign(keys[0], hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        for number, (name, key, extension) in enumerate(zip(names, keys, extensions, strict=True), 1)
    ]
    pkcs8, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    authority, server = folder / "ca.pem", folder / "server.pem"
    authority.write_bytes(made[0])
    server.write_bytes(keys[1].private_bytes(serialization.Encoding.PEM, pkcs8, bare) + made[1])
    return authority, server


def check_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a TLS context check authorities as Python 3.13 does: `api_server`'s has no identifier of its key."""
    default = ssl.create_default_context

    def strict(**options: Any) -> ssl.SSLContext:
        context = default(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


def token_of(node: str, uid: str = "u1", issued: float = 0.0, life: float = 3600.0) -> str:
    """A token as the API server makes it for a Node, with a signature that means nothing."""
    claims = {"iat": issued, "exp": issued + life, "kubernetes.io": {"node": {"name": node, "uid": uid}}}
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{part}.s3cret-signature-of-the-token"


@contextmanager
def api_server(folder: Path, answer: Answer, headers: Mapping[str, str] | None = None) -> Iterator[tuple[str, Path]]:
    """Serve until it is left; its URL, and the authority that it is known by."""
    authority, certificate = certificates(folder)

    def answered(request: Request) -> tuple[int, dict[str, Any]] | None:
        return answer(request.method, request.path, json.loads(request.body) if request.body else None)

    with serving(answered, certificate, headers or {}) as url:
        yield url, authority


def merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """The document after a JSON merge patch (RFC 7386)."""
    changed = {
        key: merged(document.get(key) or {}, value) if isinstance(value, dict) else value
        for key, value in patch.items()
    }
    return {key: value for key, value in {**document, **changed}.items() if value is not None}


def rules_answer(rules: dict[str, Any], method: str, name: str, body: Any) -> tuple[int, dict[str, Any]]:
    """List an API server's DeviceTaintRules, create one, or delete one that has the precondition's UID."""
    if method == "GET":
        return 200, {"items": list(rules.values())}
    if method == "POST":
        name = body["metadata"]["name"]
    if (name in rules) is (method == "POST"):
        return (409 if name in rules else 404), {"kind": "Status", "message": "refused"}
    if method == "POST":
        rules[name] = {**body, "metadata": {**body["metadata"], "uid": f"of-{name}-{next(NUMBERS)}"}}
        return 201, rules[name]
    if body and body["preconditions"] != {"uid": rules[name]["metadata"]["uid"]}:
        return 409, {"kind": "Status", "message": "another uid"}
    del rules[name]
    return 200, {}


def answer_one(connection: ssl.SSLSocket) -> bool:
    """Answer one request; whether there was one."""
    text = b""
    while b"\r\n\r\n" not in text:
        if not (received := connection.recv(4096)):
            return False
        text += received
    body = b'{"kind": "List"}'
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return True


def _reset(connection: ssl.SSLSocket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _end_tls(connection: ssl.SSLSocket) -> None:
    connection.setblocking(False)
    with suppress(ssl.SSLWantReadError):  # of the client's own end
        connection.unwrap()


def _end_after(done: object, end: Callable[[], None]) -> None:
    end()


def _say_first(text: bytes) -> Callable[[ssl.SSLSocket], None]:
    def say(connection: ssl.SSLSocket) -> None:
        connection.sendall(text)
        connection.close()

    return say


ENDINGS: dict[str, Callable[[ssl.SSLSocket], object]] = {
    "end of file": lambda connection: connection.close(),
    "TLS ended, too": _end_tls,
    "reset": _reset,
    "no answer": lambda connection: _end_after(connection.recv(4096), connection.close),
    "no answer and a reset": lambda connection: _end_after(connection.recv(4096), lambda: _reset(connection)),
    "half an answer": _say_first(b"HTTP/1.1 2"),
    "garbage": _say_first(b"bye\r\n"),
    "408": _say_first(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"),
    "broken TLS": lambda connection: _end_after(os.write(connection.fileno(), b"bye, bye, bye"), connection.close),
}
"""By name, how a server or a proxy ends a connection that it has answered on."""


@contextmanager
def ending_server(folder: Path, ends: Callable[[ssl.SSLSocket], object]) -> Iterator[tuple[str, Path, list[str]]]:
    """Serve a connection after the other: the first one ends so after one answer. Also a list with an item for each."""
    authority, certificate = certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    connections: list[str] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                with context.wrap_socket(listener.accept()[0], server_side=True) as connection, suppress(OSError):
                    connections.append("open")
                    if len(connections) == 1 and answer_one(connection):
                        ends(connection)
                        continue
                    while answer_one(connection):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", authority, connections
        listener.shutdown(socket.SHUT_RDWR)


_BEGINNINGS = {
    "handshake": b"\x16\x03\x03\x3f\xff\x02",  # a long record of TLS
    "headers": b"HTTP/1.1 200 OK\r\nX-Long: ",
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
}


@contextmanager
def dripping_server(folder: Path, part: str) -> Iterator[tuple[str, Path]]:
    """As :func:`api_server`, but a part of what it sends comes a byte at a time, for five seconds: handshake, headers, body."""
    authority, certificate = certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    over = threading.Event()

    def serve() -> None:
        accepted = listener.accept()[0]
        with suppress(OSError), accepted if part == "handshake" else context.wrap_socket(accepted, True) as connection:
            connection.sendall(_BEGINNINGS[part])
            for _ in range(100):
                if over.wait(0.05):
                    break
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", authority
        over.set()
        thread.join(10)
