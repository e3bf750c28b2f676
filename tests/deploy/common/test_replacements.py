"""What replaces pyinfra's functions returns the same or mends a fault of theirs, and each is needed still."""

import getpass
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import paramiko
import pyinfra.progress
import pytest
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from pyinfra.api import arguments
from pyinfra.api.config import config_defaults
from pyinfra.api.exceptions import ConnectorDataTypeError, PyinfraError
from pyinfra.api.inventory import Inventory
from pyinfra.api.operation import operation
from pyinfra.api.state import BaseStateCallback
from pyinfra.api.util import get_operation_order_from_stack
from pyinfra.connectors import base, ssh_util, util
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.sshuserclient import client, config
from pyinfra.context import host

from tasks.common import connection, questions
from tasks.common.archive import ROOT
from tasks.common.commands import Commands
from tasks.common.replacements import REPLACEMENTS
from tests.deploy import fake
from tests.deploy.conftest import Node, state_of

HOOKS = {
    *("host_before_connect", "host_connect", "host_connect_error", "host_disconnect"),
    *("operation_start", "operation_host_start", "operation_host_success", "operation_host_error"),
    *("operation_host_retry", "operation_end"),
}
# What is in pyinfra_cli is tried in a process of its own: its import replaces parts of Python's library.
CLI = """
import inspect, json, sys
from pathlib import Path
from pyinfra.api.state import State
from pyinfra.context import ctx_state
from pyinfra_cli import cli, exceptions, inventory, util
Path("hosts.py").write_text("hosts = {'a': {}}")
with ctx_state.use(State()):
    groups = inventory._get_groups_from_filename("hosts.py")
try:
    raise ValueError
except ValueError as error:
    place = exceptions.get_frame_line_from_tb(error.__traceback__)
said = [inspect.getsource(each) for each in (util._parallel_load_hosts, cli._do_confirm, cli._set_fail_prompts)]
needed = ["raise result" in said[0], "EOFError" not in said[1], "isatty" not in said[2]]
print(json.dumps([groups == {}, place is not None, *needed]))
"""


def hooks() -> set[str]:
    return {name for name in vars(BaseStateCallback) if not name.startswith("_")}


def has_no_time_limit() -> bool:
    return {name for name in config_defaults if "TIMEOUT" in name} == {"CONNECT_TIMEOUT"}


