"""Pure functions: what is wrong with a node, and what to do about it. Causes come before their consequences.

Findings are sorted by stage: agent (without it nothing else is known), device, network, cluster. Within a stage, problems come
before warnings, and refused changes are in the order of the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from attrs import frozen

from agent.hardware.sysfs import whole
from agent.report.published import Published
from agent.report.reasons import declared
from agent.report.records import Condition, Outcome, Report, Severity
from agent.report.verdict import NoReport
from agent.spec.node import NodeSpec

Stage = Literal["agent", "device", "network", "cluster"]
STAGES: tuple[Stage, ...] = ("agent", "device", "network", "cluster")

REPEAT_OUTCOMES = ("Converged", "Uncontended", "UpToDate")
"""Conditions whose messages repeat outcomes."""

CAUSES = ("WorkerAlive", "NicsPresent")
"""Conditions that explain others: if nobody reads the devices, or a NIC is missing, other conditions are not True either."""

FEW = 3
"""How many outcomes with the same reason are listed one by one."""


@frozen
class Finding:
    """One thing that is wrong."""

    stage: Stage
    severity: Severity
    what: str
    remedy: str


@frozen
class Service:
    """The unit's state as `systemctl show` prints it: ActiveState, UnitFileState, Result, NRestarts."""

    active: str
    enabled: str
    result: str = "success"
    restarts: int = 0

    @classmethod
    def shown(cls, output: str) -> Service | None:
        """Read what `systemctl show` printed, a ``NAME=VALUE`` a line; None if that describes no unit."""
        properties = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
        if "ActiveState" not in properties:
            return None
        active = "not installed" if properties.get("LoadState") == "not-found" else properties["ActiveState"]
        enabled, result = (properties.get(name, "") for name in ("UnitFileState", "Result"))
        return cls(active, enabled, result, whole(properties.get("NRestarts", "")) or 0)


def redirecting(listed: str) -> frozenset[str]:
    """The functions that send what one device writes to another up to the root complex, from `lspci -D -vv`."""
    found = set[str]()
    address = ""
    for line in listed.splitlines():
        if line and not line[0].isspace():
            address = line.partition(" ")[0]
        elif line.lstrip().startswith("ACSCtl:") and ("ReqRedir+" in line or "CmpltRedir+" in line):
            found.add(address)
    return frozenset(found)


@frozen
class Evidence:
    """What is known about the node. ``service`` None: systemd does not run here. ``no_report``: why there is no report.

    ``not_fresh``: why the report may be out of date. ``spec_fault``: what is wrong with the spec's file.
    ``redirecting``: PCI bridges above NICs and GPUs that redirect what these write to each other.
    ``publishes``: the reporter should publish the node in Kubernetes. ``published``: what it has published.
    """

    service: Service | None = None
    report: Report | None = None
    no_report: NoReport | None = None
    not_fresh: Sequence[str] = ()
    spec: NodeSpec | None = None
    spec_hash: str = ""
    spec_fault: str = ""
    redirecting: Sequence[str] = ()
    processes: frozenset[str] = frozenset()
    publishes: bool = False
    published: Published | None = None


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """What is wrong, in the order in which to repair it."""
    findings = [*_agent(evidence), *_hints(evidence)]
    if evidence.report is not None and not evidence.not_fresh and _runs(evidence.service) is not False:
        findings += _publication(evidence.report, evidence.published) if evidence.publishes else ()
        findings += _report(evidence.report)
    return tuple(sorted(findings, key=lambda f: (STAGES.index(f.stage), f.severity != "required")))


def _runs(service: Service | None) -> bool | None:
    """Whether the service runs; None: unknown, since systemd does not run here."""
    return None if service is None else service.active in ("active", "reloading", "activating")


