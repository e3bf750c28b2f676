"""The table of docs/campaign/zoo.md, from the machines in tests/zoo/ and what stands beside each."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import yaml

from handbook.markdown import cell, table

FOLDER = Path(__file__).parents[1] / "tests/zoo"
COLUMNS = ("Machine", "What it is there for", "Sources", "Filled in", "Result")


def made(folder: Path = FOLDER) -> str:
    """The table: a line for each machine."""
    return table(COLUMNS, [_row(file) for file in sorted(folder.glob("*.yaml"))])


def _row(file: Path) -> tuple[str, ...]:
    facts = yaml.safe_load(file.read_text())
    sources = ", ".join(f"[{_called(source)}]({source})" for source in facts["sources"])
    result = _result(file.with_suffix(".txt").read_text().splitlines())
    return f"`{file.stem}`", cell(facts["shows"]), sources, cell(facts.get("filled_in", "")), result


def _called(source: str) -> str:
    """A repository by its name, another page by its host."""
    parts = urlsplit(source)
    return "/".join(parts.path.split("/")[1:3]) if parts.hostname == "github.com" else str(parts.hostname)


def _result(lines: list[str]) -> str:
    """How many passes ended ready, what was refused, and what a pass could not do."""
    ready, not_ready = lines.count("Ready"), lines.count("not Ready")
    words = [f"{ready} of {ready + not_ready} passes end ready"]
    words += [
        cell(line) for line in dict.fromkeys(lines) if line.startswith(("refused: ", "unsupported: ", "blocked: "))
    ]
    return "; ".join(words)
