"""Installs the base packages, and a Python for the agent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Literal

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.rpm import RpmPackages
from pyinfra.facts.server import LinuxDistribution

from agent.spec.node import NodeSpec
from tasks.common import systemd_reload
from tasks.common.commands import Commands, script
from tasks.common.data import host_data, this_host
from tasks.common.facts import FactBase
from tasks.common.failures import NodeError
from tasks.common.texts import Present

Family = Literal["debian", "rhel"]

BASE: dict[Family, tuple[str, ...]] = {
    "debian": ("python3", "iproute2", "ethtool", "pciutils", "kmod", "rdma-core", "ibverbs-utils", "jq"),
    # The minimal installation of RHEL 8 and later has no tar (github.com/kubernetes-sigs/kubespray/issues/9183).
    "rhel": ("python3", "iproute", "ethtool", "pciutils", "kmod", "rdma-core", "libibverbs-utils", "jq", "tar"),
}

RDMA_TOOLS: dict[Family, tuple[str, ...]] = {
    "debian": ("rdmacm-utils", "infiniband-diags", "perftest"),
    "rhel": ("librdmacm-utils", "infiniband-diags", "perftest"),
}
"""Programs to test RDMA with: rping, ibstat, ib_write_bw and their like."""

OTHER_NAMES = {"python3": "python36"}
"""The names of packages that RHEL 8 provides under another name."""

RHEL_PYTHON = "python3.11"
"""A second Python of RHEL 8 and 9, whose default one (3.6, 3.9) is too old."""

INTERPRETERS = ("/usr/bin/python3", f"/usr/bin/{RHEL_PYTHON}")
NO_PYTHON = (
    f"the node has no Python 3.10 or newer ({' or '.join(INTERPRETERS)}); install one, or upgrade the distribution"
)


@frozen
class Distribution:
    """A distribution. ``oldest``: the oldest supported release. ``new_python``: the first whose python3 is 3.10 or newer."""

    name: str
    family: Family
    oldest: int
    new_python: int


# By ID in os-release. Alibaba Cloud Linux 3 and Anolis OS 8 are rebuilt from RHEL 8's sources.
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

OSTREE = "/run/ostree-booted"
"""A file that exists where /usr is an image (ostree-prepare-root)."""

_CLOUD_INIT = """
left=60
while [ "$left" != 0 ]; do
  case $(systemctl show --property=Job --value cloud-config.service 2>/dev/null) in [1-9]*) sleep 5 ;; *) break ;; esac
  left=$((left - 1))
done
"""
"""A script that waits up to five minutes while cloud-init writes the package manager's sources, or is still to do so: at a
server's first boot one can log in before. What it installs comes in a later unit, with the package manager's own locks."""

UNDISTURBED = f"{systemd_reload.BEFORE_PACKAGES}{_CLOUD_INIT}export NEEDRESTART_SUSPEND=1 APT_LISTBUGS_FRONTEND=none\n"
"""The start of a script in which packages are installed. What runs on the node goes on as it is.

After each run of apt, Ubuntu 24.04's needrestart would restart services whose libraries were replaced, as containerd, the
kubelet or slurmd, without a question. Since needrestart 3.0 its hook (apt-pinvoke) does nothing in this environment.
Nor does apt-listbugs: for a grave bug in Debian's list it would end an installation that nobody watches, and pin the package.
"""

OLD_SIGNATURES = """
old_signatures() {  # arguments: the package manager, and what names the key's file
  echo "the key's own signatures are of a kind that $1 accepts no more (SHA1). Its owner may have renewed them:" \\
    "remove its file on the node ($2) and deploy again, which fetches it; else use a repository" \\
    "with another key" >&2
}
"""

APT = (
    UNDISTURBED
    + OLD_SIGNATURES
    + """
