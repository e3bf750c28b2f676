"""Commands for operations to yield."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import logger
from pyinfra.api.arguments import ConnectorArguments
from pyinfra.api.command import FunctionCommand, PyinfraCommand, QuoteString, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import OperationMeta
from pyinfra.api.state import State

from agent.report.printable import printable

Commands = Generator[PyinfraCommand, None, None]


BEGIN = """umask 022
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LC_ALL=C PATH"""
"""How each script begins, whatever the login has. Other users read what it makes (the reporter, networkd).

Without secure_path in sudoers(5) sudo keeps the user's PATH, often without sbin: a script would take a program for missing. And
it reads what programs print in English.
"""


def script(
    text: str, *arguments: str, name: str = "sh", limit: int | None = None, stdin: str | None = None
) -> StringCommand:
    """Run a constant shell script. Data are passed as $1, $2 and so on, never as text. The first failed command ends it.

    tests/shellcheck.py finds the text by this call, so the text is made of constants of its module.

    :param name: its $0, by which the shell's own errors and the tests call it.
    :param limit: the seconds that it may take; None: as long as any command (tasks/time_limits.py).
    :param stdin: its standard input, which is in no argument and no log.
    """
    own: ConnectorArguments = {} if limit is None else {"_timeout": limit}
    if stdin is not None:
        own["_stdin"] = stdin
    return StringCommand("sh", "-ec", QuoteString(f"{BEGIN}\n{text}"), name, *map(QuoteString, arguments), **own)


def changes(earlier: OperationMeta) -> bool:
    """Whether an earlier operation of this deploy has changed something; while pyinfra prepares, whether it will."""
    return earlier.did_change() if earlier.is_complete() else earlier.will_change


def refuse(message: str) -> FunctionCommand:
    """Print the message and fail this host. (An exception would stop the deploy of all hosts.)"""
    return FunctionCommand(_fail, (message,), {})


# pyinfra calls a function that has parameters `state` and `host` directly; its result says whether the command succeeded.
def _fail(state: State, host: Host, message: str) -> bool:
    return fail(host, message)


def fail(host: Host, message: str) -> bool:
    """Print the error of a function that pyinfra runs as a command; its result, False, fails the host."""
    for line in message.splitlines():
        host.log_styled(printable(line), fg="red", log_func=logger.error)
    return False


def warn(host: Host, message: str) -> None:
    """Print a warning about a host, and count it for pyinfra's summary."""
    host.log_styled(printable(message), fg="yellow", log_func=logger.warning)
    host.state.increment_warning_counter()
