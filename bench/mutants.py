"""Writes docs/mutants.md's table from the results of the last `make mutants`: `python -m bench.mutants`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from attrs import frozen

PAGE = Path(__file__).parent.parent / "docs" / "mutants.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"

# mutmut's words for mutants that the tests noticed; a test that could not finish has noticed its mutant, too.
KILLED = ("killed", "timeout", "segfault", "suspicious")
NOT_NOTICED = ("survived", "no tests")

HEAD = """\
| Module | Mutants | Killed | Survived | Not reached | Killed of those reached |
| --- | --- | --- | --- | --- | --- |
"""


@frozen
class Module:
    """The mutants of one module: how many had each of mutmut's results, and which survived."""

    name: str
    words: Counter[str]
    survivors: tuple[str, ...]

    def row(self) -> str:
        """The module's row of the table."""
        killed, lived = (sum(self.words[word] for word in words) for words in (KILLED, NOT_NOTICED))
        reached = killed + lived
        share = f"{100 * killed / reached:.1f} %" if reached else ""
        return f"| `{self.name}` | {self.words.total()} | {killed} | {lived} | {self.words.total() - reached} | {share} |\n"


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
    """Replace the table, and print the survivors."""
    command = [str(Path(sys.executable).parent / "mutmut"), "results", "--all", "true"]
    measured = modules(subprocess.run(command, capture_output=True, text=True, check=True, cwd=PAGE.parents[1]).stdout)
    if not measured:
        sys.exit("there are no results; get some: make mutants")
    table = HEAD + "".join(module.row() for module in measured)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.partition(END)[2])
    print(table, end="")  # noqa: T201
    for module in measured:
        for mutant in module.survivors:
            print(f"survived: {module.name}.{mutant}")  # noqa: T201


if __name__ == "__main__":
    main()
