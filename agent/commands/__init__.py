"""The commands of `trackbed`: one module each, found by being in this folder and imported when it is called.

A module's command has the module's name. What reads the kernel is imported inside the commands that do: the supervisor
stays small, and `status` answers at once.
"""

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
