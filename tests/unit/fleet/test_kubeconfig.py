"""How the fleet's commands use a kubeconfig, and how they fail without a cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from fleet.credentials import NotGiven, bound_token

ROOT = Path(__file__).parents[3]


def trackbed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent", "fleet", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: secret-token}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (KUBECONFIG, (), "https://127.0.0.1:1 cannot be reached"),
        (KUBECONFIG, ("--context", "d"), "Context 'd' not found"),
        ("{}", (), "the kubeconfig cannot be read"),
        ("a: [secret-token", (), "the kubeconfig is not YAML in line 1"),
        (KUBECONFIG.replace("secret-token", "[1]"), (), "the kubeconfig cannot be read"),
        (KUBECONFIG.replace('"https://127.0.0.1:1"', "5"), (), "the kubeconfig cannot be read"),
        ("[" * 5000, (), "the kubeconfig cannot be read: RecursionError"),
        (KUBECONFIG.replace("127.0.0.1:1", "127.0.0.1:abc"), (), "the kubeconfig's server is no URL"),
        (
            KUBECONFIG.replace("token:", "client-key: /nonexistent, token:"),
            (),
            "/nonexistent, which the kubeconfig names, is not a file",
        ),
        (
            KUBECONFIG.replace(
                "token: secret-token", "exec: {apiVersion: client.authentication.k8s.io/v1, command: /nonexistent}"
            ),
            (),
            "the kubeconfig's exec command '/nonexistent' is not installed; install it",
        ),
        (None, (), "not found; give --kubeconfig FILE"),
    ],
)
def test_without_a_cluster_there_is_one_message(
    tmp_path: Path, text: str | None, options: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    done = trackbed("status", "--kubeconfig", str(file), *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret-token" not in done.stderr


def test_several_files_in_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "a:b")
    assert "KUBECONFIG names several files" in trackbed("status").stderr


@contextmanager
def server(body: str) -> Iterator[tuple[str, list[str | None]]]:
    """A server on this machine that answers each request with this body; its URL, and the credentials that it was sent."""
    sent: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            sent.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", sent
        finally:
            listening.shutdown()


TIME = '{"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "items": %s}'


@pytest.mark.parametrize("body", ["<html>", "", "null", "5", TIME % "null", TIME % "[{}]", '{"metadata": {}}'])
def test_a_server_that_is_no_api_server_is_named(tmp_path: Path, body: str) -> None:
    with server(body) as (url, _):
        (tmp_path / "kubeconfig").write_text(KUBECONFIG.replace("https://127.0.0.1:1", url))
        done = trackbed("status", "--kubeconfig", str(tmp_path / "kubeconfig"))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith(f"trackbed: {url} ")
    assert "a fault of trackbed" not in done.stderr


def test_a_token_with_a_line_break_is_not_shown(tmp_path: Path) -> None:
    with server("") as (url, _):
        text = KUBECONFIG.replace("https://127.0.0.1:1", url).replace("secret-token", r'"secret-token\n"')
        (tmp_path / "kubeconfig").write_text(text)
        said = trackbed("status", "--kubeconfig", str(tmp_path / "kubeconfig")).stderr
        with pytest.raises(NotGiven) as refused:
            bound_token(str(tmp_path / "kubeconfig"), "n1", 600)
    for text in (said, str(refused.value)):
        assert "has the kubeconfig's token a line break" in text
        assert "secret-token" not in text


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_credential_plugin_learns_its_version_and_its_token_is_used(tmp_path: Path, version: str) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text('#!/bin/sh\necho "$KUBERNETES_EXEC_INFO" > "$0.info"\necho \'{"status": {"token": "t"}}\'\n')
    plugin.chmod(0o755)
    with server(TIME % "[]") as (url, sent):
        config = KUBECONFIG.replace("https://127.0.0.1:1", url).replace(
            "token: secret-token", f"exec: {{apiVersion: client.authentication.k8s.io/{version}, command: {plugin}}}"
        )
        (tmp_path / "kubeconfig").write_text(config)
        done = trackbed("sweep", "--dry", "--kubeconfig", str(tmp_path / "kubeconfig"))
    assert done.returncode == 0, done.stderr
    assert set(sent) == {"Bearer t"}
    info = yaml.safe_load((tmp_path / "plugin.info").read_text())
    assert info["apiVersion"] == f"client.authentication.k8s.io/{version}"
