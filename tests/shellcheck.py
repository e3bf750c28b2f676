"""Checks the project's shell with shellcheck: `python -m tests.shellcheck`.

The shell of tasks/ is the argument of a call, most often of `script` (tasks/common/commands.py), or an attribute `shell` of a
fact. It is checked as it is sent.
"""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from tasks.common.commands import BEGIN
from tasks.packages import Family

ROOT = Path(__file__).parent.parent

SENDERS = {"script": 0, "self.script": 0, "replace": 2, "engine_files.command": 0}
"""The functions that are given shell, and the position of that argument."""

PASSED_ON = (
    "tasks/common/facts.py: text",
    "tasks/common/facts.py: self",
    "tasks/common/texts.py: after",
    "tasks/containers/engine_files.py: text",
)
"""The parameters of these functions, which pass them to `script`: they are checked where they are given."""

FILES = ("templates/irqbalance-policy.sh", "examples/slurm/prolog.sh")

NOT_MEANT = {
    "SC1003": "a quote after a backslash: programs of sed",
    "SC1007": "a= b=: how variables are emptied",
    "SC2016": "$ in single quotes: programs of sed and awk, and patterns",
    "SC2034": "a variable that is not used: scripts share their parts",
}


def scripts() -> Iterator[tuple[str, str]]:
    """Each script of the tasks, after the place where it is sent."""
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        file = path.relative_to(ROOT)
        module = vars(importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__")))
        for sent in filter(None, map(_sent, ast.walk(ast.parse(path.read_text())))):
            for text in texts(sent, module, file):
                # `sh -e` runs them.
                yield f"{file}:{sent.lineno}", f"#!/bin/sh -e\n{BEGIN}\n{text}"


def _sent(node: ast.AST) -> ast.expr | None:
    """The shell in a call, or the attribute of a fact (tasks/common/facts.py)."""
    if isinstance(node, ast.Call) and (position := SENDERS.get(ast.unparse(node.func))) is not None:
        return node.args[position] if len(node.args) > position else None
    return node.value if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "shell" else None


def texts(argument: ast.expr, module: Mapping[str, Any], file: Path) -> Iterator[str]:
    """The values of an argument: one, or more if it depends on the family of the distribution or on a condition."""
    if isinstance(argument, ast.IfExp):
        yield from texts(argument.body, module, file)
        yield from texts(argument.orelse, module, file)
        return
    for family in get_args(Family):
        try:
            yield eval(ast.unparse(argument), {**module, "family": family})  # noqa: S307
        except NameError as error:
            if f"{file}: {error.name}" not in PASSED_ON:
                sys.exit(
                    f"{file}:{argument.lineno}: {error}: make the script of constants, and give it data as arguments"
                )


def findings(place: str, text: str) -> list[str]:
    """What shellcheck says of a script."""
    command = [
        str(Path(sys.executable).with_name("shellcheck")),
        "--format=json",
        f"--exclude={','.join(NOT_MEANT)}",
        "-",
    ]
    said = json.loads(subprocess.run(command, input=text, capture_output=True, text=True, check=False).stdout)
    lines = text.splitlines()
    return [f"{place}: SC{one['code']}: {one['message']}: {lines[one['line'] - 1].strip()}" for one in said]


def main() -> None:
    """Print what shellcheck says. Exit code: 1 if it says anything."""
    all_texts = list(dict.fromkeys([*scripts(), *((name, (ROOT / name).read_text()) for name in FILES)]))
    with ThreadPoolExecutor() as pool:
        said = [line for lines in pool.map(findings, *zip(*all_texts, strict=True)) for line in lines]
    print(*said, f"{len(all_texts)} scripts, {len(said)} findings", sep="\n")  # noqa: T201
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
