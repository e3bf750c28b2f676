"""Counts drift by kind: changes that were made after the node had been as its spec wants. The reporter serves the counts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from attrs import define, field, frozen

from agent.documents import load, read
from agent.report.publisher import READABLE
from agent.report.records import Change, Outcome, to_plain
from agent.runtime import journal, write_atomically

NAME = "drift.json"

LARGEST = 64 << 10
"""Bytes. A file with thirty kinds has two thousand."""

Suspects = Mapping[str, Collection[str]]
"""By kind of state, the programs that set such state: those that are known to, or those of them that run."""


@frozen
class Counts:
    """``repairs``: by kind of state. ``suspects``: of these, by kind and program, those made while that program ran."""

    repairs: Mapping[str, int] = field(factory=dict)
    suspects: Mapping[str, Mapping[str, int]] = field(factory=dict)


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
        repairs = {kind: before.repairs.get(kind, 0) for kind in sorted(known)}
        suspects = {
            kind: {name: before.suspects.get(kind, {}).get(name, 0) for name in programs}
            for kind, programs in sorted(known.items())
            if programs
        }
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
            self.counts = _more(self.counts, kinds, suspects)
            self._write()
        self._was_true = self._was_true or as_wanted

    def _write(self) -> None:
        try:
            write_atomically(self.path, json.dumps(to_plain(self.counts), sort_keys=True) + "\n", READABLE)
        except OSError as error:
            journal(f"{self.path} cannot be written: {error.strerror}; the next repair writes it")


def _more(counts: Counts, kinds: Iterable[str], suspects: Suspects) -> Counts:
    repairs = dict(counts.repairs)
    programs = {kind: dict(by_program) for kind, by_program in counts.suspects.items()}
    for kind in kinds:
        repairs[kind] = repairs.get(kind, 0) + 1
        for name in suspects.get(kind, ()):
            of_kind = programs.setdefault(kind, {})
            of_kind[name] = of_kind.get(name, 0) + 1
    return Counts(repairs, programs)


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
            return Counts(repairs, suspects)
    return Counts()


def _are_counts(document: object) -> bool:
    return isinstance(document, dict) and all(type(count) is int and count >= 0 for count in document.values())
