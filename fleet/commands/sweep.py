"""`trackbed fleet sweep`."""

from __future__ import annotations

import json
import sys

import click

from agent.report import names
from agent.report.options import number
from agent.report.printable import printable
from fleet import sweeping
from fleet.api import Api, options
from fleet.interruption import INTERRUPTED, interruptible
from fleet.sweeping import SweepResult

REFUSED = 2


@click.command()
@click.option(
    "--max-share",
    default=0.25,
    show_default=True,
    type=number("a share", 0.0, 1.0),
    help="If a larger share of the nodes is silent, and more than five or half of them, no node is tainted.",
)
@click.option(
    "--max-evict-share",
    default=0.05,
    show_default=True,
    type=number("a share", 0.0, 1.0),
    help="If bad devices would evict pods on a larger share of the nodes, and more than five or half of them, none is evicted.",
)
@click.option("--dry", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@options
def sweep(api: Api, max_share: float, max_evict_share: float, dry: bool, as_json: bool) -> None:
    """Mark silent nodes as not ready: taint them, and set their condition to Unknown.

    A node is silent if its Lease has expired. If a Lease says that its node is not ready, but the Node does not say so, the
    command taints the Node, too, and sets its condition to False. If a Lease was deleted, the command makes a new one.

    The DeviceTaintRules of silent and deleted nodes, and of a maintenance that is not recorded, are removed. Where a node's
    policy asks for it (quarantine.evict_after), the pods that use a bad device are evicted after that time.

    Run this command from a timer, as often as you like; two runs at once do no harm.

    Exit code: 0 done, 2 too many nodes are without a heartbeat, or have bad devices, and nothing was done to these, 1 an error,
    130 stopped before all was done.

    Example: trackbed fleet sweep --dry
    """
    decided = sweeping.decide(api, max_share, max_evict_share)
    with interruptible("the node that was begun is finished first") as interruption:
        result = SweepResult(decided) if dry else sweeping.sweep(api, decided, interruption.stop)
        _print(result, dry, as_json)
    if result.left:
        sys.exit(INTERRUPTED)
    if decided.refused or decided.devices.refused:
        sys.exit(REFUSED)
    if result.failed:
        sys.exit(1)


def _print(result: SweepResult, dry: bool, as_json: bool) -> None:
    decided = result.plan
    if as_json:
        document = {
            "nodes": decided.fleet,
            "expired": decided.expired,
            "allowed": decided.allowed,
            "refused": decided.refused,
            "to_taint": decided.taint,
            "tainted": result.tainted,
            "recovered": result.recovered,
            "renewed": decided.renew if dry else result.renewed,
            "rules_to_remove": [rule.name for rule in decided.devices.remove],
            "rules_removed": [rule.name for rule in result.removed],
            "evictions_refused": decided.devices.refused,
            "rules_to_evict": [rule.name for rule in decided.devices.evict],
            "rules_evicting": [rule.name for rule in result.evicting],
            "failed": result.failed,
            "left": result.left,
        }
        click.echo(json.dumps(document))
    else:
        for name in decided.taint if dry else result.tainted:
            silent = name in decided.expired
            why, status = ("no heartbeat", "Unknown") if silent else ("not ready by its Lease", "False")
            click.echo(f"{name}: {why}; {'would be tainted' if dry else 'tainted'}, its condition {status}")
        for name in decided.renew if dry else result.renewed:
            would = "would be made" if dry else "was made"
            click.echo(f"{name}: its Lease is gone; another one {would}, good for {names.LEASE_DURATION} s")
        for rule in decided.devices.remove if dry else result.removed:
            why = "no maintenance is recorded" if rule.maintains else "the node is silent or gone"
            click.echo(f"{rule.node}: {why}; its rule for {rule.device} {'would be' if dry else 'is'} removed")
        for rule in decided.devices.evict if dry else result.evicting:
            click.echo(f"{rule.node}: {rule.device} is bad for {rule.evict_after} s; its pods {_would_be(dry)} evicted")
        for name in result.recovered:
            click.echo(f"{name}: came back meanwhile")
        now = {*decided.taint, *decided.renew}
        already = 0 if decided.refused else len(set(decided.expired) - now)
        click.echo(
            f"{decided.fleet} nodes, {len(decided.expired)} without a heartbeat, {already} of them tainted before"
        )
    for name, reason in result.failed.items():
        click.echo(printable(f"trackbed: {name}: {reason}"), err=True)
    if decided.refused:
        click.echo(
            f"trackbed: {len(decided.expired)} of {decided.fleet} nodes are without a heartbeat, and at most "
            f"{decided.allowed} may be: none of them was tainted. The fault is likely elsewhere (the API server, the "
            "network, the reporters' credentials); if it is not, give a larger --max-share",
            err=True,
        )
    if decided.devices.refused:
        click.echo(
            f"trackbed: bad devices would evict pods on {len(decided.devices.nodes)} of {decided.fleet} nodes, and at most "
            f"{decided.devices.allowed} are allowed: no pod was evicted. The fault is likely elsewhere (a switch, a "
            "new version of Trackbed); if it is not, give a larger --max-evict-share",
            err=True,
        )
    if result.left:
        click.echo(printable(f"trackbed: left to the next sweep: {', '.join(result.left)}"), err=True)


def _would_be(dry: bool) -> str:
    """The verb of what is done, or with --dry would be done."""
    return "would be" if dry else "are"
