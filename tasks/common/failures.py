"""What fails one host, and how many hosts may fail before the deploy of all hosts stops.

pyinfra 3.10 ends the deploy of all hosts at the first exception in the code of one host. It goes on with a fact's default after
the fact could not be read: a file that could not be read looks like one that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any

from click import ClickException
from gevent import GreenletExit
from pyinfra import logger
from pyinfra.api.config import Config
from pyinfra.api.exceptions import ArgumentTypeError, DeployError, PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import host

from tasks.common.commands import fail

PERCENT = 10
"""If more hosts have failed, the fault is not a single node's."""


class NodeError(Exception):
    """Deploy code cannot go on with this node, because of what the node has answered. Only its host fails.

    The message names host, key and remedy. For a fault of the inventory, raise DeployError: it ends the deploy of all hosts
    before any node is changed.
    """


class HostFailed(Exception):
    """The host has failed already, and pyinfra has printed why."""


def limit(config: Config, hosts: int) -> None:
    """Stop the deploy of all hosts if more than PERCENT of them, and more than one, have failed.

    `--fail-percent` overrides it. Without -y, pyinfra sets 0, and asks after each failure whether to go on.
    """
    if hosts and config.FAIL_PERCENT is None:
        config.FAIL_PERCENT = max(PERCENT, ceil(100 / hosts))


def loading(load: Callable[..., None]) -> Callable[..., None]:
    """_parallel_load_hosts: what the deploy code of one host raises fails this host."""

    @wraps(load)
    def load_alone(state: State, callback: Callable[[], object], name: str) -> None:
        load(state, lambda: prepared(state, callback), name)

    return load_alone


def running(run: Callable[[State, Host, str], Any]) -> Callable[[State, Host, str], Any]:
    """_run_host_op_with_context: what an operation raises on one host fails this host."""

    @wraps(run)
    def run_alone(state: State, host: Host, op_hash: str) -> Any:
        try:
            return run(state, host, op_hash)
        except Exception as error:
            # This runs in a greenlet of the host. If it raised the error that too many hosts have failed, gevent would print a
            # traceback. pyinfra raises that error again after the operation, and ends the deploy.
            if host not in state.failed_hosts:
                if ends_all(error):
                    raise
                _say(host, error)
            state.trigger_callbacks("operation_host_error", host, op_hash)
            return False

    return run_alone


def prepared(state: State, code: Callable[[], object]) -> None:
    """Run deploy code for the current host. An exception that concerns only this host fails it, and ends its greenlet.

    :raises PyinfraError: the deploy of all hosts ends.
    """
    this = state.inventory.get_host(host.name)
    try:
        code()
    except Exception as raised:
        # pyinfra_cli wraps what the code of a file raises, unless it is a PyinfraError.
        error = getattr(raised, "exception", raised) if isinstance(raised, ClickException) else raised
        if ends_all(error):
            raise
        _say(this, error)
        if this not in state.failed_hosts:
            state.fail_hosts({this})  # type: ignore[no-untyped-call]
        # pyinfra then neither prints a traceback nor counts the host as ready.
        raise GreenletExit from None


def ends_all(error: Exception) -> bool:
    """Whether an exception is a fault of the inventory or of the control host, or says that too many hosts have failed.

    pyinfra raises PyinfraError itself for the last of these. Its subclasses also describe one host, such as an operation that
    finds a folder in the place of its file.
    """
    return type(error) is PyinfraError or isinstance(error, DeployError | ArgumentTypeError | ClickException)


def placing(find: Callable[[TracebackType], Any]) -> Callable[[TracebackType], Any]:
    """get_frame_line_from_tb: where in a deploy's files an error was raised; None: in Trackbed's.

    Such an error names the place in the inventory. pyinfra would first name the line of Trackbed that found the fault.
    """

    @wraps(find)
    def place(traceback: TracebackType) -> Any:
        from tasks.common.archive import ROOT  # archive.py imports this module

        found = find(traceback)
        return None if found and Path(found.filename).is_relative_to(ROOT) else found

    return place


def _say(host: Host, error: Exception) -> None:
    if isinstance(error, HostFailed):
        return
    if isinstance(error, NodeError):
        fail(host, str(error))
        return
    logger.debug("", exc_info=error)
    fail(
        host, f"the deploy cannot go on with this host: {error!r}; --debug shows where; log in, and see what it answers"
    )
