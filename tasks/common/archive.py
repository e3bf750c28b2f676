"""Builds the agent's archive on the control host: the agent and the Python libraries it needs on a node."""

from __future__ import annotations

import gzip
import hashlib
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

from agent.runtime import version as project_version
from fleet.paths import cache as cache_folder
from tasks.common.failures import NodeError

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements" / "node.txt"

PYTHON = "3.10"
"""The oldest Python that the agent runs on. The wheels are pure Python or abi3, so they work with later ones, too."""

# RHEL 8 has glibc 2.28.
PLATFORMS = ("manylinux2014", "manylinux_2_28")
MACHINES = ("x86_64", "aarch64")

LEFT_OUT = ("bin", "*.dist-info/RECORD")
"""Installed files that are left out: scripts begin with the path of this host's interpreter, and RECORD has their checksums."""

MAIN = """\
from cli.__main__ import main

main()
"""

_building = Lock()


@cache
def version(machine: str) -> str:
    """The name of the archive for a machine (`uname -m`): the project's version and a hash of the archive's content.

    The hash covers the wheels by their pins, which have hashes themselves, so it needs neither a build nor the network.

    :raises NodeError: the agent does not support the machine.
    """
    if machine not in MACHINES:
        raise NodeError(f"the agent does not support the machine type {machine!r}; it supports {', '.join(MACHINES)}")
    digest = hashlib.sha256()
    # The machine is part of it: the same pins mean different wheels on another machine.
    recipe = "\n".join([machine, PYTHON, *PLATFORMS, *LEFT_OUT, MAIN, pins(REQUIREMENTS, machine)])
    contents = {"": recipe.encode(), **{str(path.relative_to(ROOT)): path.read_bytes() for path in _sources()}}
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{project_version()}-{digest.hexdigest()[:12]}"


def build(machine: str) -> Path:
    """Build the archive unless it is in the cache, and return its path.

    :raises DeployError: pip failed, with its message; or the cache cannot be written.
    """
    folder = cache_folder()
    archive = folder / f"agent-{version(machine)}.tar.gz"
    # The lock makes all hosts of this deploy share one build. Another deploy may build at the same time: the last rename wins.
    with _building:
        try:
            if not archive.exists():
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as work:
                    _build(machine, Path(work)).replace(archive)
        except OSError as error:
            raise DeployError(
                f"the agent's archive cannot be built in {folder}: {error.strerror}; make it writable and make room, "
                "or give another folder in XDG_CACHE_HOME"
            ) from None
    return archive


def _build(machine: str, work: Path) -> Path:
    content = work / "content"
    _install_agent_libraries(machine, work, content)
    for path in _sources():
        copy = content / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (content / "__main__.py").write_text(MAIN)
    (content / "VERSION").write_text(version(machine) + "\n")
    archive = work / "archive.tar.gz"
    pack(content, archive)
    return archive


def pack(folder: Path, file: Path) -> None:
    """Pack a folder. The headers get no names, times or owners, so the same content always makes the same bytes."""
    with (
        file.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def _install_agent_libraries(machine: str, work: Path, target: Path) -> None:
    pinned = work / "node.txt"
    pinned.write_text(pins(REQUIREMENTS, machine))
    install_wheels(f"the agent's libraries for {machine}", pinned, target, machine, PYTHON, ("abi3", "none"))


def install_wheels(what: str, pins: Path, target: Path, machine: str, python: str, abis: tuple[str, ...]) -> None:
    """Install pinned wheels for another machine and Python into a folder.

    :param what: what is installed, for the error message.
    :param abis: the wheels' ABI tags that are accepted, as ``abi3``.
    :raises DeployError: pip failed; with its message.
    """
    command = [
        sys.executable, "-m", "pip", "install", f"--target={target}", f"--requirement={pins}", "--require-hashes",
        "--no-deps", "--only-binary=:all:", "--no-compile", "--implementation=cp", f"--python-version={python}",
        *(f"--abi={abi}" for abi in abis), *(f"--platform={platform}_{machine}" for platform in PLATFORMS),
        "--quiet", "--disable-pip-version-check",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeployError(
            f"{what} cannot be fetched (pip, with the configuration of this control host):\n"
            f"{(done.stderr or done.stdout).strip()}"
        )
    for path in [path for pattern in LEFT_OUT for path in target.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def pins(lock: Path, machine: str, python: str = PYTHON) -> str:
    """Those pins of a lock file that apply on a node with this machine and Python.

    pip evaluates markers for the Python it runs on, even with --python-version. So they are evaluated here.
    """
    node = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    kept = []
    for line in lock.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        text, *hashes = line.split("--hash=")
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(node):
            kept.append(
                " ".join([f"{requirement.name}{requirement.specifier}", *(f"--hash={h.strip()}" for h in hashes)])
            )
    return "\n".join(kept) + "\n"


def _sources() -> list[Path]:
    paths = (path for folder in ("agent", "cli") for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)