without_conflict() {  # argument: what apt says
  ours=$(printf '%s\\n' "$1" | sed -n 's,.*Conflicting values .*/\\(trackbed-[a-z-]*\\)\\.gpg.*,\\1,p' | head -n 1)
  parts=''
  eval "$(apt-config shell parts Dir::Etc::sourceparts/d)"
  [ -n "$ours" ] && [ -e "$parts$ours.sources" ] && rm "$parts$ours.sources"
}
apt_update() {
  left=60 harmless=' is configured multiple times '
  until output=$(apt-get -q update 2>&1); do
    case $output in *"Conflicting values "*) if without_conflict "$output"; then continue; fi ;; esac
    left=$((left - 1))
    case $output in *"Could not get lock"* | *"Mirror sync in progress"*) ;; *) left=0 ;; esac
    if [ "$left" -gt 0 ]; then sleep 5; continue; fi
    case $output in *"Mirror sync in progress"*) break ;; esac
    printf '%s\\n' "$output" | grep -v "$harmless" >&2
    case $output in
    *" changed its '"*)
      echo "if its owner has announced this, accept it on the node: apt-get update --allow-releaseinfo-change" >&2 ;;
    *" is not bound:"*) old_signatures apt 'Signed-By of the entry' ;;
    *" does not have a Release file"*)
      echo "if that repository is gone, or was the installation's medium (cdrom:), remove its entry in /etc/apt" >&2 ;;
    *" is not valid yet "*) echo "the node's clock may be slow: it says $(date -u); correct it, and deploy again" >&2 ;;
    *" is expired "*)
      echo "the node's clock may be fast (it says $(date -u)), or this is a mirror that is not updated any more; for a" \\
        "snapshot, give its entry 'Check-Valid-Until: no' (sources.list(5))" >&2 ;;
    esac
    return 1
  done
  warnings=$(printf '%s\\n' "$output" | grep '^[EW]: ' | grep -v "$harmless" || true)
}
apt_once() {
  left=60 errors=$(mktemp)
  while true; do
    code=0
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confdef \\
      -o Dpkg::Options::=--force-confold --no-install-recommends "$@" 2> "$errors" || code=$?
    left=$((left - 1))
    if [ "$code" = 0 ] || [ "$left" -le 0 ]; then break; fi
    case $(cat "$errors") in
    *archives/lock* | *"Mirror sync in progress"*) ;;
    *"Hash Sum mismatch"* | *"404  Not Found"*) left=1 ;;
    *) break ;;
    esac
    sleep 5
    if ! grep -q "archives/lock" "$errors" && ! (apt_update); then break; fi
  done
  cat "$errors" >&2
  rm -f "$errors"
  return "$code"
}
finish_interrupted() {
  [ -n "$(ls "${DPKG_ADMINDIR:-/var/lib/dpkg}/updates" 2>/dev/null)" ] || return 1
  echo 'what was interrupted is completed by dpkg --configure -a'
  DEBIAN_FRONTEND=noninteractive dpkg --force-confdef --force-confold --configure -a ||
    apt_once --fix-broken --no-remove install
}
apt_install() {
  apt_once "$@" || { finish_interrupted && apt_once "$@"; } || {
    if [ -n "$warnings" ]; then printf 'before that, apt-get update said:\\n%s\\n' "$warnings" >&2; fi
    return 1
  }
}
"""
)
"""The shell functions `apt_update` and `apt_install OPTIONS install -- PACKAGES`. Both wait up to five minutes for another apt,
which often runs after a server's first boot. (DPkg::Lock::Timeout applies neither to apt-get update nor to the lock of the
folder of packages, hence the loops.) So does the first for a repository whose owner is changing it, as NVIDIA's for minutes.

If the operator has added an entry of a repository of the deploy, with another key, apt reads no sources at all. Then the
deploy's entry goes. The operation that has written it judges the other one (tasks/packages/vendor_repository.py).

`apt-get update` ends with 0 if a repository does not answer, so that others can be used. If an installation fails, this may be
the reason. One that is still being changed is treated in the same way.

A package that is not as its index says is fetched again with a new index: while its owner changes the repository for as long
as an index; else once.

If dpkg was killed, as by a power cut, its folder `updates` has what it has not written to its database. apt refuses to work
until `dpkg --configure -a` has run (debSystem::CheckUpdates in apt). That fails if a dependency was not unpacked yet.
"""

WAITING_DNF = """
dnf() {
  left=60
  while true; do
    code=0
    { message=$(command dnf --setopt=exit_on_lock=1 "$@" 2>&1 >&3); } 3>&1 || code=$?
    left=$((left - 1))
    case "$code $message" in
    0\\ *) break ;;
    200\\ *) ;;
    *"Status code: 404 for "*"/repodata/"*"-primary.xml"*) ;;
    *"transaction lock on "*"(Resource temporarily unavailable)"* | *"Failed to obtain rpm transaction lock"*) ;;
    *"Rpm transaction failed."*)
      tail -n 1 "${DNF5_LOG:-/var/log/dnf5.log}" 2>/dev/null | grep -q "transaction lock on " || break ;;
    *) break ;;
    esac
    [ "$left" != 0 ] || break
    sleep 5
  done
  if [ -n "$message" ]; then printf '%s\\n' "$message" >&2; fi
  return "$code"
}
"""
"""A shell function that waits up to five minutes for another dnf or rpm. dnf itself would wait for another dnf for ever.

With ``exit_on_lock`` dnf ends with 200 if another process has a lock, and names that process (dnf/lock.py, dnf/cli/main.py).
For rpm's own lock neither rpm without a terminal (rpmlockAcquire in rpm) nor dnf5 waits, and dnf ends with 1. What rpm says of
it is only in the log of dnf5 (tried with dnf5 5.4).

It waits, too, for a repository whose owner is changing it: the index files that it names are not there yet, or no more.
"""

DNF = UNDISTURBED + OLD_SIGNATURES + WAITING_DNF

FIND_PYTHON = """
for python; do
  if "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo "$python"; exit; fi
