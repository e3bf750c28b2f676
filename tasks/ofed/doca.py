"""DOCA-OFED: NVIDIA's drivers and libraries as packages of its repository, which DKMS builds on the node.

From vendor documents: the RHEL half is asserted by its commands, and none was run with NVIDIA's own packages.
"""

from __future__ import annotations

import re
from io import StringIO
from typing import Literal

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.deb import DebPackages
from pyinfra.operations import files

from agent.spec.validators import Matches
from tasks import kernel, packages
from tasks.common.commands import Commands, refuse, script
from tasks.ofed import modules
from tasks.packages import Family, System, dkms, vendor_repository
from tasks.packages.vendor_repository import HEADER, Package, Repository

NVIDIA = "https://linux.mellanox.com/public/repo/doca"
# What signs the RPMs, by NVIDIA's guide for DGX on RHEL.
SIGNED_BY: dict[Family, str] = {
    "debian": f"{NVIDIA}/GPG-KEY-Mellanox.pub",
    "rhel": "https://www.mellanox.com/downloads/ofed/RPM-GPG-KEY-Mellanox-SHA256",
}
PREFERENCES = "/etc/apt/preferences.d/trackbed-doca"
RELEASE = re.compile(r"\d+\.\d+\.\d+")
VERSION = re.compile(RELEASE.pattern + r"[a-zA-Z0-9.+:~^_-]*")

Profile = Literal["doca-ofed", "doca-roce", "doca-host-basic", "doca-networking", "doca-all"]


@frozen
class Doca:
    """A profile of DOCA-Host at one version, as the package manager prints it; its beginning is the repository's release.

    ``fingerprint`` is that of the key which signs the packages; ``repository`` and ``key`` are URLs in the place of NVIDIA's.
    """

    version: str = field(validator=Matches(VERSION, "give it as the package manager prints it, such as 3.2.1-044501"))
    fingerprint: str
    profile: Profile = "doca-ofed"
    repository: str | None = None
    key: str | None = None

    def __attrs_post_init__(self) -> None:
        # For its checks of the fingerprint and the URLs.
        Repository(self.repository or NVIDIA, self.key or NVIDIA, self.fingerprint)


def repository(wanted: Doca, system: System, arch: str) -> Repository:
    """NVIDIA's, or the one that is given.

    :raises DeployError: where the folder's name for this distribution is not known.
    """
    uri = wanted.repository
    if uri is None:
        [number] = RELEASE.findall(wanted.version)[:1]
        uri = f"{NVIDIA}/{number}/{_folder(number, system)}/{'arm64-sbsa' if arch == 'aarch64' else arch}/"
    return Repository(uri, wanted.key or SIGNED_BY[system.family], wanted.fingerprint)


def _folder(number: str, system: System) -> str:
    # Of minor releases until 3.1, which Debian's os-release does not tell (debian12.5).
    before = tuple(map(int, number.split(".")[:2])) < (3, 2)
    if system.identity == "ubuntu" or (system.identity == "debian" and not before):
        return f"{system.identity}{system.version}"
    if system.identity in ("rhel", "rocky", "almalinux"):
        return f"rhel{system.version if before else system.major}"
    raise DeployError(
        f"{host.name}.ofed: doca.repository: it is not known what NVIDIA calls its folder for {system}; look for it below "
        f"{NVIDIA}/{number}/, and give its URL"
    )


# The distribution's updates of these would not fit the vendor's drivers. apt_preferences(5): a regular expression (a leading
# * is not understood); above 1000, older ones, too.
LIBRARIES = (
    *("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "infiniband-diags", "perftest"),
    *("libibverbs1", "librdmacm1", "libibumad3", "libibmad5", "libibnetdisc5"),
)
PREFERRED = f"{HEADER}Package: {' '.join(LIBRARIES)}\nPin: version /mlnx/\nPin-Priority: 1001\n"


def install(wanted: Doca, family: Family, repository: Repository) -> None:
    """Deploy code: the repository, and the profile, held at its version."""
    vendor_repository.add("doca", repository, family)
    if family == "debian":
        files.put(name="The vendor's rdma-core is preferred", src=StringIO(PREFERRED), dest=PREFERENCES, mode="644")
    headers(name="Kernel headers")
    profile(name="DOCA-OFED", wanted=Package(wanted.profile, wanted.version), family=family)
    if family == "debian":
        libraries(name="The vendor's rdma-core")


class KernelHeaders(FactBase[bool]):
    """Whether DKMS can build for the running kernel: its headers are there."""

    default = bool

    def command(self) -> StringCommand:
        """Where every distribution puts, or links, them."""
        return script('if [ -e "/lib/modules/$(uname -r)/build/include" ]; then echo yes; fi')

    def process(self, output: list[str]) -> bool:
        """Its only line."""
        return output == ["yes"]


@operation()
def headers() -> Commands:
    """Refused without the running kernel's headers: the packages would be installed, and no modules."""
    if kernel.waits("the drivers are built"):
        return
    if host.get_fact(KernelHeaders):
        host.noop("the headers of the running kernel are there")
        return
    running = host.get_fact(dkms.RunningKernel)
    yield refuse(
        f"ofed: the headers of the running kernel {running} are missing, with which the drivers are built: the key 'kernel' "
        f"installs them; if the distribution has none for {running} any more, boot its present kernel"
    )


@operation()
def profile(wanted: Package, family: Family) -> Commands:
    """Install the profile at its version and hold it, once the kernel runs that its modules are for."""
    if kernel.waits(f"{wanted.name} is installed"):
        return
    module = modules.NAMES[0 if family == "debian" else 1]
    yield from vendor_repository.packages._inner(wanted=(wanted,), family=family, module=module)


_LIBRARIES = (
    packages.APT
    + """
apt_update
apt_install --allow-downgrades --allow-change-held-packages install -- "$@"
"""
)


@operation()
def libraries() -> Commands:
    """Put the vendor's rdma-core back where the distribution's has taken its place."""
    if kernel.waits("rdma-core is the vendor's"):
        return
    others = [
        name for name, versions in host.get_fact(DebPackages).items() if name in LIBRARIES and not _vendor(versions)
    ]
    if "rdma-core" not in others:
        host.noop("rdma-core is the vendor's")
        return
    yield script(_LIBRARIES, *others)
    if not _vendor(host.get_fact(DebPackages).get("rdma-core", ())):
        yield refuse(
            "ofed: rdma-core is still the distribution's, which does not fit the vendor's drivers: the vendor's repository "
            f"must offer one, which {PREFERENCES} prefers; `apt-cache policy rdma-core` tells which there are"
        )


def _vendor(versions: object) -> bool:
    """Whether the versions of a package are NVIDIA's, such as 2510mlnx58-1.2510067."""
    return "mlnx" in str(versions)
