"""A simulated node whose probes run again and again as time passes."""

from __future__ import annotations

import errno
import os
import time
from datetime import date
from multiprocessing.connection import wait
from pathlib import Path
from typing import TextIO

from attrs import define, field

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import Pass, converge, judged
from agent.engine.readiness import Probes
from agent.report.records import Condition
from agent.spec.node import from_mapping
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.two_nics import PF0, PF1, two_nics


@define
class Node:
    """A simulated node with its probes, at a time of the test's choosing."""

    kernel: Kernel
    now: float = 1000.0
    today: date = date(2026, 6, 1)
    last: Pass | None = None
    wanted_state: str = "up"
    more: dict[str, object] = field(factory=dict)
    folder: Path | None = None
    probes: Probes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the agent again: only what it has kept in files is known to it."""
        self.last = None
        self.probes = Probes(self.kernel.machine(), self.folder, lambda: self.now, lambda: self.today)

    @classmethod
    def with_two_nics(cls) -> Node:
        return cls(two_nics())

    def begin(self, **judged: object) -> dict[str, Condition]:
        """A pass. The readings that it starts go on."""
        rails = enumerate((PF0, PF1))
        nics = [nic(f"rail{n}", pf, state=self.wanted_state) for n, pf in rails]
        spec = from_mapping({"node_name": "n1", "nics": nics, "readiness": judged, **self.more})
        have = self.last.have if self.last else None
        machine = self.kernel.machine()
        self.last = converge(
            machine, Goal(spec), Memory(lambda: self.now), have, callbacks=Callbacks(judge=self.probes.judge)
        )
        self.probes.go_on()
        return self.conditions()

    def again(self) -> dict[str, Condition]:
        """The probes judged again, without a pass."""
        assert self.last is not None
        self.last = judged(self.last, self.probes.judge)
        self.probes.go_on()
        return self.conditions()

    def woken(self) -> dict[str, Condition]:
        """The conditions after readings have ended."""
        assert wait([self.probes.fileno()], 20), "no reading has ended"
        self.probes.drain()
        return self.again()

    def until(self, type: str, reason: str) -> dict[str, Condition]:
        """The conditions once one of them has this reason."""
        conditions = self.conditions()
        while conditions[type].reason != reason:
            conditions = self.woken()
        return conditions

    def look(self, **judged: object) -> dict[str, Condition]:
        """A pass, and all the readings that it starts."""
        conditions = self.begin(**judged)
        while self.probes.waiting():
            conditions = self.woken()
        return conditions

    def conditions(self) -> dict[str, Condition]:
        assert self.last is not None
        return {condition.type: condition for condition in self.last.conditions}


def writer(pipe: Path) -> TextIO:
    """A named pipe, opened for writing as soon as it has a reader."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
        except OSError as error:
            assert error.errno == errno.ENXIO, error
            assert time.monotonic() < deadline, f"nothing has opened {pipe} to read"
            time.sleep(0.01)
