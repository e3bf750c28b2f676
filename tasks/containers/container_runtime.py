"""Installs NVIDIA's container toolkit, configures container engines for its runtime, and keeps CDI specifications up to date.

Repository, key and packages are those of the toolkit's installation guide. `nvidia-ctk runtime configure` writes an engine's
files, after a dry run: the same command against the node's real files, in a mount namespace where /etc is an overlay. The
node is not changed, and the engine itself can print the configuration that would result. (The output of nvidia-ctk's own
--dry-run is two files in one stream, which no engine reads.) Three configurations are compared, key by key: the present one,
the one of the operator's files alone, and the one that nvidia-ctk makes. Only names of keys leave the node, since such files
hold passwords.

Before 2.1, containerd takes a plugin's section from the last file that has it (seen with 1.6.20). nvidia-ctk's drop-in
therefore hides what other files say in that section. If that loses a key of the operator's, the drop-in is made from
`containerd config dump` (--config-source=command), which has all keys. What runc has and nvidia's entry lacks is added to the
drop-in. nvidia-ctk also replaces the whole entry `nvidia`: dockerd's `runtimeArgs` in it would be lost.

Tested: the dry run; on a node of the lab with nvidia-ctk 1.20.1 the reload of dockerd 20.10.24, the restart of containerd
1.6.20, the roll-back, CDI by containerd 2, and CRI-O 1.34.0; on a node with dnf the installation; with one H100 the files for
containerd 2, and containers that get the GPU. Not run: NVIDIA's own repository.
"""

from __future__ import annotations

from functools import partial

from attrs import Attribute, field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import packages, reboot
from tasks.common import units
from tasks.common.commands import Commands, refuse
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.containers import engine_files
from tasks.containers.engine_files import DryRun, Engine, Mode
from tasks.packages import Family, vendor_repository
from tasks.packages.vendor_repository import PACKAGE_VERSION, Package, Repository

SCRIPT = engine_files.with_shared("engine-configuration.sh")

PACKAGE = "nvidia-container-toolkit"
# The guide pins all four to one version.
PACKAGES = (PACKAGE, f"{PACKAGE}-base", "libnvidia-container-tools", "libnvidia-container1")
LEFTOVERS = vendor_repository.files_of(PACKAGE)
REFRESH = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")

_HOME = "https://nvidia.github.io/libnvidia-container"
_KEY = f"{_HOME}/gpgkey"
_FINGERPRINT = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
# apt and dnf replace $(ARCH) and $basearch. repo_gpgcheck as in NVIDIA's own .repo file.
REPOSITORIES: dict[Family, Repository] = {
    "debian": Repository(f"{_HOME}/stable/deb/$(ARCH)", _KEY, _FINGERPRINT, suite="/"),
    "rhel": Repository(f"{_HOME}/stable/rpm/$basearch", _KEY, _FINGERPRINT, repo_gpgcheck=True),
}


def _some(_: ContainerRuntime, attribute: Attribute[tuple[Engine, ...]], value: tuple[Engine, ...]) -> None:
    if not value or len(set(value)) != len(value):
        raise ValueError(
            f"{attribute.name}: {list(value)} is not valid; name each of the node's container engines once"
        )


@frozen
class ContainerRuntime:
    """Which engines get NVIDIA's runtime, and where the toolkit comes from.

    ``version``: as the package manager prints it. ``repository``: used instead of NVIDIA's.
    """

    engines: tuple[Engine, ...] = field(validator=_some)
    set_as_default: bool = True
    cdi: bool = False
    version: str | None = field(default=None, validator=PACKAGE_VERSION)
    repository: Repository | None = None


CONTAINER_RUNTIME = Key[ContainerRuntime | None]("container_runtime", None, record(ContainerRuntime))


@deploy("Container runtime")
def configure() -> None:
    """Install the toolkit and configure the engines; without the key, do nothing."""
    wanted = CONTAINER_RUNTIME.here()
    if wanted is None:
        return
    family = packages.system().family
    vendor_repository.configure(PACKAGE, wanted.repository or REPOSITORIES[family], family)
    names = PACKAGES if wanted.version else PACKAGES[:1]
    vendor_repository.packages(
        name="Packages", wanted=tuple(Package(name, wanted.version) for name in names), family=family
    )
    for engine in host.loop(wanted.engines):  # type: ignore[no-untyped-call]
        configure_engine(
            name=f"NVIDIA's runtime in {engine}", engine=engine, set_as_default=wanted.set_as_default, cdi=wanted.cdi
        )
    if wanted.cdi:
        enable_cdi_refresh(name="CDI specifications kept up to date")


@operation()
def enable_cdi_refresh() -> Commands:
    """Enable the units. The path unit watches driver and toolkit; the service writes the specification, then and at boot."""
    # Without the driver the service fails.
    if host.state.is_executing and reboot.awaited_by("gpu_driver"):
        host.noop("the units are enabled once the GPU driver is loaded")
        return
    for unit in REFRESH:
        yield from units.enable(
            unit,
            missing=f"container_runtime: the node has no {unit}, which needs {PACKAGE} 1.18 or later; install that",
            failed=f"container_runtime: {unit} does not start; its journal is above",
        )


def _command(mode: Mode, engine: Engine, set_as_default: bool, cdi: bool) -> StringCommand:
    words = ("yes" if wanted else "no" for wanted in (set_as_default, cdi))
    return engine_files.command(SCRIPT, mode, engine, *words)


class EngineDryRun(FactBase[DryRun | None]):
    """What nvidia-ctk would do to an engine's files; None: it is not installed yet."""

    def command(self, engine: Engine, set_as_default: bool, cdi: bool) -> StringCommand:
        """Run only the dry run."""
        return _command("dry-run", engine, set_as_default, cdi)

    def process(self, output: list[str]) -> DryRun | None:
        """Parse the script's lines."""
        return engine_files.parse(output)


@operation()
def configure_engine(engine: Engine, set_as_default: bool, cdi: bool) -> Commands:
    """Let nvidia-ctk write the engine's files, and make the engine load them. Fail if that would lose the operator's settings.

    containerd and CRI-O are restarted, and containers keep running. dockerd reloads its file, and is restarted only for CDI. If
    the engine does not accept the files, the former ones are restored.
    """
    dry_run = host.get_fact(EngineDryRun, engine=engine, set_as_default=set_as_default, cdi=cdi)
    if dry_run is None:
        yield refuse(
            f"container_runtime: {engine} cannot be configured: the node has no nvidia-ctk or no jq; deploy again"
        )
    else:
        apply, done = _command("apply", engine, set_as_default, cdi), f"{engine} has NVIDIA's runtime"
        restarts = None if engine == "docker" and not cdi else engine
        lost = partial(_would_lose, engine)
        yield from engine_files.configure(CONTAINER_RUNTIME.name, restarts, dry_run, lost, apply, done)


def _would_lose(engine: Engine, settings: str) -> str:
    return (
        f"{engine}: nvidia-ctk would change or remove your settings {settings}; remove "
        "them from the entry nvidia or from the file that sets them (the runtime has settings of its own in "
        f"/etc/nvidia-container-runtime/config.toml), or remove {engine} from engines"
    )
