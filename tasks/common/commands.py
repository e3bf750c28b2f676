"""Commands for operations to yield."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import logger
from pyinfra.api.command import FunctionCommand, PyinfraCommand, QuoteString, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import State

from agent.report.printable import printable

Commands = Generator[PyinfraCommand, None, None]


def script(text: str, *arguments: str) -> StringCommand:
    """Run a constant shell script; data reach it as $1, $2..., never as text. It ends at the first failed command."""
    return StringCommand("sh", "-ec", QuoteString(text), "sh", *map(QuoteString, arguments))


def refuse(message: str) -> FunctionCommand:
    """Print the message and fail the host, and no other: an exception would stop the deploy of them all."""
    return FunctionCommand(_fail, (message,), {})


# pyinfra calls a function with these two names in place, and takes its result as the command's.
def _fail(state: State, host: Host, message: str) -> bool:
    for line in message.splitlines():
        host.log_styled(printable(line), fg="red", log_func=logger.error)
    return False
