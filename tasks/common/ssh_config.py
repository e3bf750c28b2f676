"""The SSH configuration of the control host, read as ssh_config(5) has it, where pyinfra and paramiko read it otherwise."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import wraps
from glob import glob
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from pyinfra import logger

ALONE = ("all", "canonical", "final")
KNOWN = (*ALONE, "host", "originalhost", "user", "localuser", "exec")
"""The criteria of Match that paramiko knows. The first ones have no pattern."""

NO_HOST = [{"type": "host", "param": "", "negate": False}]

DEEPEST = 16
"""How many files may include each other (READCONF_MAX_DEPTH in OpenSSH's readconf.c)."""


def _criteria(line: str) -> Iterator[tuple[str, ...]]:
    words = shlex.split(line)
    while words:
        name, equals, pattern = words.pop(0).partition("=")
        name = name.lower()
        if name.removeprefix("!") in ALONE:
            yield (name,)
        elif equals or not words:
            yield name, pattern
        else:
            yield name, words.pop(0)


def matching(parse: Callable[[Any, str], list[dict[str, Any]]]) -> Callable[[Any, str], list[dict[str, Any]]]:
    """SSHConfig._get_matches: a criterion that paramiko does not know fits no host, and is named. To paramiko it fits each."""

    @wraps(parse)
    def parse_known(self: Any, line: str) -> list[dict[str, Any]]:
        criteria = list(_criteria(line))
        if unknown := [name for name, *_ in criteria if name.removeprefix("!") not in KNOWN]:
            logger.warning(
                f"SSH configuration: the lines after `Match {line}` are left out, since pyinfra cannot judge "
                f"{', '.join(unknown)}; give what hosts need of them under Host, or in the inventory"
            )
            return NO_HOST
        if ("final",) in criteria:
            # It asks for nothing more, and paramiko refuses it there.
            criteria = [each for each in criteria if each != ("all",)]
        return parse(self, shlex.join(word for each in criteria for word in each))

    return parse_known


def executing(_: object) -> Callable[..., SimpleNamespace]:
    """FakeInvoke.run: a command of `Match exec` is one for the shell. pyinfra has the shell read a file of that name."""

    def run(command: str, **_: object) -> SimpleNamespace:
        shell = os.environ.get("SHELL") or "/bin/sh"
        done = subprocess.run([shell, "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        return SimpleNamespace(ok=done.returncode == 0)

    return run


def including(expand: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """_expand_include_statements: a line may include several files, and a file may be included again, if not by itself."""

    @wraps(expand)
    def expand_each(file: TextIO, within: tuple[str, ...] = ()) -> list[str]:
        within = (*within, file.name)
        if len(within) > DEEPEST:
            raise ValueError(f"the SSH configuration's {file.name} is included {DEEPEST} files deep, or by itself")
        lines: list[str] = []
        for line in file:
            keyword, *patterns = shlex.split(line, comments=True) if _INCLUDE.match(line) else [""]
            if not keyword:
                lines += expand(SimpleNamespace(name=file.name, readlines=[line].copy))
            for path in chain.from_iterable(_files(each, Path(within[0]).parent) for each in patterns):
                with path.open(encoding="utf-8") as included:
                    lines += expand_each(included, within)
        return lines

    return expand_each


_INCLUDE = re.compile(r"\s*include\s", re.IGNORECASE)


def _files(pattern: str, folder: Path) -> list[Path]:
    # pathlib's glob() takes no whole path before Python 3.13.
    found = sorted(glob(str(folder / Path(pattern).expanduser())))  # noqa: PTH207
    return [path for path in map(Path, found) if path.is_file()]
