"""`trackbed doctor`: what is wrong, what to do, and in which order."""

from typing import Any

import pytest
from attrs import evolve

from agent.report.published import Published
from agent.report.records import Change, Condition, Outcome, Report
from agent.report.verdict import NoReport
from agent.spec.node import from_mapping
from cli.diagnosis import Evidence, Finding, Service, diagnose, redirecting

RUNS = Service("active", "enabled")
REPORT = Report("n1", "h1", "boot", "0.1", ready=True, up_to_date=True)
SPEC = from_mapping({"node_name": "n1", "irqs": {"irqbalance": "untouched"}})
WELL = Evidence(service=RUNS, report=REPORT, spec=SPEC, spec_hash="h1")


def text(findings: tuple[Finding, ...]) -> str:
    return "\n".join(f"{f.stage} {f.severity} {f.what} | {f.remedy}" for f in findings)


def test_a_healthy_node_has_no_findings() -> None:
    assert diagnose(WELL) == ()
    assert diagnose(evolve(WELL, service=None)) == ()


@pytest.mark.parametrize(
    ("output", "service"),
    [
        (
            "Result=success\nNRestarts=3\nActiveState=active\nUnitFileState=enabled\nLoadState=loaded",
            Service("active", "enabled", "success", 3),
        ),
        ("ActiveState=inactive\nLoadState=not-found\nNRestarts=", Service("not installed", "", "")),
        ("ActiveState=active\nNRestarts=[not set]\nodd", Service("active", "", "")),
        ("ActiveState=active\nNRestarts=\u00b2", Service("active", "", "")),
        ("", None),
    ],
)
def test_the_output_of_systemctl_show_is_parsed(output: str, service: Service | None) -> None:
    assert Service.shown(output) == service


@pytest.mark.parametrize(
    ("changed", "what", "remedy"),
    [
        ({"service": Service("failed", "enabled", "exit-code")}, "trackbed is failed (exit-code)", "systemctl start"),
        ({"service": Service("not installed", "")}, "trackbed is not installed", "systemctl start"),
        ({"service": Service("active", "disabled")}, "not started at boot", "systemctl enable trackbed"),
        ({"service": Service("active", "enabled", restarts=9)}, "restarted the service 9 times", "journalctl"),
        ({"report": None, "no_report": NoReport("it is not there", "start it")}, "it is not there", "start it"),
        ({"not_fresh": ["the last heartbeat is 90 s old"]}, "90 s old", "may hang in a driver"),
        ({"spec": None, "spec_fault": "node.json: mtu: 1 is out of range; give 68"}, "mtu: 1 is out", "write a correct spec"),
        ({"report": evolve(REPORT, up_to_date=False, refusal="no such NIC")}, "refused: no such NIC", "correct the spec"),
        ({"spec_hash": "h2"}, "follows spec h1, the file has h2", "systemctl reload trackbed"),
        ({"processes": frozenset({"irqbalance"})}, "irqbalance runs while", "irqs.pin"),
        ({"publishes": True}, "the reporter does not publish the node", "systemctl restart trackbed-reporter"),
        ({"publishes": True, "published": Published("boot", error="no route")}, "Kubernetes: no route", "journalctl -u"),
    ],
)  # fmt: skip
def test_each_fault_has_a_remedy(changed: dict[str, Any], what: str, remedy: str) -> None:
    (finding,) = diagnose(evolve(WELL, **changed))
    assert what in finding.what
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("published", "severities"),
    [
        (Published("boot", 7, ready=True), []),
        (Published("boot", 7, ready=True, error="a label is invalid"), ["warn"]),
        (Published("boot", 7, ready=False, error="connection refused"), ["required"]),
        (Published("another boot", 7, ready=True, error="connection refused"), ["required"]),
    ],
)
def test_what_kubernetes_is_not_told_is_a_problem_if_it_shows_another_readiness(
    published: Published, severities: list[str]
) -> None:
    findings = diagnose(evolve(WELL, publishes=True, published=published))
    assert [finding.severity for finding in findings] == severities


def test_if_the_agent_is_dead_nothing_else_is_reported() -> None:
    dark = Condition("Carrier", "False", "NoCarrier", "no carrier on x; check the cable", stage="network")
    evidence = evolve(WELL, service=Service("inactive", "enabled"), report=evolve(REPORT, conditions=(dark,)))
    assert [finding.stage for finding in diagnose(evidence)] == ["agent"]
    assert [finding.stage for finding in diagnose(evolve(evidence, service=RUNS, not_fresh=["old"]))] == ["agent"]
    assert [finding.stage for finding in diagnose(evolve(evidence, service=None))] == ["network"]


