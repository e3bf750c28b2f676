"""The archive of pull mode, made on the control host: the deploy, the agent, and pyinfra with its libraries.

`python -m tasks.pull_archive trackbed.tar.gz --for 3.11-x86_64`, then `gpg --detach-sign trackbed.tar.gz`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pyinfra.api.exceptions import DeployError

from tasks.common import archive

CONTENT = (
    "agent",
    "config.py",
    "deploy.py",
    "group_data",
    "inventories",
    "pyproject.toml",
    "requirements",
    "tasks",
    "templates",
)
PINS = archive.ROOT / "requirements" / "control.txt"
NEEDED = ("pyinfra", "attrs", "cattrs", "jinja2", "pyyaml", "packaging", "click")
TARGETS = tuple(f"3.{minor}-{machine}" for minor in range(10, 15) for machine in archive.MACHINES)


def build(output: Path, targets: tuple[str, ...], root: Path = archive.ROOT) -> None:
    """Write the archive.

    :param targets: Python's version and the machine (`uname -m`) of the nodes, as `3.11-x86_64`.
    :raises DeployError: a library cannot be fetched; with pip's message.
    """
    with tempfile.TemporaryDirectory(prefix="trackbed-pull-") as made:
        tree = Path(made)
        for name in CONTENT:
            if (root / name).is_dir():
                shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(root / name, tree / name)
        # A node takes none that is older than what it had.
        (tree / "ISSUED").write_text(f"{int(time.time())}\n")
        (tree / "cache" / "trackbed").mkdir(parents=True)
        for target in targets:
            python, _, machine = target.partition("-")
            _install(python, machine, tree / f"lib-{target}", tree / "pins.txt")
            agent = archive.build(machine)
            shutil.copyfile(agent, tree / "cache" / "trackbed" / agent.name)
        (tree / "pins.txt").unlink(missing_ok=True)
        new = output.with_name(f"{output.name}.new")
        with tarfile.open(new, "w:gz") as tar:
            for path in sorted(tree.iterdir()):
                tar.add(path, path.name)
        new.replace(output)


def _install(python: str, machine: str, target: Path, pins: Path) -> None:
    pins.write_text(_pins())
    abi = python.replace(".", "")
    command = [
        sys.executable, "-m", "pip", "install", f"--target={target}", f"--requirement={pins}", "--require-hashes", "--no-deps",
        "--only-binary=:all:", "--no-compile", "--implementation=cp", f"--python-version={python}", f"--abi=cp{abi}",
        "--abi=abi3", "--abi=none", *(f"--platform={platform}_{machine}" for platform in archive.PLATFORMS),
        "--quiet", "--disable-pip-version-check",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeployError(
            f"pyinfra for {python}-{machine} cannot be fetched (pip):\n{(done.stderr or done.stdout).strip()}"
        )


def _pins() -> str:
    """The pins of pyinfra and what it needs; which these are, this host's installation says."""
    wanted: set[str] = set()
    left = [canonicalize_name(name) for name in NEEDED]
    while left:
        name = left.pop()
        if name not in wanted:
            wanted.add(name)
            needs = (Requirement(line) for line in metadata.requires(name) or [])
            left += [canonicalize_name(r.name) for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    lines = PINS.read_text().replace("\\\n", " ").splitlines()
    kept = (line for line in lines if line[:1].isalnum() and canonicalize_name(line.split("==")[0].strip()) in wanted)
    return "\n".join(kept) + "\n"


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--for", "targets", multiple=True, required=True, type=click.Choice(TARGETS), help="Nodes' Python and machine."
)
def main(output: Path, targets: tuple[str, ...]) -> None:
    """Write the archive of pull mode to OUTPUT; sign it with `gpg --detach-sign OUTPUT`."""
    try:
        build(output, targets)
    except (DeployError, OSError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
