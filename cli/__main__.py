"""The command line, and the wiring of everything."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import click

from agent.report.printable import printable
from agent.runtime import fault, version
from cli.commands import Commands

SERVICES = ("run", "worker", "reporter")
"""The commands that systemd units run. An unexpected exception ends them with its traceback, for the journal."""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes, examples and shell completion of each command: trackbed COMMAND --help, and docs/cli.md.",
)
@click.version_option(version(), prog_name="trackbed")
def cli() -> None:
    """Keep this node's VFs, netdevs and interrupts as its spec says, and say whether it is ready."""


def main() -> None:
    """Run the command line. Every error is one message and exit code 1: click's own 2 would mean "changes" to `plan`."""
    _open_outputs()
    # https://no-color.org: set to anything but an empty text. None: click uses colours if it writes to a terminal.
    color = False if os.environ.get("NO_COLOR") else None
    try:
        cli.main(prog_name="trackbed", standalone_mode=False, color=color)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(1)
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, click.UsageError) and error.ctx is not None:
            message = f"{message.removesuffix('.')}; see: {error.ctx.command_path} --help"
        # click puts the choices of an argument on lines of their own.
        for line in f"trackbed: {message}".replace("\n\t", " ").splitlines():
            click.echo(printable(line), err=True)
        sys.exit(1)
    except click.Abort:
        sys.exit(130)
    except PermissionError as error:
        click.echo(printable(f"trackbed: {error}; run as root"), err=True)
        sys.exit(1)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room" if full else "if a device went away meanwhile, run it again"
        # The commands name each other file that they write.
        is_output = full and error.filename is None
        what = f"standard output cannot be written: {error.strerror}" if is_output else str(error)
        click.echo(printable(f"trackbed: {what}; {remedy}"), err=True)
        _discard_output()
        sys.exit(1)
    except Exception as error:
        if sys.argv[1:2] and sys.argv[1] in SERVICES:
            raise
        click.echo(printable(f"trackbed: {fault(error)}"), err=True)
        sys.exit(1)


def _open_outputs() -> None:
    """Replace closed outputs by /dev/null. Standard output shows a character that its encoding lacks as an escape."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discard the text that standard output has not taken: Python would try to write it at its end, and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
