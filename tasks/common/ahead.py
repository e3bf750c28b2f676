"""Asks a node ahead: one message has all the commands of facts that the last deploy sent to it one by one.

pyinfra 3.10 sends a command for each fact, and each is a channel of SSH, a login shell and a shell. A deploy that finds nothing
to do asks some fifty facts. So the commands are kept on the control host, and the next deploy's first fact sends all of them.
What is kept only says what is asked, and when: a fact that the list lacks is asked by itself.

An answer is used only before this deploy changes anything on the node, in the phase of pyinfra that asked (prepare or execute),
and for a few seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import time
from functools import cache
from pathlib import Path
from typing import Any

import click
from attrs import define, field
from pyinfra import logger
from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.connectors.util import CommandOutput, OutputLine

from agent.documents import load
from agent.runtime import write_atomically
from tasks.common.archive import ROOT

USABLE_S = 30.0
"""Seconds for which an answer is used. After that all are asked again: the deploy of a large fleet takes minutes."""

LONGEST_ANSWER = 16 << 10
"""Characters. A longer answer, as the list of all packages, is asked by itself: the answers of all hosts are in memory."""

LARGEST_FILE = 4 << 20

# Each command has a shell of its own, as when it is sent alone. The mark is random, so that no answer can have it.
_ONE = """\
answer=$({sh} -c {command} </dev/null 2>/dev/null; echo "+$?")
printf '%s\\n%s\\n' {mark} "$answer"
"""


def learn(state: State) -> None:
    """Have a deploy ask ahead, and keep what it asks. For config.py.

    pyinfra makes its list of callbacks only when it knows the inventory.
    """
    context = click.get_current_context(silent=True)
    deploy = "\n".join(context.params.get("operations", ())) if context else ""
    init = state.init

    def init_with_questions(*arguments: Any, **named: Any) -> None:
        init(*arguments, **named)
        state.add_callback_handler(_Connections(deploy))  # type: ignore[no-untyped-call]

    state.init = init_with_questions  # type: ignore[method-assign]


class _Connections(BaseStateCallback):
    """What pyinfra calls when a host connects, and when it disconnects."""

    def __init__(self, deploy: str) -> None:
        self._deploy = deploy
        self._questions: dict[str, Questions] = {}

    def host_connect(self, state: State, host: Host) -> None:  # type: ignore[override]
        """A host is connected: its facts pass through here from now on. It may be connected again after a reboot."""
        if host.name in self._questions:
            self._questions[host.name].forget()
        else:
            self._questions[host.name] = Questions(state, host, _file(self._deploy, host.name))

    def host_disconnect(self, state: State, host: Host) -> None:  # type: ignore[override]
        """A host is done, or boots again."""
        if host.name in self._questions and host not in state.failed_hosts:
            self._questions[host.name].keep()


def _file(deploy: str, host_name: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trackbed" / "questions"
    name = hashlib.sha256("\n".join((deploy, host_name)).encode()).hexdigest()
    return folder / f"{name}.json"


@cache
def _code() -> str:
    """The code that asks. Its questions are of no use to another version."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@define