done
"""
"""A script that prints the first of its arguments that is Python 3.10 or newer."""


class NodePython(FactBase[str | None]):
    """The path of the first interpreter that is Python 3.10 or newer, which runs the agent; None if there is none yet."""

    shell = FIND_PYTHON
    words = INTERPRETERS


@frozen
class OperatingSystem:
    """A node's operating system. ``identity`` and ``version``: ID and VERSION_ID of os-release, as ``ubuntu`` and ``22.04``."""

    distribution: Distribution
    identity: str
    version: str

    @property
    def family(self) -> Family:
        """The distribution's family, which decides the package manager."""
        return self.distribution.family

    @property
    def major(self) -> int:
        """The major version."""
        return int(self.version.split(".")[0])

    def __str__(self) -> str:
        return f"{self.distribution.name} {self.version}"


def system() -> OperatingSystem:
    """For deploy code: the current host's operating system.

    :raises NodeError: the distribution or release is not supported.
    """
    return _system(this_host())


# A deploy does not change it.
@cache
def _system(host: Host) -> OperatingSystem:
    fact = host.get_fact(LinuxDistribution)
    identity = fact["release_meta"].get("ID", "unknown")
    release = fact["major"] or 0
    distribution = DISTRIBUTIONS.get(identity)
    if distribution is None or release < distribution.oldest:
        supported = ", ".join(f"{d.name} {d.oldest}" for d in DISTRIBUTIONS.values())
        raise NodeError(
            f"{host.name}: {fact['name'] or identity} {release or '(os-release names no release)'} is not supported; "
            f"supported are, from the release given: {supported}"
        )
    if distribution.family == "rhel" and host.get_fact(Present, paths=(OSTREE,)):
        raise NodeError(
            f"{host.name}: the node boots an image (rpm-ostree, bootc), into which dnf installs nothing; use a "
            "distribution with packages"
        )
    return OperatingSystem(distribution, identity, fact["release_meta"].get("VERSION_ID") or str(release))


def base(spec: NodeSpec) -> None:
    """Install the base packages, and the RDMA tools if a NIC must have RDMA devices.

    :raises NodeError: the distribution or release is not supported.
    """
    have = system()
    install(name="Base packages", family=have.family, new_python=have.major >= have.distribution.new_python)
    # Every source of OFED brings its own build of them.
    if any(nic.rdma is not None for nic in spec.nics) and host_data().get("ofed") is None:
        present(name="RDMA tools", names=RDMA_TOOLS[have.family], family=have.family)


@operation()
def install(family: Family, new_python: bool) -> Commands:
    """Install the base packages that are missing.

    :param new_python: the distribution's python3 is 3.10 or newer.
    """
    have = installed(family)
    wanted = list(BASE[family])
    too_old = "python3" in have or not new_python
    if family == "rhel" and too_old and host.get_fact(NodePython) is None:
        wanted.append(RHEL_PYTHON)
    yield from install_missing(wanted, have, family)


def installed(family: Family) -> Mapping[str, Collection[str]]:
    """For an operation: the installed packages, each with its versions."""
    versions: Mapping[str, Collection[str]] = host.get_fact(DebPackages if family == "debian" else RpmPackages)
    return versions


# From the indexes that the node has: an installation has fetched them.
_AVAILABLE: dict[Family, str] = {
    "debian": 'apt-cache madison -- "$@" | sed "s/ *| */ /g"',
    "rhel": 'dnf -q -C repoquery --queryformat "%{name} %{version}\\n" -- "$@" || true',
}


class AvailableVersions(FactBase[list[tuple[str, str]]]):
    """The names and versions of packages that the node's repositories have."""

    default = list

    def command(self, names: tuple[str, ...], family: Family) -> StringCommand:
        """Ask the package manager, which downloads nothing for this."""
        return self.script(_AVAILABLE[family], *names)

    def process(self, output: list[str]) -> list[tuple[str, str]]:
        """Take the first two words of each line."""
        return [(name, version) for name, version, *_ in (line.split() for line in output if line.strip())]


@operation()
def present(names: tuple[str, ...], family: Family) -> Commands:
    """Install the packages that are missing."""
    yield from install_missing(names, installed(family), family)


def dnf_install(*names: str) -> StringCommand:
    """A command that has dnf install packages. It asks for new indexes, since dnf uses its own for two days (dnf.conf(5))."""
    return script(f'{DNF}dnf install -y --refresh -- "$@"', *names)


def install_missing(wanted: Iterable[str], have: Mapping[str, object], family: Family) -> Commands:
    """For an operation: install the wanted packages that are not in ``have``.

    pyinfra's dnf.packages would first query the repositories for each package, which takes seconds each.
    """
    missing = [package for package in wanted if package not in have and OTHER_NAMES.get(package) not in have]
    if not missing:
        host.noop("all packages are installed")
    elif family == "debian":
        yield script(f'{APT}apt_update\napt_install install -- "$@"', *missing)
    else:
        yield dnf_install(*missing)
