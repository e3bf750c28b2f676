"""`trackbed fleet status`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import click
from attrs import asdict
from rich.text import Text

from agent.report import names
from agent.report.printable import printable
from fleet import columns, device_rules
from fleet.api import Api, options
from fleet.inventory import Inventory
from fleet.inventory import options as inventory_options
from fleet.objects import annotations_of
from fleet.standing import Standing, since, standings, unreadable, unready

NOT_READY = 2
COLOURS = {"True": "green", "False": "red", "Unknown": "yellow"}
WORDS = {"True": "ready", "False": "not ready"}
"""The words for a node's status, the same as in `trackbed status`. Every other status is "unknown"."""


@click.command()
@inventory_options("Every node of this inventory is shown.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@options
def status(api: Api, inventory: Path | None, limit: tuple[str, ...], as_json: bool) -> None:
    """Show for every node whether it is ready, since when, and if not, why; also its spec and its agent.

    If the Lease of a node has expired, the node is unknown, also before a sweep. If its kubelet is not ready, the node is not
    ready. A node of the inventory is shown even if the cluster has no Node of its name. Nodes that are shut out are named, also
    if there is no Node, and so are devices that a maintenance has tainted (`fleet maintain --device`).

    Exit code: 0 every node is ready, 2 some are not or there is none, 1 the cluster did not answer.

    Example: trackbed fleet status --json
    """
    # Rules come first: a maintenance records itself before it makes them.
    rules = [rule for rule in device_rules.listed(api) if rule.maintains]
    nodes, leases, shut_out = api.nodes(), api.leases(), api.shut_out()
    recorded = {name for name, node in nodes.objects.items() if names.MAINTENANCE in annotations_of(node)}
    expected = Inventory.given(inventory, limit).hosts
    listed = standings(nodes.objects, leases.objects, api.now, unreadable(nodes.faults, leases.faults), expected)
    others = len(nodes.objects.keys() - {one.name for one in listed})
    ready = bool(listed) and not unready(listed)
    if as_json:
        document = {
            "nodes": [plain(one) for one in listed],
            "ready": ready,
            "other_nodes": others,
            "shut_out": shut_out,
            "maintenance_rules": [
                {"name": rule.name, "node": rule.node, "device": rule.device, "recorded": rule.node in recorded}
                for rule in rules
            ],
        }
        click.echo(json.dumps(document))
    else:
        print_nodes(listed, api.now, others, shut_out or {})
        for rule in rules:
            left = "is not recorded; trackbed fleet sweep removes the taint"
            has = "has not ended" if rule.node in recorded else left
            click.echo(printable(f"{rule.node}: {rule.device} is tainted by a maintenance that {has}"))
    if shut_out is None:
        click.echo("trackbed: this user may not read which nodes are shut out (rights: docs/fleet.md)", err=True)
    if not listed:
        remedy = "is it the right cluster? give another --context or --kubeconfig, or an --inventory of nodes to expect"
        click.echo(f"trackbed: the cluster has no node of Trackbed's; {remedy}", err=True)
    sys.exit(0 if ready else NOT_READY)


def plain(one: Standing) -> dict[str, object]:
    """A node in JSON's types; times as RFC 3339."""
    return asdict(
        one, value_serializer=lambda _, __, value: value.isoformat() if hasattr(value, "isoformat") else value
    )


def print_nodes(listed: list[Standing], now: datetime, others: int, shut_out: Mapping[str, str]) -> None:
    """Print a line for each node, how many are ready, and which are shut out."""
    rows = []
    for one in listed:
        # The message of a ready node names its warnings.
        why = one.message or one.reason if one.ready == "True" else ": ".join(filter(None, (one.reason, one.message)))
        notes = [note for note, holds in (("cordoned", one.cordoned), ("in maintenance", one.maintenance)) if holds]
        # Its reporter knows what the taint waits for, as a resource that no device plugin offers.
        notes += ["tainted (why: trackbed status on the node)"] if one.ready == "True" and one.tainted else []
        notes += ["not tainted"] if one.ready != "True" and one.joined and not one.tainted else []
        row = (
            _text(one.name),
            _text(WORDS.get(one.ready, "unknown"), style=COLOURS.get(one.ready, "")),
            _text(since(one, now)),
            _text({"True": "yes", "False": "no"}.get(one.up_to_date, "unknown")),
            _text(one.spec_hash or "-"),
            _text(one.agent_version or "-"),
            _text("; ".join([why, *notes])),
        )
        rows.append(row)
    if rows:
        columns.show(("NODE", "READY", "SINCE", "UP TO DATE", "SPEC", "AGENT", "WHY"), rows)
    ready = len(listed) - len(unready(listed))
    foreign = f"; {others} other nodes in the cluster are not Trackbed's" if others else ""
    click.echo(f"{ready} of {len(listed)} nodes are ready{foreign}")
    for name, why in sorted(shut_out.items()):
        click.echo(printable(f"{name} is shut out ({why}); docs/kubernetes.md says how it is let in again"))


def _text(text: str, style: str = "") -> Text:
    """Text that a node has written. Rich's markup and the terminal's escape sequences in it have no effect."""
    return Text(printable(text), style)
