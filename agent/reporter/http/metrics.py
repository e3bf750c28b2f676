"""The report, and the count of repairs, as Prometheus metrics. docs/metrics.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from attrs import frozen
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from agent.report.drift import Counts
from agent.report.records import Condition, LinkState, NicVerdict, Result, Status
from agent.report.verdict import Verdict

STATUSES = get_args(Status)
# If several conditions have one type, the worst counts.
_WORST = ("True", "Unknown", "False")


def render(verdict: Verdict, drift: Counts, accept: str) -> tuple[bytes, str]:
    """The metrics, and their content type, as the ``Accept`` header asks for.

    :param drift: how many changes were made although the spec had been true.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Served(lambda: _metrics(verdict, drift)))
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is none
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


@frozen
class _Served(Collector):
    metrics: Callable[[], Iterator[Metric]]

    def collect(self) -> Iterator[Metric]:
        return self.metrics()


def _metrics(verdict: Verdict, drift: Counts) -> Iterator[Metric]:
    report = verdict.report
    yield _gauge("ready", "1 if a fresh report of this boot says that the node is ready, else 0", verdict.ready)
    yield _gauge(
        "report_fresh", "1 if the report is of this boot and its heartbeat is not stale, else 0", verdict.fresh
    )
    repairs = CounterMetricFamily(
        "trackbed_drift_repairs",
        "Repairs since the boot (changes made after the spec had been true), by kind of state",
        labels=("kind",),
    )
    for kind, count in sorted(drift.repairs.items()):
        repairs.add_metric((kind,), count)
    yield repairs
    suspects = CounterMetricFamily(
        "trackbed_drift_suspects",
        "Of these, the repairs that were made while a program ran that is known to set such state",
        labels=("kind", "program"),
    )
    for pair, count in sorted(drift.suspects.items()):
        suspects.add_metric(pair, count)
    yield suspects
    if report is None:
        return
    yield _gauge("up_to_date", "1 if the node follows the newest spec that it was given, else 0", report.up_to_date)
    yield _gauge(
        "generation", "Grows whenever the content of the report changes; it starts over at a boot", report.generation
    )
    yield _gauge(
        "heartbeat_timestamp_seconds",
        "Time of the report's last heartbeat, by the node's clock",
        report.heartbeat,
    )
    conditions = GaugeMetricFamily(
        "trackbed_condition",
        "1 for the condition's present status, 0 for the other two",
        labels=("type", "status", "severity"),
    )
    for condition in _by_type(report.conditions):
        for status in STATUSES:
            conditions.add_metric((condition.type, status, condition.severity), float(condition.status == status))
    yield conditions
    yield from _of_nics(report.nics, verdict.fresh)
    outcomes = GaugeMetricFamily("trackbed_outcomes", "Changes of the last pass, by result", labels=("result",))
    counted = Counter(outcome.result for outcome in report.outcomes)
    for result in get_args(Result):
        outcomes.add_metric((result,), counted[result])
    yield outcomes
    yield InfoMetricFamily("trackbed_build", "1, with the agent's version", {"version": report.agent_version})
    yield InfoMetricFamily(
        "trackbed_spec",
        "1, with the hash of the spec that the node follows and the node's name",
        {"hash": report.spec_hash, "node": report.node_name},
    )


def _of_nics(nics: Iterable[NicVerdict], fresh: bool) -> Iterator[Metric]:
    """The labels are bounded: the names of the NICs in the spec."""
    ready = GaugeMetricFamily(
        "trackbed_nic_ready", "1 if a fresh report says that the NIC is ready, else 0", labels=("nic",)
    )
    ready_vfs = GaugeMetricFamily(
        "trackbed_nic_ready_vfs", "VFs of the NIC that are ready by a fresh report", labels=("nic",)
    )
    vfs = GaugeMetricFamily("trackbed_nic_vfs", "VFs of the NIC", labels=("nic",))
    link = GaugeMetricFamily(
        "trackbed_nic_link",
        "1 for the state of the NIC's link by its losses of carrier, else 0",
        labels=("nic", "state"),
    )
    for nic in nics:
        for state in get_args(LinkState):
            link.add_metric((nic.name, state), float(nic.link == state))
        ready.add_metric((nic.name,), float(nic.ready and fresh))
        ready_vfs.add_metric((nic.name,), float(nic.ready_vfs * fresh))
        vfs.add_metric((nic.name,), len(nic.vfs))
    yield from (ready, ready_vfs, vfs, link)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"trackbed_{name}", documentation, value=float(value))


def _by_type(conditions: tuple[Condition, ...]) -> list[Condition]:
    worst: dict[str, Condition] = {}
    for condition in conditions:
        kept = worst.setdefault(condition.type, condition)
        if _rank(condition) > _rank(kept):
            worst[condition.type] = condition
    return [worst[type] for type in sorted(worst)]


def _rank(condition: Condition) -> tuple[bool, int]:
    return condition.severity == "required" and condition.status != "True", _WORST.index(condition.status)
