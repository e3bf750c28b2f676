"""Runs scripts that change a container engine's files. A dry run in an overlay of /etc comes first, and prints the changes.

Functions that the scripts share are in templates/engine-files.sh. The files may hold passwords, so only names of keys leave the
node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.context import host

from agent.report.records import Disruption
from tasks import disruption
from tasks.common import units
from tasks.common.archive import ROOT
from tasks.common.commands import Commands, refuse, script, warn
from tasks.common.facts import Yes
from tasks.common.texts import PUT

SHARED = units.STALE + PUT + (ROOT / "templates" / "engine-files.sh").read_text()

Engine = Literal["docker", "containerd", "crio"]
STOPPED_BY_RESTART = f"{SHARED}engine=$1\nstopped_by_restart\n"
"""Prints why a restart of the engine, $1, would stop running containers; nothing if it would not."""

Mode = Literal["dry-run", "apply"]


@frozen
class DryRun:
    """The result of a script's dry run. ``changes`` and ``lost`` are keys as the engine names them.

    ``warnings``: what does not keep the files from being written. ``lost``: the operator's keys that it would remove or change.
    ``pending``: the running engine has not loaded its files.
    """

    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    pending: bool = False


def with_shared(name: str) -> str:
    """A script of templates/, after the functions that all share."""
    return SHARED + (ROOT / "templates" / name).read_text()


def command(text: str, mode: Mode, *arguments: str) -> StringCommand:
    """Run a script of :func:`with_shared` in a mount namespace of its own."""
    return StringCommand("unshare", "--mount", script(text, mode, *arguments))


def parse(output: list[str]) -> DryRun:
    """Parse lines such as `change runtimes.nvidia.path`."""
    lines = [line.split(" ", 1) for line in output]
    faults, warnings, changes, lost = (
        tuple(line[1] for line in lines if line[0] == word) for word in ("fault", "warning", "change", "lost")
    )
    return DryRun(faults, warnings, changes, lost, ["pending"] in lines)


class ContainersRun(Yes):
    """Whether an engine has running containers."""

    prefetched = False

    def command(self, engine: Engine) -> StringCommand:
        """Ask docker, or look for the processes that the others start for each container."""
        return self.script(SHARED + "engine=$1\ncontainers_run\n", engine)


def restart_deferred(engine: Engine) -> bool:
    """For an operation: whether the engine may not be restarted now. Without containers a restart interrupts nothing."""
    level = disruption.ENGINE_RESTART if host.get_fact(ContainersRun, engine=engine) else Disruption.NONE
    return disruption.deferred(f"restart of {engine}", level, of_nics=False)


def configure(
    key: str,
    restarts: Engine | None,
    dry_run: DryRun,
    would_lose: Callable[[str], str],
    apply: StringCommand,
    done: str,
) -> Commands:
    """Run ``apply`` if the dry run says that there is something to do. Refuse its faults, and to lose the operator's settings.

    ``restarts``: the engine that ``apply`` may restart, so it waits until that is allowed; None: it is only reloaded.

    ``would_lose``: the message for these settings; messages name the inventory's ``key``. ``done``: there is nothing to do.
    """
    # Before that, another operation may still start the engine.
    for warning in dry_run.warnings if host.state.is_executing else ():
        warn(host, f"{key}: {warning}")
    if dry_run.faults:
        yield refuse("\n".join(f"{key}: {fault}" for fault in dry_run.faults))
    elif dry_run.changes and dry_run.lost:
        yield refuse(f"{key}: {would_lose(', '.join(dry_run.lost))}")
    elif dry_run.changes or dry_run.pending:
        if restarts is None or not restart_deferred(restarts):
            yield apply
    else:
        host.noop(done)
