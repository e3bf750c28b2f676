"""The stages of a run. A stage's rounds follow from the results of the stages before it, so a stopped run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from fleet.fabric.ends import Ends
from fleet.fabric.results import FabricResult
from fleet.fabric.schedule import Round, survey
from fleet.fabric.tests import ALL_REDUCE, TESTS, Load
from fleet.fabric.verdict import confirming, repeating


@frozen
class FabricSettings:
    """What a run does, the same for all nodes.

    ``tests``: programs of perftest, and the collective stage. ``seconds``, ``size``, ``messages``, ``gpu_memory``: as in
    :class:`Load`. ``grace``: seconds that a test may take beyond that, for the connection and for what is still on its way when
    the time is over. ``across_rails``: also between rails. ``at_once``: the most tests at the same time; None is all of a
    round. ``collective_size``: the bytes that a collective reduces.
    """

    tests: tuple[str, ...] = (*TESTS, ALL_REDUCE)
    seconds: int = 5
    size: int = 65536
    messages: int = 1000
    grace: int = 15
    across_rails: bool = True
    at_once: int | None = None
    gpu_memory: bool = False
    collective_size: int = 64 << 20
    seed: int = 1

    @property
    def load(self) -> Load:
        """What each test puts on the network."""
        return Load(self.seconds, self.size, self.messages, self.gpu_memory)


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
