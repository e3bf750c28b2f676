"""An API server that says what a test wants: HTTPS on the loopback address, and a function that answers."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from agent.reporter.identity import _openssl

Answer = Callable[[str, str, Any], tuple[int, dict[str, Any]] | None]
"""Of method, path without query, and body: status and document; None: the connection ends without an answer."""


@contextmanager
def api_server(folder: Path, answer: Answer) -> Iterator[tuple[str, Path]]:
    """Serve until it is left; its URL, and the certificate that it is known by."""
    pem, key = folder / "ca.pem", folder / "ca.key"
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
        "-subj", "/CN=cluster", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem),
    )  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def handle_request(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = answer(self.command, self.path.partition("?")[0], json.loads(text) if text else None)
            if found is None:
                self.close_connection = True
                return
            document = json.dumps(found[1]).encode()
            self.send_response(found[0])
            self.send_header("Content-Length", str(len(document)))
            self.end_headers()
            self.wfile.write(document)

        do_GET = do_POST = do_PATCH = handle_request

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}", pem
    server.shutdown()
    server.server_close()
