"""A node has one deploy at a time: a lock on the node says who deploys it, since when, and until when the lock is good.

It is taken when the changes begin, renewed while the deploy runs, and given back when it ends, also by an error or by Ctrl-C.
After a crash the next deploy from the same control host sees that the process is gone, and takes the lock over. Another control
host waits until it expires.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click
import gevent
from attrs import define, field, frozen
from gevent import Timeout
from gevent.pool import Pool
from paramiko import SSHException
from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.progress import progress_spinner

from agent.report.printable import printable
from tasks import time_limits
from tasks.common import answers, progress
from tasks.common.commands import fail, script, warn
from tasks.common.connection import arguments

FILE = "/var/lib/trackbed-deploy.lock"
STEAL = "TRACKBED_STEAL_LOCK"
COMMENT = "TRACKBED_LOCK_COMMENT"

GOOD_FOR = 3600
"""Seconds until the lock of a deploy expires that does not renew it any more."""

RENEWED_S = 900.0
"""Seconds after which the locks are renewed: they are good as long as the deploy runs, also while hosts wait for a turn."""

HELD = 75
"""Exit code of the script that takes the lock, if another deploy holds it (EX_TEMPFAIL of sysexits.h)."""

ANSWER_S = 60

# A file that was removed while this shell waited for it is another deploy's old lock. Whoever may read a file may lock it.
_OPEN = """
umask 077
while :; do
  exec 9>>"$1"
  flock 9
  if [ "$1" -ef /proc/self/fd/9 ]; then break; fi
done
"""

TAKE = (
    _OPEN
    + """
token='' until=0 owner=''
{ read -r token; read -r until; IFS= read -r owner; } <"$1" || true
now=$(date +%s)
# No deploy takes a lock for longer: the clock was ahead.
if [ "$until" -gt "$((now + $3))" ] 2>/dev/null; then
  until=$((now + $3))
  printf '%s\\n' "$token" "$until" "$owner" >"$1"
fi
if [ -n "$token" ] && [ "$token" != "$2" ] && [ "$5" != all ] && [ "$5" != "$token" ] && [ "$until" -gt "$now" ] 2>/dev/null
then
  printf '%s\\n' "$token" "$(((until - now + 59) / 60))" "$owner"
  exit HELD
fi
printf '%s\\n' "$2" "$((now + $3))" "$4" >"$1"
"""
).replace("HELD", str(HELD))
"""Arguments: the file, this deploy's token, seconds, the owner's text, and the token to take over; `all`: whatever holds it."""

GIVE_BACK = f"""
if [ ! -e "$1" ]; then exit 0; fi
{_OPEN}
token=''
read -r token <"$1" || true
if [ "$token" = "$2" ] || [ -z "$token" ]; then rm -f "$1"; fi
"""


@frozen
class Answer:
    """Whether a command succeeded; who holds the lock, as TAKE prints it; and all that was printed."""

    done: bool
    holder: tuple[str, ...] = ()
    said: str = ""


@define
class Deploy:
    """One run of pyinfra. ``token``: names its process and control host. ``owner``: who runs it, in words."""

    token: str = field(factory=lambda: f"{_processes()}:{os.getpid()}:{_began(os.getpid())}:{secrets.token_hex(4)}")
    owner: str = field(factory=lambda: _owner())
    steal: bool = field(factory=lambda: os.environ.get(STEAL) == "1")
    held: list[Host] = field(factory=list)

    def take(self, state: State, host: Host) -> None:
        """Take a host's lock, or say who has it."""
        answer = self._ask(state, host, "all" if self.steal else "none")
        if answer.holder and _is_gone(answer.holder[0]):
            answer = self._ask(state, host, answer.holder[0])
        if answer.done:
            self.held.append(host)
        elif answer.holder:
            _, minutes, owner = answer.holder
            remedy = f"wait for the end, or if that deploy is over, take the lock with {STEAL}=1"
            fail(host, f"{owner} deploys this node; the lock expires in {minutes} min; {remedy}")
        else:
            fail(
                host,
                f"the lock {FILE} cannot be taken: {answer.said or 'no answer'}; see whether the deploy runs as root (_sudo), "
                "and whether the disk is full or read-only (df, findmnt)",
            )

    def renew(self, state: State, host: Host) -> None:
        """Renew a host's lock, unless it is away for its reboot. If another deploy has taken it over, say so."""
        if not host.connected:
            return
        holder = self._ask(state, host, "none").holder
        if holder:
            self.held.remove(host)
            warn(host, f"{holder[2]} has taken over the lock of this node, which this deploy goes on with")

    def renew_all(self, state: State) -> None:
        """Renew the locks until this greenlet is killed."""
        while True:
            gevent.sleep(RENEWED_S)
            _each(state, list(self.held), self.renew)

    def _ask(self, state: State, host: Host, over: str) -> Answer:
        return _run(host, script(TAKE, FILE, self.token, str(GOOD_FOR), self.owner, over))

    def give_back(self, state: State, host: Host) -> None:
        """Give a host's lock back; one that has gone away keeps it until it expires."""
        if host.connected:
            _run(host, script(GIVE_BACK, FILE, self.token))


