"""`trackbed explain`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from attrs import asdict, frozen, has
from pyinfra.api.arguments import all_argument_meta
from pyinfra.api.config import Config
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.context import ctx_state

from agent.report.printable import printable
from agent.spec.strict import did_you_mean
from tasks.common import layers, replacements, site
from tasks.common.data import SITE, SPEC_KEYS, pyinfra_arguments, task_keys
from tasks.common.layers import Layer
from tasks.node_spec import node_spec

DEFAULT = "default"
SECRET = ("ssh_password", "ssh_key_password", "ssh_paramiko_connect_kwargs", "_sudo_password", "_su_password", "_env")
"""The connection's keys that may have a password: their values are not printed."""

MOST_NAMED = 20
"""The most hosts that a message names."""


@frozen
class Line:
    """A part of a value, and the file and the place in it that gave it."""

    key: str
    value: Any
    source: str


@click.command()
@click.argument("host")
@click.argument("key", required=False)
@click.option(
    "--inventory",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The inventory's file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines for programs: key, value and source.")
def explain(host: str, key: str | None, inventory: Path, as_json: bool) -> None:
    """Show each value of HOST with the file that gave it, or only KEY (irqs, irqs.pin); "default" is Trackbed's own.

    Without KEY, the defaults in a list's entries (nics) are left out. The command connects to no host.

    Exit code: 0 done, 1 there is no such host or key, or the data have a fault.

    Example: trackbed explain gpu-01.example.net nics --inventory ~/fleet/inventories/prod.py
    """
    try:
        file = inventory.resolve()
        # A line's own name is a key, too.
        lines, fault = _lines(_host(file, host), file, key and key.partition(".")[0])
    except PyinfraError as error:
        raise click.ClickException(str(error)) from None
    shown = [line for line in lines if key is None or f"{line.key}.".startswith(f"{key}.")]
    if lines and not shown:
        hint = did_you_mean(str(key), [line.key for line in lines], "give the whole of it")
        raise click.ClickException(f"{key} is not a key; {hint}")
    for line in shown:
        if as_json:
            click.echo(json.dumps({"key": line.key, "value": line.value, "source": line.source}, default=str))
        else:
            click.echo(printable(f"{line.key} = {line.value!r}  # {line.source}"))
    if fault:
        raise click.ClickException(fault)


def _host(inventory: Path, name: str) -> Host:
    """A host of the inventory, as a deploy has it."""
    replacements.replace()
    # Its import replaces Python's threads by gevent's.
    from pyinfra_cli.exceptions import CliError  # type: ignore[import-untyped]
    from pyinfra_cli.inventory import make_inventory  # type: ignore[import-untyped]

    try:
        with ctx_state.use(State()):
            made = make_inventory(str(inventory))
    except (CliError, PyinfraError) as error:
        raise click.ClickException(str(error)) from None
    known: dict[str, Host] = {each.name: each for each in made}
    if name not in known:
        hosts = sorted(known)
        more = " and others" if len(hosts) > MOST_NAMED else ""
        named = f"its hosts are {', '.join(hosts[:MOST_NAMED]) or 'none'}{more}"
        longer = [f"did you mean {each!r}?" for each in hosts if each.startswith(f"{name}.")]
        hint = longer[0] if longer else did_you_mean(name, hosts, named)
        raise click.ClickException(f"{inventory} has no host {name}; {hint}")
    return known[name]


def _files(inventory: Path) -> dict[tuple[str, str], Path]:
    """The file of group data that gives a key to a group; the later folder counts, as in pyinfra."""
    from pyinfra_cli.inventory import _get_group_data

    folders = [each / "group_data" for each in dict.fromkeys((site.root_of(inventory), inventory.parent))]
    with ctx_state.use(State()):
        return {
            (group, key): folder / f"{group}.py"
            for folder in folders
            for group, data in _get_group_data(str(folder)).items()
            for key in data
        }


def _source(by: tuple[Layer, str], inventory: Path, files: Mapping[tuple[str, str], Path]) -> str:
    layer, key = by
    file = files.get((layer.group, key)) if layer.group else None
    place = str(file) if file else f"{inventory}, {layer.name}"
    return f"{place}, {key}" if key.endswith("_overrides") else place


def _lines(host: Host, inventory: Path, key: str | None) -> tuple[list[Line], str]:
    """The lines, and what is wrong with the host's data."""
    files = _files(inventory)
    of_host = layers.layers(host)
    faults = layers.merge(host)
    data = host.data.dict()  # type: ignore[no-untyped-call]
    own = sorted(each for each in data if type(each) is str and each.startswith(SITE))
    connection = {name: meta.default for name, meta in SSHConnector.data_meta.items()}
    config = Config()  # type: ignore[no-untyped-call]
    connection |= {name: all_argument_meta[name].default(config) for name in pyinfra_arguments()}
    connection = {name: value for name, value in connection.items() if name not in SECRET}
    known = (*SPEC_KEYS, *(each.name for each in task_keys()), *own, *connection)
    if key in SECRET:
        raise click.ClickException(f"{key} is a secret, which is not shown")
    if key is not None and key not in known:
        raise click.ClickException(f"{key} is not a key; {did_you_mean(key, known, 'see docs/inventory.md')}")
    try:
        host.connector_cls(State(), host)  # reads the connection's settings
        defaults: dict[str, Any] = _plain(node_spec(data, host.name))
        defaults |= {each.name: _plain(each.read(data, host.name)) for each in task_keys()}
        defaults |= connection if key is not None else {}
    except PyinfraError as error:
        defaults = {}
        faults = faults or [str(error)]
    lines: list[Line] = []
    for each in known if key is None else (key,):
        try:
            value = layers.value_of(each, of_host)
        except ValueError:  # one of the faults
            continue
        sources = {path: _source(by, inventory, files) for path, by in value.given.items()}
        given = [
            Line(".".join((each, *path)), part, sources[path]) for path, part in layers.parts(value.value) if sources
        ]
        lines += given
        shown = defaults.get(each) if key is not None or not isinstance(value.value, list | tuple) else None
        lines += _defaults(each, shown, sources) if each in defaults and (shown is not None or not given) else []
    return lines, "\n".join(faults)


def _defaults(key: str, value: Any, given: Mapping[tuple[str, ...], str]) -> Iterator[Line]:
    """The parts of a value that no layer gave, also not as a whole or in parts."""
    for path, part in layers.parts(value):
        if not any(path[: len(each)] == each or each[: len(path)] == path for each in given):
            yield Line(".".join((key, *path)), part, DEFAULT)


def _plain(value: Any) -> Any:
    return asdict(value) if has(type(value)) else value
