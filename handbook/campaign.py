"""Records the campaign's runs in docs/campaign/, from which `make docs` makes the tables.

`python -m handbook.campaign FILE...` records the runs in files of `pytest --junitxml`: one for each test file, which replaces
the earlier runs of the whole file. Runs of a part of a file stay. From files of results of `python -m tests.chaos` (`.jsonl`)
it records the trials.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from handbook import trials
from handbook.markdown import table

DOCS = Path(__file__).parents[1] / "docs"

FOLDERS = {"tests/lab": "lab", "tests/cluster": "kubernetes"}
"""The file in docs/campaign/ that has the runs of a folder's tests."""

Run = dict[str, str]
Cases = list[ElementTree.Element]


def main(results: list[str], docs: Path = DOCS) -> None:
    """Record the runs in these files."""
    for path in map(Path, results):
        (trials.record if path.suffix == ".jsonl" else record)(path, docs)


def runs(name: str, docs: Path = DOCS) -> str:
    """The table of the records in the file of this name."""
    columns, recorded = _load(docs, name)
    return table([*columns.values()], [[run[key] for key in columns] for run in recorded])


def record(results: Path, docs: Path) -> None:
    """Add the runs of a file of `pytest --junitxml` to the records."""
    for name, run in _runs(results):
        columns, earlier = _load(docs, name)
        write(name, columns, _with(earlier, {key: run[key] for key in columns}, run["file"]), docs)


def write(name: str, columns: Mapping[str, str], recorded: Sequence[Mapping[str, Any]], docs: Path = DOCS) -> None:
    """Write the records of this name: the titles of the columns by their keys, and a run for each row."""
    content = {"columns": columns, "runs": recorded}
    (docs / "campaign" / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _with(runs: Sequence[Run], run: Run, file: str) -> list[Run]:
    """The runs with a new one of a file, in the place of earlier ones of the whole file. What they show stays as written."""
    # Whoever wrote a run by hand may have left out the program or the mark. Anything else is a part, or has a condition.
    whole = re.compile(rf'`(pytest )?(-m (campaign|"") )?{re.escape(file)}`')
    earlier = [whole.fullmatch(each["command"]) is not None for each in runs]
    place = earlier.index(True) if any(earlier) else len(runs)
    shows = {key: each[key] for each in runs[place : place + 1] for key in ("shows",) if key in each}
    kept = [each for each, is_earlier in zip(runs, earlier, strict=True) if not is_earlier]
    return [*kept[:place], {**run, **shows}, *kept[place:]]


def _load(docs: Path, name: str) -> tuple[Mapping[str, str], Sequence[Run]]:
    content = json.loads((docs / "campaign" / f"{name}.json").read_text())
    return content["columns"], content["runs"]


def _runs(results: Path) -> Iterator[tuple[str, Run]]:
    """The runs in a file of results, each with the name of its records."""
    files: dict[str, Cases] = {}
    try:
        # Written by the pytest that has just run here, so it is no foreign XML.
        tree = ElementTree.parse(results)  # noqa: S314
    except (OSError, ElementTree.ParseError) as error:
        sys.exit(f"{results} cannot be read: {error}; pytest writes it at its end, so run the tests again")
    for case in tree.iter("testcase"):
        files.setdefault(case.get("classname", "").replace(".", "/") + ".py", []).append(case)
    for file, cases in files.items():
        for folder, name in FOLDERS.items():
            if file.startswith(f"{folder}/"):
                yield name, _run(file, cases)


def _run(file: str, cases: Cases) -> Run:
    outcomes = Counter(_outcome(case) for case in cases)
    failed = [f"`{case.get('name')}`" for case in cases if _outcome(case) == "failed"]
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return {
        "file": file,
        "command": f"`pytest -m campaign {file}`",
        "shows": "; ".join(case.get("name", "").removeprefix("test_").replace("_", " ") for case in cases),
        "result": f"{counted}{': ' if failed else ''}{', '.join(failed)}",
        "duration": f"{sum(float(case.get('time', 0)) for case in cases):.0f} s",
    }


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


if __name__ == "__main__":
    main(sys.argv[1:])
