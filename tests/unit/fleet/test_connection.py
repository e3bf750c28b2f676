"""The fleet's client of the Kubernetes API, over a real connection."""

import base64
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from lightkube.resources.core_v1 import Node

from fleet.connection import connect
from fleet.kubeconfig import from_kubeconfig
from tests.stand_ins import program
from tests.unit.fleet.test_kubeconfig import NOWHERE, PLUGIN, ROOT, kubeconfig, of_both
from tests.unit.reporter.scripted import api_server, check_strictly


def a_node(method: str, path: str, body: object) -> tuple[int, dict[str, object]]:
    return 200, {"metadata": {"name": "n"}}


def name_of_the_node(file: Path) -> str | None:
    with connect(from_kubeconfig(file)) as client:
        node = client.get(Node, "n")
    return node.metadata.name if node.metadata else None


def test_an_authority_without_identifiers_of_keys_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strictly(monkeypatch)
    with api_server(tmp_path, a_node) as (url, authority):
        assert name_of_the_node(kubeconfig(tmp_path, url, f"certificate-authority: {authority}")) == "n"


@contextmanager
def proxy(certificate: Path | None = None, refuse: int = 0) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """An HTTP or HTTPS proxy. Gives its host and port, and a list with the target and the credentials of each connection."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append((self.path, self.headers["Proxy-Authorization"]))
            if refuse:
                self.send_error(refuse)
                return
            host, _, port = self.path.rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=copy, args=(there, self.connection))
                back.start()
                copy(self.connection, there)
                back.join()
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            listening.socket = context.wrap_socket(listening.socket, server_side=True)
        threading.Thread(target=listening.serve_forever, args=(0.05,)).start()
        try:
            yield f"127.0.0.1:{listening.server_port}", asked
        finally:
            listening.shutdown()


def copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while some := source.recv(65536):
            target.sendall(some)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_requests_go_through_the_proxy_of_the_kubeconfig_and_not_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with (
        api_server(tmp_path, a_node) as (url, authority),
        proxy(tmp_path / "server.pem" if scheme == "https" else None) as (at, asked),
    ):
        through = f"proxy-url: '{scheme}://operator:p%40ss@{at}'"
        file = kubeconfig(tmp_path, url, f"certificate-authority: {authority}, {through}")
        assert name_of_the_node(file) == "n"
    credentials = base64.b64encode(b"operator:p@ss").decode()
    assert asked == [(url.removeprefix("https://"), f"Basic {credentials}")]


@pytest.mark.parametrize("through", [False, True], ids=["kubernetes-client-python-1889", "proxy"])
def test_the_certificate_may_be_of_another_name_that_the_kubeconfig_gives(tmp_path: Path, through: bool) -> None:
    with api_server(tmp_path, a_node) as (url, authority), proxy() as (at, _):
        by = f", proxy-url: 'http://{at}'" if through else ""
        cluster = f"certificate-authority: {authority}, tls-server-name: {{}}{by}"
        # The certificate is of 127.0.0.1 only.
        there = url.replace("127.0.0.1", "localhost")
        assert name_of_the_node(kubeconfig(tmp_path, there, cluster.format("127.0.0.1"))) == "n"
        with pytest.raises(httpx2.ConnectError, match=r"api\.example\.com"):
            name_of_the_node(kubeconfig(tmp_path, url, cluster.format("api.example.com")))


@pytest.mark.parametrize(
    "without",
    [
        pytest.param("localhost,.example.com,127.0.0.0/8", id="kubernetes-54407"),
        pytest.param("localhost,.local,127.0.0.0/8,.example.com", id="python-1578"),
        pytest.param("127.0.0.0/8", id="fabric8-4832"),
    ],
)
def test_a_network_that_needs_no_proxy_is_reached_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", without)
    with api_server(tmp_path, a_node) as (url, authority):
        assert name_of_the_node(kubeconfig(tmp_path, url, f"certificate-authority: {authority}")) == "n"


def test_a_credential_plugin_runs_once_at_a_time(tmp_path: Path) -> None:
    """kubelogin 389: a second one finds the port in use on which the first one waits for the browser."""
    held = f'mkdir "{tmp_path}/port" || exit 1\nls -R "{ROOT}/docs" > /dev/null\nrmdir "{tmp_path}/port"'
    program(tmp_path / "plugin", f'{held}\necho \'{{"status": {{"token": "t"}}}}\'')
    with api_server(tmp_path, a_node) as (url, authority):
        file = kubeconfig(tmp_path, url, f"certificate-authority: {authority}", PLUGIN)
        with connect(from_kubeconfig(file)) as client, ThreadPoolExecutor(4) as pool:
            assert len([*pool.map(lambda _: client.get(Node, "n"), range(4))]) == 4


def test_an_empty_proxy_leaves_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server(tmp_path, a_node) as (url, authority), proxy() as (at, asked):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{at}")
        file = kubeconfig(tmp_path, url, f"certificate-authority: {authority}, proxy-url: ''")
        assert name_of_the_node(file) == "n"
    assert asked == [(url.removeprefix("https://"), None)]


def test_a_proxy_that_does_not_let_through_is_named_without_its_password(tmp_path: Path) -> None:
    with proxy(refuse=403) as (at, _):
        file = kubeconfig(tmp_path, NOWHERE, f"proxy-url: 'http://operator:secret@{at}'")
        refused = of_both(file)
    for text, why in [*((each, "403 Forbidden") for each in refused), *((each, "refused") for each in of_both(file))]:
        assert f"cannot be reached: through the proxy http://{at}: " in text
        assert why in text
        assert ("secret" in text, len(text.splitlines())) == (False, 1)