class Questions:
    """The facts that one host is asked."""

    _state: State
    _host: Host
    _file: Path
    _learned: dict[str, list[str]] = field(init=False)
    """By phase, what the last deploy asked."""
    _asked: dict[str, dict[str, None]] = field(init=False, factory=dict)
    """The same of this one; the keys are in the order in which they were asked."""
    _fact: type | None = field(init=False, default=None)
    """The fact that is being asked. Without one, a command is an operation's, which changes the node."""
    _arguments: dict[str, Any] | None = field(init=False, default=None)
    _changed: bool = field(init=False, default=False)
    _answers: dict[str, list[str]] = field(init=False, factory=dict)
    _answered: tuple[str, float] | None = field(init=False, default=None)
    """The phase that asked ahead, and when."""

    def __attrs_post_init__(self) -> None:
        self._learned = self._read()
        get_fact, run, put_file = self._host.get_fact, self._host.run_shell_command, self._host.put_file

        def asked(fact: type, *arguments: Any, **named: Any) -> Any:
            outer, self._fact = self._fact, fact
            try:
                return get_fact(fact, *arguments, **named)
            finally:
                self._fact = outer

        def ran(
            command: Any, print_output: bool = False, print_input: bool = False, **arguments: Any
        ) -> tuple[bool, CommandOutput]:
            answer = self._answer(run, command, arguments)
            if answer is not None:
                return True, CommandOutput([OutputLine("stdout", line) for line in answer])
            succeeded, output = run(command, print_output=print_output, print_input=print_input, **arguments)
            if sum(map(len, output.stdout_lines)) > LONGEST_ANSWER:
                self._asked.get(self._phase(), {}).pop(_text(command) or "", None)
            return succeeded, output

        def put(*arguments: Any, **named: Any) -> bool:
            self._change()
            return put_file(*arguments, **named)

        self._host.get_fact = asked  # type: ignore[method-assign, assignment]
        self._host.run_shell_command = ran  # type: ignore[method-assign]
        self._host.put_file = put  # type: ignore[method-assign]

    def forget(self) -> None:
        """Use no answer any more."""
        self._answers, self._answered = {}, None

    def keep(self) -> None:
        """Write what was asked, for the next deploy."""
        stages = self._learned | {phase: list(asked) for phase, asked in self._asked.items()}
        if stages == self._learned:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps({"code": _code(), "phases": stages}))

    def _read(self) -> dict[str, list[str]]:
        try:
            kept = load(self._file.read_bytes(), LARGEST_FILE)
            if kept["code"] == _code():
                return {str(phase): [str(command) for command in asked] for phase, asked in kept["phases"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            logger.debug(f"{self._file}: {error!r}; it is written anew")
        return {}

    def _phase(self) -> str:
        """The phase of pyinfra. With -y it checks for no changes while it prepares, so it asks less."""
        stage = self._state.current_stage.name.lower()
        checks = self._state.should_check_for_changes()  # type: ignore[no-untyped-call]
        return stage if self._state.is_executing or checks else f"{stage} -y"

    def _change(self) -> None:
        self._changed = True
        self.forget()

    def _answer(self, run: Any, command: Any, arguments: dict[str, Any]) -> list[str] | None:
        """The answer that a fact's command has had ahead; None: it must be sent."""
        if self._fact is None:
            self._change()
            return None
        text = _text(command)
        if text is None or not getattr(self._fact, "asked_ahead", True):
            return None
        # Of another user, or with input: asked by itself.
        if self._arguments is None:
            self._arguments = arguments
        if arguments != self._arguments or arguments.get("_stdin"):
            return None
        phase = self._phase()
        self._asked.setdefault(phase, {})[text] = None
        if not self._changed and not self._is_usable(phase):
            self._ask(run, phase, text, arguments)
        return self._answers.get(text)

    def _is_usable(self, phase: str) -> bool:
        then, when = self._answered or ("", 0.0)
        return then == phase and time.monotonic() - when < USABLE_S

    def _ask(self, run: Any, phase: str, text: str, arguments: dict[str, Any]) -> None:
        """Send all commands that the phase is known to ask, if this one is among them."""
        self.forget()
        commands = self._learned.get(phase, [])
        if text not in commands or len(commands) < 2:
            return
        mark = secrets.token_hex(16)
        shell = shlex.quote(arguments.get("_shell_executable") or "sh")
        script = "".join(_ONE.format(sh=shell, command=shlex.quote(each), mark=mark) for each in commands)
        asked_at = time.monotonic()
        # By stdin: the kernel allows an argument no more than 128 KiB.
        succeeded, output = run(StringCommand("sh"), **{**arguments, "_stdin": script})
        answers = parse(output.stdout_lines, mark)
        if succeeded and len(answers) == len(commands):
            self._answers = {each: answer for each, answer in zip(commands, answers, strict=True) if answer is not None}
        self._answered = phase, asked_at


def _text(command: Any) -> str | None:
    """The command as it is sent; None: it has a secret, which is written nowhere."""
    if isinstance(command, str):
        return command
    raw = command.get_raw_value()
    return str(raw) if raw == command.get_masked_value() else None


def parse(lines: list[str], mark: str) -> list[list[str] | None]:
    """The answers after each mark; None for a command that failed: the fact sends it again, and says why."""
    answers: list[list[str]] = []
    for line in lines:
        if line == mark:
            answers.append([])
        elif answers:
            answers[-1].append(line)
    return [_of_success(answer) for answer in answers]


def _of_success(answer: list[str]) -> list[str] | None:
    rest, plus, code = (answer[-1] if answer else "").rpartition("+")
    if not plus or code != "0":
        return None
    return [*answer[:-1], rest] if rest else answer[:-1]
