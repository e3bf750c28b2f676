"""The stages of a run. A stage's rounds follow from the results of the stages before it, so a stopped run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from fleet.fabric.ends import Ends
from fleet.fabric.results import Result
from fleet.fabric.schedule import Round, survey
from fleet.fabric.tests import TESTS
from fleet.fabric.verdict import confirming, repeating


@frozen
class FabricSettings:
    """What a run does, the same for all nodes.

    ``tests``: programs of perftest. ``seconds``: how long each measures. ``grace``: seconds that it may take beyond that, for
    the connection and for what is still on its way when the time is over. ``across_rails``: also between rails.
    ``at_once``: the most tests at the same time; None is all of a round. ``gpu_memory``: use the memory of a GPU of the
    NIC's NUMA node.
    """

    tests: tuple[str, ...] = tuple(TESTS)
    seconds: int = 5
    grace: int = 15
    across_rails: bool = True
    at_once: int | None = None
    gpu_memory: bool = False
    seed: int = 1


STAGES: tuple[tuple[str, Callable[[Ends, FabricSettings, Sequence[Result]], list[Round]]], ...] = (
    (
        "survey",
        lambda ends, settings, results: survey(
            ends, [(test, TESTS[test].across) for test in settings.tests], settings.across_rails, settings.seed
        ),
    ),
    ("ends", lambda ends, settings, results: confirming(ends, results, settings.seed)),
    ("paths", lambda ends, settings, results: repeating(ends, results)),
)
"""By the stage's name: a function from the results of all earlier stages to the rounds of this one."""
