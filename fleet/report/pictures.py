"""The pictures of the report on a fleet: an SVG element each, after what its colours mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

from fleet.last_deploy import Operation, duration
from fleet.page import INK, Picture, legend, picture
from fleet.report.history import ALWAYS, History, NodeCourse
from fleet.report.prometheus import Course

READY, NOT_READY, SILENT = "#2f9e5f", "#e0464c", "#8a929c"
"""Colours of nodes that are ready, that are not, and whose reporter does not answer: on a light page and on a dark one."""

NO_DATA = "#00000000"

KINDS = "tab10"
"""A colour map of matplotlib for kinds of state; the ninth and all after it share a colour."""

NAMED_KINDS = 9

MEDIAN, LONGEST_TIME = "#2f6fb5", "#7fa8d9"

WIDTH, HIGH, ROW, LETTER, LEFT, RIGHT = 12.0, 2.2, 0.2, 0.085, 0.7, 0.3
"""Inches: of a picture, of a course over time, of a row with one name, for each letter of a name, and beside the axes."""

LONGEST = 55
"""Letters of a name that are shown in a picture."""


def fleet_over_time(history: History, width: float = WIDTH) -> str:
    """The number of nodes that were not ready, on average of each step. ``width``: of the picture, in inches."""
    courses = (history.ready, history.silent, history.nodes)
    ready, silent, nodes = (np.array([value or 0.0 for value in course]) for course in courses)
    not_ready = np.maximum(nodes - ready - silent, 0)
    dates = _dates(history.times)
    with picture(width, HIGH) as image:
        axes = _axes(image)
        # A point stands for the step before it.
        edges = [dates[0] - _step(dates), *dates]
        axes.stairs(not_ready, edges, fill=True, color=NOT_READY)
        axes.stairs(not_ready + silent, edges, baseline=not_ready, fill=True, color=SILENT)
        axes.set_ylim(0, max((not_ready + silent).max() * 1.1, 1))
        _time_axis(axes, history.times)
        axes.set_ylabel("nodes", color=INK)
        axes.locator_params(axis="y", integer=True)
    return legend(((NOT_READY, "not ready"), (SILENT, "no answer"))) + image.svg


def nodes_over_time(history: History, width: float = WIDTH) -> str:
    """The readiness of each node that has a course: a row each."""
    names = [_shortened(host_of(course.name)) for course in history.courses]
    dates = _dates(history.times)
    step = _step(dates)
    with picture(width, ROW * len(names) + 0.4) as image:
        axes = _axes(image, _margin(names))
        for row, course in enumerate(history.courses):
            for colour, group in groupby(enumerate(_colours(course)), key=lambda each: each[1]):
                places = [place for place, _ in group]
                if colour != NO_DATA:
                    axes.broken_barh(
                        [(dates[places[0]] - step, step * len(places))], (row + 0.1, 0.8), facecolors=colour
                    )
        axes.set_ylim(len(names), 0)
        axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=9, color=INK)
        _time_axis(axes, history.times)
    meanings = ((READY, "ready"), (NOT_READY, "not ready for a part of the step or all of it"), (SILENT, "no answer"))
    return legend(meanings) + image.svg


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


def repairs_over_time(history: History, width: float = WIDTH) -> str:
    """The repairs of drift in each step, by kind of state."""
    colours = [to_hex(colormaps[KINDS](number)) for number in range(NAMED_KINDS + 1)]
    named = list(history.repaired)[:NAMED_KINDS]
    shown: dict[str, Course] = {kind: course for kind, course in history.repairs.items() if kind in named}
    dates = _dates(history.times)
    edges = [dates[0] - _step(dates), *dates]
    bottom = np.zeros(len(dates))
    with picture(width, HIGH) as image:
        axes = _axes(image)
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


def slowest_operations(operations: Sequence[Operation], width: float = WIDTH) -> str:
    """Bars of the given operations of a deploy: the median host and the slowest one."""
    names = [_shortened(each.name) for each in operations]
    texts = [f"{duration(each.longest)}, {_shortened(each.slowest)}" for each in operations]
    with picture(width, ROW * 1.4 * len(names) + 0.6) as image:
        axes = _axes(image, _margin(names), _margin(texts), 0.55)
        rows = np.arange(len(names))
        axes.barh(rows, [each.longest for each in operations], 0.75, color=LONGEST_TIME)
        axes.barh(rows, [each.median for each in operations], 0.75, color=MEDIAN)
        for row, (each, text) in enumerate(zip(operations, texts, strict=True)):
            place = (each.longest, row)
            axes.annotate(text, place, (6, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
        axes.set_yticks(rows, names, fontsize=9, color=INK)
        axes.set_xlim(0, max(each.longest for each in operations) or 1)
        axes.invert_yaxis()
        axes.set_xlabel("seconds", color=INK)
        _plain_frame(axes)
    return legend(((MEDIAN, "median host"), (LONGEST_TIME, "slowest host, with its name"))) + image.svg


def _axes(image: Picture, left: float = LEFT, right: float = RIGHT, below: float = 0.35) -> Axes:
    """The axes of a picture, with so many inches beside and below them."""
    width, high = image.figure.get_size_inches()
    above = 0.05
    return image.figure.add_axes((left / width, below / high, 1 - (left + right) / width, 1 - (below + above) / high))


def _time_axis(axes: Axes, times: Sequence[int]) -> None:
    dates = _dates(times)
    axes.set_xlim(dates[0] - _step(dates), dates[-1])
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


def _step(dates: Sequence[float]) -> float:
    return dates[1] - dates[0]


def _margin(texts: Sequence[str]) -> float:
    """Inches beside the axes for the texts of its rows."""
    return max(LETTER * max(map(len, texts), default=0) + 0.15, LEFT)


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def host_of(instance: str) -> str:
    """A node's name without its reporter's port."""
    return re.sub(r":\d+$", "", instance)
