"""Counts drift by kind: changes that were made after the node had been as its spec wants. The reporter serves the counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from attrs import define, field

from agent.documents import load, read
from agent.report.publisher import READABLE
from agent.report.records import Outcome
from agent.runtime import journal, write_atomically

NAME = "drift.json"

LARGEST = 64 << 10
"""Bytes. A file with thirty kinds has one thousand."""


@define
class Drift:
    """Counts in a file of the runtime directory: a restart of the agent keeps them, and a boot starts from zero.

    ``counts``: by kind. A kind that was never repaired has a zero: if its series began with the first repair, Prometheus would
    see no increase.
    """

    path: Path
    counts: dict[str, int]
    _was_true: bool = field(default=False, init=False)

    @classmethod
    def load(cls, folder: Path, kinds: Iterable[str]) -> Drift:
        """Continue with the counts of the file in ``folder``, or with zero if there is none."""
        path = folder / NAME
        before = read_drift(path)
        drift = cls(path, {kind: before.get(kind, 0) for kind in sorted(kinds)})
        drift._write()
        return drift

    def start_over(self) -> None:
        """Another spec is in force: the changes that it brings are no drift."""
        self._was_true = False

    def count(self, outcomes: Iterable[Outcome], as_wanted: bool) -> None:
        """Count the repairs of a pass.

        :param as_wanted: the pass ended with the node as the spec wants, so later changes are drift.
        """
        repaired = (
            [outcome.change.kind for outcome in outcomes if outcome.result == "applied"] if self._was_true else []
        )
        for kind in repaired:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        if repaired:
            self._write()
        self._was_true = self._was_true or as_wanted

    def _write(self) -> None:
        try:
            write_atomically(self.path, json.dumps(self.counts, sort_keys=True) + "\n", READABLE)
        except OSError as error:
            journal(f"{self.path} cannot be written: {error.strerror}; the next repair writes it")


def read_drift(path: Path) -> dict[str, int]:
    """The counts by kind; empty if the file is missing or has another format."""
    try:
        document = load(read(path, LARGEST), LARGEST)
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or not all(type(count) is int and count >= 0 for count in document.values()):
        return {}
    return document
