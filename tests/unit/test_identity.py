"""How a node asks for its certificate, over a connection that loses an answer."""

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from agent.reporter.api import TROUBLE
from agent.reporter.identity import ANEW, REQUESTS, Certificate, _openssl
from agent.reporter.settings import Settings


@define
class Cluster:
    """An API server that keeps requests for certificates.

    ``losing``: so many answers of the next ones do not arrive. ``refusing``: with this status.
    """

    losing: int = 0
    refusing: int | None = None
    requests: dict[str, dict[str, Any]] = field(factory=dict)

    def take(self, body: dict[str, Any]) -> int:
        name = body["metadata"]["name"]
        if self.refusing is not None:
            return self.refusing
        if name in self.requests:
            return 409
        self.requests[name] = {**body, "status": {}}
        return 201


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def identity(cluster: Cluster, tmp_path: Path) -> Iterator[Certificate]:
    """The node's, before it has a certificate."""
    pem, key = tmp_path / "ca.pem", tmp_path / "ca.key"
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
        "-subj", "/CN=cluster", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem),
    )  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            code = cluster.take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if cluster.losing:
                cluster.losing -= 1
                self.close_connection = True
            else:
                self.answer(code, {})

        def do_GET(self) -> None:
            found = cluster.requests.get(self.path.removeprefix(f"{REQUESTS}/"))
            self.answer(404 if found is None else 200, found or {})

        def answer(self, code: int, document: dict[str, Any]) -> None:
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    (tmp_path / "token").write_text("enrolment")
    settings = Settings("a", f"https://127.0.0.1:{server.server_address[1]}", str(pem))
    yield Certificate(settings, tmp_path, tmp_path / "token")
    server.shutdown()
    server.server_close()


def test_a_request_whose_answer_was_lost_is_not_made_twice(cluster: Cluster, identity: Certificate) -> None:
    cluster.losing = 2
    for _ in range(2):
        with pytest.raises(TROUBLE):
            identity.keep(0.0)
    identity.keep(0.0)
    ((name, made),) = cluster.requests.items()
    assert (identity.folder / "requested.name").read_text().strip() == name
    assert base64.b64decode(made["spec"]["request"]) == (identity.folder / "requested.csr").read_bytes()


@pytest.mark.parametrize("how", ["denied", "removed", "refused"])
def test_what_came_to_nothing_is_asked_for_anew_with_another_key(
    cluster: Cluster, identity: Certificate, how: str
) -> None:
    identity.keep(0.0)
    ((first, made),) = cluster.requests.items()
    if how == "denied":
        made["status"] = {"conditions": [{"type": "Denied", "message": "nobody knows it"}]}
        assert identity.keep(0.0) == ANEW
    elif how == "removed":
        cluster.requests.clear()
        assert identity.keep(0.0) == 0.0
    else:
        cluster.requests.clear()
        identity.keep(0.0)
        cluster.refusing = 422
        with pytest.raises(TROUBLE):
            identity.keep(0.0)
        cluster.refusing = None
    identity.keep(0.0)
    assert cluster.requests.keys() - {first}
