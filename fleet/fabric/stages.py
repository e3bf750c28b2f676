"""The stages of a run. A stage's rounds follow from the results of the stages before it, so a stopped run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet.fabric.ends import Ends
from fleet.fabric.results import FabricResult
from fleet.fabric.schedule import Round, survey
from fleet.fabric.tests import TESTS, FabricSettings
from fleet.fabric.verdict import confirming, repeating

STAGES: tuple[tuple[str, Callable[[Ends, FabricSettings, Sequence[FabricResult]], list[Round]]], ...] = (
    (
        "survey",
        lambda ends, settings, results: survey(
            ends,
            [(test, TESTS[test].across) for test in settings.tests if test in TESTS],
            settings.across_rails,
            settings.seed,
        ),
    ),
    ("ends", lambda ends, settings, results: confirming(ends, results, settings.seed)),
    ("paths", lambda ends, settings, results: repeating(ends, results)),
)
"""By the stage's name: a function from the results of all earlier stages to the rounds of this one."""
