"""`trackbed inspect`."""

from __future__ import annotations

import json
import socket
import sys

import click

from agent.commands import _common
from agent.report.records import to_plain


@click.command()
@click.option("--as-spec", is_flag=True, help="Write what the node has now as a spec whose plan is empty.")
@click.option("--nic", "nics", multiple=True, help="With --as-spec: this NIC (netdev or PCI address); repeatable.")
@click.option("--node-name", default=None, help="With --as-spec: the Node's name; else the spec's, or the host's.")
@_common.as_json
def inspect(as_spec: bool, nics: tuple[str, ...], node_name: str | None, as_json: bool) -> None:
    """Show every network function: addresses, driver, firmware, netdev, RDMA device, VFs, NUMA node, interrupts.

    --as-spec takes the NICs that have SR-IOV or RDMA, or those of --nic. Its JSON is a spec as `plan --spec` and
    /etc/trackbed/node.json have it; the same keys and values go into an inventory as a host's data.

    Exit code: 0; with --as-spec 2 if the plan would not be empty (what is left is printed), 1 an error.

    Example: trackbed inspect --as-spec | trackbed plan --spec -
    """
    if as_spec:
        _write_spec(nics, node_name)
        return
    if nics or node_name:
        raise click.UsageError("--nic and --node-name belong to --as-spec")
    from agent import linux
    from agent.tools.inspection import inspect, render

    found = inspect(linux.machine())
    click.echo(json.dumps(to_plain(found)) if as_json else render(found))


def _write_spec(nics: tuple[str, ...], node_name: str | None) -> None:
    from agent import linux
    from agent.spec.node import SpecError, to_json
    from agent.tools.as_spec import NotFound, adopt

    try:
        found = adopt(linux.machine(), node_name or _name(), nics)
    except NotFound as error:
        raise _common.Failed(str(error)) from None
    except SpecError as error:
        raise _common.Failed(f"no spec says what this node has: {error}; mend that, or name the NICs to take") from None
    except ValueError as error:
        raise _common.Failed(f"{error}; give another with --node-name") from None
    click.echo(to_json(found.spec), nl=False)
    for line in found.remaining:
        click.echo(f"trackbed: the plan of this spec is not empty: {line}", err=True)
    if found.remaining:
        sys.exit(2)


def _name() -> str:
    try:
        return _common.read_spec(None).node_name
    except _common.Failed:
        return socket.gethostname().lower()
