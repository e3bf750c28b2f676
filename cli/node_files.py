"""The files of the node: where they are, and its spec."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent.documents import LARGEST_SPEC, read, too_large
from agent.report import names
from agent.spec.node import NodeSpec, SpecError, parse
from cli.commands import Failed

SPEC = Path(names.SPEC_FILE)
RUN = Path(names.RUN_FOLDER)
STATE = Path(names.STATE_FOLDER)

spec_option = click.option(
    "--spec",
    "spec_file",
    metavar="FILE",
    default=None,
    help=f"A spec to use instead of {SPEC}; - is standard input.",
)


def read_spec(spec_file: str | None) -> NodeSpec:
    """Read the given spec ("-" is standard input), or the node's.

    :raises Failed: it does not exist, or is wrong.
    """
    given = str(SPEC) if spec_file is None else spec_file
    name = "stdin" if given == "-" else given
    try:
        return parse(_read_stdin() if given == "-" else read(Path(given), LARGEST_SPEC), name)
    except SpecError as error:
        raise Failed(str(error)) from None
    except FileNotFoundError as error:
        absent = "run the deploy, or give --spec FILE" if spec_file is None else "check the path"
        raise Failed(f"{name}: {error.strerror}; {absent}") from None
    except UnicodeDecodeError as error:
        raise Failed(f"{name}: not UTF-8 text: {error}") from None
    except PermissionError as error:
        raise Failed(f"{name}: {error.strerror}; run as root") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise Failed(f"{name!r} cannot be read: {said}; give a file with a spec") from None


def _read_stdin() -> str:
    if sys.stdin is None:
        raise Failed("stdin is closed; give a spec there, or a file")
    text = sys.stdin.buffer.read(LARGEST_SPEC + 1)
    if len(text) > LARGEST_SPEC:
        raise ValueError(too_large(LARGEST_SPEC))
    return text.decode()


def present_spec() -> NodeSpec | None:
    """The node's spec; None if it has none that can be read."""
    try:
        return read_spec(None)
    except Failed:
        return None
