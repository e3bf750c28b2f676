"""Installs DOCA-OFED: NVIDIA's drivers and libraries from its repository. DKMS builds the modules on the node.

Written from vendor documents; not run with NVIDIA's own packages. The lab has stand-ins, for apt as for dnf.
"""

from __future__ import annotations

import re
from typing import Literal

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.deb import DebPackages

from agent.spec.validators import Matches
from tasks.common.commands import Commands, refuse
from tasks.common.facts import FactBase, Yes
from tasks.common.failures import NodeError
from tasks.common.texts import HEADER, written
from tasks.drivers.ofed import mlnx_ofed, modules
from tasks.host import kernel
from tasks.packages import Family, OperatingSystem, dkms, installed, vendor_repository
from tasks.packages.vendor_repository import Package, Repository

NVIDIA = "https://linux.mellanox.com/public/repo/doca"
# The URLs of the signing keys; RHEL's is from NVIDIA's guide for DGX.
SIGNED_BY: dict[Family, str] = {
    "debian": f"{NVIDIA}/GPG-KEY-Mellanox.pub",
    "rhel": "https://www.mellanox.com/downloads/ofed/RPM-GPG-KEY-Mellanox-SHA256",
}
REPOSITORY = "doca"
"""The name of the repository's files on a node."""

PREFERENCES = "/etc/apt/preferences.d/trackbed-doca"
LEFTOVERS = (PREFERENCES, *vendor_repository.files_of(REPOSITORY))
RELEASE = re.compile(r"\d+\.\d+\.\d+")
VERSION = re.compile(RELEASE.pattern + r"[a-zA-Z0-9.+:~^_-]*")

CANONICAL = re.compile(r"doca-ofed-userspace-\d.*")
"""Packages of Canonical's DOCA-OFED, for Ubuntu 26.04. NVIDIA's have no version in their names."""

Profile = Literal["doca-ofed", "doca-roce", "doca-host-basic", "doca-networking", "doca-all"]


@frozen
class Doca:
    """A profile of DOCA-Host at one version.

    ``version``: as the package manager prints it; it begins with the repository's release. ``fingerprint``: of the key that
    signs the packages. ``repository`` and ``key``: URLs to use instead of NVIDIA's.
    """

    version: str = field(validator=Matches(VERSION, "give it as the package manager prints it, such as 3.2.1-044501"))
    fingerprint: str
    profile: Profile = "doca-ofed"
    repository: str | None = None
    key: str | None = None

    def __attrs_post_init__(self) -> None:
        # Repository checks the fingerprint and the URLs.
        Repository(self.repository or NVIDIA, self.key or NVIDIA, self.fingerprint)


def repository(wanted: Doca, system: OperatingSystem, arch: str) -> Repository:
    """The given repository, or NVIDIA's.

    :raises NodeError: NVIDIA's folder for this distribution is not known.
    """
    uri = wanted.repository
    if uri is None:
        [number] = RELEASE.findall(wanted.version)[:1]
        uri = f"{NVIDIA}/{number}/{_folder(number, system)}/{'arm64-sbsa' if arch == 'aarch64' else arch}/"
    return Repository(uri, wanted.key or SIGNED_BY[system.family], wanted.fingerprint)


def _folder(number: str, system: OperatingSystem) -> str:
    # Until 3.1 the folders are of minor releases, as debian12.5, which Debian's os-release does not have.
    before = tuple(map(int, number.split(".")[:2])) < (3, 2)
    if system.identity == "ubuntu" or (system.identity == "debian" and not before):
        return f"{system.identity}{system.version}"
    if system.identity in ("rhel", "rocky", "almalinux"):
        return f"rhel{system.version if before else system.major}"
    raise NodeError(
        f"{host.name}.ofed: doca.repository: NVIDIA's folder for {system} is not known; look for it in "
        f"{NVIDIA}/{number}/, and give its URL"
    )


