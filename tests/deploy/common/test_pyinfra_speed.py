"""The faster functions return the same as pyinfra's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from paramiko import HostKeys
from paramiko.hostkeys import InvalidHostKey
from pyinfra.api.exceptions import ConnectorDataTypeError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import State
from pyinfra.connectors import base
from pyinfra.connectors.ssh import SSHConnector

from tasks.common import pyinfra_speed
from tasks.common.archive import ROOT

# Both are called on the same line, since they return line numbers.
DEPLOY = """
from importlib import import_module

from pyinfra.api import arguments, connectors, inventory
from pyinfra.api.arguments import AllArguments, get_type_hints
from pyinfra.api.deploy import deploy
from pyinfra.api.util import get_operation_order_from_stack
from pyinfra.context import state
from pyinfra.operations import server

from tasks.common import pyinfra_speed


def same():
    for theirs, ours in [(get_operation_order_from_stack(state), pyinfra_speed.order_from_stack(state))]:
        assert theirs == ours and len(ours) > 2, (theirs, ours)


@deploy("Nested")
def nested():
    (lambda: [same() for _ in range(2)])()


same()
nested()
assert import_module("pyinfra.api.operation").get_operation_order_from_stack is pyinfra_speed.order_from_stack
assert arguments.all_global_arguments() == list(get_type_hints(AllArguments).items())
assert inventory.get_all_connectors() is connectors.get_all_connectors() == inventory.get_all_connectors.__wrapped__()
server.shell(name="Nothing", commands=["true"])
server.shell(name="Reached", commands=["true"])
"""


def test_the_order_of_operations_and_the_arguments_are_those_of_pyinfra(tmp_path: Path) -> None:
    (tmp_path / "deploy.py").write_text(DEPLOY)
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", "@local", str(tmp_path / "deploy.py")],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("Nothing") < done.stderr.index("Reached")


def inventory(**of_the_second: object) -> Inventory:
    hosts = ["a", ("longer", of_the_second), "c"]
    return Inventory((hosts, {"ssh_user": "all"}), {"ssh_key": "given"}, group=(["a", "c"], {"ssh_port": 2222}))  # type: ignore[no-untyped-call]


def test_a_connector_s_settings_and_the_printed_names_are_those_of_pyinfra() -> None:
    hosts = inventory(ssh_port=22, ssh_user="own", ssh_paramiko_connect_kwargs={"a": []})
    for host in hosts:
        pyinfra_speed.init_host(host, State())
        ours = host.connector.data, host.print_prefix_padding
        Host.init(host, State())
        assert ours == (host.connector.data, host.print_prefix_padding)
        assert ours[0] == pyinfra_speed.connector_data(SSHConnector.data_cls, SSHConnector.data_meta, host.data)
    assert [(host.connector.data["ssh_port"], host.connector.data["ssh_user"]) for host in hosts] == [
        (2222, "all"), (22, "own"), (2222, "all"),
    ]  # fmt: skip


def test_a_setting_of_another_type_is_refused_as_by_pyinfra() -> None:
    host = next(host for host in inventory(ssh_port=[]) if host.name == "longer")
    said = []
    for read in (pyinfra_speed.connector_data, base.host_to_connector_data):
        with pytest.raises(ConnectorDataTypeError) as raised:
            read(SSHConnector.data_cls, SSHConnector.data_meta, host.data)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_setting_of_another_type_is_refused_with_the_host_s_name() -> None:
    host = next(host for host in inventory(ssh_port="22") if host.name == "longer")
    with pytest.raises(ConnectorDataTypeError, match=r"^longer: Invalid connector data `ssh_port`"):
        pyinfra_speed.init_host(host, State())


def test_none_is_a_setting_that_is_not_given() -> None:
    host = next(host for host in inventory(ssh_user=None, ssh_hostname=None) if host.name == "longer")
    settings = pyinfra_speed.connector_data(SSHConnector.data_cls, SSHConnector.data_meta, host.data)
    assert [settings[key] for key in ("ssh_user", "ssh_hostname", "ssh_key")] == [None, None, "given"]


# Made for this test.
KEYS = [
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINkVF+pQZZVcgAn0lCySKiqoq5lE0jsEsVzWy3WJ1TDx",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDR3rmMgi/i9PJY+lQd9J76m5I/bjyAzU7q9LLc8rBMB",
    "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBKGcd/UnmeJTigXa559IGS87SzP3cKaKXFqrQKeo3Hurgix9"
    "sjR4CfK7nHNIVX9rK2OVoYl9LUcfkDxDCyXry6Y=",
]
HASHED = "|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg="
# paramiko gives the rest of a file up at the key that cannot be read.
KNOWN_HOSTS = f"""\
# a comment

a,[b]:2222 {KEYS[0]}
a {KEYS[0]}
a {KEYS[1]}
a {KEYS[0]} a comment
c {KEYS[1]}
b,c {KEYS[1]}
{HASHED} {KEYS[0]}
{HASHED} {KEYS[0]}
f unknown-type AAAA
g
d {KEYS[2]}
e ssh-ed25519 no-key
i {KEYS[0]}
"""


def test_known_host_keys_are_those_of_paramiko(tmp_path: Path) -> None:
    files = [tmp_path / "first", tmp_path / "second"]
    files[0].write_text(KNOWN_HOSTS)
    files[1].write_text(f"a {KEYS[1]}\nh {KEYS[2]}\n")

    def read(load: Callable[[HostKeys, str], None]) -> list[tuple[list[str], str, str]]:
        keys = HostKeys()
        for file in files:
            with suppress(InvalidHostKey):
                load(keys, str(file))
        return [(entry.hostnames, entry.key.get_name(), entry.key.get_base64()) for entry in vars(keys)["_entries"]]

    ours = read(pyinfra_speed.load_host_keys)
    assert ours == read(HostKeys.load)
    assert [names for names, _, _ in ours] == [
        ["a", "[b]:2222"], ["a"], ["c"], ["b"], [HASHED], ["d"], ["a"], ["h"],
    ]  # fmt: skip
