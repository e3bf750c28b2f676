"""A server here, over HTTP or HTTPS, whose answers a test gives."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from attrs import frozen


@frozen
class Request:
    """``path``: without the ``query``. ``credentials``: the header Authorization."""

    method: str
    path: str
    body: bytes
    credentials: str | None
    query: str = ""


Document = str | bytes | object
"""A text is sent as text, bytes as they are and anything else as JSON."""


@contextmanager
def serving(
    answer: Callable[[Request], tuple[int, Document] | None],
    certificate: Path | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    key: Path | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Serve until it is left; its URL. Where there is no answer, the connection ends.

    :param headers: of each answer, in place of the document's own type.
    :param key: of the certificate, if that file has none. :param port: 0: any that is free.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay, as those of an API server
        wbufsize = -1  # an answer is one write: the second one would wait for the acknowledgement of the first (Nagle)

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, _, query = self.path.partition("?")
            answered = answer(Request(self.command, path, body, self.headers["Authorization"], query))
            if answered is None:
                self.close_connection = True
                return
            status, document = answered
            kind = "text/plain" if isinstance(document, str) else "application/json"
            text = document if isinstance(document, (str, bytes)) else json.dumps(document)
            sent = text if isinstance(text, bytes) else text.encode()
            self.send_response(status)
            given = {"Content-Type": kind} if headers is None else headers
            for name, value in {"Content-Length": str(len(sent)), **given}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http{'' if certificate is None else 's'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
