"""The base class of Trackbed's facts. If a node's output cannot be parsed, only that node fails.

pyinfra ends the whole deploy at any exception of a fact except FactProcessError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

import cattrs
from paramiko.file import BufferedFile
from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase as _FactBase

from agent.report.printable import printable
from tasks.common.commands import script

T = TypeVar("T")

_UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, RecursionError, StopIteration),
    OverflowError,  # float() of a whole number that is too large
    cattrs.BaseValidationError,
)
SHOWN = 400
"""Characters of the error that are printed; the node may have written it."""


class FactBase(_FactBase[T]):
    """A fact: a script, and ``process``, which may raise the usual exceptions of parsers: they become FactProcessError.

    Without ``process`` the fact is what the script prints. If that is nothing, the fact is its ``default``: None, unless a
    subclass says otherwise.
    """

    shell = ""
    """The script."""

    words: tuple[str, ...] = ()
    """The script's arguments. Where tests give the root folder as a further one, a node has none."""

    prefetched = True
    """Whether an answer may be up to two minutes old (tasks/common/prefetch.py). A fact about the users of a device sets this
    to False, since a job may start to use the device in that time."""

    def command(self, *_: Any, **__: Any) -> StringCommand:
        """The command. A fact whose reader gives it arguments has its own."""
        return self.script(self.shell, *self.words)

    def script(self, text: str, *arguments: str) -> StringCommand:
        """A script that is named after the fact."""
        return script(text, *arguments, name=type(self).__name__)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "process" in vars(cls):
            setattr(cls, "process", _guarded(cls.__name__, cls.process))  # noqa: B010  mypy knows no method that is given


def _guarded(name: str, process: Callable[[Any, list[str]], T]) -> Callable[[Any, list[str]], T]:
    @wraps(process)
    def guarded(self: Any, output: list[str]) -> T:
        try:
            return process(self, output)
        except _UNREADABLE as error:
            message = printable(repr(error))[:SHOWN]
            # pyinfra prints the cause, where there is one.
            raise FactProcessError(
                f"the node's answer to {name} cannot be read: {message}; log in, and see what it is"
            ) from None

    return guarded


class Yes(FactBase[bool]):
    """A fact that is whether its script prints anything."""

    default = bool

    def process(self, output: list[str]) -> bool:
        """Take any line for a yes."""
        return True


class Lines(FactBase[list[str]]):
    """A fact that is the lines of its answer."""

    default = list

    def process(self, output: list[str]) -> list[str]:
        """Return the lines unchanged."""
        return output


def reading(read: Callable[..., None]) -> Callable[..., None]:
    """read_buffer: a byte that is not UTF-8 is read as \\xNN.

    It ends the reader of pyinfra 3.10: the command still succeeds, and the lines before the byte count as the whole answer.
    """

    @wraps(read)
    def read_whole(name: str, io: Any, *arguments: Any, **named: Any) -> None:
        read(name, _lines(io), *arguments, **named)

    return read_whole


def _lines(io: Any) -> Iterator[str]:
    if isinstance(io, BufferedFile):
        # Otherwise paramiko decodes each line itself.
        io._flags |= BufferedFile.FLAG_BINARY  # type: ignore[attr-defined]
    for line in io:
        yield line.decode(errors="backslashreplace")
