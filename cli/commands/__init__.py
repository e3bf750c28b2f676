"""The commands of `trackbed`. Each module in this folder is one command of the same name, and is imported when it is called.

A file whose name begins with an underscore is not a command. Modules that read the kernel are imported inside the functions
that need them, so that the supervisor stays small and `status` answers at once.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import cast

import click

FLEET = "fleet"
"""The control host's commands: a package beside this one, which is not in the node's archive."""


class Commands(click.Group):
    """The group that looks its commands up in this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, by name."""
        # Look beside this package only: a node may have another Python package of this name.
        beside = [FLEET] if (Path(__file__).parents[2] / FLEET / "commands").is_dir() else []
        return sorted([*(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")), *beside])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if there is none of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = f"{FLEET}.commands" if cmd_name == FLEET else f"{__name__}.{cmd_name}"
        return cast(click.Command, getattr(importlib.import_module(module), cmd_name))
