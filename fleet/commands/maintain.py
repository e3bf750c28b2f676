"""`trackbed fleet maintain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from lightkube import ApiError

from agent.report import names
from agent.report.options import seconds
from agent.report.records import Disruption
from fleet import nic_devices
from fleet.api import ABSENT, Api, Failed, code, node_name, options
from fleet.eviction import Rules
from fleet.interruption import INTERRUPTED, Interruption, interruptible
from fleet.inventory import Inventory
from fleet.inventory import options as inventory_options
from fleet.maintenance import Maintenance, NodeResult
from fleet.maintenance_record import not_finished, record_of
from fleet.objects import condition_of


@click.command()
@click.argument("nodes", nargs=-1, required=True, type=node_name, metavar="NODE...")
@inventory_options("The inventory with the connection data of the nodes; --undo needs none.")
@click.option(
    "--allow",
    type=click.Choice([str(level) for level in Disruption]),
    default="vf-reset",
    show_default=True,
    help="The most disruptive level of changes to make.",
)
@click.option(
    "--device",
    "nic",
    default="",
    metavar="NIC",
    help="Change only this NIC, on one node after the other; evict only its pods, and cordon no node.",
)
@click.option(
    "--at-once", default=1, show_default=True, type=click.IntRange(1), help="How many nodes at the same time."
)
@click.option("--force", is_flag=True, help="Also evict pods without a controller; nothing starts them again.")
@click.option("--delete-emptydir-data", is_flag=True, help="Also evict pods with local data on the node's disk.")
@click.option(
    "--drain-timeout", type=seconds, default=600.0, show_default=True, help="Seconds for the pods to be evicted."
)
@click.option(
    "--apply-timeout", type=seconds, default=300.0, show_default=True, help="Seconds for the change on the node."
)
# Longer than PLUGIN_LONGEST: for so long the reporter waits until a device plugin ends that it cannot stop.
@click.option(
    "--ready-timeout", type=seconds, default=900.0, show_default=True, help="Seconds until the Node is ready again."
)
@click.option("--resume", is_flag=True, help="Continue an earlier run that was interrupted.")
@click.option("--undo", is_flag=True, help="Restore the nodes as they were before an interrupted run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@options
def maintain(
    api: Api,
    nodes: tuple[str, ...],
    inventory: Path | None,
    limit: tuple[str, ...],
    allow: str,
    nic: str,
    at_once: int,
    force: bool,
    delete_emptydir_data: bool,
    drain_timeout: float,
    apply_timeout: float,
    ready_timeout: float,
    resume: bool,
    undo: bool,
    as_json: bool,
) -> None:
    """Make changes that are deferred because the nodes are in use: cordon, drain, apply, wait for ready, uncordon.

    A node whose report says that no change waits is left as it is.

    The command evicts pods, so PodDisruptionBudgets are respected; pods of DaemonSets, static pods and finished pods stay. If a
    drain cannot be finished, it is undone, and so is a maintenance whose change fails while the node is still ready: a pod that
    stayed has a device. If the change fails otherwise, the node stays cordoned. No other node is started then. Each step is
    recorded in the Node, so after a crash --resume and --undo work from any control host.

    With --device (DRA, Kubernetes 1.37) the node is not cordoned. DeviceTaintRules have Kubernetes delete the pods that use the
    NIC or its VFs; if a PodDisruptionBudget forbids that now, nothing is begun. Other pods are left alone.

    Ctrl-C, SIGTERM, SIGHUP and an output that cannot be written (any more) stop the command: it undoes a drain, finishes a
    change that has begun, and says which nodes stay cordoned, and what ends that.

    Exit code: 0 all nodes are done and ready, 1 some are not, 130 stopped before all were.

    Example: trackbed fleet maintain gpu-01 gpu-02 --inventory ~/fleet/inventories/prod.py --allow link-flap
    """
    if resume and undo:
        raise click.UsageError("--resume and --undo exclude each other; give one of them")
    if nic and at_once > 1:
        # The taints of two nodes could evict more pods than a budget allows: it is asked before, and does not count them.
        raise click.UsageError("--device is for one node after the other; give no --at-once")
    wanted = list(dict.fromkeys(nodes))
    if undo:
        # The record suffices: the inventory may be on another control host, or wrong by now.
        known = Inventory(Path(), {})
    elif inventory is None:
        raise click.UsageError("--inventory is missing: give the inventory with the connection data of the nodes")
    else:
        known = Inventory.read(inventory, limit)
        if nic:
            nic_devices.require(api)
        _check(api, known, wanted, resume)
    with interruptible("a change that has begun on a node is finished first, and a drain undone") as interruption:
        maintenance = Maintenance(
            api=api,
            hosts=known,
            allow=Disruption.parse(allow),
            rules=Rules(force, delete_emptydir_data),
            drain_timeout=drain_timeout,
            apply_timeout=apply_timeout,
            ready_timeout=ready_timeout,
            tell=lambda line: interruption.say(line, err=as_json),
            resume=resume or undo,
            stop=interruption.stop,
            nic=nic,
        )
        results = {name: maintenance.give_back(name) for name in wanted} if undo else maintenance.run(wanted, at_once)
        good = _print(interruption, results, "undone" if undo else "done", as_json)
    sys.exit(0 if good else INTERRUPTED if interruption.stop.is_set() else 1)


def _print(interruption: Interruption, results: dict[str, tuple[NodeResult, str]], wished: str, as_json: bool) -> bool:
    """Print the results; whether all are as wished, and the JSON could be written."""
    good = all(result == wished for result, _ in results.values())
    nodes = {name: {"result": result, "reason": reason} for name, (result, reason) in results.items()}
    if as_json and not interruption.say(json.dumps({"done": good, "nodes": nodes})):
        good = False
    for name, (result, reason) in results.items():
        if result != wished:
            interruption.say(f"trackbed: {name}: {result}{': ' if reason else ''}{reason}", err=True)
    return good


def _check(api: Api, inventory: Inventory, nodes: list[str], continuing: bool) -> None:
    """Refuse with the faults of all nodes, before any node is changed."""
    faults = []
    for name in nodes:
        if name not in inventory.hosts:
            faults.append(f"{name} is the Node of no host in {inventory.path}; give node names, or another inventory")
        try:
            node, _ = api.node(name)
        except ApiError as error:
            if code(error) != ABSENT:
                raise
            faults.append(f"the cluster has no Node {name}; see: trackbed fleet status")
            continue
        if condition_of(node, names.READY) is None:
            faults.append(f"{name} has no condition {names.READY}; deploy it first")
        if (record := record_of(node)) and not continuing:
            faults.append(not_finished(name, record))
    if faults:
        raise Failed("\n".join(faults))
