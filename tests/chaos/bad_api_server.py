"""An API server that answers badly: `bad_api_server.py PORT CERTIFICATE HOW`. The key is beside the certificate."""

import os
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = {
    "429": "answers 429",
    "500": "answers 500",
    "garbage": "answers garbage",
    "silence": "accepts requests and says nothing",
    "cut": "cuts its answers short",
    "slow": "takes 3 s for each answer, and refuses it",
}
"""By the word of the command line, what the server does."""


class Handler(BaseHTTPRequestHandler):
    """Answers each request as `how` says."""

    how = ""
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        """Answer any request."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.how == "silence":
            time.sleep(3600)
        if self.how == "slow":
            time.sleep(3)
        status = {"429": 429, "500": 500, "slow": 503}.get(self.how, 200)
        content = os.urandom(4096) if self.how == "garbage" else b'{"kind": "Status", "status": "Failure"}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) * (2 if self.how == "cut" else 1)))
        if self.how == "429":
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = self.how == "cut"

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def serve(port: int, certificate: Path, how: str) -> None:
    """Serve until the process is killed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    Handler.how = how
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
