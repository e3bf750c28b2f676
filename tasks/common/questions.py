"""pyinfra's questions, where there is no terminal, as in a job of cron: each is an error instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

import click
from paramiko import SSHException
from pyinfra.api.exceptions import ConnectError, PyinfraError

Ask = Callable[[str], str]


def check_options() -> None:
    """For config.py: refuse options with which pyinfra would ask nobody, or show nothing.

    With -y pyinfra does not print the changes, so `--dry -y` would show nothing. Its JSON is complete.

    :raises PyinfraError: the options are of these.
    """
    context = click.get_current_context(silent=True)
    given = context.params if context else {}
    if given.get("json_output"):
        return
    if given.get("dry") and given.get("yes"):
        raise PyinfraError("--dry with -y prints no changes; leave out -y: a dry run asks nothing")
    is_deploy = given.get("operations", ("",))[0].endswith(".py")
    asks = is_deploy and not any(given.get(option) for option in ("yes", "dry", "debug_operations", "debug_facts"))
    if asks and not sys.stdin.isatty():
        raise PyinfraError("there is no terminal to answer; give -y, with which pyinfra does not ask, or --dry")


def asking(error: Exception) -> Callable[[Ask], Ask]:
    """getpass: the error, if there is no terminal. pyinfra then fails the host."""

    def replacement(ask: Ask) -> Ask:
        @wraps(ask)
        def ask_or_fail(question: str) -> str:
            try:
                return ask(question)
            except EOFError:
                raise error from None

        return ask_or_fail

    return replacement


asking_for_key = asking(
    ConnectError(
        "the private key is encrypted, and there is no terminal to enter its password: have ssh-agent hold the key, and leave "
        "out ssh_key, or give ssh_key_password"
    )
)
asking_for_sudo = asking(
    SSHException(
        "sudo asks for a password, and there is no terminal to enter it: log in as root, or allow the login user to run sudo "
        "without one (NOPASSWD, sudoers(5))"
    )
)
