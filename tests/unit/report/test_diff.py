"""A plan as people read it: grouped by device, equal changes of VFs folded, marked by what they do, and summed up."""

from typing import Any

import click
import pytest

from agent.report.diff import lines, summary
from agent.report.records import WHOLE_KIND, Change, Disruption

PF, OTHER = "0000:21:00.0", "0000:41:00.0"
RESET = Change("vfs", PF, "count", 4, 7, Disruption.VF_RESET, affected=("pod team/trainer-0 (0000:21:00.0#2)",))
STUCK = Change("vfs", OTHER, "count", 0, 9, blocker="it offers 7 VFs at most", remedy="lower count to 7 or less")
LATER = Change("irqs", PF, WHOLE_KIND, None, "known after vfs")


def said(*changes: Change) -> list[str]:
    return [click.unstyle(line) for line in lines(changes, {PF: "rail0"})]


def test_each_device_has_its_changes_below_it() -> None:
    assert said(RESET, STUCK, Change("links", PF, "mtu", 1500, 9000), LATER) == [
        "0000:21:00.0 rail0",
        "  ~ vfs count  4 -> 7  [vf-reset]  disturbs pod team/trainer-0 (0000:21:00.0#2)",
        "  ~ links mtu  1500 -> 9000",
        "  ? irqs       known after vfs",
        "0000:41:00.0",
        "  ~ vfs count  0 -> 9",
        "      cannot: it offers 7 VFs at most; lower count to 7 or less",
    ]


def test_equal_changes_of_vfs_of_one_pf_are_one_line() -> None:
    same = [Change("vf_links", f"{PF}#{index}", "mtu", 1500, 9000) for index in (0, 1, 2, 5)]
    other = [Change("vf_links", f"{PF}#3", "mtu", 1400, 9000), Change("vf_links", f"{OTHER}#0", "mtu", 1500, 9000)]
    assert said(*same, *other) == [
        "0000:21:00.0 rail0",
        "  ~ VF 0-2,5 vf_links mtu  1500 -> 9000",
        "  ~ VF 3 vf_links mtu      1400 -> 9000",
        "0000:41:00.0",
        "  ~ VF 0 vf_links mtu  1500 -> 9000",
    ]


@pytest.mark.parametrize(
    ("before", "after", "more", "line"),
    [
        ("absent", "present", {}, "  + links altname storage"),
        ("present", "absent", {}, "  - links altname storage"),
        (None, 100, {}, "  + links altname storage  100"),
        (100, None, {}, "  - links altname storage  100"),
        ("", "1-3", {}, "  ~ links altname storage  (empty) -> 1-3"),
        (False, True, {}, "  ~ links altname storage  off -> on"),
        ("\x1b[2J", "x", {}, "  ~ links altname storage  \\x1b[2J -> x"),
        ("1", "3", {"note": "CPU 1 went offline"}, "  ~ links altname storage  1 -> 3  (CPU 1 went offline)"),
        (1500, 9000, {"original": True}, "  ~ links altname storage  1500 -> 9000  (as it was before)"),
    ],
)
def test_the_mark_says_what_is_added_and_removed_and_a_note_why(
    before: str | None, after: str | None, more: dict[str, Any], line: str
) -> None:
    assert said(Change("links", "host", "altname storage", before, after, **more)) == ["host", line]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ((), "nothing to change"),
        ((Change("links", PF, "mtu", 1500, 9000),), "1 to change"),
        ((RESET, LATER), "1 to change (1 vf-reset), 1 disturbs pod team/trainer-0 (0000:21:00.0#2), irqs known later"),
        ((RESET, STUCK), "2 to change (1 vf-reset), 1 disturbs pod team/trainer-0 (0000:21:00.0#2), 1 cannot be made"),
        (
            (
                Change("a", PF, "x", 1, 2, Disruption.LINK_FLAP, affected=("pod a/1", "pod a/2")),
                Change("b", PF, "x", 1, 2, Disruption.VF_RESET, affected=("pod a/2", "pod a/3", "pod a/4")),
                Change("c", PF, "x", 1, 2, Disruption.LINK_FLAP),
            ),
            "3 to change (1 vf-reset, 2 link-flap), 2 disturb pod a/1, pod a/2, pod a/3 and 1 more",
        ),
    ],
)
def test_the_summary_counts_changes_and_whom_they_disturb(changes: tuple[Change, ...], text: str) -> None:
    assert summary(changes) == text
