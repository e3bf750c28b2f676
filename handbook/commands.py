"""The reference of the command lines: options and texts from click, and the exit codes from each command's help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from cli.__main__ import cli
from handbook.markdown import cell, code, table
from lab.__main__ import main as lab


def page() -> str:
    """Exit codes of the node's and the fleet's commands, then each command; the lab's last.

    :raises ValueError: the help of a command does not say its exit code.
    """
    commands = [*_commands("trackbed", cli)]
    codes = [
        (f"[{code(name)}](#{_anchor(name)})", cell(exit_code(name, command)))
        for name, command in commands
        if not isinstance(command, click.Group)
    ]
    sections = [_section(*each) for each in (*commands, *_commands("python -m lab", lab))]
    return "\n".join(["## Exit codes", "", table(("Command", "Exit code"), codes), *sections])


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """The command and those in it, except hidden ones, with their whole names."""
    if command.hidden:
        return
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            inner_command = command.get_command(context, inner)
            if inner_command is not None:
                yield from _commands(f"{name} {inner}", inner_command)


def exit_code(name: str, command: click.Command) -> str:
    """The exit codes that a command's help names."""
    said = re.search(r"Exit code: (.+?)(?:\n\n|\Z)", inspect.cleandoc(command.help or ""), re.DOTALL)
    if said is None:
        raise ValueError(f"the help of {name} does not say its exit code: give it a paragraph 'Exit code: ...'")
    return said[1]


def _section(name: str, command: click.Command) -> str:
    paragraphs = [_paragraph(text) for text in re.split(r"\n{2,}", inspect.cleandoc(command.help or ""))]
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    rows = [
        (names, meaning) for parameter in command.params if (row := _parameter(parameter)) for names, meaning in [row]
    ]
    parts = [f"## `{name}`\n", f"```text\n{usage}\n```\n", *(f"{text}\n" for text in paragraphs)]
    return "\n".join([*parts, table(("Option", "Meaning"), rows)] if rows else parts)


def _paragraph(text: str) -> str:
    if example := re.fullmatch(r"Examples?: (.+)", text, re.DOTALL):
        return f"```console\n{inspect.cleandoc(example[1])}\n```"
    if text.startswith("\b"):
        return f"```text\n{text[1:].strip(chr(10))}\n```"
    return cell(text)


def _parameter(parameter: click.Parameter) -> tuple[str, str] | None:
    if not isinstance(parameter, click.Option):
        return None
    if parameter.hidden:
        return None
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = "" if parameter.is_flag else f" {parameter.make_metavar(click.Context(click.Command('')))}"
    default = parameter.default
    given = isinstance(default, str | int | float) and not isinstance(default, bool)
    stated = f" Default: {code(default)}." if given and not callable(default) else ""
    return code(names + value), cell(parameter.help or "") + stated


def _anchor(name: str) -> str:
    return re.sub(r"[^\w -]", "", name).lower().replace(" ", "-")
