"""The reference of the metrics, read from the reporter's answer for a report that has an example of everything."""

from __future__ import annotations

from collections import Counter

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from agent.report.drift import Counts
from agent.report.records import Change, Condition, NicVerdict, Outcome, Report
from agent.report.verdict import Verdict
from agent.reporter.http.metrics import render
from handbook.markdown import cell, code, table

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

REPORT = Report(
    node_name="node1",
    spec_hash="7003db781de62589",
    boot_id="boot",
    agent_version="0.1.0",
    ready=True,
    up_to_date=True,
    conditions=(Condition("Carrier", "True", "AllConnected"),),
    nics=(NicVerdict("rail0", "0000:18:00.0", True, True, vfs=("0000:18:00.1",)),),
    outcomes=(Outcome(Change("links", "0000:18:00.0", "mtu", 1500, 9000), "applied"),),
)

COUNTS = Counts(Counter(vfs=1), Counter({("vfs", "NetworkManager"): 1}))


def page() -> str:
    """One row a metric."""
    text = render(Verdict(REPORT, (), 1.0, fresh=True), COUNTS, OPENMETRICS)[0].decode()
    rows = []
    for family in text_string_to_metric_families(text):
        names = sorted({sample.name for sample in family.samples})
        labels = sorted({label for sample in family.samples for label in sample.labels})
        rows.append(
            (
                ", ".join(map(code, names)),
                family.type,
                family.unit,
                ", ".join(map(code, labels)),
                cell(family.documentation),
            )
        )
    return table(("Metric", "Type", "Unit", "Labels", "Meaning"), sorted(rows))
