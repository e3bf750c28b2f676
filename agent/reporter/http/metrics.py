"""The report as Prometheus metrics. All of them are gauges, since a report is a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import get_args

from attrs import frozen
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from agent.report.records import Condition, Result, Status
from agent.report.verdict import Verdict

STATUSES = get_args(Status)
# If several conditions have one type, the worst counts.
_WORST = ("True", "Unknown", "False")


def render(verdict: Verdict, accept: str) -> tuple[bytes, str]:
    """The metrics, and their content type, as the ``Accept`` header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Verdict(lambda: _metrics(verdict)))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


@frozen
class _Verdict(Collector):
    metrics: Callable[[], Iterator[Metric]]

    def collect(self) -> Iterator[Metric]:
        return self.metrics()


def _metrics(verdict: Verdict) -> Iterator[Metric]:
    yield _gauge("ready", "1 if the node is ready by a fresh report of this boot", verdict.ready)
    report = verdict.report
    if report is None:
        return
    yield _gauge("up_to_date", "1 if the node follows the newest spec that it was given", report.up_to_date)
    yield _gauge("generation", "How often what the node says of itself has changed since its boot", report.generation)
    yield _gauge("heartbeat_age_seconds", "Seconds since the agent last vouched for its report", verdict.age)
    conditions = GaugeMetricFamily(
        "trackbed_condition", "1 for the status that a condition has", labels=("type", "status", "severity")
    )
    for condition in _by_type(report.conditions):
        for status in STATUSES:
            conditions.add_metric((condition.type, status, condition.severity), float(condition.status == status))
    yield conditions
    outcomes = GaugeMetricFamily(
        "trackbed_outcomes", "Changes of the last pass, by what came of them", labels=("result",)
    )
    counted = Counter(outcome.result for outcome in report.outcomes)
    for result in get_args(Result):
        outcomes.add_metric((result,), counted[result])
    yield outcomes
    yield InfoMetricFamily("trackbed_build", "The agent's version", {"version": report.agent_version})
    yield InfoMetricFamily(
        "trackbed_spec", "The spec that the node follows", {"hash": report.spec_hash, "node": report.node_name}
    )


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