def _agent(evidence: Evidence) -> Iterator[Finding]:
    service = evidence.service
    running = _runs(service)
    if evidence.spec_fault:
        yield Finding("agent", "required", evidence.spec_fault, "deploy the node again, or write a correct spec there")
    if service is not None and not running:
        why = f" ({service.result})" if service.result != "success" else ""
        remedy = "systemctl start trackbed; if it ends again: journalctl -u trackbed -n 50"
        yield Finding("agent", "required", f"the service trackbed is {service.active}{why}", remedy)
        return
    if service is not None and service.restarts > 2:
        what = f"systemd has restarted the service {service.restarts} times"
        yield Finding("agent", "warn", what, "see why: journalctl -u trackbed -n 100")
    if service is not None and service.enabled not in ("enabled", "enabled-runtime"):
        yield Finding("agent", "warn", "the service is not started at boot", "systemctl enable trackbed")
    if evidence.no_report is not None:
        yield Finding("agent", "required", evidence.no_report.reason, evidence.no_report.remedy)
    for reason in evidence.not_fresh:
        hung = "it runs, but may hang in a driver: see dmesg for blocked tasks. " if running else ""
        yield Finding("agent", "required", reason, f"{hung}systemctl restart trackbed")
    report = evidence.report
    if report is None or evidence.not_fresh:
        return
    if report.refusal:
        remedy = "correct the spec and deploy again; until then the spec before it is kept true"
        yield Finding("agent", "required", f"the newest spec was refused: {report.refusal}", remedy)
    elif evidence.spec is not None and evidence.spec_hash != report.spec_hash:
        what = f"the agent follows spec {report.spec_hash or 'none'}, the file has {evidence.spec_hash}"
        yield Finding("agent", "required", what, "systemctl reload trackbed")


def _hints(evidence: Evidence) -> Iterator[Finding]:
    """Findings that are not in the report, and may explain its conditions."""
    if evidence.redirecting:
        what = (
            "transfers between GPUs and NICs take the way by the CPU, or fail, since PCI access control (ACS) redirects them "
            f"at {', '.join(evidence.redirecting)}"
        )
        remedy = (
            "unless virtual machines need the isolation, turn ACS off in the BIOS, or boot with pci=disable_acs_redir=ADDRESS "
            "(several, with ; between them)"
        )
        yield Finding("device", "warn", what, remedy)
    pins = evidence.spec is not None and evidence.spec.irqs.pin and evidence.spec.irqs.irqbalance == "untouched"
    if pins and "irqbalance" in evidence.processes:
        what = "irqbalance runs while the agent places interrupts: each undoes the other's work"
        yield Finding("device", "warn", what, "set irqs.irqbalance to disabled, or irqs.pin to false")


def _report(report: Report) -> Iterator[Finding]:
    differing = [outcome for outcome in report.outcomes if outcome.result != "applied"]
    repeated = REPEAT_OUTCOMES if differing or report.refusal else ()
    wrong = [each for each in report.conditions if each.status != "True" and each.type not in repeated]
    yield from (_finding(each) for cause in CAUSES for each in wrong if each.type == cause)
    yield from _outcomes(differing)
    yield from (_finding(each) for each in wrong if each.type not in CAUSES)


def _publication(report: Report, published: Published | None) -> Iterator[Finding]:
    """What Kubernetes is not told of a fresh report."""
    if published is None:
        remedy = "systemctl restart trackbed-reporter; if it ends again: journalctl -u trackbed-reporter -n 50"
        yield Finding("cluster", "required", "the reporter does not publish the node in Kubernetes", remedy)
    elif published.error:
        is_told = (published.boot_id, published.ready) == (report.boot_id, report.ready)
        severity: Severity = "warn" if is_told else "required"
        what = f"not all of the newest report is published in Kubernetes: {published.error}"
        yield Finding("cluster", severity, what, "see: journalctl -u trackbed-reporter -n 50")


def _finding(condition: Condition) -> Finding:
    what = f"{condition.type} is {condition.status} ({condition.reason}): {condition.message}"
    known = declared(condition.type, condition.reason)
    remedy = condition.remedy or (known.remedy if known is not None else "") or "see: trackbed status"
    return Finding(condition.stage, condition.severity, what, remedy)


def _outcomes(outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    listed: Counter[tuple[str, ...]] = Counter()
    alike = Counter(_reason(outcome) for outcome in outcomes)
    for outcome in outcomes:
        reason = _reason(outcome)
        listed[reason] += 1
        if listed[reason] > FEW:
            continue
        more = alike[reason] - FEW if listed[reason] == FEW else 0
        alike_too = f" (and {more} more alike)" if more > 0 else ""
        what = f"{outcome.change}: {outcome.result}: {outcome.error}{alike_too}"
        severity: Severity = "required" if outcome.change.required else "warn"
        yield Finding("device", severity, what, outcome.remedy or "see: trackbed history")


def _reason(outcome: Outcome) -> tuple[str, ...]:
    return outcome.change.kind, outcome.change.field, outcome.result, outcome.error
