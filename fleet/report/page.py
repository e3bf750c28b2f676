"""The report on a fleet as an HTML page."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

from agent.report.last_deploy import LastDeploy, Operation
from fleet.page import INK, document, legend, picture, table
from fleet.report.history import ALWAYS, History, NodeCourse
from fleet.report.prometheus import Course

READY, NOT_READY, SILENT = "#2f9e5f", "#e0464c", "#8a929c"
"""Colours of nodes that are ready, that are not, and whose reporter does not answer: on a light page and on a dark one."""

NO_DATA = "#00000000"


KINDS = "tab10"
"""A colour map of matplotlib for kinds of state; the ninth and all after it share a colour."""

NAMED_KINDS = 9

SLOWEST = 15
"""Operations and hosts of a deploy that are shown."""

WIDTH, ROW, LETTER = 12.0, 0.2, 0.085
"""Inches: of a picture, of a row with one name, and for each letter of a name."""

LONGEST = 55
"""Letters of a name that are shown in a picture."""


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
    yield legend(((NOT_READY, "not ready"), (SILENT, "no answer")))
    yield _fleet_over_time(history)
    always = sum(share >= ALWAYS for share in history.shares.values())
    yield f"<p>{always} of {len(history.shares)} nodes were ready all the time.{_rest(history)}</p>"
    if history.courses:
        yield legend(
            ((READY, "ready"), (NOT_READY, "not ready for a part of the step or all of it"), (SILENT, "no answer"))
        )
        yield _nodes_over_time(history)
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
    yield _repairs_over_time(history)
    rows = [
        (kind, str(times), str(nodes), _suspects(history.suspects.get(kind, {})))
        for kind, (times, nodes) in history.repaired.items()
    ]
    yield table(("What", "Repairs", "On nodes", "Made while these ran, which set such values"), rows)
    by_node: dict[str, list[str]] = {}
    for each in history.most_repaired:
        by_node.setdefault(_host(each.node), []).append(f"{each.kind} {each.times}")
    yield "<p>Where most of it was. On the node, <code>trackbed history</code> shows each.</p>"
    yield table(("Node", "Repairs"), [(node, ", ".join(repairs)) for node, repairs in by_node.items()])
    if history.contended:
        named = html.escape(", ".join(map(_host, history.contended[:SLOWEST])))
        more = f" and {len(history.contended) - SLOWEST} more" if len(history.contended) > SLOWEST else ""
        yield f"<p>On these nodes a program kept putting a value back: {named}{more}.</p>"


def _suspects(programs: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {times}" for name, times in programs.items()) or "none of the known programs"


def _deploy(deploy: LastDeploy | None) -> Iterator[str]:
    if deploy is None or not deploy.operations:
        yield "<p>None was made from this control host.</p>"
        return
    took = f"{_seconds(deploy.noted - deploy.began)}, {len(deploy.hosts)} hosts"
    yield f"<p>{html.escape(' '.join(deploy.files))}: {_utc(deploy.began)} UTC, {took}. Its slowest operations:</p>"
    slowest = sorted(deploy.operations, key=lambda each: (-each.longest, each.name))[:SLOWEST]
    yield _operations(slowest)
    hosts = sorted(deploy.hosts.items(), key=lambda item: (-item[1], item[0]))[:SLOWEST]
    yield table(("Slowest hosts", "In operations"), [(host, _seconds(seconds)) for host, seconds in hosts])


def _fleet_over_time(history: History) -> str:
    courses = (history.ready, history.silent, history.nodes)
    ready, silent, nodes = (np.array([value or 0.0 for value in course]) for course in courses)
    not_ready = np.maximum(nodes - ready - silent, 0)
    dates = _dates(history.times)
    width = dates[1] - dates[0]
    with picture(WIDTH, 2.2) as image:
        axes = image.figure.add_axes((0.06, 0.16, 0.93, 0.8))
        # A point stands for the step before it.
        edges = [dates[0] - width, *dates]
        axes.stairs(not_ready, edges, fill=True, color=NOT_READY)
        axes.stairs(not_ready + silent, edges, baseline=not_ready, fill=True, color=SILENT)
        axes.set_ylim(0, max((not_ready + silent).max() * 1.1, 1))
        _time_axis(axes, history.times)
        axes.set_ylabel("nodes", color=INK)
        axes.locator_params(axis="y", integer=True)
    return image.svg


def _nodes_over_time(history: History) -> str:
    names = [_shortened(_host(course.name)) for course in history.courses]
    left = _margin(names)
    high = ROW * len(names) + 0.4
    dates = _dates(history.times)
    width = dates[1] - dates[0]
    with picture(WIDTH, high) as image:
        axes = image.figure.add_axes((left / WIDTH, 0.35 / high, 0.99 - left / WIDTH, 1 - 0.4 / high))
        for row, course in enumerate(history.courses):
            for colour, group in groupby(enumerate(_colours(course)), key=lambda each: each[1]):
                places = [place for place, _ in group]
                if colour != NO_DATA:
                    axes.broken_barh(
                        [(dates[places[0]] - width, width * len(places))], (row + 0.1, 0.8), facecolors=colour
                    )
        axes.set_ylim(len(names), 0)
        axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=9, color=INK)
        _time_axis(axes, history.times)
    return image.svg


def _colours(course: NodeCourse) -> list[str]:
    """The colour of each step of a node."""
    return [
        NO_DATA
        if ready is None or silent is None
        else SILENT
        if silent > ALWAYS
        else READY
        if ready > ALWAYS
        else NOT_READY
        for ready, silent in zip(course.ready, course.silent, strict=True)
    ]


def _repairs_over_time(history: History) -> str:
    colours = [to_hex(colormaps[KINDS](number)) for number in range(NAMED_KINDS + 1)]
    named = list(history.repaired)[:NAMED_KINDS]
    shown: dict[str, Course] = {kind: course for kind, course in history.repairs.items() if kind in named}
    dates = _dates(history.times)
    width = dates[1] - dates[0]
    edges = [dates[0] - width, *dates]
    bottom = np.zeros(len(dates))
    with picture(WIDTH, 2.2) as image:
        axes = image.figure.add_axes((0.06, 0.16, 0.93, 0.8))
        for number, kind in enumerate([*named, ""]):
            courses = [shown.get(kind, ())] if kind else [c for k, c in history.repairs.items() if k not in named]
            counts = sum(
                (np.array([value or 0.0 for value in course]) for course in courses if course), np.zeros(len(dates))
            )
            axes.stairs(bottom + counts, edges, baseline=bottom, fill=True, color=colours[number])
            bottom = bottom + counts
        _time_axis(axes, history.times)
        axes.set_ylabel("repairs", color=INK)
        axes.set_ylim(0, max(bottom.max() * 1.05, 1))
        axes.locator_params(axis="y", integer=True)
    others = [(colours[-1], "others")] if len(history.repaired) > NAMED_KINDS else []
    return legend([*zip(colours, named, strict=False), *others]) + image.svg


def _operations(operations: Sequence[Operation]) -> str:
    names = [_shortened(each.name) for each in operations]
    left = _margin(names)
    high = ROW * 1.4 * len(names) + 0.5
    with picture(WIDTH, high) as image:
        axes = image.figure.add_axes((left / WIDTH, 0.4 / high, 0.86 - left / WIDTH, 1 - 0.45 / high))
        rows = np.arange(len(names))
        axes.barh(rows, [each.longest for each in operations], 0.75, color="#7fa8d9")
        axes.barh(rows, [each.median for each in operations], 0.75, color="#2f6fb5")
        for row, each in enumerate(operations):
            text = f"{_seconds(each.longest)}, {each.slowest}"
            place = (each.longest, row)
            axes.annotate(text, place, (6, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
        axes.set_yticks(rows, names, fontsize=9, color=INK)
        axes.invert_yaxis()
        axes.set_xlabel("seconds", color=INK)
        _plain_frame(axes)
    return legend((("#2f6fb5", "median host"), ("#7fa8d9", "slowest host, with its name"))) + image.svg


def _time_axis(axes: Axes, times: Sequence[int]) -> None:
    dates = _dates(times)
    axes.set_xlim(dates[0] - (dates[1] - dates[0]), dates[-1])
    locator = AutoDateLocator(minticks=4, maxticks=12)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))  # type: ignore[no-untyped-call]
    _plain_frame(axes)


def _plain_frame(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def _dates(times: Sequence[int]) -> list[float]:
    # matplotlib counts days.
    return [when / 86400 for when in times]


def _margin(names: Sequence[str]) -> float:
    """Inches left of a picture for the names of its rows."""
    return max(LETTER * max(map(len, names), default=0) + 0.15, 0.7)


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _host(instance: str) -> str:
    """A node's name without its reporter's port."""
    return re.sub(r":\d+$", "", instance)


def _percent(share: float) -> str:
    """A share, rounded down: 100 % is all of it."""
    return f"{int(share * 1000) / 10:.1f} %"


def _utc(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(when))


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