def raises(error: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception as raised:
        return type(raised) is error
    return False


def connect_with_a_key_that_is_none() -> None:
    Path("key").write_text("no key")
    state = state_of(["127.0.0.1"], {"ssh_key": "key", "ssh_port": 1})
    state.inventory.get_host("127.0.0.1").connector.connect()


@operation()
def broken() -> Commands:
    if host.state.is_executing:
        raise ValueError
    yield from ()


def read_a_byte_that_is_not_utf_8() -> None:
    util.read_buffer("stdout", [b"\xff\n"], Queue())


def note_a_key_without_the_folder() -> None:
    connected = SimpleNamespace(_host_keys_filename="absent/known_hosts")
    client.append_hostkey(connected, "n1", paramiko.ECDSAKey.generate())  # type: ignore[no-untyped-call]


def settings_with_none() -> None:
    base.host_to_connector_data(SSHConnector.data_cls, SSHConnector.data_meta, {"ssh_user": None})  # type: ignore[arg-type]


NEEDED: dict[str, Callable[[], bool]] = {
    "pyinfra.api.state:State.init": lambda: hooks() == HOOKS,
    **{
        f"pyinfra.api.host:Host.{name}": has_no_time_limit
        for name in ("get_fact", "run_shell_command", "put_file", "get_file")
    },
    "pyinfra.api.operation:get_operation_order_from_stack": lambda: (
        "stack()" in inspect.getsource(get_operation_order_from_stack)
    ),
    "pyinfra.api.arguments:all_global_arguments": lambda: (
        arguments.all_global_arguments() is not arguments.all_global_arguments()
    ),
    "pyinfra.connectors.base:host_to_connector_data": lambda: raises(ConnectorDataTypeError, settings_with_none),
    "pyinfra.connectors.ssh:SSHConnector.connect": lambda: raises(PyinfraError, connect_with_a_key_that_is_none),
    "paramiko.client:SSHClient.connect": lambda: raises(
        InvalidHostKey, lambda: HostKeyEntry.from_line("@revoked * ssh-rsa AAA")
    ),
    "pyinfra.connectors.sshuserclient.client:SSHClient.connect": lambda: (
        "strict" not in inspect.getsource(client.SSHClient.parse_config).partition("c.connect(")[2]
    ),
    "pyinfra.connectors.sshuserclient.client:append_hostkey": lambda: raises(
        FileNotFoundError, note_a_key_without_the_folder
    ),
    "pyinfra.connectors.sshuserclient.client:get_host_keys": lambda: (
        "globalknownhostsfile" not in inspect.getsource(client.SSHClient.parse_config)
    ),
    "pyinfra.connectors.sshuserclient.config:_expand_include_statements": lambda: (
        "split" not in inspect.getsource(config._expand_include_statements)
    ),
    "pyinfra.connectors.sshuserclient.config:FakeInvoke.run": lambda: (
        '"-c"' not in inspect.getsource(config.FakeInvoke.run)
    ),
    "paramiko.config:SSHConfig._get_matches": lambda: "localnetwork" not in inspect.getsource(paramiko.SSHConfig),
    "pyinfra.connectors.ssh_util:getpass": lambda: vars(ssh_util)["getpass"] is getpass.getpass,
    "pyinfra.connectors.util:SUDO_PASSWORD_REQUIRED_LINES": lambda: (
        questions.SUDO_RS[0] not in util.SUDO_PASSWORD_REQUIRED_LINES
    ),
    "pyinfra.connectors.util:getpass": lambda: vars(util)["getpass"] is getpass.getpass,
    "pyinfra.connectors.util:read_buffer": lambda: raises(UnicodeDecodeError, read_a_byte_that_is_not_utf_8),
    "pyinfra.progress:_print_spinner": lambda: (
        list(inspect.signature(pyinfra.progress._print_spinner).parameters) == ["stop_event", "progress_queue"]
    ),
    "pyinfra_cli.cli:run_ops": lambda: hooks() == HOOKS,
}
"""By replacement, whether pyinfra still lacks what docs/pyinfra.md says that the replacement gains."""


@pytest.mark.parametrize("place", NEEDED)
def test_pyinfra_needs_this_replacement(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert NEEDED[place](), f"remove the replacement of {place}: pyinfra itself does what docs/pyinfra.md says of it"


def test_pyinfra_needs_what_fails_one_host_and_not_all(node: Node) -> None:
    node.replaced = ()
    with pytest.raises(ValueError):
        node.deploy(lambda: broken(name="broken"), {})


def test_pyinfras_command_line_needs_these_replacements(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLI], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    mended = "pyinfra refuses a mapping, fails one host, knows that nobody answers, or names no line of a deploy"
    assert json.loads(done.stdout) == [True] * 5, mended


QUESTIONS = {"pyinfra_cli.cli:_do_confirm", "pyinfra_cli.cli:_set_fail_prompts"}
AT_THE_SITE = {"pyinfra_cli.inventory:_get_groups_from_filename", "pyinfra_cli.inventory:make_inventory_from_files"}


def test_each_replacement_is_in_the_docs_with_what_it_gains() -> None:
    page = (ROOT / "docs" / "pyinfra.md").read_text()
    assert [place for place in REPLACEMENTS if f"`{place.rpartition(':')[2]}`" not in page] == []
    of_one_host = {"pyinfra.api.operations:_run_host_op_with_context", "pyinfra_cli.util:_parallel_load_hosts"}
    of_errors = {"pyinfra_cli.exceptions:get_frame_line_from_tb"}
    assert set(REPLACEMENTS) == {*NEEDED, *of_one_host, *AT_THE_SITE, *QUESTIONS, *of_errors}


# Both are called on the same line, since they return line numbers.
DEPLOY = """
from importlib import import_module

from pyinfra.api import arguments
from pyinfra.api.arguments import AllArguments, get_type_hints
from pyinfra.api.deploy import deploy
from pyinfra.api.util import get_operation_order_from_stack
from pyinfra.context import state
from pyinfra.operations import server

from tasks.common.replacements import order_from_stack


def same():
    for theirs, ours in [(get_operation_order_from_stack(state), order_from_stack(state))]:
        assert theirs == ours and len(ours) > 2, (theirs, ours)


@deploy("Nested")
def nested():
    (lambda: [same() for _ in range(2)])()


same()
nested()
assert import_module("pyinfra.api.operation").get_operation_order_from_stack is order_from_stack
assert arguments.all_global_arguments() == list(get_type_hints(AllArguments).items())
server.shell(name="Nothing", commands=["true"])
server.shell(name="Reached", commands=["true"])
"""


def test_the_order_of_operations_and_the_arguments_are_those_of_pyinfra(tmp_path: Path) -> None:
    (tmp_path / "deploy.py").write_text(DEPLOY)
    done = fake.pyinfra("-y", "@local", tmp_path / "deploy.py", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("Nothing") < done.stderr.index("Reached")


def settings(**of_the_second: object) -> dict[str, Any]:
    """The connection's settings of one host, which has data of its own, of its group, and of all hosts."""
    hosts = ["a", ("longer", of_the_second), "c"]
    made = Inventory((hosts, {"ssh_user": "all"}), {"ssh_key": "given"}, group=(["longer"], {"ssh_port": 2222}))  # type: ignore[no-untyped-call]
    data = made.get_host("longer").data
    read: dict[str, Any] = connection.settings(base.host_to_connector_data)(
        SSHConnector.data_cls, SSHConnector.data_meta, data
    )
    if None not in of_the_second.values():
        theirs: dict[str, Any] = base.host_to_connector_data(SSHConnector.data_cls, SSHConnector.data_meta, data)  # type: ignore[arg-type]
        ours = {"transport_factory": connection.TransportFactory(), **(theirs[connection.PARAMIKO] or {})}
        assert read == {**theirs, connection.PARAMIKO: ours}
    return read


def test_a_connector_s_settings_are_those_of_pyinfra_and_none_is_not_given() -> None:
    given = settings(ssh_user="own", ssh_paramiko_connect_kwargs={"a": []})
    assert (given["ssh_port"], given["ssh_user"], given["ssh_key"]) == (2222, "own", "given")
    absent = settings(ssh_user=None, ssh_hostname=None)
    assert [absent[key] for key in ("ssh_user", "ssh_hostname", "ssh_key")] == [None, None, "given"]


@pytest.mark.parametrize(
    ("port", "said"),
    [
        ("22", "longer.ssh_port: str is not an instance of int; see docs/inventory.md"),
        # paramiko would try port 34463.
        (99999, "longer.ssh_port: 99999 is out of range; give 1 to 65535"),
    ],
)
def test_a_setting_that_ssh_cannot_have_is_refused_with_the_host_and_the_key(port: object, said: str) -> None:
    with pytest.raises(ConnectorDataTypeError) as refused:
        settings(ssh_port=port)
    assert str(refused.value) == said
