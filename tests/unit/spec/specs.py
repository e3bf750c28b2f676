"""`specs.txt`: specs, each with the faults that the parser finds, and whether the JSON Schema refuses it, too.

`.venv/bin/python -m tests.unit.spec.specs` writes the answers anew: `git diff` then shows which messages have changed.
"""

import json
from pathlib import Path
from typing import Any

from agent.spec.node import SpecError, parse

FILE = Path(__file__).with_name("specs.txt")
ALSO = "    (and by the schema)"


def cases() -> list[tuple[str, list[str]]]:
    """Each spec and the lines below it; the specs begin at the left. A line with # is a heading."""
    found: list[tuple[str, list[str]]] = []
    for line in FILE.read_text().splitlines():
        if line.startswith("    "):
            found[-1][1].append(line)
        elif line and not line.startswith("#"):
            found.append((line, []))
    return found


def faults(text: str) -> list[str]:
    try:
        parse(text)
    except SpecError as refused:
        return [f"    {fault}" for fault in refused.faults]
    return ["    accepted"]


def write(validator: Any) -> None:
    lines = []
    for line in FILE.read_text().splitlines():
        if not line.startswith("    "):
            lines.append(line)
            if line and not line.startswith("#"):
                lines += [*faults(line), *([] if validator.is_valid(json.loads(line)) else [ALSO])]
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    from tests.unit.spec.conftest import made_validator

    write(made_validator())
