"""Makes an error of each question of pyinfra's that nobody can answer, as in a cron job. pyinfra prints a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

import click
from paramiko import SSHException
from pyinfra.api.config import Config
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.state import State

Ask = Callable[[str], object]


def check_options() -> None:
    """For config.py: refuse options with which pyinfra asks where nobody answers, shows nothing, hides failures, or raises.

    With -y pyinfra does not print the changes, so `--dry -y` would show nothing. Its JSON is complete.

    :raises PyinfraError: the options are of these.
    """
    context = click.get_current_context(silent=True)
    given = context.params if context else {}
    is_deploy = given.get("operations", ("",))[0].endswith(".py")
    if alone := [each for each in given.get("data", ()) if "=" not in each]:
        raise PyinfraError(f"--data {alone[0]!r} has no value; give it as --data key=value")
    if (parallel := given.get("parallel")) is not None and parallel < 1:
        raise PyinfraError(f"--parallel {parallel} is no number of hosts; give 1 or more, or leave it out")
    if is_deploy and given.get("no_wait"):
        raise PyinfraError("with --no-wait pyinfra ends with 0 although operations have failed; leave it out")
    if given.get("json_output"):
        return
    if given.get("dry") and given.get("yes"):
        raise PyinfraError("--dry with -y prints no changes; leave out -y: a dry run asks nothing")
    asks = is_deploy and not any(given.get(option) for option in ("yes", "dry", "debug_operations", "debug_facts"))
    if asks and not sys.stdin.isatty():
        raise PyinfraError("there is no terminal to answer pyinfra's question; give -y, which answers it, or --dry")


def asking_after_failures(ask: Callable[[State, Config], None]) -> Callable[[State, Config], None]:
    """_set_fail_prompts: after a failure, whether to go on is only asked where somebody can answer.

    Elsewhere, as in a dry run of a CI, the hosts that may fail are as many as with -y (tasks/common/failures.py).
    """

    @wraps(ask)
    def ask_on_terminal(state: State, config: Config) -> None:
        if sys.stdin.isatty():
            ask(state, config)

    return ask_on_terminal


def asking(error: Exception) -> Callable[[Ask], Ask]:
    """The error, if there is no terminal, or its user presses Ctrl-D."""

    def replacement(ask: Ask) -> Ask:
        @wraps(ask)
        def ask_or_fail(question: str) -> object:
            try:
                return ask(question)
            except EOFError:
                raise error from None

        return ask_or_fail

    return replacement


asking_to_go_on = asking(PyinfraError("the question had no answer (Ctrl-D), so the deploy stops here"))
asking_for_key = asking(
    ConnectError(
        "the private key is encrypted, and there is no terminal to enter its password: have ssh-agent hold the key, and leave "
        "out ssh_key, or give ssh_key_password"
    )
)
SUDO_RS = ("sudo: interactive authentication is required", "sudo: Authentication required but not attempted")
"""What sudo-rs 0.2.15 prints without a password; the second, if it cannot run the program that should tell it one.

Ubuntu 26.04 has sudo-rs as sudo. pyinfra knows the words of sudo-rs 0.2.8, which calls itself sudo-rs.
"""

asking_for_sudo = asking(
    SSHException(
        "sudo asks for a password, and there is no terminal to enter it: log in as root, or allow the login user to run sudo "
        "without one (NOPASSWD, sudoers(5)); if one is given, the program that tells it to sudo could not run: see whether "
        "/tmp is mounted noexec"
    )
)
