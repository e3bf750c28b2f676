"""The node that runs this, with its data from another inventory. Pull mode deploys it (tasks/pull.py)."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

from pyinfra.api.exceptions import InventoryError

SETTINGS = Path(os.environ.get("TRACKBED_PULL_SETTINGS", "/etc/trackbed/pull.json"))
"""As in templates/pull.py, which runs the deploy."""


def _groups() -> dict[str, Any]:
    try:
        settings = json.loads(SETTINGS.read_text())
        name, inventory = settings["host"], settings["inventory"]
    except FileNotFoundError:
        raise InventoryError(f"{SETTINGS} does not exist; this inventory is for nodes in pull mode") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InventoryError(
            f"{SETTINGS} cannot be read: {error!r}; deploy this node from its control host again"
        ) from None
    if not Path(inventory).is_file():
        raise InventoryError(f"{inventory} is not in this archive; deploy this node from its control host again")
    groups: dict[str, Any] = {}
    for group, hosts in runpy.run_path(inventory).items():
        if group.startswith("_") or not isinstance(hosts, list | tuple):
            continue
        listed, shared = hosts if isinstance(hosts, tuple) else (hosts, {})
        for host in listed:
            host_name, data = host if isinstance(host, tuple) else (host, {})
            if host_name == name:
                groups[group] = ([("@local", data)], shared)
    if not groups:
        raise InventoryError(f"{inventory} has no host {name}; deploy this node from its control host again")
    # pyinfra makes the inventory's file name a group, too. Data of the group `all` are overridden by all others.
    _, shared = groups.get("all", ([], {}))
    return {
        **groups,
        Path(inventory).stem: groups.get(Path(inventory).stem, ["@local"]),
        "all": ([("@local", {})], {"node_name": name, **shared}),
    }


globals().update(_groups())
