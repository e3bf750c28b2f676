"""The report, and the count of repairs, as Prometheus metrics. docs/metrics.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from attrs import frozen
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from agent.report.drift import Counts
from agent.report.records import Condition, LinkState, NicVerdict, Result, Status
from agent.report.verdict import Verdict

Samples = Mapping[Any, float]
"""Numbers by the values of their labels."""
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
    yield _gauge("ready", "1 if a fresh report of this boot says that the node is ready, else 0", {(): verdict.ready})
    fresh = "1 if the report is of this boot and its heartbeat is not stale, else 0"
    yield _gauge("report_fresh", fresh, {(): verdict.fresh})
    repairs = "Repairs since the boot (changes made after the spec had been true), by kind of state"
    by_kind = {(kind,): count for kind, count in sorted(drift.repairs.items())}
    yield _filled(CounterMetricFamily("trackbed_drift_repairs", repairs, labels=("kind",)), by_kind)
    suspects = "Of these, the repairs that were made while a program ran that is known to set such state"
    labels = ("kind", "program")
    yield _filled(
        CounterMetricFamily("trackbed_drift_suspects", suspects, labels=labels), dict(sorted(drift.suspects.items()))
    )
    if report is None:
        return
    up_to_date = "1 if the node follows the newest spec that it was given, else 0"
    yield _gauge("up_to_date", up_to_date, {(): report.up_to_date})
    generation = "Grows whenever the content of the report changes; it starts over at a boot"
    yield _gauge("generation", generation, {(): report.generation})
    heartbeat = "Time of the report's last heartbeat, by the node's clock"
    yield _gauge("heartbeat_timestamp_seconds", heartbeat, {(): report.heartbeat})
    yield _gauge(
        "condition",
        "1 for the condition's present status, 0 for the other two",
        {(c.type, s, c.severity): c.status == s for c in _by_type(report.conditions) for s in get_args(Status)},
        ("type", "status", "severity"),
    )
    yield from _of_nics(report.nics, verdict.fresh)
    counted = Counter(outcome.result for outcome in report.outcomes)
    results = {(result,): counted[result] for result in get_args(Result)}
    yield _gauge("outcomes", "Changes of the last pass, by result", results, ("result",))
    yield InfoMetricFamily("trackbed_build", "1, with the agent's version", {"version": report.agent_version})
    yield InfoMetricFamily(
        "trackbed_spec",
        "1, with the hash of the spec that the node follows and the node's name",
        {"hash": report.spec_hash, "node": report.node_name},
    )


def _of_nics(nics: Iterable[NicVerdict], fresh: bool) -> Iterator[Metric]:
    """The labels are bounded: the names of the NICs in the spec."""
    by_name = {(nic.name,): nic for nic in nics}
    ready = {name: nic.ready and fresh for name, nic in by_name.items()}
    yield _gauge("nic_ready", "1 if a fresh report says that the NIC is ready, else 0", ready, ("nic",))
    ready_vfs = {name: nic.ready_vfs * fresh for name, nic in by_name.items()}
    yield _gauge("nic_ready_vfs", "VFs of the NIC that are ready by a fresh report", ready_vfs, ("nic",))
    yield _gauge("nic_vfs", "VFs of the NIC", {name: len(nic.vfs) for name, nic in by_name.items()}, ("nic",))
    links = {(*name, state): nic.link == state for name, nic in by_name.items() for state in get_args(LinkState)}
    yield _gauge(
        "nic_link", "1 for the state of the NIC's link by its losses of carrier, else 0", links, ("nic", "state")
    )


def _gauge(name: str, meaning: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"trackbed_{name}", meaning, labels=labels), samples)


def _filled(family: Any, samples: Samples) -> Metric:
    for values, number in samples.items():
        family.add_metric(values, float(number))
    made: Metric = family
    return made


def _by_type(conditions: tuple[Condition, ...]) -> list[Condition]:
    worst: dict[str, Condition] = {}
    for condition in sorted(conditions, key=_rank, reverse=True):
        worst.setdefault(condition.type, condition)
    return [worst[type] for type in sorted(worst)]


def _rank(condition: Condition) -> tuple[bool, int]:
    return condition.severity == "required" and condition.status != "True", _WORST.index(condition.status)
