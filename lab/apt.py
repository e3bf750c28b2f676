"""Uses the build host's apt: reads its mirrors, and makes temporary configurations that leave /etc/apt alone."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from lab.command import run
from lab.debian import HOST, Debian
from lab.errors import LabError

# Options for reaching a mirror. They are the same on this host and on a node.
CARRIED = (
    "Acquire::http::Proxy",
    "Acquire::https::Proxy",
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
)


@attrs.frozen
class Source:
    """One suite on one mirror."""

    uri: str
    suite: str
    component: str

    def line(self) -> str:
        """A line of sources.list. On every Debian, apt trusts Debian's archive keys."""
        return f"deb {self.uri} {self.suite} {self.component}"


def host_sources() -> tuple[Source, ...]:
    """The entries of this host for its own Debian. apt itself reads them, so .list and deb822 files both count."""
    return _listed() or _listed_after_update()


def sources_of(debian: Debian) -> tuple[Source, ...]:
    """The same mirrors' entries of another Debian, with its backports if its kernel is from there."""
    sources = tuple(attrs.evolve(s, suite=s.suite.replace(HOST.suite, debian.suite)) for s in host_sources())
    return (*sources, backports(sources, debian)) if debian.backports else sources


def backports(sources: tuple[Source, ...], debian: Debian = HOST) -> Source:
    """The source of a Debian's backports, on the mirror that has the suite."""
    return next(attrs.evolve(s, suite=f"{debian.suite}-backports") for s in sources if s.suite == debian.suite)


def preferences(debian: Debian) -> str:
    """The preferences of apt with which a node gets its kernel, the headers, and linux-base from backports."""
    if not debian.backports:
        return ""
    packages = "src:linux src:linux-signed-amd64 src:linux-base"
    return f"Package: {packages}\nPin: release n={debian.suite}-backports\nPin-Priority: 500\n"


def carried_options() -> tuple[str, ...]:
    """Lines of the host's apt.conf without which its mirrors cannot be reached or trusted."""
    dump = run(["apt-config", "dump"]).splitlines()
    return tuple(line for line in dump if line.split(" ", 1)[0] in CARRIED and not line.endswith('"";'))


@attrs.frozen
class Apt:
    """apt with sources and lists of its own, under a temporary folder."""

    folder: Path

    def get(self, *words: str, log: Path | None = None) -> str:
        """Run apt-get."""
        return run(
            ["apt-get", *self.options(), *words], log=log, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        )

    def candidate(self, package: str) -> str:
        """The version that would be installed."""
        match = re.search(r"Candidate: (\S+)", run(["apt-cache", *self.options(), "policy", package]))
        if match is None or match[1] == "(none)":
            raise LabError(f"apt knows no package {package}", "Check the mirrors in /etc/apt.")
        return match[1]

    def depends(self, package: str) -> str:
        """The Depends field of the version that would be installed."""
        show = run(["apt-cache", *self.options(), "show", f"{package}={self.candidate(package)}"])
        return next(line for line in show.splitlines() if line.startswith("Depends:"))

    def lacking(self, package: str) -> list[str]:
        """The package, and those of its dependencies that are not installed on this host."""
        planned = self.get("--simulate", "--no-install-recommends", "install", package)
        return sorted({package, *re.findall(r"^Inst (\S+)", planned, re.MULTILINE)})

    def fetch(self, status: Path, *packages: str) -> list[Path]:
        """Download packages, with their dependencies that a system with this dpkg status lacks. The files end with this apt."""
        as_there = (f"-oDir::State::status={status}", "-oDebug::NoLocking=1", "--no-install-recommends")
        self.get(*as_there, "--download-only", "-y", "-q", "install", *packages)
        return sorted((self.folder / "cache/archives").glob("*.deb"))

    def options(self) -> list[str]:
        """The options that make an apt command use this configuration."""
        return [
            f"-oDir::Etc::SourceList={self.folder}/sources.list",
            "-oDir::Etc::SourceParts=/dev/null",
            f"-oDir::Etc::Preferences={self.folder}/preferences",
            "-oDir::Etc::PreferencesParts=/dev/null",
            f"-oDir::State::Lists={self.folder}/lists",
            f"-oDir::Cache={self.folder}/cache",
            # Download as root: the _apt user may not write to root's folder.
            "-oAPT::Sandbox::User=root",
            # Wait while another apt runs on this host (unattended upgrades).
            "-oDPkg::Lock::Timeout=300",
        ]


def of_nodes(debian: Debian) -> AbstractContextManager[Apt]:
    """An apt as on nodes with this Debian: their mirrors, and their kernel."""
    return throwaway(sources_of(debian), preferences(debian))


@contextmanager
def throwaway(sources: tuple[Source, ...], preferences: str = "") -> Iterator[Apt]:
    """An apt with exactly these sources and preferences, after an update."""
    with TemporaryDirectory(prefix="trackbed-apt-") as name:
        folder = Path(name)
        (folder / "sources.list").write_text("".join(f"{source.line()}\n" for source in sources))
        (folder / "preferences").write_text(preferences)
        (folder / "lists").mkdir()
        (folder / "cache").mkdir()
        apt = Apt(folder)
        apt.get("update", "-q")
        yield apt


def _listed_after_update() -> tuple[Source, ...]:
    # apt lists its targets only if it has their Release files, which container images delete.
    run(["apt-get", "update", "-q"])
    sources = _listed()
    if not any(source.suite == HOST.suite for source in sources):
        raise LabError(
            f"no Debian {HOST.suite} in this host's apt configuration",
            f"The lab runs on a Debian {HOST.version} host: give /etc/apt an entry for {HOST.suite}.",
        )
    return sources


def _listed() -> tuple[Source, ...]:
    listing = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)", "Created-By: Packages"]
    )
    wanted = (HOST.suite, f"{HOST.suite}-updates", f"{HOST.suite}-security")
    rows = [line.split() for line in listing.splitlines()]
    sources = (
        Source(row[0], row[1], row[2]) for row in rows if len(row) == 4 and row[1] in wanted and row[3] == "Debian"
    )
    listed = tuple(dict.fromkeys(sources))
    return listed if any(source.suite == HOST.suite for source in listed) else ()
