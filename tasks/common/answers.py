"""Frames a node's answer to a fact: text before the answer is left out, and an answer without its end is refused.

A login shell, sudo or a profile may print text before an answer, and a connection may lose its end. So the command of each
fact, pyinfra's own ones, too, prints a mark first, and one with its exit code last. The marks are random: no answer contains
them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.connectors.util import CommandOutput, OutputLine

from tasks.common.commands import fail

_BEGIN = "printf '\\n%s\\n' {}; ( "
_END = "\n); code=$?; printf '+%s %s\\n' \"$code\" {}"
_reading: WeakKeyDictionary[Host, type] = WeakKeyDictionary()


@frozen
class Answer:
    """The lines that a command has printed, and its exit code."""

    lines: list[str]
    code: int


@contextmanager
def reading(host: Host, fact: type) -> Iterator[None]:
    """While this fact is read from the host."""
    outer = _reading.get(host)
    _reading[host] = fact
    try:
        yield
    finally:
        if outer is None:
            del _reading[host]
        else:
            _reading[host] = outer


def being_read(host: Host) -> type | None:
    """The fact that is being read from the host. Without one, a command belongs to an operation, which changes the host."""
    return _reading.get(host)


def new_mark() -> str:
    """A mark that nothing else contains."""
    return secrets.token_hex(16)


def framed(command: str | StringCommand, mark: str) -> StringCommand:
    """A command, between its marks, for a shell that goes on with the next line."""
    return StringCommand(_BEGIN.format(mark), command, _END.format(mark), _separator="")


def whole(lines: list[str], mark: str) -> list[Answer]:
    """The answers that have both marks."""
    end = re.compile(rf"(.*)\+(\d+) {mark}", re.DOTALL)
    answers: list[Answer] = []
    answer: list[str] | None = None
    for line in lines:
        if line == mark:
            answer = []
        elif answer is not None and (last := end.fullmatch(line)):
            answers.append(Answer([*answer, last[1]] if last[1] else answer, int(last[2])))
            answer = None
        elif answer is not None:
            answer.append(line)
    return answers


Send = Callable[[StringCommand], tuple[bool, CommandOutput]]


def ask(command: str | StringCommand, send: Send) -> tuple[bool, CommandOutput, str]:
    """Send a command in its frame: whether it succeeded, what it printed, and what its answer lacks; empty: it is whole."""
    mark = new_mark()
    succeeded, output = send(StringCommand("{", framed(command, mark), '; exit "$code"; }'))
    answers = whole(output.stdout_lines, mark)
    errors = [line for line in output.combined_lines if line.buffer_name != "stdout"]
    lines = [OutputLine("stdout", line) for each in answers for line in each.lines]
    lacks = "" if answers else "end" if mark in output.stdout_lines else "beginning"
    return succeeded and not lacks, CommandOutput(lines + errors), lacks if succeeded else ""


def asked(host: Host, command: str | StringCommand, send: Send) -> tuple[bool, CommandOutput]:
    """Ask for a fact. An answer that is not whole fails the host, by name."""
    succeeded, output, lacks = ask(command, send)
    if lacks:
        fact: Any = being_read(host)
        fail(
            host,
            f"the node's answer to {fact.__name__} has no {lacks}, so none of it is believed; log in, and see whether the "
            "login shell ends early, or a disk is full (df)",
        )
    return succeeded, output
