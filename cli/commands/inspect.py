"""`trackbed inspect`."""

from __future__ import annotations

import json
import socket
import sys

import click

from agent.report.records import to_plain
from cli import node_files
from cli.commands import Failed, as_json


@click.command()
@click.option("--as-spec", is_flag=True, help="Write what the node has now as a spec whose plan is empty.")
@click.option("--as-inventory", is_flag=True, help="Write an inventory to start from, with the data of a group.")
@click.option("--nic", "nics", multiple=True, help="With --as-...: this NIC (netdev or PCI address); repeatable.")
@click.option("--node-name", default=None, help="With --as-...: the Node's name; else the spec's, or the host's.")
@as_json
def inspect(as_spec: bool, as_inventory: bool, nics: tuple[str, ...], node_name: str | None, as_json: bool) -> None:
    """Show every network function: addresses, driver, firmware, netdev, RDMA device, VFs, NUMA node, interrupts.

    --as-spec prints a spec of the NICs that have SR-IOV or RDMA, or of those of --nic, as JSON for `plan --spec` and for
    /etc/trackbed/node.json. An inventory can have the same keys and values as the data of a host.

    --as-inventory prints an inventory in Python, with this host and the data of its group, to start a fleet from. NICs of the
    same kind and settings have one entry. The inventory requires the RDMA devices and GPUs that work now. With --json it prints
    the data that deploys/discover.py makes groups from: one entry for each NIC, and the hardware.

    Exit code: 0 done, 1 an error. With --as-spec or --as-inventory, 2 if the plan of the result is not empty (it is printed).

    Example: trackbed inspect --as-spec | trackbed plan --spec -
    """
    if as_spec or as_inventory:
        if as_inventory and as_spec:
            raise click.UsageError("--as-inventory and --as-spec exclude each other")
        _write(as_inventory, nics, node_name, as_json)
        return
    if nics or node_name is not None:
        raise click.UsageError("--nic and --node-name belong to --as-spec and --as-inventory")
    from agent import linux
    from cli.inspection import inspect, render

    inspection = inspect(linux.machine(), node_files.present_spec())
    click.echo(json.dumps(to_plain(inspection)) if as_json else render(inspection))


def _write(as_inventory: bool, nics: tuple[str, ...], node_name: str | None, as_json: bool) -> None:
    from agent import linux
    from agent.spec.node import SpecError, to_json
    from cli.as_inventory import derive_inventory
    from cli.as_spec import NotFound, derive_spec

    present, host = node_files.present_spec(), socket.gethostname().lower()
    if node_name is None and present is None and node_files.SPEC.exists():
        click.echo(f"{node_files.SPEC} cannot be read, so node_name is this host's name; see: trackbed plan", err=True)
    own = present.node_name if present else host
    name = own if node_name is None else node_name
    try:
        if as_inventory:
            starter = derive_inventory(linux.machine(), host, name, nics)
            text = f"{json.dumps(starter.facts)}\n" if as_json else starter.text
            remaining = starter.remaining
        else:
            derived = derive_spec(linux.machine(), name, nics, present)
            text, remaining = to_json(derived.spec), derived.remaining
    except NotFound as error:
        raise Failed(str(error)) from None
    except SpecError as error:
        raise Failed(
            f"a spec cannot say what this node has: {error}; correct that, or choose NICs with --nic"
        ) from None
    except ValueError as error:
        raise Failed(f"{error}; give another name with --node-name") from None
    click.echo(text, nl=False)
    for line in remaining:
        click.echo(f"trackbed: the plan of this spec is not empty: {line}", err=True)
    if remaining:
        sys.exit(2)
