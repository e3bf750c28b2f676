"""The history of a fleet, from a Prometheus that scrapes the nodes' reporters (docs/metrics.md).

The queries ask for sums, for a few numbers of each node, and for the course of those nodes only that were ready for the least
time. So the answers are small for a large fleet, too.

Root on a node can answer a scrape with any text: numbers such as NaN, series without a label, another series named up. Each
query therefore bounds the values of each node before it adds them, and counts nodes instead of series. So a node can make up
only its own part of a sum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from fleet.api import Failed
from fleet.report.prometheus import Course, Prometheus

COURSES = 40
"""At most so many nodes have a course. In a larger fleet, nodes that were always ready have none."""

ALWAYS = 0.9999
"""From this share of the time on, a node counts as always ready. (A day has 5,760 scrapes at 15 s.)"""

MOST = 20
"""At most so many pairs of a node and a kind of state, and of a kind and a program, are named with their repairs."""

# For each node, the share of the time for which it was ready. A node without an answer, or with NaN, was never ready.
SHARE = (
    "(clamp(sum by (instance) (sum_over_time(trackbed_ready{0}[{1}])) / {2}, 0, 1) >= 0 or 0 * {2})",
    "sum by (instance) (count_over_time(up{0}[{1}]))",
)

# For each node, the share of the time for which it did not answer.
SILENT = "(1 - clamp(min by (instance) (avg_over_time(up{0}[{1}])), 0, 1) >= 0)"

TOO_MANY = 1e9
"""No node can make so many repairs of a kind. Larger numbers, and infinite ones, are left out."""

# Of a node that several servers scrape, a server above them (Thanos, a federation) has several series.
EACH = f"max by (instance, {{}}) ({{}} < {TOO_MANY:.0f})"

# Repairs in a step. increase() misses those between the last scrape of a step and the first of the next. If a step has few
# scrapes, these are many. A counter that has decreased was reset by a boot.
COUNT = 'trackbed_drift_repairs_total{kind!=""}'
IN_STEP = f"(({COUNT} - {COUNT} offset $step) >= 0 or ({COUNT} < {COUNT} offset $step) >= 0)"
REPAIRED = EACH.format("kind", IN_STEP)
REPAIRED_AT_ALL = EACH.format("kind", f"increase({COUNT}[$range])") + " > 0"
SUSPECTS = 'increase(trackbed_drift_suspects_total{kind!="",program!=""}[$range])'
SUSPECTED_AT_ALL = EACH.format("kind, program", SUSPECTS) + " > 0"

CONDITION = 'trackbed_condition{type!="",status!~"|True",severity!=""} == 1'

OURS = '{job="trackbed"}'


def _share(time: str, which: str = OURS) -> str:
    share, scrapes = SHARE
    return share.format(which, time, scrapes.format(which, time))


def _silent(time: str, which: str = OURS) -> str:
    return SILENT.format(which, time)


def _nodes(of: str, series: str) -> str:
    """The query that counts the nodes with such a series, by labels that none of them lacks."""
    return f"count by ({of}) (count by (instance, {of}) ({series}))"


@frozen
class NodeCourse:
    """A node over time. For each step: the share for which it was ``ready``, and for which its reporter was ``silent``."""

    name: str
    ready: Course
    silent: Course


@frozen
class Faulty:
    """A condition that is not True at the end, on so many nodes."""

    type: str
    status: str
    severity: str
    nodes: int


@frozen
class Repairs:
    """How often drift of a kind of state was repaired on a node."""

    node: str
    kind: str
    times: int


@frozen
class History:
    """A fleet over time.

    ``times``: the points, in seconds since the epoch. ``ready``, ``silent``, ``nodes``: how many nodes were ready, did not
    answer, and were scraped, on average of each step. ``is_ready``: whether each node is ready at the end. ``shares``:
    the share of the time for which each node was ready. ``courses``: the nodes that were ready for the least time.
    ``repairs``: repairs of drift in each step, by kind of state. ``repaired``: by kind, how often and on how many nodes.
    ``suspects``: by kind, how often while a program ran that is known to set such state.
    ``contended``: the nodes on which a program kept putting a value back. ``versions``, ``specs``: nodes by agent and spec.
    """

    times: Sequence[int]
    ready: Course
    silent: Course
    nodes: Course
    is_ready: Mapping[str, bool]
    shares: Mapping[str, float]
    courses: Sequence[NodeCourse]
    faulty: Sequence[Faulty]
    repairs: Mapping[str, Course]
    repaired: Mapping[str, tuple[int, int]]
    suspects: Mapping[str, Mapping[str, int]]
    most_repaired: Sequence[Repairs]
    contended: Sequence[str]
    versions: Mapping[str, int]
    specs: Mapping[str, int]


def read_history(prometheus: Prometheus) -> History:
    """Ask Prometheus.

    :raises Failed: it does not answer, or has no node.
    """
    shares = {labels["instance"]: share for labels, share in prometheus.at_end(_share("$range"))}
    if not shares:
        raise Failed(f"{prometheus.url} has no node in that time: it needs a job trackbed (docs/metrics.md)")
    least = sorted(shares, key=lambda node: (shares[node], node))[:COURSES]
    if len(shares) > COURSES:
        least = [node for node in least if shares[node] < ALWAYS]
    answers = f"min by (instance) (trackbed_ready) or 0 * count by (instance) (up{OURS})"
    return History(
        times=prometheus.times,
        ready=_sum(prometheus, f"sum({_share('$step')})"),
        silent=_sum(prometheus, f"sum({_silent('$step')})"),
        nodes=_sum(prometheus, f"count(count by (instance) (count_over_time(up{OURS}[$step])))"),
        is_ready={labels["instance"]: value == 1 for labels, value in prometheus.at_end(answers)},
        shares=dict(sorted(shares.items())),
        courses=tuple(_courses(prometheus, least)),
        faulty=_faulty(prometheus),
        repairs=_repairs(prometheus),
        repaired=_repaired(prometheus),
        suspects=_suspects(prometheus),
        most_repaired=_most_repaired(prometheus),
        contended=_contended(prometheus),
        versions=_counted(prometheus, "version", "trackbed_build_info"),
        specs=_counted(prometheus, "hash", "trackbed_spec_info"),
    )


def _sum(prometheus: Prometheus, query: str) -> Course:
    series = prometheus.over_time(query)
    return series[0][1] if series else [None] * prometheus.points


def _courses(prometheus: Prometheus, names: Sequence[str]) -> Iterator[NodeCourse]:
    if not names:
        return
    # A JSON text is a string of PromQL, too.
    which = f'{{job="trackbed",instance=~{json.dumps("|".join(map(re.escape, names)))}}}'
    ready = {labels["instance"]: course for labels, course in prometheus.over_time(_share("$step", which))}
    silent = prometheus.over_time(_silent("$step", which))
    by_name = {labels["instance"]: course for labels, course in silent}
    nothing = [None] * prometheus.points
    for name in sorted(names):
        yield NodeCourse(name, ready.get(name, nothing), by_name.get(name, nothing))


def _faulty(prometheus: Prometheus) -> tuple[Faulty, ...]:
    counts = prometheus.at_end(_nodes("type, status, severity", CONDITION))
    rows = [Faulty(of["type"], of["status"], of["severity"], round(nodes)) for of, nodes in counts]
    return tuple(sorted(rows, key=lambda row: (row.severity, -row.nodes, row.type, row.status)))


def _repairs(prometheus: Prometheus) -> dict[str, Course]:
    series = prometheus.over_time(f"sum by (kind) ({REPAIRED}) > 0")
    return {labels["kind"]: course for labels, course in sorted(series, key=lambda each: each[0]["kind"])}


def _repaired(prometheus: Prometheus) -> dict[str, tuple[int, int]]:
    times = prometheus.at_end(f"sum by (kind) ({REPAIRED_AT_ALL})")
    nodes = prometheus.at_end(_nodes("kind", REPAIRED_AT_ALL))
    on = {labels["kind"]: round(count) for labels, count in nodes}
    by_kind = {labels["kind"]: (round(count), on.get(labels["kind"], 0)) for labels, count in times}
    return dict(sorted(by_kind.items(), key=lambda item: (-item[1][0], item[0])))


def _suspects(prometheus: Prometheus) -> dict[str, dict[str, int]]:
    found = prometheus.at_end(f"topk({MOST}, sum by (kind, program) ({SUSPECTED_AT_ALL}))")
    suspects: dict[str, dict[str, int]] = {}
    for labels, times in sorted(found, key=lambda each: (-each[1], each[0]["program"])):
        suspects.setdefault(labels["kind"], {})[labels["program"]] = round(times)
    return suspects


def _most_repaired(prometheus: Prometheus) -> tuple[Repairs, ...]:
    found = prometheus.at_end(f"topk({MOST}, {REPAIRED_AT_ALL})")
    rows = [Repairs(of["instance"], of["kind"], round(times)) for of, times in found]
    return tuple(sorted(rows, key=lambda row: (-row.times, row.node, row.kind)))


def _contended(prometheus: Prometheus) -> tuple[str, ...]:
    which = 'trackbed_condition{type="Uncontended",status="False"}'
    instances = prometheus.at_end(f"max by (instance) (max_over_time({which}[$range])) == 1")
    return tuple(sorted(labels["instance"] for labels, _ in instances))


def _counted(prometheus: Prometheus, label: str, metric: str) -> dict[str, int]:
    counts = {of[label]: round(nodes) for of, nodes in prometheus.at_end(_nodes(label, f'{metric}{{{label}!=""}}'))}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
