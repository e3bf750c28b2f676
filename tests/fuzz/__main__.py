"""Fuzzes the parsers of foreign input: `python -m tests.fuzz TARGET --seconds 60 --seed 1`.

With --seconds, coverage guides the choice of inputs (atheris, which `make fuzz` installs); with --cases, only the seed decides.
A fault ends the run with exit code 1 and the command that repeats it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import click

from tests.fuzz import targets
from tests.fuzz.mutation import cases

HANG_S = 20
MOST_MIB = 2048


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*targets.names(), "all"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="folder for inputs that failed")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seconds", type=int, default=60, help="time for each target")
    what.add_argument("--cases", type=int, help="a number of cases instead")
    what.add_argument("--input", type=Path, help="check this file alone")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in targets.names() if given.target == "all" else [given.target]:
        if given.input:
            targets.load(name).check(given.input.read_bytes())
        elif given.cases is not None:
            worst |= _count(name, given.seed, given.cases, given.out)
        else:
            worst |= _guided(name, given.seed, given.seconds, given.out)
    return worst


def _count(name: str, seed: int, count: int, out: Path) -> int:
    target, done, began = targets.load(name), 0, time.monotonic()
    for data in cases(target.seeds(), seed, count):
        try:
            target.check(data)
        except Exception as error:
            path = out / f"{name}-{sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            click.echo(f"{name}: {error!r}; again: python -m tests.fuzz {name} --input {path}")
            return 1
        done += 1
    click.echo(f"{name}: {done} cases in {time.monotonic() - began:.1f} s, no fault")
    return 0


def _guided(name: str, seed: int, seconds: int, out: Path) -> int:
    """In a process of its own: libFuzzer ends the process when it is done."""
    if find_spec("atheris") is None:
        sys.exit("atheris is not installed; run `make fuzz`, or give --cases instead of --seconds")
    with tempfile.TemporaryDirectory(prefix="trackbed-fuzz-") as folder:
        for number, data in enumerate(targets.load(name).seeds()):
            (Path(folder) / f"seed-{number}").write_bytes(data)
        command = [
            *(sys.executable, "-m", "tests.fuzz.guided", name, folder, f"-seed={seed}", f"-max_total_time={seconds}"),
            *(f"-timeout={HANG_S}", f"-rss_limit_mb={MOST_MIB}", f"-artifact_prefix={out}/{name}-"),
            *("-max_len=65536", "-print_final_stats=1"),
        ]
        done = subprocess.run(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace", check=False
        )
    statistics = dict(line[6:].split(":", 1) for line in done.stderr.splitlines() if line.startswith("stat::"))
    if done.returncode:
        click.echo(os.linesep.join(done.stderr.splitlines()[-40:]))
        click.echo(f"{name}: a fault; again: python -m tests.fuzz {name} --input FILE, with the file named above")
        return 1
    executed, peak = (statistics.get(word, "?").strip() for word in ("number_of_executed_units", "peak_rss_mb"))
    click.echo(f"{name}: {executed} cases in {seconds} s, at most {peak} MiB, no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
