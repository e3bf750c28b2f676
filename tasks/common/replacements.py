"""Replaces functions and methods of pyinfra 3.10, and two of paramiko. docs/pyinfra.md says what each replacement gains.

No other module does so. tests/deploy/common/test_replacements.py fails if an upgrade of pyinfra makes one of them needless.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import FrameType
from typing import Any

import pyinfra
from pyinfra.api.config import Config
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import State
from pyinfra.api.util import PYINFRA_INSTALL_DIR
from pyinfra.connectors.util import CommandOutput

from tasks import disruption, time_limits
from tasks.common import (
    answers,
    connection,
    facts,
    failures,
    inventory,
    known_hosts,
    layers,
    lock,
    prefetch,
    progress,
    questions,
    shard,
    site,
    ssh_config,
    stopping,
)
from tasks.common.commands import fail
from tasks.kubernetes import maintenance


def replace() -> None:
    """For config.py: replace all of them in this process."""
    for place, replacement in REPLACEMENTS.items():
        owner, name = found(place)
        setattr(owner, name, replacement(getattr(owner, name)))


def found(place: str) -> tuple[Any, str]:
    """The module or class of a place, and the name in it."""
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    # pyinfra_cli replaces Python's threads by gevent's, and so is not imported above. pyinfra's command line has done so.
    owner: Any = import_module(module)
    for each in classes:
        owner = getattr(owner, each)
    return owner, name


def before_connect(hosts: Inventory, config: Config, limited: list[Host] | None) -> list[Host] | None:
    """Check the inventory, set what depends on the number of hosts, and handle the signals that stop a deploy.

    :param limited: the hosts that --limit and --exclude leave; None: all.
    :returns: those of them that are deployed; None: all. A shard may be empty.
    :raises PyinfraError: the inventory is wrong, or has too many hosts; with the remedy.
    """
    site.check()
    inventory.check(hosts, limited)
    limited = shard.limit(hosts, limited)
    # All hosts, since tasks compare the values of hosts that are not deployed now.
    faults = {host: layers.merge(host) for host in hosts}
    if wrong := [fault for host in (hosts if limited is None else limited) for fault in faults[host]]:
        raise PyinfraError("\n".join(wrong))
    count = len(hosts if limited is None else limited)
    failures.limit(config, count)
    connection.allow_open_files(count)
    connection.allow_name_lookups(config.PARALLEL)
    stopping.handle_signals()
    return limited


def _initialising(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_checked(self: State, hosts: Inventory, config: Config, initial_limit: list[Host] | None = None) -> None:
        init(self, hosts, config, initial_limit=before_connect(hosts, config, initial_limit))
        for handler in (progress.Progress(), disruption.Summary(), prefetch.Connections(), maintenance.Cordoned()):
            self.add_callback_handler(handler)  # type: ignore[no-untyped-call]

    return init_checked


def _getting(get_fact: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_fact)
    def get_in_time(self: Host, fact: type, *arguments: Any, **named: Any) -> Any:
        # With the inventory's own _ignore_errors pyinfra would go on with the default.
        asked = {"_timeout": time_limits.of(self).fact, "_ignore_errors": False}
        with answers.reading(self, fact), progress.step(self, f"reading {fact.__name__}"):
            value = get_fact(self, fact, *arguments, **{**asked, **named})
        if self in self.state.failed_hosts:
            raise failures.HostFailed
        return value

    return get_in_time


def _running(run: Callable[..., tuple[bool, CommandOutput]]) -> Callable[..., tuple[bool, CommandOutput]]:
    @wraps(run)
    def run_in_time(
        self: Host, command: Any, print_output: bool = False, print_input: bool = False, **arguments: Any
    ) -> tuple[bool, CommandOutput]:
        limit = arguments.get("_timeout") or time_limits.of(self).command
        shown = {"print_output": print_output, "print_input": print_input}

        def send(command: Any, **given: Any) -> tuple[bool, CommandOutput]:
            return run(self, command, **{**given, "_timeout": limit})

        def send_or_fail(command: Any) -> tuple[bool, CommandOutput]:
            return time_limits.bounded(self, limit, lambda: send(command, **shown, **arguments))

        known = prefetch.of(self)
        if (fact := answers.being_read(self)) is None:
            if known:
                known.end()
            return send_or_fail(command)

        def send_in_time(command: Any, **given: Any) -> tuple[bool, CommandOutput]:
            return time_limits.within(limit, lambda: send(command, **given))

        def ask() -> tuple[bool, CommandOutput]:
            return answers.asked(self, command, send_or_fail)

        return known.run(fact, command, arguments, send_in_time, ask) if known else ask()

    return run_in_time


def _uploading(put_file: Callable[..., bool]) -> Callable[..., bool]:
    in_time = time_limits.transferring(put_file)

    @wraps(put_file)
    def put_noted(self: Host, *arguments: Any, **named: Any) -> bool:
        if known := prefetch.of(self):
            known.end()
        try:
            return in_time(self, *arguments, **named)
        except OSError as error:
            # sftp has no error of its own for this, and a file that is too short is seen only at its end.
            if error.errno is None and not isinstance(error, TimeoutError):
                fail(
                    self,
                    f"a file cannot be uploaded: {error}; see whether the disk or the quota is used up (df /tmp, quota)",
                )
            raise

    return put_noted


def order_from_stack(state: State) -> list[int]:
    """The sort key of an operation: the line numbers on the call stack, from the deploy's file to the call of pyinfra.

    pyinfra's function returns the same, and reads the source files of the whole stack.
    """
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


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "pyinfra.api.state:State.init": _initialising,
    "pyinfra.api.host:Host.get_fact": _getting,
    "pyinfra.api.host:Host.run_shell_command": _running,
    "pyinfra.api.host:Host.put_file": _uploading,
    "pyinfra.api.host:Host.get_file": time_limits.transferring,
    "pyinfra.api.operations:_run_host_op_with_context": failures.running,
    "pyinfra.api.operation:get_operation_order_from_stack": lambda _: order_from_stack,
    "pyinfra.api.arguments:all_global_arguments": cache,
    "pyinfra.connectors.base:host_to_connector_data": connection.settings,
    "pyinfra.connectors.ssh:SSHConnector.connect": connection.connecting,
    "paramiko.client:SSHClient.connect": known_hosts.judging,
    "pyinfra.connectors.sshuserclient.client:SSHClient.connect": connection.jumping,
    "pyinfra.connectors.sshuserclient.client:append_hostkey": known_hosts.noting,
    "pyinfra.connectors.sshuserclient.client:get_host_keys": known_hosts.reading,
    "pyinfra.connectors.sshuserclient.config:_expand_include_statements": ssh_config.including,
    "pyinfra.connectors.sshuserclient.config:FakeInvoke.run": ssh_config.executing,
    "paramiko.config:SSHConfig._get_matches": ssh_config.matching,
    "pyinfra.connectors.ssh_util:getpass": questions.asking_for_key,
    "pyinfra.connectors.util:SUDO_PASSWORD_REQUIRED_LINES": lambda known: (*known, *questions.SUDO_RS),
    "pyinfra.connectors.util:getpass": questions.asking_for_sudo,
    "pyinfra.connectors.util:read_buffer": facts.reading,
    "pyinfra.progress:_print_spinner": progress.showing,
    "pyinfra_cli.cli:_do_confirm": questions.asking_to_go_on,
    "pyinfra_cli.cli:_set_fail_prompts": questions.asking_after_failures,
    "pyinfra_cli.cli:run_ops": lock.running,
    "pyinfra_cli.exceptions:get_frame_line_from_tb": failures.placing,
    "pyinfra_cli.inventory:make_inventory_from_files": site.reading,
    "pyinfra_cli.inventory:_get_groups_from_filename": lambda _: inventory.groups_of_file,
    "pyinfra_cli.util:_parallel_load_hosts": failures.loading,
}
"""What is replaced, and the function that makes the replacement of the original."""
