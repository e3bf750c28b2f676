"""OFED: the RDMA drivers and libraries, from one of three sources.

inbox      the distribution's own
doca       NVIDIA's repository of DOCA: packages whose modules DKMS builds (tasks/ofed/doca.py)
mlnx_ofed  a bundle of NVIDIA's with its own installer (tasks/ofed/mlnx_ofed.py)

The vendor's are from its documents: not run on its hardware. In the lab, packages of the same shapes and names stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import asdict, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.server import Arch

from tasks import kernel, packages
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.ofed import doca, mlnx_ofed, modules
from tasks.ofed.doca import Doca
from tasks.ofed.mlnx_ofed import MlnxOfed
from tasks.packages import Family, System, dkms

TASK = "ofed"


@frozen
class Inbox:
    """The distribution's rdma-core, and its kernel's modules."""


@frozen
class Ofed:
    """The source: exactly one of the fields."""

    inbox: Inbox | None = None
    doca: Doca | None = None
    mlnx_ofed: MlnxOfed | None = None

    def __attrs_post_init__(self) -> None:
        sources = asdict(self, recurse=False)
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"given: {' and '.join(given) or 'no source'}; give exactly one of {', '.join(sources)}")


OFED = Key[Ofed | None]("ofed", None, record(Ofed))
KEYS = (OFED,)

# By ID in os-release, what the vendor's documents name ("General Support" of DOCA 3 and of MLNX_OFED 24.10): Ubuntu's full
# releases, the major ones of all others.
Releases = Mapping[str, tuple[str, ...]]
_RHEL = ("rhel", "centos", "rocky", "almalinux", "ol")
DOCA_ON: Releases = {
    "ubuntu": ("22.04", "24.04"),
    "debian": ("12", "13"),
    **dict.fromkeys(_RHEL, ("8", "9", "10")),
    "anolis": ("8",),
    "alinux": ("3",),
}
MLNX_OFED_ON: Releases = {
    "ubuntu": ("22.04", "24.04"),
    "debian": ("12",),
    **dict.fromkeys(_RHEL, ("8", "9")),
    "anolis": ("8",),
    "alinux": ("3",),
}

INBOX: dict[Family, tuple[str, ...]] = {
    "debian": ("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "infiniband-diags", "perftest"),
    "rhel": ("rdma-core", "libibverbs", "libibverbs-utils", "librdmacm-utils", "infiniband-diags", "perftest"),
}
SMALL_KERNELS = ("ubuntu", *_RHEL)
"""Where a package of its own brings the RDMA modules that a small kernel was installed without."""


@deploy("OFED")
def install() -> None:
    """Carry out what the inventory gives; without the key, nothing.

    :raises DeployError: for a distribution or release that the source does not support; for a bundle that is not as said.
    """
    wanted = OFED.here()
    if wanted is None:
        return
    system = packages.system()
    if wanted.doca is not None:
        _supported("doca", DOCA_ON, system)
        doca.install(wanted.doca, system.family, doca.repository(wanted.doca, system, host.get_fact(Arch)))
    elif wanted.mlnx_ofed is not None:
        _supported("mlnx_ofed", MLNX_OFED_ON, system)
        mlnx_ofed.check(wanted.mlnx_ofed, system, host.get_fact(Arch))
        mlnx_ofed.bundle(name="MLNX_OFED", wanted=wanted.mlnx_ofed)
    else:
        inbox(name="Inbox", family=system.family, of_its_own=system.identity in SMALL_KERNELS)
        return
    modules.built(name="Modules for the running kernel")
    modules.in_force(name="Loaded modules", task=TASK)


def _supported(source: str, table: Releases, system: System) -> None:
    mine = system.version if system.identity == "ubuntu" else str(system.major)
    if mine not in table.get(system.identity, ()):
        names = (f"{packages.DISTRIBUTIONS[known].name} {', '.join(releases)}" for known, releases in table.items())
        raise DeployError(
            f"{host.name}.ofed: {source} does not support {system}; it supports {'; '.join(names)}. "
            "Use the source inbox, or another distribution"
        )


def _modules_package(release: str, family: Family) -> str:
    if family == "debian":
        return f"linux-modules-extra-{release}"
    name, version = kernel.rpm(release)
    return f"{name}-modules-{version}"


class RdmaModules(FactBase[bool | None]):
    """Whether the running kernel has the RDMA subsystem's modules; None: unknown."""

    def command(self) -> StringCommand:
        """Ask modinfo for the module that every user of RDMA needs."""
        return script("if modinfo -n ib_uverbs >/dev/null 2>&1; then echo yes; else echo no; fi")

    def process(self, output: list[str]) -> bool:
        """Its only line."""
        return output == ["yes"]


@operation()
def inbox(family: Family, of_its_own: bool) -> Commands:
    """Install what is missing of the distribution's packages; refused where a vendor's OFED is in their place.

    :param of_its_own: the distribution has RDMA modules in a package beside the kernel's.
    """
    stack = host.get_fact(modules.OfedStack)
    if stack is not None and stack.built:
        yield refuse(
            f"ofed: the source is inbox, and a vendor's OFED is installed here ({stack.built} modules for {stack.kernel}); "
            "remove it (`/usr/sbin/ofed_uninstall.sh --force`) and reboot, or give its source"
        )
        return
    have = packages.installed(family)
    wanted = list(INBOX[family])
    if kernel.awaited() is None and host.get_fact(RdmaModules) is False:
        running = host.get_fact(dkms.RunningKernel)
        if not of_its_own:
            yield refuse(
                f"ofed: the kernel {running} has no RDMA modules; install the distribution's full kernel "
                "(on Debian linux-image-amd64, and not the cloud one) and reboot"
            )
            return
        wanted.append(_modules_package(running, family))
    yield from packages.lacking(wanted, have, family)
