"""pyinfra's questions, where there is no terminal, as in a job of cron: each is an error instead of a traceback."""

from __future__ import annotations

from collections.abc import Callable
from getpass import getpass
from typing import Any

import click
from paramiko import SSHException
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.connectors import ssh_util, util


def need_answers() -> None:
    """For config.py: a password that nobody can enter fails its host only. Any other question ends the deploy."""
    # Not above: the import replaces Python's threads by gevent's. pyinfra's command line, which runs this, has done so.
    from pyinfra_cli import cli  # type: ignore[import-untyped]

    cli._do_confirm = _or_raise(
        cli._do_confirm, PyinfraError, "there is no terminal to answer; give -y, with which pyinfra does not ask"
    )
    ssh_util.getpass = _or_raise(  # type: ignore[attr-defined]
        getpass,
        ConnectError,
        "the private key is encrypted, and there is no terminal to enter its password: have ssh-agent hold the key, and leave "
        "out ssh_key, or give ssh_key_password",
    )
    # For this exception of a command pyinfra fails the host.
    util.getpass = _or_raise(  # type: ignore[attr-defined]
        getpass,
        SSHException,
        "sudo asks for a password, and there is no terminal to enter it: log in as root, or allow the login user to run sudo "
        "without one (NOPASSWD, sudoers(5))",
    )


def refuse_answers_to_a_dry_run() -> None:
    """For config.py: with -y pyinfra does not print the changes, so `--dry -y` would show nothing. Its JSON is complete."""
    context = click.get_current_context(silent=True)
    given = context.params if context else {}
    if given.get("dry") and given.get("yes") and not given.get("json_output"):
        raise PyinfraError("--dry with -y prints no changes; leave out -y: a dry run asks nothing")


def _or_raise(ask: Callable[[str], Any], error: type[Exception], message: str) -> Any:
    def ask_or_raise(question: str) -> Any:
        try:
            return ask(question)
        except EOFError:
            raise error(message) from None

    return ask_or_raise
