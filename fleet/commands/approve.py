"""`trackbed fleet approve`."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import click
from attrs import asdict
from lightkube import ApiError
from lightkube.models.certificates_v1 import CertificateSigningRequestCondition, CertificateSigningRequestStatus
from lightkube.resources.certificates_v1 import CertificateSigningRequest

from agent.report import names
from agent.report.printable import printable
from fleet.api import ABSENT, CONFLICTS, Api, code, node_name, options
from fleet.approval import KnownNodes, Verdict, verdicts
from fleet.bindings import admit, admitted
from fleet.inventory import Inventory
from fleet.issued import decide, wrong

NOT_ALL = 2


@click.command()
@click.argument("nodes", nargs=-1, type=node_name, metavar="[NODE]...")
@click.option(
    "--inventory", type=click.Path(path_type=Path, exists=True), help="Every node of this inventory may be enrolled."
)
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
    api: Api, nodes: tuple[str, ...], inventory: Path | None, again: tuple[str, ...], dry: bool, as_json: bool
) -> None:
    """Approve certificate requests of reporters, and deny requests in a reporter's name that no reporter would make.

    A renewal is approved if the node itself requests it. A first certificate is approved only if the node is named here or in
    the inventory, and was not enrolled before. Requests of other clients are left alone. To approve renewals, run this command
    from a timer, without names.

    Exit code: 0 every request was approved, or there was none; 2 some were denied or left for you; 1 an error.

    Example: trackbed fleet approve --inventory inventories/prod.py --dry
    """
    expected = {*nodes, *(Inventory.read(inventory).hosts if inventory else ())}
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
        try:
            if one.action == "approve" and one.requester == names.ENROLMENT:
                # Made before the approval, since the bindings mark the node as enrolled. Not for a renewal, which must not
                # restore removed rights.
                admit(api.client, one.node)
        except ApiError as error:
            failed[one.request] = f"{one.node} cannot be admitted: {error.status.message}; is fleet/cluster applied?"
            continue
        try:
            _decide(api, requests[one.request], one, api.now)
        except ApiError as error:
            # Another approver was faster, or the request is gone: there is nothing left to do.
            if code(error) not in (*CONFLICTS, ABSENT):
                failed[one.request] = error.status.message or str(error)
            continue
        if one.action == "approve":
            approved[one.request] = requests[one.request]
    return {**failed, **wrong(api.client, approved)}


def _decide(api: Api, request: CertificateSigningRequest, verdict: Verdict, now: datetime) -> None:
    good = verdict.action == "approve"
    condition = CertificateSigningRequestCondition(
        status="True",
        type="Approved" if good else "Denied",
        reason="TrackbedApproved" if good else "TrackbedDenied",
        message=f"{verdict.reason} (trackbed fleet approve, by {api.user})",
        lastUpdateTime=now,
    )
    others = (request.status.conditions if request.status else None) or []
    request.status = CertificateSigningRequestStatus(conditions=[*others, condition])
    decide(api.client, request)