def running(run: Callable[..., None]) -> Callable[..., None]:
    """run_ops: a deploy takes the locks of its hosts before it changes them. A host whose lock is held fails alone."""

    @wraps(run)
    def run_locked(state: State, **given: Any) -> None:
        # `pyinfra INVENTORY exec` runs a single command, also for `trackbed fleet maintain`.
        if not click.get_current_context().params["operations"][0].endswith(".py"):
            run(state, **given)
            return
        deploy = Deploy()
        renewing = gevent.spawn(deploy.renew_all, state)
        try:
            _each_shown(state, list(state.active_hosts), "taking the lock", deploy.take)
            state.fail_hosts({each for each in state.active_hosts if each not in deploy.held})  # type: ignore[no-untyped-call]
            run(state, **given)
        finally:
            renewing.kill()
            _each_shown(state, deploy.held, "giving the lock back", deploy.give_back)

    return run_locked


def _each_shown(state: State, hosts: list[Host], step: str, do: Callable[[State, Host], None]) -> None:
    """Do this for each host. While pyinfra waits for hosts, their steps are shown."""
    with progress_spinner(hosts) as done:

        def do_shown(state: State, host: Host) -> None:
            with progress.step(host, step):
                do(state, host)
            done(host)

        _each(state, hosts, do_shown)


def _each(state: State, hosts: list[Host], do: Callable[[State, Host], None]) -> None:
    pool = Pool(state.config.PARALLEL)
    for each in hosts:
        pool.spawn(do, state, each)
    pool.join()


def _run(host: Host, command: StringCommand) -> Answer:
    """Run a command with the host's own arguments (`_sudo`)."""
    given = arguments(host)
    try:
        # By the connector: the host's method takes it for a change of the host, after which no fact is prefetched.
        with Timeout(ANSWER_S + time_limits.MARGIN, TimeoutError):
            run = partial(host.connector.run_shell_command, **{**given, "_timeout": ANSWER_S})
            done, output, lacks = answers.ask(command, run)
    except (OSError, EOFError, SSHException) as error:
        return Answer(False, said=str(error) or f"no answer within {ANSWER_S} s")
    # sudo may print a warning beside it.
    held = not done and len(output.stdout_lines) == 3
    holder = tuple(printable(line) for line in output.stdout_lines) if held else ()
    return Answer(done, holder, f"the answer has no {lacks}" if lacks else printable(" ".join(output.output_lines)))


def _processes() -> str:
    """Names the kernel's boot and the container in which process ids are unique; two machines may have the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return "unknown"


def _owner() -> str:
    with suppress(OSError, KeyError):
        user = getpass.getuser()
        comment = " ".join(os.environ.get(COMMENT, "").split())
        since = datetime.now(timezone.utc).strftime("since %Y-%m-%d %H:%M UTC")
        return f"{user} on {socket.gethostname()} {since}{f' ({comment})' if comment else ''}"
    return f"somebody on {socket.gethostname()}"


def _began(pid: int) -> str:
    """When a process began, by its kernel; empty: there is none. Process ids are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_gone(token: str) -> bool:
    """Whether the deploy with this token ran on this control host, and has ended."""
    processes, pid, began, *_ = [*token.split(":"), "", "", ""]
    return processes == _processes() and pid.isdigit() and bool(began) and _began(int(pid)) != began
