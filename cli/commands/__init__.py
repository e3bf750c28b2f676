"""The commands of `trackbed`. Each module in this folder is one command of the same name, and is imported when it is called.

Modules that read the kernel are imported inside the functions that need them, so that the supervisor stays small and `status`
answers at once.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import cast

import click

CONTROL = "control"
FLEET = "fleet"
"""The control host's commands: packages beside this one, which are not in the node's archive."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


class Failed(click.ClickException):
    """An error that the user can correct; exit code 1."""


class Commands(click.Group):
    """The group that looks its commands up in this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, by name."""
        return sorted(_modules())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if there is none of this name."""
        module = _modules().get(cmd_name)
        return cast(click.Command, getattr(importlib.import_module(module), cmd_name)) if module else None


def _modules() -> dict[str, str]:
    """The module of each command."""
    # Look beside this package only: a node may have other Python packages of these names.
    root = Path(__file__).parents[2]
    fleet = {FLEET: f"{FLEET}.commands"} if (root / FLEET / "commands").is_dir() else {}
    folders = {__name__: list(__path__), CONTROL: [str(root / CONTROL)]}
    return fleet | {
        module.name: f"{package}.{module.name}"
        for package, paths in folders.items()
        for module in pkgutil.iter_modules(paths)
    }
