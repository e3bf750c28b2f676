"""NVIDIA's container runtime: the toolkit from its repository, the engines that use it, and its CDI specifications.

Repository, key and packages are as in the toolkit's installation guide; the units that keep CDI specifications fresh came with
1.18. What it does to the engines, and what of that was run: tasks/engine_configuration.py. From vendor documents:
the installation from NVIDIA's repository, and GPUs, were not run.
"""

from __future__ import annotations

from attrs import Attribute, field, frozen
from attrs.validators import optional
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import engine_configuration, packages
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.engine_configuration import Engine
from tasks.packages import Family, vendor_repository
from tasks.packages.vendor_repository import PACKAGE_VERSION, Package, Repository

PACKAGE = "nvidia-container-toolkit"
# Their versions go together: the guide pins all four.
PACKAGES = (PACKAGE, f"{PACKAGE}-base", "libnvidia-container-tools", "libnvidia-container1")
REFRESH = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")

_HOME = "https://nvidia.github.io/libnvidia-container"
_KEY = f"{_HOME}/gpgkey"
_FINGERPRINT = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
# apt and dnf fill in the machine's type. NVIDIA's own .repo file has gpgcheck=0 and repo_gpgcheck=1.
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
    """Which engines get NVIDIA's runtime, and from where.

    ``version`` as the package manager prints it; ``repository`` in the place of NVIDIA's own.
    """

    engines: tuple[Engine, ...] = field(validator=_some)
    set_as_default: bool = True
    cdi: bool = False
    version: str | None = field(default=None, validator=optional(PACKAGE_VERSION))
    repository: Repository | None = None


CONTAINER_RUNTIME = Key[ContainerRuntime | None]("container_runtime", None, record(ContainerRuntime))
KEYS = (CONTAINER_RUNTIME,)


@deploy("Container runtime")
def configure() -> None:
    """Install the toolkit, and give the runtime to the engines; without the key, nothing."""
    wanted = CONTAINER_RUNTIME.here()
    if wanted is None:
        return
    family = packages.system().family
    vendor_repository.add(PACKAGE, wanted.repository or REPOSITORIES[family], family)
    names = PACKAGES if wanted.version else PACKAGES[:1]
    vendor_repository.packages(
        name="Packages", wanted=tuple(Package(name, wanted.version) for name in names), family=family
    )
    for engine in host.loop(wanted.engines):  # type: ignore[no-untyped-call]
        engine_configuration.configure(
            name=f"NVIDIA's runtime in {engine}", engine=engine, set_as_default=wanted.set_as_default, cdi=wanted.cdi
        )
    if wanted.cdi:
        refresh(name="CDI specifications are kept fresh")


_UNITS = """
for unit; do systemctl show --property=LoadState,UnitFileState,ActiveState "$unit" | sort | tr '\\n' ' '; echo; done
"""


class RefreshUnits(FactBase[list[str]]):
    """The state of the toolkit's units that write CDI specifications: one line a unit."""

    default = list

    def command(self) -> StringCommand:
        """Ask systemd."""
        return script(_UNITS, *REFRESH)

    def process(self, output: list[str]) -> list[str]:
        """As they are."""
        return output


@operation()
def refresh() -> Commands:
    """Enable the units: one waits for changes of driver and toolkit, the other writes the specification, then and at boot."""
    path, service = [*host.get_fact(RefreshUnits), "", ""][:2]
    if "LoadState=not-found" in path:
        yield refuse(
            f"container_runtime: there is no {REFRESH[0]}, which came with {PACKAGE} 1.18; install a later one"
        )
    elif "UnitFileState=enabled" in path and "ActiveState=active" in path and "UnitFileState=enabled" in service:
        host.noop("CDI specifications are kept fresh")
    else:
        yield StringCommand("systemctl", "enable", "--now", *REFRESH)
