"""Builds programs written in Go from the Go module proxy, and caches them by a hash of their inputs."""

import json
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

import attrs

from lab import cache, host
from lab.command import run
from lab.errors import LabError
from lab.progress import step

PLACES = ("usr/local/go/bin", "usr/lib/go-1.*/bin")
"""Folders with Go besides PATH: that of Go's own archive, and Debian's."""

DEBIAN_GO = "golang-1.23-go"
"""Of Debian 12's backports; it fetches the newer Go that a program asks for by itself (GOTOOLCHAIN)."""

# Older ones cannot fetch a newer Go by themselves (GOTOOLCHAIN).
OLDEST_GO = (1, 21)
REMEDY = f"Install Go: from https://go.dev/dl into /usr/local/go, or {DEBIAN_GO} of Debian 12's backports."


@attrs.frozen
class Build:
    """Go packages that are built together.

    ``folder`` is a module whose go.mod and go.sum decide all versions: one of ours, or a downloaded one. Without it each
    package is written `path@version`, and is built by its own go.mod, checked against Go's public checksum database.
    ``host_packages``: Debian's packages that its C code (``cgo``) needs.
    """

    name: str
    packages: tuple[str, ...]
    folder: Path | None = None
    ldflags: str = ""
    cgo: bool = False
    tags: str = ""
    host_packages: tuple[str, ...] = ()
    usual_s: float = 30
    memory_mib: int = 512
    disk_mib: int = 1024

    @property
    def target(self) -> Path:
        """The folder with the programs, once they are built."""
        return cache.home() / "go" / f"{self.name}-{self._key()}"

    def program(self, name: str) -> Path:
        """The path of one program."""
        return self.target / name

    def _key(self) -> str:
        digest = sha256(repr((self.packages, self.ldflags, self.cgo, self.tags)).encode())
        if self.folder is not None:
            for file in sorted(path for path in self.folder.iterdir() if path.is_file()):
                digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:12]


def ensure(build: Build) -> Path:
    """The folder with the programs. They are built first if they are not cached."""
    return cache.made(build.target, lambda new: _build(build, new), "Go programs")


def source(module: str, build: Build | None = None) -> Path:
    """The folder with a module's source, for files that come with a program.

    :param module: written `path@version`; with ``build`` only its path, since that build's go.mod has the version.
    """
    of = [] if build is None else ["-C", str(build.folder)]
    return Path(json.loads(run([go(), "mod", "download", *of, "-json", module]))["Dir"])


def compiler() -> str:
    """The command of a C compiler: gcc, or on a host without it the gcc-12 that the lab has installed for kernel modules."""
    return "gcc" if shutil.which("gcc") else "gcc-12"


def go() -> Path:
    """The `go` command of this host; Debian's is installed if there is none.

    :raises LabError: Go is missing and cannot be installed, or is too old; the remedy says what to install.
    """
    program = _find()
    if program is None:
        host.ensure_packages(newer=(DEBIAN_GO,))
        program = _find()
    if program is None:
        raise LabError("this host has no Go", REMEDY)
    version = re.search(r"go(\d+)\.(\d+)", run([program, "version"]))
    if version is None or (int(version[1]), int(version[2])) < OLDEST_GO:
        raise LabError(f"{program} is older than Go {'.'.join(map(str, OLDEST_GO))}", REMEDY)
    return Path(program)


def _find() -> str | None:
    places = (str(folder) for pattern in PLACES for folder in sorted(Path("/").glob(pattern), reverse=True))
    return shutil.which("go", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def _build(build: Build, new: Path) -> None:
    command = go()
    _check_room(build)
    if build.host_packages:
        host.ensure_packages(build.host_packages)
    log = build.target.parent / f"{build.name}.log"
    log.unlink(missing_ok=True)
    # GOTOOLCHAIN: a Go older than a module asks for fetches the right one through the module proxy.
    env = {**os.environ, "GOTOOLCHAIN": "auto", "CGO_ENABLED": str(int(build.cgo)), "GOBIN": str(new)}
    if build.cgo:
        env["CC"] = compiler()
    flags = ["-trimpath", "-buildvcs=false", f"-tags={build.tags}", f"-ldflags=-s -w {build.ldflags}"]
    with step(f"Go: building {build.name}", usual_s=build.usual_s):
        if build.folder is None:
            run([command, "install", *flags, *build.packages], log=log, env=env)
        else:
            run([command, "build", "-C", build.folder, *flags, "-o", f"{new}/", *build.packages], log=log, env=env)


def _check_room(build: Build) -> None:
    free = shutil.disk_usage(cache.home()).free >> 20
    if free < build.disk_mib:
        raise LabError(
            f"building {build.name} takes {build.disk_mib} MiB of disk, and {cache.home()} has {free} left",
            "Make room, or set XDG_CACHE_HOME, GOCACHE and GOMODCACHE to a place that has it.",
        )
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    memory = int(available[1]) >> 10 if available else build.memory_mib
    if memory < build.memory_mib:
        raise LabError(
            f"building {build.name} takes {build.memory_mib} MiB of memory, and {memory} are available",
            "Stop what else runs (`make lab-down`), or build on a larger host and copy the cache.",
        )
