"""The result of each test, and what perftest printed."""

from __future__ import annotations

import re
from typing import Literal

from attrs import frozen

from fleet.fabric.schedule import Round
from fleet.fabric.tests import TESTS, FabricSettings, FabricTest

Fault = Literal["", "no-server", "timeout", "client", "server", "output", "lost"]

LONGEST_TEXT = 300
"""Characters that are kept of a program's messages."""


@frozen
class FabricResult:
    """One test of a round.

    ``value`` in the test's unit; None with a ``fault``: the server never listened, the time was up, the client or the server
    ended with an error, the output has no result, a node was lost. ``text``: the program's messages then.
    """

    stage: str
    number: int
    test: str
    across: bool
    server: str
    client: str
    value: float | None = None
    fault: Fault = ""
    text: str = ""

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Identifies a test within a run."""
        return self.stage, self.number, self.server, self.client


def failed(made: Round, server: str, client: str, fault: Fault, text: str = "") -> FabricResult:
    """The result of a test without a value."""
    return FabricResult(
        made.stage, made.number, made.test, made.across, server, client, None, fault, text[-LONGEST_TEXT:]
    )


def measured(made: Round, server: str, client: str, code: int, output: str, settings: FabricSettings) -> FabricResult:
    """The result of a client that has ended with an exit status, having printed ``output``."""
    value = parse(TESTS[made.test], output, settings) if code == 0 else None
    if value is None:
        return failed(made, server, client, *why_none(code, messages(output)))
    return FabricResult(made.stage, made.number, made.test, made.across, server, client, value)


def why_none(code: int, said: str) -> tuple[Fault, str]:
    """Why a program that has ended with an exit status has no result. ``said``: its messages."""
    if code == TIMED_OUT:
        return "timeout", said
    return ("client", said or f"exit status {code}") if code else ("output", said or "it printed no result")


TIMED_OUT = 124
"""The exit status of timeout(1)."""

COLUMNS = {"Gbit/s": "BW average[Gb/sec]", "us": "t_typical[usec]"}
"""The column of perftest's table that has the result (RESULT_FMT_G and RESULT_FMT_LAT of perftest_parameters.h)."""

MESSAGES, COUNT = "MsgRate[Mpps]", "#iterations"

LEAST, MOST = 1e-6, 1e6
"""The range of plausible results, in Gbit/s or microseconds. Nodes report them, and the code divides by them."""

_HEADING = re.compile(r"#bytes|#iterations|BW (?:peak|average)\[[^\]]*\]|MsgRate\[Mpps\]|\S+(?: percentile)?\[usec\]")


def parse(test: FabricTest, output: str, settings: FabricSettings) -> float | None:
    """The result in perftest's output; None if there is none, or an impossible one.

    perftest prints the rate with two decimals, so a rate below 1 Gbit/s is computed from the message rate, which has six. Both
    are 0 if perftest cannot measure the CPU's frequency, as on some virtual machines ("Correlation coefficient", get_clock.c).
    Then the rate is computed from the number of messages.
    """
    columns: list[str] = []
    for line in output.splitlines():
        if "#bytes" in line:
            columns = _HEADING.findall(line)
            continue
        words = line.split()
        if COLUMNS[test.unit] in columns and len(words) >= len(columns) and words[0].isdigit():
            try:
                value = float(words[columns.index(COLUMNS[test.unit])])
                if test.unit == "Gbit/s" and value < 1:
                    bits = int(words[0]) * 8
                    value = bits * 1e-3 * float(words[columns.index(MESSAGES)])
                    value = value or bits * 1e-9 * float(words[columns.index(COUNT)]) / settings.window
            except ValueError:
                continue
            return value if LEAST <= value <= MOST else None
    return None


def messages(output: str) -> str:
    """The lines that say what went wrong: those without perftest's tables of settings and addresses."""
    noise = re.compile(r"^[-*]|^ ?(local|remote) address|GID:| : |^ #bytes|^ +RDMA_|^ +Send |^\* Waiting|^\s*$")
    return "; ".join(line.strip() for line in output.splitlines() if not noise.search(line))
