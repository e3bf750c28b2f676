"""Runs the unit and simulation tests on each Python that this machine has: `python -m tests.pythons`; prints a table.

Each Python gets an environment of its own with the project in it. If a Python is missing, uv fetches it; if that fails, its row
says so.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from attrs import frozen

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
FOLDER = Path(tempfile.gettempdir()) / "trackbed-pythons"
UV = str(Path(sys.executable).with_name("uv"))
TESTS = ("tests/unit", "tests/sim")


@frozen
class Row:
    """One Python. ``exact``: its full version."""

    version: str
    exact: str
    result: str
    good: bool

    def __str__(self) -> str:
        return f"| {self.version} | {self.exact} | {self.result} |"


def run(version: str, tests: tuple[str, ...], workers: int) -> Row:
    """Install and test on one Python."""
    place = FOLDER / version
    python = place / "bin" / "python"
    made = _call(UV, "venv", "--quiet", "--clear", "--python", _interpreter(version), str(place))
    if made.returncode:
        return Row(version, "-", f"not run: {_last(made.stderr).strip()}", True)
    exact = _call(str(python), "-c", "import platform; print(platform.python_version())").stdout.strip()
    # The lock is for one Python; another may need older versions of what the tests use.
    words = ("pip", "install", "--quiet", "--python", str(python), "--editable", ".[control,test]")
    if (installed := _call(UV, *words)).returncode:
        return Row(version, exact, f"cannot be installed: {_last(installed.stderr)}", False)
    command = (str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--numprocesses={workers}", *tests)
    done = _call(*command)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            click.echo(f"{version}: {line}", err=True)
    counts = re.sub(r" in .*|=+", "", _last(done.stdout)).strip()
    return Row(version, exact, counts, done.returncode == 0)


def _interpreter(version: str) -> str:
    """The path of this Python, from pyenv or PATH. If there is none: its version, which uv looks for elsewhere and fetches.

    pyenv's programs in PATH are scripts, which run the version that is selected at that moment.
    """
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}") or version


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=__doc__)
    parser.add_argument("tests", nargs="*", default=list(TESTS))
    parser.add_argument("--workers", type=int, default=2, help="processes for each Python")
    parser.add_argument("--only", action="append", choices=VERSIONS, help="a version; may be repeated")
    given = parser.parse_args()
    rows = [run(version, tuple(given.tests), given.workers) for version in given.only or VERSIONS]
    click.echo("| Python | exactly | tests |\n| --- | --- | --- |")
    for row in rows:
        click.echo(str(row))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
