"""The site: the folder with an operator's own inventories and group data, outside of this checkout.

It is pyinfra's folder of the project: group data and relative paths in the inventory are looked for there, and a module in it
can be imported by the inventory. `trackbed init` makes one (control/init.py).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any

import click
from pyinfra import logger
from pyinfra.api.exceptions import InventoryError, PyinfraError
from pyinfra.api.inventory import Inventory
from pyinfra.context import state

from agent.runtime import version
from fleet.paths import expanded
from tasks.common.archive import ROOT
from tasks.common.data import known_keys

PIN = ".trackbed-version"
"""The file with the version of Trackbed that a site is for, one line."""


def root_of(inventory: Path) -> Path:
    """The site of an inventory's file: what `trackbed init` made; else the folder above `inventories/`, or the file's own."""
    folder = inventory.resolve().parent
    made = (each for each in (folder, *folder.parents) if (each / PIN).is_file())
    return next(made, folder.parent if folder.name == "inventories" else folder)


def _root() -> Path:
    return Path(state.cwd or ".")


def path(given: str) -> Path:
    """A path in the inventory's data: ~ is a home folder, and a relative path begins at the site."""
    return _root() / expanded(given)


def pinned(root: Path) -> str | None:
    """The version that a site is for; None: it does not say."""
    file = root / PIN
    words = file.read_text("utf-8-sig", "backslashreplace").split() if file.is_file() else []
    return words[0] if words else None


def fault(root: Path) -> str:
    """Why this checkout must not change the nodes of a site: it has another version than the site is for; empty: nothing."""
    wanted = pinned(root)
    if wanted in (None, version()):
        return ""
    return (
        f"{root / PIN} says that this site is for Trackbed {wanted}, and this checkout is {version()}: check out {wanted}, or "
        f"to move to {version()}, read what `--dry` shows, then write {version()} into that file"
    )


def reading(read: Callable[..., Inventory]) -> Callable[..., Inventory]:
    """make_inventory_from_files: the site of the inventory's file is pyinfra's folder of the project.

    pyinfra reads `group_data/` of the folder in which it runs, which is this checkout, and then of the inventory's folder, in
    which a site has none. The data of our examples would be mixed with those of the site.
    """

    @wraps(read)
    def read_site(file: str, override_data: Any = None, cwd: str | None = None, folders: Any = None) -> Inventory:
        given = Path(file)
        if given.is_dir():
            example = root_of(given / "prod.py") / "inventories/prod.py"
            raise InventoryError(f"{file} is a folder; give the file of an inventory, such as {example}")
        if given.resolve() == ROOT / "deploy.py" or given.resolve().parent == ROOT / "deploys":
            raise InventoryError(f"{file} is no inventory; give the inventory before it: pyinfra INVENTORY {file}")
        if not given.exists() and not all(file.split(",")):
            raise InventoryError(f"{file!r} has an empty name; give an inventory's file, or hosts as a,b")
        if given.is_file():
            cwd = state.cwd = str(root_of(given))
            if cwd not in sys.path:
                sys.path.append(cwd)
        try:
            made = read(file, override_data, cwd, folders)
        except PyinfraError:
            raise
        except (Exception, SystemExit) as raised:
            logger.debug("", exc_info=raised)
            # pyinfra_cli wraps what a file raises while it runs.
            error = getattr(raised, "exception", raised)
            # Whoever comes from another tool may give YAML or JSON.
            said = error.msg if isinstance(error, SyntaxError) else error
            said = f"{said} (the file is read as Python)" if isinstance(error, SyntaxError | NameError) else said
            raise InventoryError(f"{_place(error, cwd)}: {type(error).__name__}: {said}; correct the file") from None
        _warn_of_unread(Path(cwd or "."), made)
        return made

    return read_site


def _warn_of_unread(root: Path, hosts: Inventory) -> None:
    """Name what somebody may take for data of this inventory, and pyinfra does not read.

    Other files of group data may be of the groups of other inventories, and a folder there a package of Python's.
    """
    folder = root / "group_data"
    files = {each.stem for each in folder.glob("*.py")}
    for name in sorted({*hosts.group_data} - {*hosts.groups} - files):
        if name.lower() in known_keys():
            logger.warning(
                f"{name} is a group without hosts in this inventory; did you mean the key {name.lower()!r}? give it in the "
                f"data of a group ({folder}) or of a host"
            )
    for each in (root / name for name in ("host_data", "host_vars", "group_vars")):
        if each.is_dir():
            logger.warning(
                f"{each} is not read: data of a host are in the inventory, those of a group in group_data/NAME.py"
            )
    for name in sorted({"all", *hosts.groups}):
        if (folder / name).is_dir():
            logger.warning(f"{folder / name} is not read: the data of a group are one file, {name}.py")
    for other in sorted(each for each in folder.glob("*") if each.suffix in (".yml", ".yaml", ".json")):
        logger.warning(f"{other} is not read: group data are Python, as in {other.stem}.py")
    for name in sorted(files - {"all", *hosts.groups}):
        if near := difflib.get_close_matches(name, set(hosts.groups) - files, n=1, cutoff=0.8):
            logger.warning(f"{folder / name}.py is of no group of this inventory; did you mean {near[0]}.py?")


def _place(error: BaseException, root: str | None) -> str:
    """The file of a site, and the line in it if it is known, whose code raised an error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    place = str(root)
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "exec_file":
            # pyinfra_cli's, which reads and runs a file of the inventory.
            place = str(frame.f_locals["filename"])
        elif root and file.startswith(f"{root}/") and "site-packages" not in file:
            place = f"{file}:{line}"
    return place


def check() -> None:
    """Compare the version that the site is for with this checkout's. A dry run says what it shows then.

    :raises InventoryError: a deploy would change nodes, and the version is another.
    """
    context = click.get_current_context(silent=True)
    given = context.params if context else {}
    # Commands of the fleet that run on a node (`pyinfra INVENTORY exec`) install nothing.
    if not given.get("operations", ("",))[0].endswith(".py") or not (told := fault(_root())):
        return
    if not any(given.get(option) for option in ("dry", "debug_operations", "debug_facts")):
        raise InventoryError(told)
    logger.warning(
        f"{told}. The changes below are what the upgrade does to each node; {ROOT / 'CHANGELOG.md'} has its reasons, in the "
        f"entries between {pinned(_root())} and {version()}."
    )
