"""Installs OFED, the RDMA drivers and libraries, from one of three sources.

inbox      the distribution's packages
doca       NVIDIA's DOCA repository; DKMS builds the modules (tasks/drivers/ofed/doca.py)
mlnx_ofed  NVIDIA's MLNX_OFED bundle, which has its own installer (tasks/drivers/ofed/mlnx_ofed.py)

The latter two are written from vendor documents and were not run on NVIDIA's hardware. The lab uses stand-ins: packages of
the same names and structure.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import asdict, frozen
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.server import Arch

from tasks import packages
from tasks.common.commands import Commands, refuse
from tasks.common.data import Key, record
from tasks.common.facts import Yes
from tasks.common.failures import NodeError
from tasks.drivers.ofed import doca, mlnx_ofed, modules
from tasks.drivers.ofed.doca import Doca
from tasks.drivers.ofed.mlnx_ofed import MlnxOfed
from tasks.host import kernel
from tasks.packages import Family, OperatingSystem, dkms

TASK = "ofed"


@frozen
class Inbox:
    """The distribution's rdma-core and kernel modules."""


@frozen
class Ofed:
    """The source: exactly one field is given."""

    inbox: Inbox | None = None
    doca: Doca | None = None
    mlnx_ofed: MlnxOfed | None = None

    def __attrs_post_init__(self) -> None:
        sources = asdict(self, recurse=False)
        names = [name for name, value in sources.items() if value is not None]
        if len(names) != 1:
            raise ValueError(f"it has {' and '.join(names) or 'no source'}; give exactly one of {', '.join(sources)}")


OFED = Key[Ofed | None]("ofed", None, record(Ofed))

# The supported releases by ID in os-release, from the tables "General Support" of DOCA 3 and MLNX_OFED 24.10. Ubuntu's are full
# releases, the others major releases.
Releases = Mapping[str, tuple[str, ...]]
_RHEL = ("rhel", "centos", "rocky", "almalinux", "ol")
DOCA_ON: Releases = {
    "ubuntu": ("22.04", "24.04", "26.04"),
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
    "debian": ("rdma-core", "ibverbs-providers", "ibverbs-utils", *packages.RDMA_TOOLS["debian"]),
    "rhel": ("rdma-core", "libibverbs", "libibverbs-utils", *packages.RDMA_TOOLS["rhel"]),
}
SMALL_KERNELS = ("ubuntu", *_RHEL)
"""Distributions that have the RDMA modules in a separate package, which a minimal installation lacks."""


@deploy("OFED")
def install() -> None:
    """Install OFED as the inventory says; without the key, do nothing.

    :raises NodeError: the source does not support the distribution or release, or the bundle is not the given one.
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
        mlnx_ofed.bundle(name="MLNX_OFED", wanted=wanted.mlnx_ofed, family=system.family)
    else:
        inbox(name="Inbox", family=system.family, separate_modules=system.identity in SMALL_KERNELS)
        return
    modules.build(name="Modules for the running kernel")
    modules.load_installed(name="Loaded modules", task=TASK)


def _supported(source: str, table: Releases, system: OperatingSystem) -> None:
    mine = system.version if system.identity == "ubuntu" else str(system.major)
    if mine not in table.get(system.identity, ()):
        names = (f"{packages.DISTRIBUTIONS[known].name} {', '.join(releases)}" for known, releases in table.items())
        raise NodeError(
            f"{host.name}.ofed: {source} does not support {system}; it supports {'; '.join(names)}. "
            "Use the source inbox, or another distribution"
        )


def _modules_package(release: str, family: Family) -> str:
    if family == "debian":
        return f"linux-modules-extra-{release}"
    name, version = kernel.rpm(release)
    return f"{name}-modules-{version}"


class RdmaModules(Yes):
    """Whether the running kernel has the RDMA subsystem's modules: ib_uverbs, which every user of RDMA needs."""

    shell = "modinfo -n ib_uverbs 2>/dev/null || true"


@operation()
def inbox(family: Family, separate_modules: bool) -> Commands:
    """Install the distribution's packages that are missing. Fail if a vendor's OFED has replaced them.

    :param separate_modules: the distribution has the RDMA modules in a separate package.
    """
    stack = host.get_fact(modules.OfedStack)
    if stack.built:
        yield refuse(
            f"ofed: the source is inbox, but a vendor's OFED is installed ({stack.built} modules for {stack.kernel}); "
            "remove it (`/usr/sbin/ofed_uninstall.sh --force`) and reboot, or give its source"
        )
        return
    have = packages.installed(family)
    wanted = list(INBOX[family])
    if kernel.pending_release() is None and not host.get_fact(RdmaModules):
        running = host.get_fact(dkms.RunningKernel)
        if not separate_modules:
            yield refuse(
                f"ofed: the kernel {running} has no RDMA modules; install the distribution's full kernel "
                "(on Debian linux-image-amd64, not the cloud kernel) and reboot"
            )
            return
        wanted.append(_modules_package(running, family))
    yield from packages.install_missing(wanted, have, family)
