"""Records the results of the last `make mutants` in docs/campaign/mutants.json: `python -m bench.mutants`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from attrs import frozen

from handbook import campaign

ROOT = Path(__file__).parents[1]

# mutmut's words for mutants that the tests noticed; a test that could not finish has noticed its mutant, too.
KILLED = ("killed", "timeout", "segfault", "suspicious")
NOT_NOTICED = ("survived", "no tests")

COLUMNS = {
    "module": "Module",
    "mutants": "Mutants",
    "killed": "Killed",
    "survived": "Survived",
    "missed": "Not reached",
    "share": "Killed of those reached",
}


@frozen
class Module:
    """The mutants of one module: how many had each of mutmut's results, and which survived."""

    name: str
    words: Counter[str]
    survivors: tuple[str, ...]

    def row(self) -> dict[str, str]:
        """The module's row of the table."""
        killed, lived = (sum(self.words[word] for word in words) for words in (KILLED, NOT_NOTICED))
        reached = killed + lived
        share = f"{100 * killed / reached:.1f} %" if reached else ""
        values = (f"`{self.name}`", self.words.total(), killed, lived, self.words.total() - reached, share)
        return dict(zip(COLUMNS, map(str, values), strict=True))


def modules(results: str) -> list[Module]:
    """The modules in the output of `mutmut results --all true`, of which a line is ``module.function__mutmut_1: killed``."""
    by_module: dict[str, list[tuple[str, str]]] = {}
    for line in results.splitlines():
        mutant, _, word = line.strip().rpartition(": ")
        module, _, function = mutant.rpartition(".")
        by_module.setdefault(module, []).append((function, word))
    return [
        Module(
            name, Counter(word for _, word in mutants), tuple(mutant for mutant, word in mutants if word in NOT_NOTICED)
        )
        for name, mutants in sorted(by_module.items())
    ]


def main() -> None:
    """Record the results, and print the survivors."""
    command = [str(Path(sys.executable).parent / "mutmut"), "results", "--all", "true"]
    measured = modules(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    if not measured:
        sys.exit("there are no results; get some: make mutants")
    campaign.write("mutants", COLUMNS, [module.row() for module in measured])
    for module in measured:
        for mutant in module.survivors:
            print(f"survived: {module.name}.{mutant}")  # noqa: T201


if __name__ == "__main__":
    main()
