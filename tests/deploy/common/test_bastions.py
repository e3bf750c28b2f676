"""Hosts behind bastions, connections that are dropped, and the keys of hosts that are known."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.sshuserclient import client

from tasks.common.connection import PARAMIKO, TRIES, TransportFactory, connecting
from tests.deploy.common.test_connection import Node, failed
from tests.deploy.common.test_known_hosts import REPLACED

KEY = paramiko.ECDSAKey.generate()


class Bastion(Node):
    """A server that serves each forwarded connection itself. ``reached``: where they are to go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[str] = []

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return int(paramiko.common.AUTH_SUCCESSFUL)

    check_auth_password = check_auth_publickey  # type: ignore[assignment]

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        self.reached.append(destination[0])
        return int(paramiko.common.OPEN_SUCCEEDED)

    def serve(self, over: Any) -> None:
        transport = paramiko.Transport(over)
        transport.add_server_key(KEY)
        transport.start_server(server=self, event=Event())
        while (channel := transport.accept(60)) is not None:
            Thread(target=self.serve, args=(channel,), daemon=True).start()


@contextmanager
def bastion(folder: Path, config: str) -> Iterator[tuple[Bastion, dict[str, Any]]]:
    """A bastion, and the settings of a host behind it."""
    node, key = Bastion(), folder / "id"
    paramiko.RSAKey.generate(2048).write_private_key_file(str(key))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    Thread(target=node.serve, args=(listener.accept()[0],), daemon=True).start()
                except OSError:
                    return

        Thread(target=serve, daemon=True).start()
        (folder / "config").write_text(config.format(port=listener.getsockname()[1], key=key))
        yield node, {"ssh_config_file": str(folder / "config"), "ssh_known_hosts_file": str(folder / "known_hosts")}


ONE = """
Host gpu-*
  ProxyJump way-in
Host way-in
  HostName 127.0.0.1
  Port {port}
  User me
  IdentityFile {key}
"""
TWO = (
    ONE.replace("way-in", "inner", 1)
    + """
Host inner
  HostName inner.invalid
  User me
  IdentityFile {key}
  ProxyJump way-in
"""
)


def connect(settings: dict[str, Any], name: str) -> Any:
    connected: Any = client.SSHClient()
    given = {f"_pyinfra_{key}": value for key, value in settings.items()}
    given[f"_pyinfra_{PARAMIKO}"] = {"transport_factory": TransportFactory()}
    given["_pyinfra_ssh_strict_host_key_checking"] = "accept-new"
    connected.connect(name, username="root", password=name, allow_agent=False, look_for_keys=False, **given)
    connected.close()
    return connected


@pytest.mark.parametrize(
    ("config", "ways"),
    [pytest.param(ONE, [], id="kubespray-1287"), pytest.param(TWO, ["inner.invalid"], id="pyinfra-1963")],
)
def test_hosts_behind_bastions_are_reached_and_each_key_is_noted_once(
    tmp_path: Path, replace: Callable[..., None], config: str, ways: list[str]
) -> None:
    replace(*REPLACED)
    hosts = ["gpu-1", "gpu-2"]
    with bastion(tmp_path, config) as (node, settings):
        for name in hosts:
            connect(settings, name)
    assert node.reached == [*ways, "gpu-1", *ways, "gpu-2"]
    noted = [line.split()[0] for line in (tmp_path / "known_hosts").read_text().splitlines()]
    assert sorted(name.partition("]")[0] for name in noted) == sorted(["[127.0.0.1", *ways, *hosts])


def test_a_bastion_whose_key_has_changed_is_named(tmp_path: Path) -> None:
    with bastion(tmp_path, ONE) as (_, settings):
        port = (tmp_path / "config").read_text().partition("Port ")[2].split()[0]
        other = paramiko.ECDSAKey.generate()
        (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{port} {other.get_name()} {other.get_base64()}\n")
        said = failed(tmp_path, ("gpu-1", settings))
    assert f"[gpu-1] [127.0.0.1]:{port} has another key than line 1 of {tmp_path}/known_hosts says" in said


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("@cert-authority *.internal ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFoo CA", id="pyinfra-1339"),
        pytest.param("10.0.0.1 ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQD", id="pyinfra-683"),
        pytest.param("10.0.0.1 ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYA", id="paramiko-1346"),
        pytest.param("example.net ssh-rsa AAAA", id="paramiko-490"),
    ],
)
def test_a_line_that_cannot_be_read_lets_no_host_have_another_key(
    tmp_path: Path, replace: Callable[..., None], line: str
) -> None:
    replace(*REPLACED)
    with bastion(tmp_path, ONE) as (_, settings):
        other = paramiko.ECDSAKey.generate()
        (tmp_path / "known_hosts").write_text(f"{line}\ngpu-1 {other.get_name()} {other.get_base64()}\n")
        with pytest.raises(ConnectError, match="gpu-1 has another key than line 2"):
            connect(settings, "gpu-1")


def test_a_connection_that_is_dropped_at_once_is_tried_again(tmp_path: Path) -> None:
    """Beyond MaxStartups, sshd closes it. The third one is answered, here with what is no SSH."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            listener.accept()[0].sendall(b"\xff\r\n")

        Thread(target=serve, daemon=True).start()
        at = {"ssh_hostname": "127.0.0.1", "ssh_port": listener.getsockname()[1]}
        assert "can't decode byte 0xff" in failed(tmp_path, ("gpu-1", at))


@pytest.mark.parametrize(
    ("said", "least"),
    [
        pytest.param(b"Not allowed at this time\r\n", 15, id="ansible-86325"),
        (b"Exceeded MaxStartups\r\n", 4),
        (b"", 4),
    ],
)
def test_a_penalty_of_sshd_is_outlasted_and_named(monkeypatch: pytest.MonkeyPatch, said: bytes, least: int) -> None:
    """A penalty lasts 15 s or more (sshd_config(5)); a connection too many has its turn sooner."""
    waits: list[float] = []
    monkeypatch.setattr("gevent.sleep", waits.append)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(TRIES):
                accepted, _ = listener.accept()
                # A close without this would reset the connection.
                accepted.recv(100)
                accepted.sendall(said)
                accepted.close()

        Thread(target=serve, daemon=True).start()

        def connect_once(_: Any) -> None:
            ssh = paramiko.SSHClient()
            try:
                ssh.connect("127.0.0.1", listener.getsockname()[1], transport_factory=TransportFactory())
            except paramiko.SSHException as error:
                raise ConnectError(f"SSH error ({error})") from None

        connector: Any = SimpleNamespace(data={"ssh_hostname": "127.0.0.1"})
        with pytest.raises(ConnectError, match=f"{said.decode().strip()}.* PerSourcePenaltyExemptList"):
            connecting(connect_once)(connector)
    assert len(waits) == TRIES - 1
    assert least <= sum(waits) <= 4 * least