# Libraries whose versions from the distribution do not fit the vendor's drivers. In apt_preferences(5), /mlnx/ is a regular
# expression (a leading * does not work), and a priority above 1000 allows downgrades.
LIBRARIES = (
    *("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "infiniband-diags", "perftest"),
    *("libibverbs1", "librdmacm1", "libibumad3", "libibmad5", "libibnetdisc5"),
)
PREFERRED = f"{HEADER}Package: {' '.join(LIBRARIES)}\nPin: version /mlnx/\nPin-Priority: 1001\n"


def install(wanted: Doca, family: Family, repository: Repository) -> None:
    """Deploy code: add the repository, and install and hold the profile."""
    no_other(name="No other OFED", family=family)
    vendor_repository.configure(REPOSITORY, repository, family)
    if family == "debian":
        written(name="The vendor's rdma-core is preferred", path=PREFERENCES, text=PREFERRED)
    headers(name="Kernel headers")
    profile(name="DOCA-OFED", wanted=Package(wanted.profile, wanted.version), family=family)
    release(name="Packages of the same release", uri=repository.uri, family=family)
    if family == "debian":
        libraries(name="The vendor's rdma-core")


class KernelHeaders(Yes):
    """Whether the running kernel's headers are installed, which DKMS needs."""

    shell = 'if [ -e "/lib/modules/$(uname -r)/build/include" ]; then echo yes; fi'


@operation()
def headers() -> Commands:
    """Fail without the running kernel's headers: the packages would be installed, but no modules built."""
    if kernel.skip_until_booted("the drivers are built"):
        return
    if host.get_fact(KernelHeaders):
        host.noop("the headers of the running kernel are installed")
        return
    running = host.get_fact(dkms.RunningKernel)
    yield refuse(
        f"ofed: the headers of the running kernel {running} are missing, which the drivers' build needs; give the key "
        f"'kernel', which installs them, or boot a newer kernel if the distribution no longer has headers for {running}"
    )


@operation()
def no_other(family: Family) -> Commands:
    """Fail beside MLNX_OFED, whose packages are held, and beside Canonical's DOCA-OFED: the vendors have each removed first.

    From DOCA's manual, and documentation.ubuntu.com/server/how-to/networking/install-doca-ofed.
    """
    have = host.get_fact(mlnx_ofed.InstalledBundle)
    if have.current.startswith("MLNX_OFED_LINUX-"):
        yield refuse(
            f"ofed: the source is doca, but {have.current.rstrip(':')} is installed; drain the node, remove it "
            "(`/usr/sbin/ofed_uninstall.sh --force`), reboot, and deploy again"
        )
    elif others := sorted(filter(CANONICAL.fullmatch, installed(family))):
        yield refuse(
            f"ofed: the source is doca, but Canonical's DOCA-OFED is installed ({', '.join(others)}); drain the node, remove "
            "these packages and what they brought (`apt autoremove`), reboot, and deploy again"
        )


@operation()
def profile(wanted: Package, family: Family) -> Commands:
    """Install the profile at its version and hold it, once the wanted kernel runs."""
    if kernel.skip_until_booted(f"{wanted.name} is installed"):
        return
    module = modules.NAMES[0 if family == "debian" else 1]
    yield from vendor_repository.packages._inner(wanted=(wanted,), family=family, module=module)


# The repository has one release. A package is left over from a newer release if no repository has its version any more, and
# this one has an older version. madison lists no versions that are only installed.
_LEFT_BEHIND: dict[Family, str] = {
    "debian": """
left_behind() {  # argument: the repository's URI
  dpkg-query --show --showformat '${db:Status-Status} ${Package} ${Version}\\n' | sort -u >"$work/installed"
  apt-get indextargets --format '$(FILENAME)' 'Created-By: Packages' "Repo-URI: ${1%/}/" | while read -r index; do
    /usr/lib/apt/apt-helper cat-file "$index"
  done | awk '
    NR == FNR { if ($1 == "installed") have[$2] = $3; next }
    $1 == "Package:" { name = $2 }
    $1 == "Version:" && name in have && have[name] != $2 { print name, $2, have[name] }' "$work/installed" - |
    sort -V | while read -r name version have; do
      dpkg --compare-versions "$have" gt "$version" || continue
      apt-cache madison -- "$name" | grep -qF " $have |" || echo "$name $version"
    done | awk '{ newest[$1] = $2 } END { for (name in newest) print name "=" newest[name] }' | sort
}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
left_behind "$1"
""",
    # From the indexes that the node has: without them, nothing came from the repository.
    "rhel": """
packages() {  # arguments: a word for each line, and options
  word=$1; shift
  dnf -q -C repoquery --queryformat "$word %{name} %{epoch}:%{version}-%{release}\\n" "$@" 2>/dev/null || true
}
{
  packages there --available
  packages newer --repo "$2" --upgrades
  rpm --query --all --queryformat 'have %{NAME} %{EPOCHNUM}:%{VERSION}-%{RELEASE}\\n'
  packages ours --repo "$2" --latest-limit=1
} | awk '
  $1 == "there" { there[$2, $3] }
  $1 == "newer" { newer[$2] }
  $1 == "have" && !(($2, $3) in there) && !($2 in newer) { left[$2] }
  $1 == "ours" && $2 in left { sub(/^[0-9]+:/, "", $3); print $2 "=" $3 }' | sort -u
""",
}


class LeftBehind(FactBase[list[Package]]):
    """The packages that a newer release has left on the node, with the version of the repository."""

    default = list

    def command(self, uri: str, family: Family) -> StringCommand:
        """Compare the installed packages with the repository's index, as far as the node has it."""
        return self.script(_LEFT_BEHIND[family], uri, f"trackbed-{REPOSITORY}")

    def process(self, output: list[str]) -> list[Package]:
        """Parse lines of NAME=VERSION."""
        return [Package(name, version) for name, version in (line.split("=", 1) for line in output)]


@operation()
def release(uri: str, family: Family) -> Commands:
    """Downgrade the packages that a newer release has left behind to the repository's version.

    The packages of a release require a version of each other or any later one. So if the profile goes back, apt and dnf
    themselves leave the drivers as they are.
    """
    if kernel.skip_until_booted("the packages are those of one release"):
        return
    left = host.get_fact(LeftBehind, uri=uri, family=family)
    if not left:
        host.noop("all packages are of the same release")
        return
    yield from vendor_repository.install(family, tuple(left), module=modules.NAMES[0 if family == "debian" else 1])


@operation()
def libraries() -> Commands:
    """Install the vendor's rdma-core again if the distribution's has replaced it."""
    if kernel.skip_until_booted("rdma-core is the vendor's"):
        return
    others = [
        name for name, versions in host.get_fact(DebPackages).items() if name in LIBRARIES and not _vendor(versions)
    ]
    if "rdma-core" not in others:
        host.noop("rdma-core is the vendor's")
        return
    yield from vendor_repository.install("debian", tuple(map(Package, others)))
    if not _vendor(host.get_fact(DebPackages).get("rdma-core", ())):
        yield refuse(
            "ofed: rdma-core is still the distribution's, which does not fit the vendor's drivers; the vendor's repository "
            f"must have an rdma-core that {PREFERENCES} prefers: `apt-cache policy rdma-core` lists the versions"
        )


def _vendor(versions: object) -> bool:
    """Whether a package's versions are NVIDIA's, such as 2510mlnx58-1.2510067."""
    return "mlnx" in str(versions)
