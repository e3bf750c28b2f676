"""Installs a container engine, containerd or docker, and sets what Kubernetes needs in containerd's configuration.

The packages are the distribution's (containerd, docker.io) or Docker's (containerd.io, docker-ce). URL, keys and packages of
Docker's repository are from Docker's installation guides (docs.docker.com/engine/install).

Kubernetes needs two settings of containerd (kubernetes.io/docs/setup/production-environment/container-runtimes): the CRI
plugin, which containerd.io disables, and SystemdCgroup for runc, unless the kubelet uses cgroupfs. They are set by lines in
/etc/containerd/config.toml (templates/containerd-for-kubernetes.sh), and read back as containerd reads its files. The file is
edited only if that lacks one. NVIDIA's runtime comes afterwards (tasks/containers/container_runtime.py).

Tested: the edits with containerd 1.6.20, 1.7.28, 2.0.4, 2.2.1 and 2.2.9 without systemd; on a node of the lab, Debian's
containerd, and a containerd.io from signed repositories of the lab, by apt and by dnf. Not run: the installation from Docker's
own repository.
"""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import packages
from tasks.common import units
from tasks.common.commands import Commands, refuse
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.common.failures import NodeError
from tasks.common.texts import Present
from tasks.containers import engine_files
from tasks.containers.engine_files import DryRun, Mode
from tasks.packages import Family, OperatingSystem, vendor_repository
from tasks.packages.vendor_repository import PACKAGE_VERSION, Package, Repository

Name = Literal["containerd", "docker"]
Source = Literal["distribution", "vendor"]

SCRIPT = engine_files.with_shared("containerd-for-kubernetes.sh")
REPOSITORY = "docker"
"""The name of the files of Docker's repository on a node."""

LEFTOVERS = vendor_repository.files_of(REPOSITORY)

_HOME = "https://download.docker.com/linux"
# As the guides print them, for apt and for dnf.
_APT_KEY = "9DC858229FC7DD38854AE2D88D81803C0EBFCD88"
_DNF_KEY = "060A61C51B558A7F742B77AAC52FEB6B621E9F35"
# The repository's name of a distribution, and the suite of its release. The rebuilds of RHEL use CentOS's.
_SUITES = {
    "debian": {"12": "bookworm", "13": "trixie"},
    "ubuntu": {"22.04": "jammy", "24.04": "noble", "26.04": "resolute"},
}
_RPMS = {"rhel": "rhel", "fedora": "fedora", **dict.fromkeys(("centos", "rocky", "almalinux", "ol"), "centos")}

# Debian has the client in a package of its own since release 13.
_DISTRIBUTION: dict[Name, tuple[str, ...]] = {"containerd": ("containerd",), "docker": ("docker.io",)}
_VENDOR: dict[Name, tuple[str, ...]] = {
    "containerd": ("containerd.io",),
    "docker": ("docker-ce", "docker-ce-cli", "containerd.io"),
}
_OTHERS: dict[Source, tuple[str, ...]] = {
    "distribution": ("containerd.io", "docker-ce"),
    "vendor": ("containerd", "docker.io", "moby-engine"),
}
"""The packages of the other source. Installing those of this source would remove them."""

# In the second folder where distributions follow the file hierarchy standard, as the RHEL family.
SNAPS = ("/snap/docker/current", "/var/lib/snapd/snap/docker/current")


@frozen
class ContainerEngine:
    """The engine, and where its packages come from.

    ``version``: of the engine's own package, as the package manager prints it; it is held at that. ``repository``: used instead
    of Docker's.
    """

    name: Name
    source: Source = "distribution"
    version: str | None = field(default=None, validator=PACKAGE_VERSION)
    repository: Repository | None = None

    def __attrs_post_init__(self) -> None:
        if self.repository is not None and self.source != "vendor":
            raise ValueError("repository: it replaces Docker's; give the source 'vendor', or remove it")


CONTAINER_ENGINE = Key[ContainerEngine | None]("container_engine", None, record(ContainerEngine))


@deploy("Container engine")
def install() -> None:
    """Install, enable and configure the engine; without the key, do nothing.

    :raises NodeError: the distribution has no such package, or Docker has no repository for it.
    """
    wanted = CONTAINER_ENGINE.here()
    if wanted is None:
        return
    system = packages.system()
    names = _names(wanted, system)
    no_other(name="No engine of another source", wanted=wanted, family=system.family)
    repository = (wanted.repository or docker_repository(system)) if wanted.source == "vendor" else None
    vendor_repository.configure(REPOSITORY, repository, system.family)
    install_packages(name="Packages", engine=wanted.name, wanted=names, family=system.family)
    units.enabled(
        name=f"{wanted.name} enabled",
        unit=f"{wanted.name}.service",
        missing=f"container_engine: the node has no {wanted.name}.service, which its package brings; install the package again",
        failed=f"container_engine: {wanted.name} does not start; its journal is above",
    )
    if wanted.name == "containerd":
        configure_containerd(name="containerd for Kubernetes")


