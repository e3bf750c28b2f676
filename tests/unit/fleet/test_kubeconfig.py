"""How the fleet's commands use a kubeconfig, and how they fail without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from fleet.api import _from_environment
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
            "the kubeconfig's exec command '/nonexistent' is not installed or not executable; install it",
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


IGNORED = [
    ("token:", key, "the user 'u'")
    for key in ("as: viewer", "as-uid: '7'", "as-groups: [readers]", "as-user-extra: {scopes: [view]}")
]


@pytest.mark.parametrize(("before", "key", "whose"), [*IGNORED, ("server:", "tls-server-name: api", "the cluster 'c'")])
def test_a_key_that_has_no_effect_here_is_refused(tmp_path: Path, before: str, key: str, whose: str) -> None:
    with server(TIME % "[]") as (url, sent):
        text = KUBECONFIG.replace("https://127.0.0.1:1", url).replace(before, f"{key}, {before}")
        file = tmp_path / "kubeconfig"
        file.write_text(text)
        done = trackbed("status", "--kubeconfig", str(file))
        with pytest.raises(NotGiven) as refused:
            bound_token(str(file), "n1", 600)
    assert (done.returncode, len(done.stderr.splitlines()), sent) == (1, 1, [])
    said = f"{file}: {whose} has {key.partition(':')[0]}, which cannot be used here"
    assert (said in done.stderr, said in str(refused.value)) == (True, True)


def test_the_keys_of_another_context_do_not_count(tmp_path: Path) -> None:
    with server(TIME % "[]") as (url, _):
        text = KUBECONFIG.replace("https://127.0.0.1:1", url).replace("users: [", "users: [{name: v, user: {as: w}}, ")
        (tmp_path / "kubeconfig").write_text(text)
        done = trackbed("sweep", "--dry", "--kubeconfig", str(tmp_path / "kubeconfig"))
    assert done.returncode == 0, done.stderr


def test_an_empty_kubeconfig_in_the_environment_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"the kubeconfig {tmp_path}/.kube/config is not found" in trackbed("status").stderr
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(KUBECONFIG)
    assert "https://127.0.0.1:1 cannot be reached" in trackbed("status").stderr


@pytest.mark.parametrize(
    ("variable", "at_home", "chosen"),
    [(True, True, "variable"), (True, False, "variable"), (False, True, "home"), (False, False, "account")],
)
def test_a_kubeconfig_comes_before_the_service_account_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool, at_home: bool, chosen: str
) -> None:
    for name in ("token", "namespace"):
        (tmp_path / name).write_text("x")
    monkeypatch.setattr("fleet.api.SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "account")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "kubeconfig").write_text(KUBECONFIG.replace("127.0.0.1:1", "variable:443"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig") if variable else "")
    monkeypatch.setenv("HOME", str(tmp_path))
    if at_home:
        (tmp_path / ".kube").mkdir()
        (tmp_path / ".kube" / "config").write_text(KUBECONFIG.replace("127.0.0.1:1", "home:443"))
    config = _from_environment(None)
    assert config and config.cluster.server == f"https://{chosen}:443"


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


@pytest.mark.parametrize(
    ("plugin", "mode", "message"),
    [
        ("echo no interpreter", 0o755, "cannot be run: Exec format error; is it a program for this machine, or a script"),
        ("#!/nonexistent/sh\n", 0o755, "cannot be run: No such file or directory; is the interpreter of"),
        ("#!/bin/sh\necho one >&2; echo two >&2; exit 3\n", 0o755, "failed with exit code 3: two; try it with kubectl"),
        ("#!/bin/sh\nprintf '\\377' >&2; kill -9 $$\n", 0o755, "failed with exit code -9: "),
        ("#!/bin/sh\n", 0o644, "is not installed or not executable; install it"),
    ],
)  # fmt: skip
def test_a_credential_plugin_that_fails_is_named(tmp_path: Path, plugin: str, mode: int, message: str) -> None:
    file = tmp_path / "plugin"
    file.write_text(plugin)
    file.chmod(mode)
    user = f"exec: {{apiVersion: client.authentication.k8s.io/v1, command: {file}}}"
    (tmp_path / "kubeconfig").write_text(KUBECONFIG.replace("token: secret-token", user))
    done = trackbed("status", "--kubeconfig", str(tmp_path / "kubeconfig"))
    with pytest.raises(NotGiven) as refused:
        bound_token(str(tmp_path / "kubeconfig"), "n1", 600)
    for said in (done.stderr, f"trackbed: {refused.value}\n"):
        assert said.startswith(f"trackbed: the kubeconfig's exec command '{file}' {message}")
        assert len(said.splitlines()) == 1
    assert (done.returncode, "device" in done.stderr, "--kubeconfig" in done.stderr) == (1, False, False)


def test_a_credential_plugin_is_not_given_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "plugin").write_text('#!/bin/sh\necho "{\\"status\\": {\\"token\\": \\"t$(cat)\\"}}"\n')
    (tmp_path / "plugin").chmod(0o755)
    with server(TIME % "[]") as (url, sent):
        user = "exec: {apiVersion: client.authentication.k8s.io/v1, command: ./plugin}"
        text = KUBECONFIG.replace("https://127.0.0.1:1", url).replace("token: secret-token", user)
        (tmp_path / "kubeconfig").write_text(text)
        command = [
            sys.executable,
            "-m",
            "agent",
            "fleet",
            "sweep",
            "--dry",
            "--kubeconfig",
            str(tmp_path / "kubeconfig"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, input="typed")
    assert done.returncode == 0, done.stderr
    assert set(sent) == {"Bearer t"}


@pytest.mark.parametrize(
    "user", ["tokenFile: ./token", "exec: {apiVersion: client.authentication.k8s.io/v1, command: ./plugin}"]
)
def test_files_are_looked_for_from_the_kubeconfigs_folder(tmp_path: Path, user: str) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "plugin").write_text('#!/bin/sh\necho \'{"status": {"token": "t"}}\'\n')
    (tmp_path / "plugin").chmod(0o755)
    with server(TIME % "[]") as (url, sent):
        config = KUBECONFIG.replace("https://127.0.0.1:1", url).replace("token: secret-token", user)
        (tmp_path / "kubeconfig").write_text(config)
        done = trackbed("sweep", "--dry", "--kubeconfig", os.path.relpath(tmp_path / "kubeconfig", ROOT))
    assert done.returncode == 0, done.stderr
    assert set(sent) == {"Bearer t"}
