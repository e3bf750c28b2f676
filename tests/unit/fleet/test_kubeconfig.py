"""How the fleet's commands use a kubeconfig, and how they fail without a cluster."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import httpx2
import pytest
import yaml
from click.testing import CliRunner

from fleet.api import Failed, _from_environment
from fleet.commands import fleet
from fleet.credentials import bound_token
from tests.http_server import Request, serving
from tests.stand_ins import program, text_file
from tests.unit.reporter.local_user import as_nobody, public_folder
from tests.unit.reporter.scripted import api_server, certificates

ROOT = Path(__file__).parents[3]


def trackbed(*arguments: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "fleet", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, input=typed)


KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: secret-token}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""


NOWHERE, USER = "https://127.0.0.1:1", "token: secret-token"
PLUGIN = "exec: {apiVersion: client.authentication.k8s.io/v1, command: ./plugin}"
TIME = '{"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "items": %s}'


@contextmanager
def server(body: str, status: int = 200) -> Iterator[tuple[str, list[str | None]]]:
    """A server here that answers each request with this body and status; its URL, and the credentials that it was sent."""
    sent: list[str | None] = []

    def answer(request: Request) -> tuple[int, bytes]:
        sent.append(request.credentials)
        return status, body.encode()

    with serving(answer) as url:
        yield url, sent


def kubeconfig(folder: Path, url: str, cluster: str = "", user: str = USER) -> Path:
    """A kubeconfig of the API server at this URL. ``cluster``, ``user``: more keys of the cluster, and those of the user."""
    file = folder / "kubeconfig"
    text = KUBECONFIG.replace(f'server: "{NOWHERE}"', f'server: "{url}", {cluster}')
    file.write_text(text.replace(USER, user))
    return file


def swept(file: Path, *changes: tuple[str, str], named: str = "") -> set[str | None]:
    """The credentials that a sweep sends, which follows a kubeconfig with these changes and is typed at."""
    with server(TIME % "[]") as (url, sent):
        file.write_text(reduce(lambda text, change: text.replace(*change), changes, KUBECONFIG.replace(NOWHERE, url)))
        done = trackbed("sweep", "--dry", "--kubeconfig", named or str(file), typed="typed")
    assert done.returncode == 0, done.stderr
    return set(sent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "https://127.0.0.1:1 cannot be reached"),
        (("--context", "d"), "kubeconfig has no context 'd'; give another kubeconfig, or another context"),
        (("--context", ""), "kubeconfig has no context ''"),
    ],
)
def test_without_a_cluster_there_is_one_message(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = trackbed("status", "--kubeconfig", str(kubeconfig(tmp_path, NOWHERE)), *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret-token" not in done.stderr


def of_both(file: Path) -> tuple[str, str]:
    """What a command of the fleet and the deploy say of a kubeconfig."""
    done = CliRunner().invoke(fleet, ["status", "--kubeconfig", str(file)])
    assert done.exit_code == 1, done.output
    with pytest.raises(Failed) as refused:
        bound_token(str(file), "n1", 600)
    return done.output.removeprefix("Error: ").rstrip("\n"), str(refused.value)


CLUSTER = 'cluster: {server: "https://127.0.0.1:1"'


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (KUBECONFIG, "", "is no kubeconfig: Expected `object`, got `null`"),
        (KUBECONFIG, "[1]", "is no kubeconfig: Expected `object`, got `array`"),
        (KUBECONFIG, "a: [secret-token", "is not YAML in line 1"),
        (KUBECONFIG, "[" * 5000, "cannot be read: RecursionError"),
        (KUBECONFIG, "users: &a [*a]", "is no kubeconfig: maximum recursion depth exceeded"),
        (KUBECONFIG, "\udcff", "cannot be read: UnicodeDecodeError"),
        (KUBECONFIG, "{}", "has no current context"),
        ("current-context: c", "current-context: [c]", "Expected `str`, got `array` - at `$.current-context`"),
        ("clusters: [{name: c", "clusters: [null, {name: c", "Expected `object`, got `null` - at `$.clusters[0]`"),
        ("clusters: [", "clusters: {x: [", "is not YAML in line 5"),
        ("users: [{name: u, user: {token: secret-token}}]", "users: {name: u}", "`array`, got `object` - at `$.users`"),
        ("{name: u, user", "{user", "Object missing required field `name` - at `$.users[0]`"),
        (CLUSTER, "cluster: [1], x: {a: 1", "Expected `object`, got `array` - at `$.clusters[0].cluster`"),
        ('"https://127.0.0.1:1"', "5", "Expected `str`, got `int` - at `$.clusters[0].cluster.server`"),
        ('"https://127.0.0.1:1"', "2026-01-01", "Expected `str`, got `date` - at `$.clusters[0].cluster.server`"),
        ("127.0.0.1:1", "127.0.0.1:abc", "the server is no URL: Invalid port"),
        ("https://127.0.0.1:1", "127.0.0.1", "the server is no URL: '127.0.0.1' is none such as"),
        ("127.0.0.1:1", r"127.0.0.1:1/\ud800", "the server is no URL: 'utf-8' codec can't encode"),
        ("https://", "https://root:secret-token@", "the server's URL has a user or a password"),
        ("{cluster: c, user: u}", "{user: u}", "the context 'c' has no cluster"),
        ("{cluster: c, user: u}", "{cluster: c, user: v}", "the user 'v'; the file has 0 of that name, and needs one"),
        ("users: [", "users: [{name: u}, ", "the user 'u'; the file has 2 of that name, and needs one"),
        (CLUSTER, f"{CLUSTER}, certificate-authority-data: secret", "certificate-authority-data is not base64"),
        (CLUSTER, f"{CLUSTER}, certificate-authority-data: c2VjcmV0", "of the kubeconfig or of SSL_CERT_FILE cannot be read"),
        (CLUSTER, f"{CLUSTER}, certificate-authority: /tmp", "certificate-authority '/tmp' is no file that can be read"),
        (CLUSTER, f"{CLUSTER}, proxy-url: 'http://root:secret@[::1'", "the cluster's proxy-url is no URL; give an HTTP proxy"),
        (CLUSTER, f"{CLUSTER}, proxy-url: 'bastion:3128'", "the cluster's proxy-url is no URL of a proxy; give an HTTP"),
        (CLUSTER, f"{CLUSTER}, proxy-url: 'socks5://secret@b:1080'", "the cluster's proxy-url is a SOCKS proxy's, which"),
        (USER, "client-certificate-data: '!'", "client-certificate-data is not base64"),
        (USER, "client-certificate-data: c2VjcmV0", "the user has a client-certificate and no client-key"),
        (USER, "client-certificate: x/a", "/x/a' is no file that can be read"),
        (USER, "client-key: /nonexistent, token: secret-token", "client-key '/nonexistent' is no file that can be read"),
        (USER, "token: [secret-token]", "- at `$.users[0].user.token`; check"),
        (USER, "tokenFile: /tmp", "tokenFile '/tmp' is no file that can be read"),
        (USER, "tokenFile: bytes", "holds no token: 'utf-8' codec"),
        (USER, "tokenFile: lines", "/lines' has a line break or another character that no token has"),
        (USER, r'token: "secret-token\n"', "token has a line break or another character that no token has"),
        (USER, "token: secret-tokén", "token has a line break or another character that no token has"),
        (USER, "exec: {command: x}", "Object missing required field `apiVersion` - at `$.users[0].user.exec`"),
        (USER, "exec: {apiVersion: v, command: x, env: {A: b}}", "got `object` - at `$.users[0].user.exec.env`"),
        (USER, "exec: {apiVersion: v, command: /nonexistent}", "the kubeconfig's exec command '/nonexistent' is not installed"),
        pytest.param(
            USER, r'exec: {apiVersion: v, command: x-y, installHint: "See\n http://x/y"}', "; install it: See http://x/y",
            id="runner-images-6778",
        ),
    ],
)  # fmt: skip
def test_a_fault_of_the_kubeconfig_is_one_message(tmp_path: Path, before: str, after: str, message: str) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "lines").write_text("secret\ntoken")
    assert before in KUBECONFIG
    file = tmp_path / "kubeconfig"
    file.write_text(KUBECONFIG.replace(before, after), errors="surrogateescape")
    for said in of_both(file):
        assert message in said
        assert ("; " in said, "\n" in said, "secret" in said) == (True, False, False)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HTTPS_PROXY", "http://root:secret@[::1", "a proxy of the environment (HTTPS_PROXY) cannot be used (InvalidURL)"),
        ("ALL_PROXY", "ftp://proxy", "a proxy of the environment (ALL_PROXY) cannot be used (ValueError)"),
        ("https_proxy", "socks5://proxy", "a proxy of the environment (https_proxy) cannot be used (ImportError)"),
        ("SSL_CERT_FILE", "/nonexistent", "of the kubeconfig or of SSL_CERT_FILE cannot be read: [Errno 2]"),
        ("SSL_CERT_FILE", "/etc/hostname", "of the kubeconfig or of SSL_CERT_FILE cannot be read: [X509"),
    ],
)  # fmt: skip
def test_what_the_environment_gives_and_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    for said in of_both(kubeconfig(tmp_path, NOWHERE)):
        assert (message in said, "secret" in said) == (True, False)


@pytest.mark.parametrize("name", ["", "missing", "~nobody-has-this-name/config", "pipe"])
def test_what_is_no_file_is_no_kubeconfig(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for said in of_both(Path(name) if name.startswith("~") else tmp_path / name):
        assert ("is not found; give " in said, "cannot be read: it is not a regular file" in said).count(True) == 1


def test_null_and_an_empty_text_mean_that_there_is_no_such_key(tmp_path: Path) -> None:
    sent = swept(
        tmp_path / "kubeconfig",
        (USER, "token: t, tokenFile: '', client-certificate-data: '', exec: null"),
        ("server:", "certificate-authority-data: null, insecure-skip-tls-verify: null, server:"),
        # Other contexts may be unfinished.
        ("contexts: [", "contexts: [{name: d, context: {namespace: e}}, {name: f, context: null}, "),
    )
    assert sent == {"Bearer t"}


@pytest.mark.parametrize("context", ["{cluster: c}", "{cluster: c, user: ''}", "{cluster: c, user: null}"])
def test_a_context_without_a_user_has_no_credentials(tmp_path: Path, context: str) -> None:
    assert swept(tmp_path / "kubeconfig", ("{cluster: c, user: u}", context)) == {None}


@pytest.mark.parametrize(
    ("key", "value"),
    [("as", "viewer"), ("as-uid", "'7'"), ("as-groups", "[readers]"), ("as-user-extra", "{scopes: [view]}")],
)
def test_a_key_that_has_no_effect_here_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with server(TIME % "[]") as (url, sent):
        file = kubeconfig(tmp_path, url, "", f"{key}: {value}, {USER}")
        for said in of_both(file):
            assert f"{file}: the user 'u' has {key}, which cannot be used here" in said
    assert sent == []


def test_the_keys_of_another_context_do_not_count(tmp_path: Path) -> None:
    assert swept(tmp_path / "kubeconfig", ("users: [", "users: [{name: v, user: {as: w}}, ")) == {"Bearer secret-token"}


def test_without_a_kubeconfig_the_default_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    said = f"the kubeconfig {tmp_path}/.kube/config is not found; give its path by --kubeconfig or KUBECONFIG"
    assert said in trackbed("status").stderr


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
        text_file(tmp_path / ".kube" / "config", KUBECONFIG.replace("127.0.0.1:1", "home:443"))
    config = _from_environment(None)
    assert config and config.cluster.server == f"https://{chosen}:443"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_in_a_pod_whose_home_cannot_be_read_the_service_account_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def answer(method: str, path: str, body: object) -> tuple[int, dict[str, object]]:
        sent.append(f"{method} {path}")
        return 200, {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "items": []}

    def sweep() -> tuple[int, str]:
        done = CliRunner().invoke(fleet, ["sweep"])
        return done.exit_code, done.output

    with public_folder() as folder, api_server(folder, answer) as (url, authority):
        (folder / "home").mkdir(mode=0o700)
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.delenv("KUBECONFIG", raising=False)
        monkeypatch.setattr("fleet.api.SERVICE_ACCOUNT", str(folder / "account"))
        code, said = as_nobody(sweep)
        assert (code, f"{folder}/home/.kube/config cannot be read: Permission denied" in said) == (1, True)
        (folder / "account").mkdir()
        for name, text in (("token", "t"), ("namespace", "n"), ("ca.crt", authority.read_text())):
            (folder / "account" / name).write_text(text)
        address = httpx2.URL(url)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", address.host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
        assert as_nobody(sweep) == (0, "0 nodes, 0 without a heartbeat, 0 of them tainted before\n")
    assert "GET /apis/coordination.k8s.io/v1/namespaces/trackbed-system/leases" in sent


def test_several_files_in_the_environment_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", f"a:{tmp_path}/kubeconfig")
    with pytest.raises(Failed) as refused:
        bound_token(None, "n1", 600)
    for said in (trackbed("status").stderr, str(refused.value)):
        assert "KUBECONFIG names 2 files, and only one can be used; set it to that one" in said
    for one in (f":{tmp_path}/kubeconfig", f"{tmp_path}/kubeconfig:{tmp_path}/kubeconfig"):
        monkeypatch.setenv("KUBECONFIG", one)
        assert "https://127.0.0.1:1 cannot be reached" in trackbed("status").stderr


@pytest.mark.parametrize("body", ["<html>", "", "null", "5", TIME % "null", TIME % "[{}]", '{"metadata": {}}'])
def test_a_server_that_is_no_api_server_is_named(tmp_path: Path, body: str) -> None:
    with server(body) as (url, _):
        by_command, by_deploy = of_both(kubeconfig(tmp_path, url))
    assert by_command.startswith(f"{url} ") and "\n" not in by_command
    assert "a fault of trackbed" not in by_command
    assert by_deploy.startswith(f"{url} gives no answer of an API server")


def test_a_plugins_token_with_a_line_break_is_not_shown(tmp_path: Path) -> None:
    program(tmp_path / "plugin", 'printf %s \'{"status": {"token": "secret-token\\n"}}\'')
    with server("") as (url, _):
        both = of_both(kubeconfig(tmp_path, url, user=PLUGIN))
    for said in both:
        assert "has the kubeconfig's token a line break" in said
        assert "secret-token" not in said


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_credential_plugin_learns_its_version_and_its_token_is_used(tmp_path: Path, version: str) -> None:
    plugin = tmp_path / "plugin"
    program(plugin, 'echo "$KUBERNETES_EXEC_INFO" > "$0.info"\necho \'{"status": {"token": "t"}}\'')
    user = f"exec: {{apiVersion: client.authentication.k8s.io/{version}, command: {plugin}}}"
    assert swept(tmp_path / "kubeconfig", (USER, user)) == {"Bearer t"}
    info = yaml.safe_load((tmp_path / "plugin.info").read_text())
    assert info["apiVersion"] == f"client.authentication.k8s.io/{version}"


def test_a_credential_plugin_that_asks_for_its_cluster_is_told_it(tmp_path: Path) -> None:
    """As by kubectl: the authority's certificates, and what the kubeconfig has for plugins."""
    authority, _ = certificates(tmp_path)
    program(tmp_path / "plugin", 'echo "$KUBERNETES_EXEC_INFO" > "$0.info"\necho \'{"status": {"token": "t"}}\'')
    theirs = "{name: client.authentication.k8s.io/exec, extension: {role: admin}}"
    cluster = f"certificate-authority: ca.pem, extensions: [{theirs}, {{name: other, extension: {{a: 1}}}}], server:"
    asking = (USER, PLUGIN.replace("}", ", provideClusterInfo: true}"))
    assert swept(tmp_path / "kubeconfig", asking, ("server:", cluster)) == {"Bearer t"}
    told = yaml.safe_load((tmp_path / "plugin.info").read_text())["spec"]["cluster"]
    assert told.pop("server").startswith("http://127.0.0.1:")
    data = base64.b64encode(authority.read_bytes()).decode()
    assert told == {"certificate-authority-data": data, "config": {"role": "admin"}}


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
    for said in of_both(kubeconfig(tmp_path, NOWHERE, user=PLUGIN)):
        assert said.startswith(f"the kubeconfig's exec command '{file}' {message}")
        assert ("\n" in said, "device" in said, "--kubeconfig" in said) == (False, False, False)


def test_a_credential_plugin_is_not_given_the_terminal(tmp_path: Path) -> None:
    program(tmp_path / "plugin", 'echo "{\\"status\\": {\\"token\\": \\"t$(cat)\\"}}"')
    assert swept(tmp_path / "kubeconfig", (USER, PLUGIN)) == {"Bearer t"}


@pytest.mark.parametrize("user", ["tokenFile: ./token", PLUGIN])
def test_files_are_looked_for_from_the_kubeconfigs_folder(tmp_path: Path, user: str) -> None:
    (tmp_path / "token").write_text("t")
    program(tmp_path / "plugin", 'echo \'{"status": {"token": "t"}}\'')
    file = tmp_path / "kubeconfig"
    assert swept(file, (USER, user), named=os.path.relpath(file, ROOT)) == {"Bearer t"}
