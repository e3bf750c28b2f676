"""Prefetches facts: one command to a host runs the commands of all facts that the last deploy read from it.

pyinfra 3.10 sends a command for each fact. Each needs an SSH channel, a login shell and a shell, and a deploy that finds
nothing to do reads some fifty facts. So the control host keeps the commands (not the answers) of each host's last deploy. When
the next deploy reads its first fact, it sends all of these commands at once. A fact that was not read before is sent by itself.
At a host's first deploy it sends the commands that the last deploy of another host has left.

A prefetched answer is used for at most two minutes, in the phase of pyinfra that fetched it (prepare or execute), and only
until this deploy changes something on the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import click
from attrs import define, field
from pyinfra import logger
from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.connectors.util import CommandOutput, OutputLine

from agent.documents import load
from agent.runtime import write_atomically
from fleet import paths
from tasks.common import answers
from tasks.common.archive import ROOT

USABLE_S = 120.0
"""Seconds for which an answer is used. After that all facts are fetched again: the deploy of a large fleet takes minutes, and
somebody else may change a host meanwhile."""

LONGEST_ANSWER = 16 << 10
"""Characters. A fact with a longer answer, such as the list of all packages, is not prefetched: the answers of all hosts are in
memory."""

LARGEST_FILE = 4 << 20

Send = Callable[..., tuple[bool, CommandOutput]]

_connected: WeakKeyDictionary[Host, HostFacts] = WeakKeyDictionary()


class Connections(BaseStateCallback):
    """What pyinfra calls when it connects to a host, and when it disconnects.

    From the first connection on, the host's facts are prefetched. Their commands are kept for the next deploy.
    """

    def __init__(self) -> None:
        context = click.get_current_context(silent=True)
        self._folder = _folder("\n".join(context.params.get("operations", ())) if context else "")

    @cached_property
    def _last(self) -> dict[str, list[str]]:
        """The commands of the newest file, by phase; none if no host was deployed to."""
        # Without the folder, or without the right to read it, the first facts are asked one by one.
        with suppress(OSError):
            written = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(self._folder)]
            return _read(Path(max(written)[1])) if written else {}
        return {}

    def host_connect(self, state: State, host: Host) -> None:  # type: ignore[override]
        """Prefetch the host's facts from now on. After a reboot pyinfra connects again, and the old answers are dropped."""
        if host in _connected:
            _connected[host].drop_answers()
        else:
            file = self._folder / f"{_digest(host.name)}.json"
            kept = _read(file)
            _connected[host] = HostFacts(state, file, kept, kept or self._last)

    def host_disconnect(self, state: State, host: Host) -> None:  # type: ignore[override]
        """Keep the commands for the next deploy: the host is done, or reboots."""
        if host in _connected and host not in state.failed_hosts:
            _connected[host].keep_commands()


def of(host: Host) -> HostFacts | None:
    """The facts of a host; None: it is not connected."""
    return _connected.get(host)