def test_a_waiting_spec_is_reported_once_and_is_no_refusal() -> None:
    waits = Condition("UpToDate", "False", "Deferred", "vfs ...: not allowed now", severity="warn")
    deferred = Outcome(Change("vfs", "0000:3b:00.0", "count", 7, 5), "deferred", "not allowed now", "allow it")
    (finding,) = diagnose(
        evolve(WELL, report=evolve(REPORT, up_to_date=False, conditions=(waits,), outcomes=(deferred,)))
    )
    assert "count: 7 -> 5: deferred" in finding.what
    assert finding.remedy == "allow it"


def test_causes_come_before_consequences() -> None:
    conditions = (
        Condition("Kubelet", "False", "NoPlugin", "no folder; start it", stage="cluster"),
        Condition("Carrier", "False", "NoCarrier", "no carrier on ens1; check the cable", stage="network"),
        Condition("Clock", "False", "NotSynced", "not synchronised; start chrony", stage="device", severity="warn"),
        Condition("Converged", "False", "Failed", "links ...: said by the outcomes"),
        Condition("NicsPresent", "False", "NicMissing", "NIC rail1 is not there; look at the slot"),
    )
    outcomes = (
        Outcome(Change("vfs", "0000:3b:00.0", "count", 0, 8), "failed", "ENOSPC", "lower vfs.count"),
        Outcome(Change("irqs", "0000:3b:00.0", "rx-0", "0-1", "1"), "failed", "EIO", "see dmesg"),
        Outcome(Change("links", "0000:3b:00.0", "mtu", 1500, 9000), "applied"),
    )
    evidence = evolve(WELL, report=evolve(REPORT, ready=False, conditions=conditions, outcomes=outcomes))
    said = [finding.what.split()[0] for finding in diagnose(evidence)]
    assert said == ["NicsPresent", "vfs", "irqs", "Clock", "Carrier", "Kubelet"]
    assert "lower vfs.count" in diagnose(evidence)[1].remedy


def test_a_condition_without_a_remedy_has_that_of_its_reason() -> None:
    conditions = (
        Condition("WorkerAlive", "False", "WorkerLost", "the worker has ended"),
        Condition("Carrier", "False", "NoCarrier", "no carrier on eth0", remedy="plug it in"),
        Condition("OfALaterVersion", "False", "Whatever", "something"),
    )
    found = {
        finding.what.split()[0]: finding.remedy
        for finding in diagnose(evolve(WELL, report=evolve(REPORT, conditions=conditions)))
    }
    assert found == {
        "WorkerAlive": "see: systemctl status trackbed; journalctl -u trackbed",
        "Carrier": "plug it in",
        "OfALaterVersion": "see: trackbed status",
    }


def test_many_equal_findings_are_shortened() -> None:
    outcomes = tuple(
        Outcome(Change("vfs", f"0000:3b:00.0#{n}", "trust", False, True), "unsupported", "no", "leave it out")
        for n in range(64)
    )
    findings = diagnose(evolve(WELL, report=evolve(REPORT, outcomes=outcomes)))
    assert len(findings) == 3
    assert "(and 61 more alike)" in findings[-1].what


LSPCI = """\
0000:00:03.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Starship/Matisse GPP Bridge (prog-if 00 [Normal decode])
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\t{}

0000:41:00.0 VGA compatible controller: NVIDIA Corporation AD102GL (rev a1)
\tControl: I/O+ Mem+ BusMaster+
"""


@pytest.mark.parametrize(
    ("control", "named"),
    [
        pytest.param(
            "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-", True, id="nccl-214"
        ),
        pytest.param(
            "SrcValid+ TransBlk- ReqRedir- CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-", True, id="nccl-2079"
        ),
        ("SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-", False),
    ],
)
def test_a_bridge_that_redirects_what_gpus_and_nics_send_to_each_other_is_named(control: str, named: bool) -> None:
    found = redirecting(LSPCI.format(control))
    assert found == ({"0000:00:03.1"} if named else set())
    said = text(diagnose(evolve(WELL, redirecting=sorted(found))))
    assert ("redirects them at 0000:00:03.1 " in said) is named
