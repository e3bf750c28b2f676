"""The command line, and the wiring of everything."""

from __future__ import annotations

import errno
import os
import sys

import click

from agent.commands import Commands
from agent.report.printable import printable
from agent.runtime import fault, version

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
            message += f"; see: {error.ctx.command_path} --help"
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
        click.echo(printable(f"trackbed: {error}; {remedy}"), err=True)
        sys.exit(1)
    except Exception as error:
        if sys.argv[1:2] and sys.argv[1] in SERVICES:
            raise
        click.echo(printable(f"trackbed: {fault(error)}"), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