def _folder(deploy: str) -> Path:
    """The folder of this deploy, with a file for each host."""
    return paths.cache() / "facts" / _digest(deploy)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _code_digest() -> str:
    """A digest of the code that reads facts. Other code reads other facts, so the kept commands are of no use to it."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@define
class HostFacts:
    """The facts of one host: takes part in each fact, command and upload of the host."""

    _state: State
    _file: Path
    _kept: dict[str, list[str]]
    """What the file says: the commands of the last deploy's facts, by phase."""
    _known: dict[str, list[str]]
    """The commands to prefetch, by phase: the kept ones, or another host's if this host has none."""
    _used: dict[str, dict[str, None]] = field(init=False, factory=dict)
    """The commands of this deploy's facts, by phase; the keys are in the order in which the facts were read."""
    _arguments: dict[str, Any] | None = field(init=False, default=None)
    """The connector's arguments (such as the user) of the first fact. Facts with others are not prefetched."""
    _ended: bool = field(init=False, default=False)
    """Whether no fact is prefetched any more."""
    _answers: dict[str, list[str]] = field(init=False, factory=dict)
    """The prefetched answers, by command."""
    _fetched: tuple[str, float] | None = field(init=False, default=None)
    """The phase in which the answers were fetched, and when."""

    def run(
        self,
        fact: type,
        command: Any,
        arguments: dict[str, Any],
        send: Send,
        ask: Callable[[], tuple[bool, CommandOutput]],
    ) -> tuple[bool, CommandOutput]:
        """Answer a fact's command: take the answer if it was prefetched, else ask the node.

        :param send: sends a command as it is; raises TimeoutError after the limit of the fact.
        """
        answer = self._answer(fact, send, command, arguments)
        if answer is not None:
            return True, CommandOutput([OutputLine("stdout", line) for line in answer])
        succeeded, output = ask()
        if sum(map(len, output.stdout_lines)) > LONGEST_ANSWER:
            self._used.get(self._phase(), {}).pop(_text(command) or "", None)
        return succeeded, output

    def drop_answers(self) -> None:
        """Use no answer that was fetched until now."""
        self._answers, self._fetched = {}, None

    def keep_commands(self) -> None:
        """Write the commands of this deploy's facts, for the next deploy."""
        phases = self._kept | {phase: list(used) for phase, used in self._used.items()}
        if phases == self._kept:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, json.dumps({"code": _code_digest(), "phases": phases}))
        except OSError as error:
            # The next deploy of this host takes longer. Another deploy of it may write the same file now.
            logger.debug(f"{self._file}: {error}; the commands of the facts are not kept")

    def _phase(self) -> str:
        """The phase of pyinfra. With -y it does not check for changes while it prepares, and reads fewer facts."""
        stage = self._state.current_stage.name.lower()
        checks = self._state.should_check_for_changes()  # type: ignore[no-untyped-call]
        return stage if self._state.is_executing or checks else f"{stage} -y"

    def end(self) -> None:
        """No fact is prefetched from now on: this deploy has changed the host, or the facts together take too long."""
        self._ended = True
        self.drop_answers()

    def _answer(self, fact: type, send: Send, command: Any, arguments: dict[str, Any]) -> list[str] | None:
        """The prefetched answer to a command; None: the command must be sent."""
        text = _text(command)
        if text is None or not getattr(fact, "prefetched", True):
            return None
        if self._arguments is None:
            self._arguments = arguments
        if arguments != self._arguments or arguments.get("_stdin"):
            return None
        phase = self._phase()
        self._used.setdefault(phase, {})[text] = None
        if not self._ended and not self._is_usable(phase):
            self._fetch(send, phase, text, arguments)
        return self._answers.get(text)

    def _is_usable(self, phase: str) -> bool:
        fetched_in, at = self._fetched or ("", 0.0)
        return fetched_in == phase and time.monotonic() - at < USABLE_S

    def _fetch(self, send: Send, phase: str, text: str, arguments: dict[str, Any]) -> None:
        """Send the commands of all facts that the last deploy read in this phase, if ``text`` is among them."""
        self.drop_answers()
        commands = self._known.get(phase, [])
        if text not in commands or len(commands) < 2:
            return
        mark = answers.new_mark()
        script = framed(commands, shlex.quote(arguments.get("_shell_executable") or "sh"), mark)
        sent_at = time.monotonic()
        try:
            # On standard input: the kernel allows an argument no more than 128 KiB.
            succeeded, output = send(StringCommand("sh"), **{**arguments, "_stdin": script})
        except TimeoutError:
            # One of them hangs, or all together take longer than one may. Asked one by one, each has its own limit.
            self.end()
            return
        whole = answers.whole(output.stdout_lines, mark)
        if succeeded and len(whole) == len(commands):
            # pyinfra sends a command that failed again, and reports why.
            self._answers = {
                each: answer.lines for each, answer in zip(commands, whole, strict=True) if answer.code == 0
            }
        self._fetched = phase, sent_at


def _read(file: Path) -> dict[str, list[str]]:
    """The commands by phase; none if the file is missing or damaged, or was written by other code."""
    try:
        kept = load(file.read_bytes(), LARGEST_FILE)
        if kept["code"] == _code_digest():
            return {str(phase): [str(command) for command in used] for phase, used in kept["phases"].items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.debug(f"{file}: {error!r}; it is written again")
    return {}


def _text(command: Any) -> str | None:
    """The command as it is sent; None: it contains a secret, which must not be written to a file."""
    if isinstance(command, str):
        return command
    raw = command.get_raw_value()
    return str(raw) if raw == command.get_masked_value() else None


def framed(commands: list[str], shell: str, mark: str) -> str:
    """A script that runs the commands one after the other. Each has its own shell, as when it is sent alone."""
    return "".join(
        f"{answers.framed(f'{shell} -c {shlex.quote(each)} </dev/null 2>/dev/null', mark)}\n" for each in commands
    )
