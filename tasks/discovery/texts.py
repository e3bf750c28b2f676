"""The files of discovered groups: an inventory that has them, and for each group its data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from agent.report.printable import printable
from agent.report.python_text import literal
from tasks.discovery.profiles import Data, Profile


def inventory_text(source: str, profiles: Sequence[Profile]) -> str:
    """An inventory with the groups, and with those of the inventory that was asked.

    That one is read, not copied: what it gives to its hosts may be a password that it has asked for.

    :param source: the name of its file.
    """
    parts = [
        f'"""The servers of {source} by their hardware. Written by deploys/discover.py.\n\n'
        "A server that is not as most of its group has values of its own here; group_data/ has those of the groups.\n"
        '"""\n\n'
        "from pathlib import Path as _Path\nfrom runpy import run_path as _run_path\n\n"
    ]
    for profile in profiles:
        entries = [f"    {_entry(name, data)},\n" for name, data in sorted(profile.servers.items())]
        parts.append(f"{profile.name} = [\n{''.join(entries)}]\n\n")
    parts.append(
        f"# The groups of {source}, with their own data, which count before those above.\n"
        f'_asked = _run_path(str(_Path(__file__).with_name("{source}")))\n'
        '_groups = {name: value for name, value in _asked.items() if isinstance(value, list | tuple) and name[0] != "_"}\n'
        "globals().update(_groups)\n"
        "# That of the file itself.\n"
        "_hosts = [host for group in _groups.values() for host in (group[0] if isinstance(group, tuple) else group)]\n"
        f'globals().setdefault("{source.removesuffix(".py")}", _hosts)\n'
    )
    return "".join(parts)


def _entry(name: str, data: Data) -> str:
    return f"({literal(name)}, {literal(data, ' ' * 4)})" if data else literal(name)


def data_text(profile: Profile) -> str:
    """The data of a group. Settings that several of its NICs share stand there once."""
    count = len(profile.servers)
    parts = [
        f'"""{count} server{"" if count == 1 else "s"} with the same hardware. Written by deploys/discover.py.\n\n'
        "docs/inventory.md describes the keys.\n"
        '"""\n\n',
        *(f"# {printable(line)}\n" for line in _hardware(profile)),
        "\n",
    ]
    shared = [text for text, uses in Counter(map(_settings, profile.nics)).items() if uses > 1 and text != "{}"]
    names = {text: "_SETTINGS" if len(shared) == 1 else f"_SETTINGS_{at}" for at, text in enumerate(shared, 1)}
    parts += [f"{name} = {literal(json.loads(text))}\n\n" for text, name in names.items()]
    if profile.nics:
        parts.append("nics = [\n")
        for nic in profile.nics:
            if name := names.get(_settings(nic)):
                own = f'"name": {literal(nic["name"])}, "select": {literal(nic["select"])}'
                parts.append(f"    {{{own}, **{name}}},\n")
            else:
                parts.append(f"    {literal(nic, ' ' * 4)},\n")
        parts.append("]\n")
    parts += [f"{key} = {literal(value)}\n" for key, value in profile.data.items()]
    return "".join(parts)


def _settings(nic: Data) -> str:
    kept: dict[str, Any] = {key: value for key, value in nic.items() if key not in ("name", "select")}
    return json.dumps(kept)


def _hardware(profile: Profile) -> Iterator[str]:
    nics = {nic["select"]["pci"] for nic in profile.nics}
    for each in profile.functions:
        facts = [each.address, f"[{each.vendor}:{each.device}]", each.model, each.driver or ""]
        facts += [] if each.numa_node is None else [f"NUMA node {each.numa_node}"]
        facts += [] if each.address in nics else ["(not in nics)"]
        yield " ".join(filter(None, facts))
    yield from (f"GPU {address}" for address in profile.gpus)
    if not profile.functions and not profile.gpus:
        yield "no network card, and no GPU"
