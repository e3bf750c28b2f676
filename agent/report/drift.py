"""Counts drift by kind: changes that were made after the node had been as its spec wants. The reporter serves the counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from attrs import define, field, frozen

from agent.documents import load, read
from agent.report.publisher import READABLE
from agent.report.records import Change, Outcome
from agent.runtime import journal, write_atomically

NAME = "drift.json"

LARGEST = 64 << 10
"""Bytes. A file with thirty kinds has two thousand."""

Suspects = Mapping[str, Collection[str]]
"""By kind of state, the programs that set such state: those that are known to, or those of them that run."""


@frozen
class Counts:
    """``repairs``: by kind of state. ``suspects``: of these, those made while a program ran, by kind and program."""

    repairs: Counter[str] = field(factory=Counter)
    suspects: Counter[tuple[str, str]] = field(factory=Counter)


@define
class Drift:
    """Counts in a file of the runtime directory: a restart of the agent keeps them, and a boot starts from zero.

    What was never counted has a zero: if its series began with the first repair, Prometheus would see no increase.
    """

    path: Path
    counts: Counts
    _was_true: bool = field(default=False, init=False)

    @classmethod
    def load(cls, folder: Path, known: Suspects) -> Drift:
        """Continue with the counts of the file in ``folder``, or with zero if there is none.

        :param known: every kind, with the programs that are known to set its state.
        """
        path = folder / NAME
        before = read_drift(path)
        repairs = Counter({kind: before.repairs[kind] for kind in known})
        suspects = Counter({pair: before.suspects[pair] for pair in _pairs(known, known)})
        drift = cls(path, Counts(repairs, suspects))
        drift._write()
        return drift

    def start_over(self) -> None:
        """Another spec is in force: the changes that it brings are no drift."""
        self._was_true = False

    def repairs(self, outcomes: Iterable[Outcome]) -> list[Change]:
        """The changes of a pass that have repaired drift."""
        return [outcome.change for outcome in outcomes if outcome.result == "applied"] if self._was_true else []

    def count(self, repairs: Iterable[Change], suspects: Suspects, as_wanted: bool) -> None:
        """Count the repairs of a pass.

        :param suspects: the programs that ran.
        :param as_wanted: the pass ended with the node as the spec wants, so later changes are drift.
        """
        kinds = [change.kind for change in repairs]
        if kinds:
            self.counts.repairs.update(kinds)
            self.counts.suspects.update(_pairs(kinds, suspects))
            self._write()
        self._was_true = self._was_true or as_wanted

    def _write(self) -> None:
        try:
            write_atomically(self.path, to_json(self.counts), READABLE)
        except OSError as error:
            journal(f"{self.path} cannot be written: {error.strerror}; the next repair writes it")


def _pairs(kinds: Iterable[str], suspects: Suspects) -> list[tuple[str, str]]:
    return [(kind, program) for kind in kinds for program in suspects.get(kind, ())]


def to_json(counts: Counts) -> str:
    """The text of the file. It has the programs of each kind in an object of their own."""
    suspects: dict[str, dict[str, int]] = {}
    for (kind, program), count in counts.suspects.items():
        suspects.setdefault(kind, {})[program] = count
    return json.dumps({"repairs": counts.repairs, "suspects": suspects}, sort_keys=True) + "\n"


def read_drift(path: Path) -> Counts:
    """The counts; none if the file is missing or has another format."""
    try:
        document = load(read(path, LARGEST), LARGEST)
    except (OSError, ValueError):
        return Counts()
    match document:
        case {"repairs": dict() as repairs, "suspects": dict() as suspects} if all(
            _are_counts(each) for each in (repairs, *suspects.values())
        ):
            by_pair = {(kind, program): count for kind, counts in suspects.items() for program, count in counts.items()}
            return Counts(Counter(repairs), Counter(by_pair))
    return Counts()


def _are_counts(document: object) -> bool:
    return isinstance(document, dict) and all(type(count) is int and count >= 0 for count in document.values())
