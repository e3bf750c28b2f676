"""The report on a fleet as an HTML page."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Mapping

from fleet.last_deploy import LastDeploy, duration
from fleet.page import document, table
from fleet.report.history import ALWAYS, History
from fleet.report.pictures import (
    fleet_over_time,
    host_of,
    nodes_over_time,
    repairs_over_time,
    slowest_operations,
)

SLOWEST = 15
"""Operations and hosts of a deploy that are shown."""


def page(history: History, deploy: LastDeploy | None) -> str:
    """The HTML text."""
    ready, nodes = sum(history.is_ready.values()), len(history.is_ready)
    begin, end = (_utc(when) for when in (history.times[0], history.times[-1]))
    word = "good" if ready == nodes else "bad"
    return document(
        "Fleet",
        [
            f'<h1>Fleet: <span class="{word}">{ready} of {nodes} nodes are ready</span></h1>',
            f"<p>From {begin} to {end} UTC.</p>",
            "<h2>Readiness</h2>",
            *_readiness(history),
            "<h2>Drift that the agents repaired</h2>",
            *_drift(history),
            "<h2>Versions</h2>",
            table(("Agent", "Nodes"), [(name, str(count)) for name, count in history.versions.items()]),
            table(("Spec", "Nodes"), [(name, str(count)) for name, count in history.specs.items()]),
            "<h2>The last deploy</h2>",
            *_deploy(deploy),
        ],
    )


def _readiness(history: History) -> Iterator[str]:
    yield "<p>Nodes that were not ready, on average of each step:</p>"
    yield fleet_over_time(history)
    always = sum(share >= ALWAYS for share in history.shares.values())
    yield f"<p>{always} of {len(history.shares)} nodes were ready all the time.{_rest(history)}</p>"
    if history.courses:
        yield nodes_over_time(history)
    if history.faulty:
        yield "<p>Conditions that are not True now:</p>"
        rows = [(each.type, each.status, each.severity, str(each.nodes)) for each in history.faulty]
        yield table(("Condition", "Status", "Severity", "Nodes"), rows)


def _rest(history: History) -> str:
    """A sentence about the nodes that were not always ready and are not in the picture; empty if there are none."""
    shown = {course.name for course in history.courses}
    rest = [share for name, share in history.shares.items() if name not in shown and share < ALWAYS]
    if not rest:
        return ""
    return (
        f" The picture shows those that were ready for the least time; {len(rest)} more were ready for at least "
        f"{_percent(min(rest))} of it."
    )


def _drift(history: History) -> Iterator[str]:
    if not history.repaired:
        yield "<p>None.</p>"
        return
    yield repairs_over_time(history)
    rows = [
        (kind, str(times), str(nodes), _suspects(history.suspects.get(kind, {})))
        for kind, (times, nodes) in history.repaired.items()
    ]
    yield table(("What", "Repairs", "On nodes", "Made while these ran, which set such values"), rows)
    by_node: dict[str, list[str]] = {}
    for each in history.most_repaired:
        by_node.setdefault(host_of(each.node), []).append(f"{each.kind} {each.times}")
    yield "<p>Where most of it was. On the node, <code>trackbed history</code> shows each.</p>"
    yield table(("Node", "Repairs"), [(node, ", ".join(repairs)) for node, repairs in by_node.items()])
    if history.contended:
        named = html.escape(", ".join(map(host_of, history.contended[:SLOWEST])))
        more = f" and {len(history.contended) - SLOWEST} more" if len(history.contended) > SLOWEST else ""
        yield f"<p>On these nodes a program kept putting a value back: {named}{more}.</p>"


def _suspects(programs: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {times}" for name, times in programs.items()) or "none of the known programs"


def _deploy(deploy: LastDeploy | None) -> Iterator[str]:
    if deploy is None or not deploy.operations:
        yield "<p>None was made from this control host.</p>"
        return
    took = f"{duration(deploy.noted - deploy.began)}, {len(deploy.hosts)} hosts"
    yield f"<p>{html.escape(' '.join(deploy.files))}: {_utc(deploy.began)} UTC, {took}. Its slowest operations:</p>"
    slowest = sorted(deploy.operations, key=lambda each: (-each.longest, each.name))[:SLOWEST]
    yield slowest_operations(slowest)
    hosts = sorted(deploy.hosts.items(), key=lambda item: (-item[1], item[0]))[:SLOWEST]
    yield table(("Slowest hosts", "In operations"), [(host, duration(seconds)) for host, seconds in hosts])


def _percent(share: float) -> str:
    """A share, rounded down: 100 % is all of it."""
    return f"{int(share * 1000) / 10:.1f} %"


def _utc(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(when))
