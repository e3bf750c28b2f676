"""The commands of `trackbed fleet`: each module in this folder is one, and is imported when it is called."""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

import click


class Commands(click.Group):
    """The group that looks its commands up in this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, by name."""
        return sorted(module.name for module in pkgutil.iter_modules(__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if there is none of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return cast(click.Command, getattr(importlib.import_module(f"{__name__}.{cmd_name}"), cmd_name))


@click.group(cls=Commands)
def fleet() -> None:
    """Show, sweep and maintain the nodes of a cluster, from the control host.

    Each command has --json. Commands that ask the cluster have --kubeconfig and --context.

    Exit code: 0 done, 1 an error. The help of each command says what 2 means.

    Example: trackbed fleet status
    """
