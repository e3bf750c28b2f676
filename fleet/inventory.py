"""Reads the operator's inventory with pyinfra, and runs commands on its hosts.

pyinfra runs as a program, so it uses the inventory's connection data (address, port, user, key, bastion, sudo) as in a deploy.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import click
from attrs import frozen

from fleet.api import Failed

ROOT = Path(__file__).parent.parent
"""pyinfra runs here, as for a deploy, since it reads config.py here; group data are those of the inventory's site."""

LINES = 12
"""Lines of a command's output that are shown: the last ones."""


def options(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that choose the hosts of an inventory.

    :param help: what the command needs the inventory for.
    """
    file = click.option("--inventory", type=click.Path(path_type=Path, exists=True), help=help)
    limit = click.option(
        "--limit",
        multiple=True,
        metavar="GROUP|HOST",
        help="Only this group or these hosts of the inventory, as for pyinfra; may be given several times.",
    )
    return lambda command: file(limit(command))


@frozen
class CommandResult:
    """The result of a command on a host. ``output``: the last lines that it printed."""

    failed: bool
    output: str


class Hosts(Protocol):
    """Runs commands on the hosts of nodes."""

    @property
    def words(self) -> str:
        """The options that give a command these hosts, for a shell."""

    def run(self, node: str, command: Sequence[str], timeout: float) -> CommandResult:
        """Run a command on a node's host; ``timeout``: in seconds."""


@frozen
class Inventory:
    """An inventory's file, and the names of its hosts by their Nodes' names.

    ``limit``: the groups and hosts that were chosen; none: all.
    """

    path: Path
    hosts: dict[str, str]
    limit: tuple[str, ...] = ()

    @classmethod
    def given(cls, path: Path | None, limit: tuple[str, ...]) -> Inventory:
        """The inventory of a command's options; without the option, one without hosts.

        :raises Failed: as :meth:`read`.
        """
        if path is None and limit:
            raise click.UsageError("--limit chooses hosts of an inventory: give --inventory, too")
        return cls.read(path, limit) if path else cls(Path(), {})

    @classmethod
    def read(cls, path: Path, limit: tuple[str, ...] = ()) -> Inventory:
        """Ask pyinfra for the hosts.

        :raises Failed: the inventory is wrong, the limit matches none of its hosts, or two hosts have the same Node.
        """
        path = path.resolve()
        if not path.is_file():
            raise Failed(f"{path} is not a file; give the file of an inventory")
        done = _pyinfra("--json", str(path), "debug-inventory")
        try:
            # What the inventory itself prints comes first.
            listing = json.loads(done.stdout[_start(done.stdout) :])
        except ValueError:
            raise Failed(f"{path} is not an inventory that pyinfra can read: {_error(done.stderr)}") from None
        hosts: dict[str, str] = {}
        for one in _limited(path, listing, limit):
            host = one["name"]
            node = str(one["data"].get("node_name") or host)
            other = hosts.setdefault(node, host)
            if other != host:
                # The deploy accepts this of two clusters, by their kubernetes.server. It is the URL that nodes use, which
                # the kubeconfig may not have, so it does not say here which of the hosts is meant.
                raise Failed(
                    f"{path}: {other} and {host} have the same node_name, {node}; give one another, or if they "
                    "are in two clusters, choose one cluster's hosts with --limit GROUP"
                )
        return cls(path, hosts, limit)

    @property
    def words(self) -> str:
        """As in :class:`Hosts`."""
        return shlex.join(["--inventory", str(self.path), *(word for each in self.limit for word in ("--limit", each))])

    def run(self, node: str, command: Sequence[str], timeout: float) -> CommandResult:
        """Run a command on a node's host, as the user that the inventory's connection data give."""
        host = self.hosts[node]
        words = ("-y", str(self.path), "--limit", _only(host), "exec", "--", shlex.join(command))
        try:
            done = _pyinfra(*words, timeout=timeout)
        except subprocess.TimeoutExpired:
            return CommandResult(True, f"no answer from {host} within {timeout:.0f} s")
        except OSError as error:
            return CommandResult(True, f"pyinfra cannot be started: {error.strerror}")
        # pyinfra indents its own messages.
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"[{host}]")]
        printed = last_lines(line.removeprefix(f"[{host}]") for line in lines)
        return CommandResult(done.returncode != 0, printed or _last(done.stderr))


def last_lines(printed: Iterable[str]) -> str:
    """The last lines that a command has printed, in one."""
    return "; ".join(filter(None, map(str.strip, [*printed][-LINES:])))


def _limited(path: Path, listing: Sequence[Any], limit: Sequence[str]) -> list[Any]:
    """The hosts that the patterns match: each is a group's name, else a pattern of hosts' names (as pyinfra_cli/cli.py has it).

    pyinfra itself lists all hosts, whatever its ``--limit``.
    """
    groups = sorted({group for one in listing for group in one["groups"]})
    matched: set[str] = set()
    for pattern in limit:
        hosts = {
            one["name"]
            for one in listing
            if (pattern in one["groups"] if pattern in groups else fnmatch(one["name"], pattern))
        }
        if not hosts:
            raise Failed(f"{path} has no group and no host {pattern!r}; its groups are {', '.join(groups)}")
        matched |= hosts
    return [one for one in listing if not limit or one["name"] in matched]


def _only(host: str) -> str:
    """The pattern of pyinfra's ``--limit`` that matches this host alone.

    pyinfra looks for a group of that name first (`_get_inventory_pattern_matches`, pyinfra_cli/cli.py). An inventory's file and
    each list in it is a group, and may have the name of a host. No group's name begins with a bracket.
    """
    return "".join(f"[{each}]" if at == 0 or each in "*?[" else each for at, each in enumerate(host))


def _pyinfra(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    # A session of its own, so that Ctrl-C does not reach pyinfra: a change that has begun must be finished.
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        start_new_session=True,
    )


def _start(text: str) -> int:
    listing = re.search(r"^\[", text, re.MULTILINE)
    return listing.start() if listing else 0


def _error(text: str) -> str:
    """What pyinfra says of an inventory; of a traceback, the exception."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Exit)\b", line)]
    return said[-1] if said else _last(text).removeprefix("--> pyinfra error: ")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
