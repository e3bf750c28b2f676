"""Which host keys are accepted: as OpenSSH's own client does."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any

import paramiko
import pytest
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.sshuserclient import client

from tasks.common.known_hosts import lines
from tests.deploy.common.test_connection import Node, failed
from tests.private_namespace import in_namespace

KEYS = [paramiko.ECDSAKey.generate(), paramiko.RSAKey.generate(2048)]
REPLACED = [
    f"pyinfra.connectors.sshuserclient.client:{name}"
    for name in ("SSHClient.connect", "append_hostkey", "get_host_keys")
]
REPLACED.append("paramiko.client:SSHClient.connect")


@pytest.fixture(autouse=True)
def as_each_deploy(replace: Callable[..., None]) -> None:
    """pyinfra's functions are replaced as each deploy does it."""
    replace(*REPLACED)


class Guest(Node):
    """A host that accepts any password. ``passwords``: those that it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.passwords: list[str] = []

    def check_auth_password(self, username: str, password: str) -> int:
        self.passwords.append(password)
        return int(paramiko.common.AUTH_SUCCESSFUL)


@contextmanager
def guest(*keys: paramiko.PKey) -> Iterator[tuple[Guest, int]]:
    """A host with these keys, and its port."""
    node, transports = Guest(), list[paramiko.Transport]()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    # As OpenSSH since 8.8, it signs by no SHA-1.
                    served = paramiko.Transport(listener.accept()[0], disabled_algorithms={"keys": ["ssh-rsa"]})
                    transports.append(served)
                    for key in keys:
                        served.add_server_key(key)
                    served.start_server(server=node, event=Event())
                except OSError:
                    return

        Thread(target=serve, daemon=True).start()
        yield node, listener.getsockname()[1]
    for served in transports:
        served.close()


def text(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.get_base64()}"


def filled(known: str, key: paramiko.PKey) -> str:
    """The lines of a file, with keys and hashed names."""
    other = type(key).generate(*([2048] if key.get_name() == "ssh-rsa" else []))  # type: ignore[attr-defined]
    hashed = {name: paramiko.HostKeys.hash_host(name) for name in ("gpu-1", "[gpu-1]:2222")}
    return known.format(key=text(key), other=text(other), hashed=hashed["gpu-1"], hashed_port=hashed["[gpu-1]:2222"])


def files(folder: Path, user: str, of_all: str) -> None:
    """Write the file of a user, that of all users, and the SSH configuration that names both."""
    for name, known in (("user", user), ("global", of_all)):
        written = filled(known, KEYS[0])
        (folder / name).write_text(written and f"{written}\n", errors="surrogateescape")
    (folder / "config").write_text(f"GlobalKnownHostsFile {folder}/global\nUserKnownHostsFile {folder}/user\n")


ACCEPTED, NOTED = "accepted", "noted"
CASES: list[tuple[str, str, int, str]] = [
    # The user's file, that of all users, the port, what comes of it.
    ("", "", 22, NOTED),
    ("", "gpu-1 {key}", 22, ACCEPTED),
    ("", "gpu-1 {other}", 22, "line 1 of global"),
    ("", "# all hosts\n\ngpu-2 {key}\ngpu-1,10.0.0.1  {other}", 22, "line 4 of global"),
    ("gpu-1 {other}", "gpu-1 {key}", 22, ACCEPTED),
    ("gpu-1 {key}", "gpu-1 {other}", 22, ACCEPTED),
    ("gpu-1 {other}\ngpu-1 {key}", "", 22, ACCEPTED),
    ("gpu-1 {other}", "", 22, "line 1 of user"),
    # Patterns and hashed names.
    ("", "gpu-* {other}", 22, "line 1 of global"),
    ("", "GPU-? {key}", 22, ACCEPTED),
    ("", "gpu-*,!gpu-1 {other}", 22, NOTED),
    ("", "!gpu-1 {other}", 22, NOTED),
    ("", "[g]pu-1 {other}", 22, NOTED),
    ("", "{hashed} {other}", 22, "line 1 of global"),
    ("", "{hashed} {key}", 22, ACCEPTED),
    # Ports.
    ("", "[gpu-1]:2222 {key}", 2222, ACCEPTED),
    ("", "[gpu-*]:2222 {other}", 2222, "line 1 of global"),
    ("", "{hashed_port} {other}", 2222, "line 1 of global"),
    ("", "gpu-1 {key}", 2222, ACCEPTED),
    ("", "gpu-1 {other}", 2222, NOTED),
    ("", "[gpu-1]:2222 {other}", 22, NOTED),
    # Revoked keys.
    ("", "@revoked * {key}", 22, "line 1 of global"),
    ("gpu-1 {key}", "@revoked gpu-1 {key}", 22, "line 1 of global"),
    ("@revoked * {key}", "gpu-1 {key}", 22, "line 1 of user"),
    ("@revoked gpu-2 {key}", "", 22, NOTED),
    ("@revoked *,!gpu-1 {key}", "", 22, NOTED),
    ("@revoked * {other}", "", 22, NOTED),
    ("@revoked {hashed} {key}", "", 22, "line 1 of user"),
    ("@revoked [gpu-1]:2222 {key}", "gpu-1 {key}", 22, ACCEPTED),
    ("@revoked [gpu-1]:2222 {key}", "gpu-1 {key}", 2222, "line 1 of user"),
    ("@revoked gpu-1 {key}", "", 2222, "line 1 of user"),
    # Lines that cannot be read.
    ("|1|damaged {other}", "gpu-1 {key}", 22, ACCEPTED),
    ("gpu-1 ssh-rsa AAAA", "gpu-1 {key}", 22, ACCEPTED),
    ("@unknown gpu-1 {other}", "", 22, NOTED),
    ("# a\x0cb\ngpu-1 {other}", "", 22, "line 2 of user"),
    ("# \udce9t\udce9\ngpu-1 {other}", "", 22, "line 2 of user"),
]


@pytest.fixture(params=CASES, ids=repr)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int, str]:
    """A folder with both files, the port, and what comes of it."""
    user, of_all, port, wanted = request.param
    files(tmp_path, user, of_all)
    return tmp_path, port, wanted


def connect(folder: Path, at: int, port: int = 22, policy: str = "accept-new") -> None:
    """Connect to a host of the name GPU-1, by a password."""
    connected: Any = client.SSHClient()
    given: dict[str, Any] = {
        "_pyinfra_ssh_config_file": str(folder / "config"),
        "_pyinfra_ssh_strict_host_key_checking": policy,
    }
    given |= {"username": "root", "password": folder.name, "port": port}
    with socket.create_connection(("127.0.0.1", at)) as wire:
        connected.connect("GPU-1", sock=wire, allow_agent=False, look_for_keys=False, **given)
        connected.close()


def test_a_host_key_is_judged_as_openssh_judges_it(case: tuple[Path, int, str]) -> None:
    folder, port, wanted = case
    before = (folder / "user").read_bytes()
    with guest(KEYS[0]) as (node, at):
        try:
            connect(folder, at, port)
            came = ACCEPTED if (folder / "user").read_bytes() == before else NOTED
        except ConnectError as error:
            came = str(error)
            assert not node.passwords
    assert came == wanted or f"{wanted.partition(' of ')[0]} of {folder}/{wanted.partition(' of ')[2]}" in came


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")
def test_openssh_judges_a_host_key_so(case: tuple[Path, int, str]) -> None:
    folder, port, wanted = case
    before = (folder / "user").read_bytes()
    log = folder / "log"
    with guest(KEYS[0]) as (_, at):
        # What is left of a pipe would keep the test waiting: the wire's program outlives ssh.
        wire = f"ProxyCommand=bash -c 'exec 3<>/dev/tcp/127.0.0.1/{at}; cat <&3 & exec cat >&3'"
        words = ["-o", wire, "-o", "StrictHostKeyChecking=accept-new", "-o", "BatchMode=yes", "-p", str(port)]
        subprocess.run(
            ["ssh", "-F", folder / "config", "-E", log, *words, "root@GPU-1", "true"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=60,
        )  # fmt: skip
    said = log.read_text()
    # If the key is revoked for the host's name alone, ssh warns at other ports, and connects.
    refused = "Host key verification failed" in said or "REVOKED" in said
    assert refused == (wanted not in (ACCEPTED, NOTED)), said
    assert refused or ((folder / "user").read_bytes() != before) == (wanted == NOTED), said


@pytest.mark.parametrize("policy", ["accept-new", "yes"])
@pytest.mark.parametrize(
    "known", ["@cert-authority *pu-1 {other}", "@cert-authority {hashed} {other}\n@cert-authority * {key}"]
)
def test_a_host_whose_certificate_would_have_to_be_read_is_refused(tmp_path: Path, known: str, policy: str) -> None:
    files(tmp_path, "", known)
    with guest(KEYS[0]) as (node, at):
        with pytest.raises(ConnectError, match=f"line 1 of {tmp_path}/global has .*: note the host's key"):
            connect(tmp_path, at, policy=policy)
        assert not node.passwords
        files(tmp_path, "gpu-1 {key}", known)
        lines.cache_clear()
        connect(tmp_path, at, policy=policy)


def test_an_authority_of_other_hosts_says_nothing_of_a_new_one(tmp_path: Path) -> None:
    files(tmp_path, "", "@cert-authority *.example.net {key}")
    with guest(KEYS[0]) as (_, at):
        connect(tmp_path, at)
    assert (tmp_path / "user").read_text() == f"GPU-1 {text(KEYS[0])}\n"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.get_name())
def test_a_host_with_several_keys_is_asked_for_the_one_that_is_known(tmp_path: Path, key: paramiko.PKey) -> None:
    files(tmp_path, f"gpu-1 {text(key)}", "")
    with guest(*KEYS) as (node, at):
        connect(tmp_path, at)
        assert node.passwords
    assert (tmp_path / "user").read_text() == f"gpu-1 {text(key)}\n"


def test_without_files_of_known_hosts_nothing_is_known_or_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").write_text("UserKnownHostsFile none\nGlobalKnownHostsFile none\n")
    with guest(KEYS[0]) as (node, at):
        connect(tmp_path, at)
        assert node.passwords
    assert [file.name for file in tmp_path.iterdir()] == ["config"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files(tmp_path, "", "")
    (tmp_path / "global").unlink()
    (tmp_path / "global").mkdir()
    with guest(KEYS[0]) as (_, at):
        connect(tmp_path, at)
    assert f"the host keys in {tmp_path}/global are not read: Is a directory" in caplog.text


@pytest.mark.parametrize(("known", "accepted"), [("site-gpu-1 {key}", True), ("site-gpu-1 {other}", False), ("", True)])
def test_a_host_is_known_by_its_alias(tmp_path: Path, known: str, accepted: bool) -> None:
    files(tmp_path, "", known)
    with (tmp_path / "config").open("a") as config:
        config.write("HostKeyAlias site-gpu-1\n")
    with guest(KEYS[0]) as (node, at):
        with nullcontext() if accepted else pytest.raises(ConnectError, match="site-gpu-1 has another key"):
            connect(tmp_path, at, 2222)
        assert bool(node.passwords) == accepted
    assert (tmp_path / "user").read_text() == ("" if known else f"site-gpu-1 {text(KEYS[0])}\n")


def test_another_client_of_paramiko_keeps_its_own_keys() -> None:
    with guest(KEYS[0]) as (_, at):
        own = paramiko.SSHClient()
        own.get_host_keys().add(f"[127.0.0.1]:{at}", KEYS[0].get_name(), KEYS[0])
        own.connect("127.0.0.1", at, "root", "secret", allow_agent=False, look_for_keys=False)
        own.close()


GLOBAL = """
mount -t tmpfs none /tmp
mount -t tmpfs none /etc/ssh
ip link set lo up
"""


@pytest.mark.parametrize("file", ["ssh_known_hosts", "ssh_known_hosts2"])
@in_namespace(GLOBAL)
def test_a_deploy_reads_the_file_of_all_users(file: str) -> None:
    known, folder = Path("/etc/ssh", file), Path("/tmp")
    with guest(KEYS[0]) as (node, port):
        known.write_text(filled(f"[127.0.0.1]:{port} {{other}}\n", KEYS[0]))
        settings = {"ssh_port": port, "ssh_user": "root", "ssh_password": "secret", "ssh_known_hosts_file": "/tmp/user"}
        said = failed(folder, ("127.0.0.1", settings))
    assert said.count("another key") == 1
    assert (
        f"[127.0.0.1] [127.0.0.1]:{port} has another key than line 1 of {known} says: if the host has a new key" in said
    )
    assert not node.passwords
    assert not Path("/tmp/user").exists()
