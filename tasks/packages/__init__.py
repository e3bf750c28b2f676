"""Base packages, and a Python that the agent can run on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal
from weakref import WeakKeyDictionary

from attrs import frozen
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.rpm import RpmPackages
from pyinfra.facts.server import LinuxDistribution

from tasks.common.commands import Commands, script

Family = Literal["debian", "rhel"]

BASE: dict[Family, tuple[str, ...]] = {
    "debian": ("python3", "iproute2", "ethtool", "pciutils", "kmod", "rdma-core", "ibverbs-utils", "jq"),
    "rhel": ("python3", "iproute", "ethtool", "pciutils", "kmod", "rdma-core", "libibverbs-utils", "jq"),
}

OTHER_NAMES = {"python3": "python36"}
"""What RHEL 8 calls a package that is known by what it provides."""

RHEL_PYTHON = "python3.11"
"""What RHEL 8 and 9 offer beside their own Python (3.6, 3.9), which is too old."""

INTERPRETERS = ("/usr/bin/python3", f"/usr/bin/{RHEL_PYTHON}")


@frozen
class Distribution:
    """A distribution: its oldest release that can be made to run the agent, and the first whose python3 is 3.10."""

    name: str
    family: Family
    oldest: int
    new_python: int


# By ID in os-release. Alibaba Cloud Linux 3 and Anolis OS 8 are made from RHEL 8's sources.
DISTRIBUTIONS = {
    "debian": Distribution("Debian", "debian", 12, 12),
    "ubuntu": Distribution("Ubuntu", "debian", 22, 22),
    "rhel": Distribution("RHEL", "rhel", 8, 10),
    "centos": Distribution("CentOS", "rhel", 8, 10),
    "rocky": Distribution("Rocky Linux", "rhel", 8, 10),
    "almalinux": Distribution("AlmaLinux", "rhel", 8, 10),
    "ol": Distribution("Oracle Linux", "rhel", 8, 10),
    "anolis": Distribution("Anolis OS", "rhel", 8, 23),
    "alinux": Distribution("Alibaba Cloud Linux", "rhel", 3, 4),
    "fedora": Distribution("Fedora", "rhel", 36, 36),
}

APT = """
apt_update() {
  left=60
  until said=$(LC_ALL=C apt-get -q update 2>&1); do
    left=$((left - 1))
    case $said in *"Could not get lock"*) ;; *) left=0 ;; esac
    if [ "$left" -le 0 ]; then printf '%s\\n' "$said" >&2; return 1; fi
    sleep 5
  done
}
apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confdef \\
    -o Dpkg::Options::=--force-confold --no-install-recommends "$@"
}
"""
"""Two shell functions, that wait five minutes for another apt, as a server's first boot runs one: `apt_update` (apt-get's
DPkg::Lock::Timeout does not count for its lists) and `apt_install OPTIONS install -- PACKAGES`."""

_FIND_PYTHON = """
for python; do
  if "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo "$python"; exit; fi
done
"""


class NodePython(FactBase[str | None]):
    """The path of the interpreter that runs the agent: the first that is 3.10 or newer; None if there is none yet."""

    def command(self) -> StringCommand:
        """One script for all candidates."""
        return script(_FIND_PYTHON, *INTERPRETERS)

    def process(self, output: list[str]) -> str | None:
        """Its only line."""
        return output[0]


@frozen
class System:
    """What runs on a node. ``identity`` and ``version`` are ID and VERSION_ID of os-release: ``ubuntu``, ``22.04``."""

    distribution: Distribution
    identity: str
    version: str

    @property
    def family(self) -> Family:
        """Which package manager it has."""
        return self.distribution.family

    @property
    def major(self) -> int:
        """The first number of its version."""
        return int(self.version.split(".")[0])

    def __str__(self) -> str:
        return f"{self.distribution.name} {self.version}"


_known: WeakKeyDictionary[Host, System] = WeakKeyDictionary()


def system() -> System:
    """The host's, for deploy code: the one thing of a node that no deploy changes, so that it is asked for it once.

    :raises DeployError: for a distribution, or a release, that Trackbed does not know.
    """
    this = host.state.inventory.get_host(host.name)
    if this not in _known:
        _known[this] = _system()
    return _known[this]


def _system() -> System:
    found = host.get_fact(LinuxDistribution)
    identity = found["release_meta"].get("ID", "unknown")
    release = found["major"] or 0
    distribution = DISTRIBUTIONS.get(identity)
    if distribution is None or release < distribution.oldest:
        supported = ", ".join(f"{d.name} {d.oldest}" for d in DISTRIBUTIONS.values())
        raise DeployError(
            f"{host.name}: {found['name'] or identity} {release or ''} is not supported; "
            f"supported, each with its later releases: {supported}"
        )
    return System(distribution, identity, found["release_meta"].get("VERSION_ID") or str(release))


def base() -> None:
    """Install the base packages.

    :raises DeployError: for a distribution, or a release, that Trackbed does not know.
    """
    have = system()
    install(name="Base packages", family=have.family, new_python=have.major >= have.distribution.new_python)


@operation()
def install(family: Family, new_python: bool) -> Commands:
    """Install those of the base packages that are missing; package lists are fetched only then.

    :param new_python: the distribution's python3 is new enough.
    """
    have = installed(family)
    wanted = list(BASE[family])
    too_old = "python3" in have or not new_python
    if family == "rhel" and too_old and host.get_fact(NodePython) is None:
        wanted.append(RHEL_PYTHON)
    yield from lacking(wanted, have, family)


def installed(family: Family) -> Mapping[str, Collection[str]]:
    """For an operation: the packages that the node has, each with its versions."""
    found: Mapping[str, Collection[str]] = host.get_fact(DebPackages if family == "debian" else RpmPackages)
    return found


@operation()
def present(names: tuple[str, ...], family: Family) -> Commands:
    """Install those that are missing."""
    yield from lacking(names, installed(family), family)


def lacking(wanted: Iterable[str], have: Mapping[str, object], family: Family) -> Commands:
    """For an operation: install what is not among those that the node has.

    pyinfra's dnf.packages would ask the repositories about each package first, which takes seconds for each.
    """
    missing = [package for package in wanted if package not in have and OTHER_NAMES.get(package) not in have]
    if not missing:
        host.noop("all packages are installed")
    elif family == "debian":
        yield script(f'{APT}apt_update\napt_install install -- "$@"', *missing)
    else:
        yield StringCommand("dnf", "install", "-y", *map(QuoteString, missing))
