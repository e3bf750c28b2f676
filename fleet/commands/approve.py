"""`trackbed fleet approve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import httpx2
from attrs import asdict
from lightkube import ApiError
from lightkube.models.certificates_v1 import CertificateSigningRequestCondition, CertificateSigningRequestStatus
from lightkube.resources.certificates_v1 import CertificateSigningRequest

from agent.report import names
from agent.report.printable import printable
from fleet.api import ABSENT, Api, Failed, code, node_name, options
from fleet.approval import KnownNodes, Verdict, conditions, decisions, verdicts
from fleet.bindings import Binding, admit, admitted, withdraw
from fleet.connection import why
from fleet.inventory import Inventory
from fleet.inventory import options as inventory_options
from fleet.issued import decide, wrong
from fleet.reading import PlainRequest, read

NOT_ALL = 2

TRIES = 2
"""How often a decision is written if the request is still pending after the first try."""


@click.command()
@click.argument("nodes", nargs=-1, type=node_name, metavar="[NODE]...")
@inventory_options("Every node of this inventory may be enrolled.")
@click.option(
    "--again",
    multiple=True,
    type=node_name,
    metavar="NODE",
    help="This node was reinstalled and may be enrolled again.",
)
@click.option("--dry", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@options
def approve(
    api: Api,
    nodes: tuple[str, ...],
    inventory: Path | None,
    limit: tuple[str, ...],
    again: tuple[str, ...],
    dry: bool,
    as_json: bool,
) -> None:
    """Approve certificate requests of reporters, and deny requests in a reporter's name that no reporter would make.

    A renewal is approved if the node itself requests it. A first certificate is approved only if the node is named here or in
    the inventory, and was not enrolled before. Requests of other clients are left alone. To approve renewals, run this command
    from a timer, without names.

    Exit code: 0 every request was approved, or there was none; 2 some were denied or left for you; 1 an error.

    Example: trackbed fleet approve --inventory inventories/prod.py --limit own_cluster --dry
    """
    expected = {*nodes, *Inventory.given(inventory, limit).hosts}
    requests = api.requests()
    known = KnownNodes(expected=expected, enrolled=admitted(api.client), joined=api.nodes().objects.keys(), again=again)
    judged = verdicts(requests.objects.values(), known, requests.faults)
    failed = {} if dry else _carry_out(api, requests.objects, judged)
    if as_json:
        click.echo(json.dumps({"requests": [asdict(one) for one in judged], "done": not dry, "failed": failed}))
    else:
        for one in judged:
            done = "would " if dry and one.action != "leave" else ""
            line = f"{one.request}: {done}{one.action}: {one.node or 'no node'}, asked by {one.requester}: {one.reason}"
            click.echo(printable(line))
        click.echo(f"{len(judged)} pending requests" if judged else "no pending requests of reporters")
    for name, reason in failed.items():
        click.echo(printable(f"trackbed: {name}: {reason}"), err=True)
    if failed:
        sys.exit(1)
    sys.exit(0 if all(one.action == "approve" for one in judged) else NOT_ALL)


def _carry_out(api: Api, requests: dict[str, CertificateSigningRequest], judged: list[Verdict]) -> dict[str, str]:
    failed: dict[str, str] = {}
    approved: dict[str, CertificateSigningRequest] = {}
    for one in judged:
        if one.action == "leave":
            continue
        enrols = one.action == "approve" and one.requester == names.ENROLMENT
        again = f"; if it stays pending: trackbed fleet approve --again {one.node}" if enrols else ""
        try:
            # Made before the approval, since the bindings mark the node as enrolled. Not for a renewal, which must not
            # restore removed rights.
            made = admit(api.client, one.node) if enrols else []
        except ApiError as error:
            failed[one.request] = f"{one.node} cannot be admitted: {why(error)}; is fleet/cluster applied?"
            continue
        except httpx2.HTTPError as error:
            failed[one.request] = f"{one.node} cannot be admitted: {why(error)}{again}"
            continue
        try:
            _decide(api, requests[one.request], one)
        except Failed as error:
            failed[one.request] = error.message + ("" if _withdrawn(api, made) else again)
        except httpx2.HTTPError as error:
            # The decision may have been written, and then the node needs its bindings.
            failed[one.request] = f"{why(error)}{again}"
        else:
            if one.action == "approve":
                approved[one.request] = requests[one.request]
    return {**failed, **wrong(api.client, approved)}


def _withdrawn(api: Api, made: list[Binding]) -> bool:
    """Delete the bindings that were made for a request that is not approved: else the node would count as enrolled."""
    try:
        withdraw(api.client, made)
    except httpx2.HTTPError:
        return False
    return True


def _decide(api: Api, request: CertificateSigningRequest, verdict: Verdict) -> None:
    """Decide on a request, unless another approver was faster, or the request is gone.

    :raises Failed: it is not decided in this way.
    :raises httpx2.HTTPError: whether it is decided is unknown.
    """
    wanted = "Approved" if verdict.action == "approve" else "Denied"
    there, reason = request, ""
    for _ in range(TRIES):
        try:
            _write(api, there, verdict, wanted)
            return
        except httpx2.HTTPError as error:
            reason = why(error)
        try:
            # If only the answer was lost, the decision is there. A request that somebody has changed is decided as it is now.
            current, fault = read(api.client.get(PlainRequest, verdict.request), CertificateSigningRequest)
        except ApiError as error:
            if code(error) == ABSENT:
                return
            raise
        if current is None or current.spec != request.spec or (fault and wanted == "Approved"):
            raise Failed("it was changed meanwhile, and must be judged again; run the command again")
        if decided := decisions(current):
            if wanted not in decided:
                raise Failed(
                    f"it is {' and '.join(sorted(decided))} meanwhile, and should be {wanted}: {verdict.reason}"
                )
            return
        there = current
    raise Failed(reason)


def _write(api: Api, request: CertificateSigningRequest, verdict: Verdict, wanted: str) -> None:
    condition = CertificateSigningRequestCondition(
        status="True",
        type=wanted,
        reason=f"Trackbed{wanted}",
        message=f"{verdict.reason} (trackbed fleet approve, by {api.user})",
        lastUpdateTime=api.now,
    )
    request.status = CertificateSigningRequestStatus(conditions=[*conditions(request), condition])
    decide(api.client, request)
