"""Measures what two replacements of pyinfra's functions gain: `python -m bench.replacements`.

It deploys operations that do nothing to hosts that are not there, with pyinfra's functions and with each replacement.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tasks.common.archive import ROOT

PLACES = ("pyinfra.api.operation:get_operation_order_from_stack", "pyinfra.api.arguments:all_global_arguments")
HOSTS, OPERATIONS = 100, 50
CONFIG = """
from tasks.common.replacements import REPLACEMENTS, found
for place in {places!r}:
    owner, name = found(place)
    setattr(owner, name, REPLACEMENTS[place](getattr(owner, name)))
"""
DEPLOY = """
from pyinfra.operations import server
for number in range({operations}):
    server.shell(name=f"Operation {{number}}", commands=["true"])
"""


def cpu_seconds(folder: Path, places: tuple[str, ...]) -> float:
    """The CPU time of pyinfra for a deploy with these replacements."""
    (folder / "config.py").write_text(CONFIG.format(places=places))
    quick = {"PYINFRA_FAKE_DELAY": "0", "PYINFRA_FAKE_DELAY_JITTER": "0", "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", "hosts.py", "deploy.py"],
        cwd=folder, env={**os.environ, **quick}, stdin=subprocess.DEVNULL, capture_output=True, check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@click.command()
def main() -> None:
    """Print the CPU time for each host."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hosts.py").write_text(f"hosts = [f'@fake/h{{n}}' for n in range({HOSTS})]\n")
        (folder / "deploy.py").write_text(DEPLOY.format(operations=OPERATIONS))
        for what, places in (("none", ()), *((place, (place,)) for place in PLACES), ("both", PLACES)):
            took = cpu_seconds(folder, places) / HOSTS * 1000
            click.echo(f"replaced: {what}: {took:.0f} ms of CPU time for each host, {OPERATIONS} operations")


if __name__ == "__main__":
    main()