def docker_repository(system: OperatingSystem) -> Repository:
    """Docker's repository for a node.

    :raises NodeError: Docker has none for this distribution.
    """
    if system.family == "debian" and (suite := _SUITES[system.identity].get(system.version)):
        home = f"{_HOME}/{system.identity}"
        return Repository(home, f"{home}/gpg", _APT_KEY, suite=suite, components=("stable",))
    if name := _RPMS.get(system.identity):
        return Repository(f"{_HOME}/{name}/{system.major}/$basearch/stable", f"{_HOME}/{name}/gpg", _DNF_KEY)
    raise NodeError(
        f"{host.name}.container_engine.source: Docker documents no repository for {system}; give container_engine.repository, "
        "or the source 'distribution'"
    )


def _names(wanted: ContainerEngine, system: OperatingSystem) -> tuple[Package, ...]:
    if wanted.source == "vendor":
        names = _VENDOR[wanted.name]
    elif system.family == "rhel":
        raise NodeError(
            f"{host.name}.container_engine.source: {system} has no package of {wanted.name}; give the source 'vendor'"
        )
    else:
        names = _DISTRIBUTION[wanted.name]
    # containerd.io beside docker-ce has versions of its own.
    versions = [None if name == "containerd.io" and wanted.name == "docker" else wanted.version for name in names]
    client = (Package("docker-cli"),) if names == ("docker.io",) and _separate_client(system) else ()
    return (*map(Package, names, versions), *client)


def _separate_client(system: OperatingSystem) -> bool:
    return system.identity == "debian" and system.major >= 13


@operation()
def no_other(wanted: ContainerEngine, family: Family) -> Commands:
    """Refuse if the node has an engine of the other source: the package manager would remove that, with what it runs."""
    have = packages.installed(family)
    if others := [name for name in _OTHERS[wanted.source] if name in have]:
        yield refuse(
            f"container_engine: the node has {', '.join(others)}, which the packages of the source '{wanted.source}' replace; "
            "drain the node and remove them first, or give the other source"
        )
    elif wanted.name == "docker" and host.get_fact(Present, paths=SNAPS):
        yield refuse(
            "container_engine: the node has docker as a snap, beside which docker of a package would be a second engine with "
            "containers of its own; drain the node and remove it first (snap remove docker)"
        )
    else:
        host.noop("there is none")


class StoppedByRestart(FactBase[str | None]):
    """Why a restart of an engine would stop running containers; None if it would not."""

    prefetched = False

    def command(self, engine: Name) -> StringCommand:
        """Ask systemd or docker."""
        return self.script(engine_files.STOPPED_BY_RESTART, engine)


@operation()
def install_packages(engine: Name, wanted: tuple[Package, ...], family: Family) -> Commands:
    """Install the packages. Refuse another version while that would stop containers: a package restarts its daemon."""
    have = packages.installed(family)
    other = [p.name for p in wanted if p.name in have and p.version and p.version not in have[p.name]]
    if other and (reason := host.get_fact(StoppedByRestart, engine=engine)):
        yield refuse(
            f"container_engine: another version of {', '.join(other)} restarts {engine}, which {reason}, and deploy again"
        )
        return
    if other and engine_files.restart_deferred(engine):
        return
    yield from vendor_repository.packages._inner(wanted=wanted, family=family)


class ContainerdDryRun(FactBase[DryRun | None]):
    """What the script would change in containerd's file; None: containerd is not installed yet."""

    def command(self) -> StringCommand:
        """Run only the dry run."""
        return _script("dry-run")

    def process(self, output: list[str]) -> DryRun | None:
        """Parse the script's lines."""
        return engine_files.parse(output)


def _script(mode: Mode) -> StringCommand:
    return engine_files.command(SCRIPT, mode)


@operation()
def configure_containerd() -> Commands:
    """Set what Kubernetes needs, and restart containerd if its file has changed since it started. Containers keep running.

    If containerd does not accept the file, the former one is restored.
    """
    dry_run = host.get_fact(ContainerdDryRun)
    if dry_run is None:
        if host.state.is_executing:
            yield refuse(
                "container_engine: the node has no containerd, which its package brings; install the package again"
            )
        else:
            yield _script("apply")
    else:
        done = "containerd has what Kubernetes needs"
        yield from engine_files.configure(
            CONTAINER_ENGINE.name, "containerd", dry_run, _would_lose, _script("apply"), done
        )


def _would_lose(settings: str) -> str:
    return (
        f"containerd: your settings {settings} would be lost; set what Kubernetes needs "
        "yourself: SystemdCgroup = true for runc, and no cri in disabled_plugins"
    )
