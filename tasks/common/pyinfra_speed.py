"""Replaces functions of pyinfra 3.10 and of paramiko by faster ones, which return the same unless they say otherwise.

Two of them run for every operation of every host. One reads the source files of the whole call stack to get line numbers. The
other evaluates the same type annotations each time. In a deploy that finds nothing to do, they took more than half of the
control host's CPU time for each host.

The others run for every host of the inventory, even if one host is deployed. One looks for connectors in all installed
packages, if the host's name begins with the connector's. One looks up each of a connector's settings in all data of the host.
One looks for the longest name among all hosts. paramiko compares each known host key with all keys before it.

tests/deploy/common/test_pyinfra_speed.py compares the results.
"""

from __future__ import annotations

import gc
import sys
from copy import copy
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import pyinfra
from paramiko import HostKeys, SSHException
from paramiko.hostkeys import HostKeyEntry
from pyinfra.api import arguments, connectors, facts, inventory
from pyinfra.api.exceptions import ConnectorDataTypeError
from pyinfra.api.host import Host, HostData
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import State
from pyinfra.api.util import PYINFRA_INSTALL_DIR, raise_if_bad_type
from pyinfra.connectors import base


def replace_functions() -> None:
    """For config.py: make pyinfra use them, and have the garbage collector pass over all that is loaded so far."""
    all_arguments = cache(arguments.all_global_arguments)
    for module in (arguments, facts):
        setattr(module, "all_global_arguments", all_arguments)  # noqa: B010  mypy knows no function that is replaced
    all_connectors = cache(connectors.get_all_connectors)
    for module in (connectors, inventory):
        setattr(module, "get_all_connectors", all_connectors)  # noqa: B010
    # In pyinfra.api the module's name is that of the decorator.
    setattr(import_module("pyinfra.api.operation"), "get_operation_order_from_stack", order_from_stack)  # noqa: B010
    base.host_to_connector_data = connector_data  # type: ignore[assignment]
    Host.init = init_host  # type: ignore[method-assign]
    HostKeys.load = load_host_keys  # type: ignore[method-assign, assignment]
    gc.freeze()


def connector_data(kind: Any, settings: dict[str, base.DataMeta], host_data: HostData) -> dict[str, Any]:
    """The settings of a host's connector: from the host's data, or their defaults.

    None stands for "not given", as in every other key of the inventory; pyinfra itself refuses it.

    :param kind: the TypedDict of the settings.
    :raises ConnectorDataTypeError: a value has another type.
    """
    given: dict[str, Any] = host_data.dict()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {}
    for key, type_ in _type_hints(kind).items():
        value = given.get(key)
        if value is not None:
            raise_if_bad_type(value, type_, ConnectorDataTypeError, f"Invalid connector data `{key}`:")
        found[key] = settings[key].default if value is None else copy(value)
    return found


def init_host(self: Host, state: State) -> None:
    """Give a host its connector, and the spaces that align what is printed after its name.

    :raises ConnectorDataTypeError: a setting of its connector has another type; naming the host, which pyinfra does not.
    """
    self.state = state
    try:
        self.connector = self.connector_cls(state, self)
    except ConnectorDataTypeError as error:
        raise ConnectorDataTypeError(f"{self.name}: {error}") from None
    self.print_prefix_padding = " " * (_longest_name(self.inventory) - len(self.name))


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _longest_name(hosts: Inventory) -> int:
    return max(len(host.name) for host in hosts)


def load_host_keys(self: HostKeys, filename: str) -> None:
    """Add the entries of a file in the format of OpenSSH's known_hosts. A name that has this key already is not added again.

    paramiko also compares a name with the hashed ones, so as to leave it out. Here it stays beside them, with the same key.
    """
    entries: list[HostKeyEntry] = self._entries  # type: ignore[attr-defined]
    keys: dict[tuple[str, str], bytes] = {}
    for entry in entries:
        for name in entry.hostnames:
            keys.setdefault((name, entry.key.get_name()), entry.key.asbytes())
    with Path(filename).open() as file:
        for number, line in enumerate(map(str.strip, file), 1):
            if not line or line.startswith("#"):
                continue
            try:
                read = HostKeyEntry.from_line(line, number)
            except SSHException:
                continue
            if read is None:
                continue
            kind, key = read.key.get_name(), read.key.asbytes()
            read.hostnames = [name for name in read.hostnames if keys.get((name, kind)) != key]
            for name in read.hostnames:
                keys.setdefault((name, kind), key)
            if read.hostnames:
                entries.append(read)


def order_from_stack(state: State) -> list[int]:
    """The sort key of an operation: the line numbers on the call stack, from the deploy's file to the call of pyinfra."""
    lines = list[tuple[str, int]]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    lines.reverse()
    deploy = state.current_deploy_filename
    first = next((index for index, (file, _) in enumerate(lines) if file == deploy), len(lines) - 1) if deploy else 0
    order = [state.current_op_file_number] if pyinfra.is_cli else []
    return order + [line for file, line in lines[first:] if not file.startswith(PYINFRA_INSTALL_DIR)]
