"""The agent's archive, built on the control host: the agent, and the libraries it needs on a node."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

from packaging.requirements import Requirement
from pyinfra.api.exceptions import DeployError

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements" / "node.txt"

PYTHON = "3.10"
"""The oldest that a node may have; the wheels are pure Python or abi3, so they serve every later one."""

# RHEL 8 has glibc 2.28.
PLATFORMS = ("manylinux2014", "manylinux_2_28")
MACHINES = ("x86_64", "aarch64")

MAIN = """\
from agent.__main__ import main

main()
"""

_building = Lock()


@cache
def version(machine: str) -> str:
    """What the archive for a machine (`uname -m`) is called: the project's version and a hash of what goes in.

    The wheels are pinned by hash, so their pins stand for them: knowing the version takes no build and no network.

    :raises DeployError: there is no agent for such a machine.
    """
    if machine not in MACHINES:
        raise DeployError(f"no agent for a machine of type {machine!r}; there is one for {', '.join(MACHINES)}")
    digest = hashlib.sha256()
    # The pins of two machines may be the same, and stand for other wheels.
    recipe = "\n".join([machine, PYTHON, *PLATFORMS, MAIN, _pins(machine)])
    contents = {"": recipe.encode(), **{str(path.relative_to(ROOT)): path.read_bytes() for path in _sources()}}
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{_project_version()}-{digest.hexdigest()[:12]}"


def build(machine: str) -> Path:
    """The archive's path, after building it if the cache does not have it.

    :raises DeployError: with pip's message.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trackbed"
    archive = folder / f"agent-{version(machine)}.tar.gz"
    # One build for all hosts of this deploy; another deploy may build too, and the last rename wins.
    with _building:
        if not archive.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as made:
                _build(machine, Path(made)).replace(archive)
    return archive


def _build(machine: str, work: Path) -> Path:
    content = work / "content"
    _install_wheels(machine, work, content)
    for path in _sources():
        copy = content / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (content / "__main__.py").write_text(MAIN)
    (content / "VERSION").write_text(version(machine) + "\n")
    archive = work / "archive.tar.gz"
    # No name and no time in gzip's header, no owner and no time in tar's: the same content makes the same bytes.
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(content.rglob("*")):
            tar.add(path, str(path.relative_to(content)), recursive=False, filter=_anonymous)
    return archive


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def _install_wheels(machine: str, work: Path, target: Path) -> None:
    pins = work / "node.txt"
    pins.write_text(_pins(machine))
    platforms = [f"--platform={platform}_{machine}" for platform in PLATFORMS]
    command = [
        sys.executable, "-m", "pip", "install", f"--target={target}", f"--requirement={pins}", "--require-hashes",
        "--no-deps", "--only-binary=:all:", "--no-compile", "--implementation=cp", f"--python-version={PYTHON}",
        "--abi=abi3", "--abi=none", *platforms, "--quiet", "--disable-pip-version-check",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeployError(
            f"the agent's libraries for {machine} cannot be fetched (pip, with this machine's own configuration):\n"
            f"{(done.stderr or done.stdout).strip()}"
        )
    # Scripts that name the control host's interpreter.
    shutil.rmtree(target / "bin", ignore_errors=True)


def _pins(machine: str) -> str:
    """The pins for a node.

    pip would judge their markers by the Python it runs on, whatever --python-version says.
    """
    node = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{PYTHON}.0",
        "python_version": PYTHON,
        "sys_platform": "linux",
    }
    kept = []
    for line in REQUIREMENTS.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        wanted, *hashes = line.split("--hash=")
        requirement = Requirement(wanted)
        if requirement.marker is None or requirement.marker.evaluate(node):
            kept.append(
                " ".join([f"{requirement.name}{requirement.specifier}", *(f"--hash={h.strip()}" for h in hashes)])
            )
    return "\n".join(kept) + "\n"


def _sources() -> list[Path]:
    found = (ROOT / "agent").rglob("*")
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def _project_version() -> str:
    found = re.search(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise DeployError('pyproject.toml has no line like: version = "0.1.0"')
    return found[1]
