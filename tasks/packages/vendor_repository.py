"""Configures a vendor's package repository with its signing key, and installs packages from it at a version that is held.

Other tasks call `configure` and then `packages`. Tested: apt on Debian 12; dnf, with signed packages or metadata, on a Debian
that looks like Rocky Linux 9.
"""

from __future__ import annotations

import re
from io import StringIO
from typing import Any, get_args

from attrs import field, frozen
from attrs.validators import and_
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.validators import Matches
from tasks.common.commands import Commands, refuse, script, warn
from tasks.common.data import without_password
from tasks.common.facts import Lines
from tasks.common.texts import HEADER
from tasks.packages import APT, DNF, Family, dkms, holds, installed, signatures
from tasks.packages.apt_sources import FINGERPRINTS, RepositoryEntries
from tasks.time_limits import LIMITS

URL = re.compile(r"https?://[!-~]+")
# The characters that dpkg and rpm allow, without those that are special to a shell or to apt (a trailing - removes a package).
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9+._-]*[a-zA-Z0-9+]")
VERSION = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.+:~^_-]*")
FETCH = r"""
# Prints dnf's proxy and certificates (dnf.conf(5)) as settings of curl. It reads them from its standard input, since a password
# must not be in an argument.
as_dnf() {
  user=
  for pair in proxy:proxy proxy_username:user proxy_password:password sslcacert:cacert; do
    value=$(sed -n "s/^[[:space:]]*${pair%:*}[[:space:]]*=[[:space:]]*//p" "${DNF_CONF:-/etc/dnf/dnf.conf}" 2>/dev/null |
      tail -n 1 | sed 's/[[:space:]]*$//; s/[\\"]/\\&/g')
    [ -n "$value" ] && [ "$value" != _none_ ] || continue
    case $pair in
    *:user) user=$value ;;
    *:password) printf '%s\n' "proxy-user = \"$user:$value\"" ;;
    *) printf '%s\n' "${pair#*:} = \"$value\"" ;;
    esac
  done
}
fetch() {
  if [ -x "${APT_HELPER:=/usr/lib/apt/apt-helper}" ]; then
    # It uses apt's proxy and certificates, and needs no curl.
    "$APT_HELPER" -qq -oAPT::Sandbox::User=root download-file "$1" "$2" >&2
  else
    as_dnf | curl --config - --fail --silent --show-error --location --connect-timeout 30 --speed-limit 1 --speed-time 120 \
      --retry 2 --output "$2" -- "$1"
  fi || { echo "$1 cannot be fetched; the reason is above; check that the node can reach it" >&2; exit 1; }
}
"""
"""The shell function ``fetch URL FILE``. If it fails, the script ends with an error that names the URL."""


def _compact(value: Any) -> Any:
    return "".join(value.split()).upper() if isinstance(value, str) else value


WEB = and_(without_password, Matches(URL, "give a URL, http:// or https://"))


@frozen
class Repository:
    """A vendor's repository, as the inventory gives it.

    ``key``: the URL of the signing key. Plain HTTP is safe, since only a key with this ``fingerprint`` is installed.
    ``suite`` and ``components``: as in apt's sources.list (a flat repository has ``./`` and no components); dnf uses only
    ``uri``, as its baseurl. ``repo_gpgcheck``: as in dnf.conf; the key signs the repository's metadata, which has the
    packages' checksums, instead of each package.
    """

    uri: str = field(validator=WEB)
    key: str = field(validator=WEB)
    fingerprint: str = field(
        converter=_compact,
        validator=Matches(re.compile(r"[0-9A-F]{40}"), "give the whole fingerprint, 40 hexadecimal digits"),
    )
    suite: str = field(default="./", validator=Matches(re.compile(r"[a-zA-Z0-9./_-]+"), "give it as in sources.list"))
    components: tuple[str, ...] = ()
    repo_gpgcheck: bool = False

    def __attrs_post_init__(self) -> None:
        if self.suite.endswith("/") and self.components:
            raise ValueError("components: a suite that ends in / has none; leave them out")
        if not self.suite.endswith("/") and not self.components:
            raise ValueError("components: they are missing; give names such as ['main'], or a suite that ends in /")
        for component in self.components:
            if not NAME.fullmatch(component):
                raise ValueError(f"components: {component!r} is not valid; give names such as 'main'")


@frozen
class Package:
    """A package and its wanted version, as ``dpkg -l`` or ``rpm -q`` prints it; None: any version."""

    name: str
    version: str | None = None


PACKAGE_NAME = Matches(NAME, "give a package's name")
PACKAGE_VERSION = Matches(VERSION, "give it as the package manager prints it")


class KeyFingerprints(Lines):
    """The fingerprints of the primary keys in a keyring that have not expired; empty if the file or gpg is missing."""

    def command(self, keyring: str) -> StringCommand:
        """Run gpg with a temporary home, so that it does not touch root's."""
        return self.script(
            FINGERPRINTS
            + """
[ -e "$1" ] && command -v gpg >/dev/null || exit 0
home=$(mktemp -d); trap 'rm -rf "$home"' EXIT
fingerprints "$1" "$home" e
""",
            keyring,
        )


def configure(name: str, repository: Repository | None, family: Family) -> None:
    """Deploy code: install the key, then the repository's entry; without a repository, remove both.

    If the key has another fingerprint, the host fails without the entry. Packages that were installed from a former one stay.

    :param name: for the names of the files, as ``doca``.
    """
    ring = keyring(name, family)
    if repository is None:
        files.file(name=f"{name}: no repository", path=_source_path(name, family), present=False)
        files.file(name=f"{name}: no key of a repository", path=ring, present=False)
        return
    key(
        name=f"{name}: key of its repository",
        url=repository.key,
        fingerprint=repository.fingerprint,
        family=family,
        ring=ring,
    )
    entry(name=f"{name}: repository", file=name, repository=repository, family=family)


@operation()
def entry(file: str, repository: Repository, family: Family) -> Commands:
    """Write the package manager's entry. An entry of this repository that apt has already is used, if its key is the right one.

    With both entries apt might read no sources at all. So the deploy's own is removed, even if the other one is refused.

    :param file: for its name, as for `configure`.
    """
    dest, text = source(file, repository, family)
    if family == "debian":
        others = host.get_fact(RepositoryEntries, path=dest, text=text)
        if others.there:
            yield from files.file._inner(path=dest, present=False)
        if fault := others.fault(repository.fingerprint):
            yield refuse(f"{file}: {fault}")
        if others.there or others.broken:
            return
    yield from files.put._inner(src=StringIO(text), dest=dest, mode="644")


def files_of(name: str) -> tuple[str, ...]:
    """The paths of a repository's files, for both families."""
    families: tuple[Family, ...] = get_args(Family)
    return tuple(path for family in families for path in (_source_path(name, family), keyring(name, family)))


def keyring(name: str, family: Family) -> str:
    """The path of the key's file."""
    if family == "debian":
        return f"/etc/apt/keyrings/trackbed-{name}.gpg"
    return f"/etc/pki/rpm-gpg/RPM-GPG-KEY-trackbed-{name}"


def source(name: str, repository: Repository, family: Family) -> tuple[str, str]:
    """The path and text of the repository's file, in the deb822 format of sources.list(5) or as in dnf.conf(5)."""
    ring = keyring(name, family)
    if family == "debian":
        lines = ["Types: deb", f"URIs: {repository.uri}", f"Suites: {repository.suite}"]
        if repository.components:
            lines.append(f"Components: {' '.join(repository.components)}")
        lines.append(f"Signed-By: {ring}")
    else:
        lines = [f"[trackbed-{name}]", f"name={name}, by Trackbed", f"baseurl={repository.uri}"]
        checked = ["gpgcheck=0", "repo_gpgcheck=1"] if repository.repo_gpgcheck else ["gpgcheck=1"]
        # As apt does it: otherwise a repository that does not answer keeps dnf from installing anything (dnf.conf(5)).
        lines += ["enabled=1", "skip_if_unavailable=1", *checked, f"gpgkey=file://{ring}"]
    return _source_path(name, family), HEADER + "\n".join(lines) + "\n"


def _source_path(name: str, family: Family) -> str:
    if family == "debian":
        return f"/etc/apt/sources.list.d/trackbed-{name}.sources"
    return f"/etc/yum.repos.d/trackbed-{name}.repo"


# Exports only the wanted key, since the file may have several. An expired key of the node is fetched again, since its owner may
# have extended it. If that is not possible, it stays: the node may need nothing from the repository.
_KEY = (
    FETCH
    + FINGERPRINTS
    + """
url=$1 want=$2 ring=$3 armor=$4
umask 077; home=$(mktemp -d); trap 'rm -rf "$home"' EXIT
expired=
if [ -e "$ring" ] && [ "$(fingerprints "$ring" "$home")" = "$want" ]; then expired=yes; fi
(fetch "$url" "$home/key") || { [ -n "$expired" ]; exit; }
if [ -n "$expired" ] && ! fingerprints "$home/key" "$home" e | grep -qxF "$want"; then exit 0; fi
actual=$(fingerprints "$home/key" "$home")
if ! printf '%s\\n' "$actual" | grep -qxF "$want"; then
  actual=$(printf '%s' "${actual:-none: it is not a key}" | tr '\\n' ' ')
  echo "the key at $url has the fingerprint $actual, expected is $want;" >&2
  echo "nothing was installed; ask the vendor for the right fingerprint, and give that" >&2
  exit 1
fi
# Without gpg-agent, gpg imports the key but reports an error. So its exit code is ignored, and the exported key is checked.
set -- gpg --homedir "$home" --batch --quiet --no-default-keyring --keyring "$home/ring"
"$@" --import "$home/key" 2>/dev/null || true
"$@" ${armor:+"$armor"} --export "$want" > "$home/out"
[ "$(fingerprints "$home/out" "$home")" = "$want" ]
install -D -m 644 "$home/out" "$ring"
"""
)


@operation()
def key(url: str, fingerprint: str, family: Family, ring: str) -> Commands:
    """Install the key with this fingerprint, and gpg before it if it is missing."""
    gpg = "gpg" if family == "debian" else "gnupg2"
    if gpg not in installed(family):
        yield from install(family, (Package(gpg),))
    if host.get_fact(KeyFingerprints, keyring=ring) == [fingerprint]:
        host.noop(f"{ring} has the key {fingerprint}")
        return
    yield script(_KEY, url, fingerprint, ring, "" if family == "debian" else "--armor")
    if host.state.is_executing and host.get_fact(KeyFingerprints, keyring=ring) != [fingerprint]:
        # pyinfra does not show what a command prints that succeeds.
        warn(
            host,
            f"the key {fingerprint} in {ring} has expired, and {url} gave no extended one: ask the vendor for a new key. Until "
            "then, each deploy fetches it again",
        )


@operation()
def packages(
    wanted: tuple[Package, ...], family: Family, hold: bool = True, module: str = "", remedy: str = ""
) -> Commands:
    """Install packages. Those with a version are installed at that version, even as a downgrade, and held there.

    :param module: the packages' DKMS module. If the installation fails, the cause is printed from its build log.
    :param hold: hold the packages. If False, dnf's locks are ignored.
    :param remedy: printed after the package manager's output if the installation fails.
    """
    have = installed(family)
    if hold and family == "rhel" and any(p.version for p in wanted) and holds.has_dnf5(have):
        # Before the installation: the next update would replace what is not held.
        yield refuse(holds.NO_LOCKS)
        return
    missing = tuple(p for p in wanted if p.name not in have or (p.version and p.version not in have[p.name]))
    held = host.get_fact(holds.HeldPackages, family=family) if hold else {}
    loose = tuple(p for p in wanted if hold and p.version and not _is_held(p, held, family))
    if not missing and not loose:
        host.noop("installed: " + ", ".join(p.name for p in wanted))
        return
    if missing:
        if family == "rhel" and (locked := [p.name for p in missing if p.name in held]):
            yield holds.release(family, *locked)
        yield from install(family, missing, module, remedy, locked=hold)
    # apt removes the hold of a package that it upgrades.
    again = tuple(p for p in wanted if hold and p.version and (p in loose or p in missing))
    if again and family == "debian":
        yield holds.hold(family, *(p.name for p in again))
    elif again:
        yield from holds.lock_plugin(have)
        yield holds.hold(family, *(f"{p.name}-{p.version}" for p in again))


def _is_held(package: Package, held: dict[str, str | None], family: Family) -> bool:
    return package.name in held and (family == "debian" or held[package.name] == package.version)


_FAILED = (
    dkms.CAUSE
    + """
failed() {
  status=$? said=${message:-}
  cause "$module" "$(uname -r)"
  if [ -n "$module" ] && command -v dnf >/dev/null && ! command -v dkms >/dev/null && ! dnf -q list dkms >/dev/null 2>&1; then
    echo "no repository has dkms, which for the RHEL family is in EPEL: add EPEL (epel-release) and CRB, or mirrors of them" >&2
  fi
  restrictions >&2
  # An image of a kernel and its initramfs need most of this, in /boot.
  df -P / /boot /usr /var 2>/dev/null | awk 'NR > 1 && $4 < 200000 && !seen[$6]++ {
    print $6 " has " int($4 / 1024) " MiB left, which may be the cause (df)" }' >&2
  if [ -n "$remedy" ]; then echo "$remedy" >&2; fi
  exit "$status"
}
"""
)
# apt names neither the hold nor the pin that keeps it from a version.
_APT = (
    APT
    + _FAILED
    + """
restrictions() {
  held=$(apt-mark showhold | tr '\\n' ' ')
  if [ -n "$held" ]; then echo "these packages are held, which may be the cause (apt-mark unhold): $held"; fi
  file='' parts=''
  eval "$(apt-config shell file Dir::Etc::preferences/f parts Dir::Etc::preferencesparts/d)"
  for each in "$file" "$parts"*; do
    case ${each##*/} in trackbed-*) continue ;; esac
    if [ -f "$each" ]; then echo "$each has pins of packages, which may be the cause (apt_preferences(5))"; fi
  done
}
module=$1 remedy=$2; shift 2
apt_update
apt_install --allow-downgrades --allow-change-held-packages install -- "$@" || failed
"""
)
# In the RHEL family the vendors also have modules that they have built and signed. So the packages themselves are asked.
# dnf says that a package is "filtered out by exclude filtering", also for a version lock, and not where.
_DNF = (
    DNF
    + _FAILED
    + holds.LOCKS
    + signatures.OF_RPMS
    + """
restrictions() {
  case $said in
  *"No binding signature"* | *"Hash algorithm SHA1 not available"*) old_signatures rpm 'gpgkey of the entry' ;;
  *"Import of key(s) didn't help"*)
    echo "the packages are signed with another key than the repository's entry has: give the repository's key and" \\
      "fingerprint anew, as the vendor publishes them" ;;
  esac
  locked=$(locks '' | tr '\\n' ' ')
  if [ -n "$locked" ]; then echo "there are version locks, which may be the cause (dnf versionlock delete): $locked"; fi
  for each in "${DNF_CONF:-/etc/dnf/dnf.conf}" "${DNF_REPOSITORIES:-/etc/yum.repos.d}"/*.repo; do
    if grep -qsE '^[[:space:]]*(exclude|excludepkgs|includepkgs)[[:space:]]*=' "$each"; then
      echo "$each leaves packages out (exclude=), which may be the cause (dnf.conf(5))"
    fi
  done
}
module=$1 remedy=$2 options=$3; shift 3
if [ -n "$module" ] && enforced; then
  fetched=$(mktemp -d -p /var/tmp trackbed-packages.XXXXXX); trap 'rm -rf "$fetched"' EXIT
  # shellcheck disable=SC2086  # an option is a word
  dnf install -y --refresh --downloadonly --destdir "$fetched" $options -- "$@" || failed
  accept_rpms "$module" "$fetched"/*.rpm
  rm -rf "$fetched"
fi
# shellcheck disable=SC2086  # an option is a word
dnf install -y --refresh $options -- "$@" || failed
"""
)


def install(
    family: Family, wanted: tuple[Package, ...], module: str = "", remedy: str = "", locked: bool = True
) -> Commands:
    """For an operation: install packages, even as a downgrade. A version may end in ``*``, for apt as for dnf.

    :param locked: respect dnf's version locks.
    """
    if module and (problem := signatures.refusal_of_packages(module, family)):
        yield refuse(problem)
        return
    joint = "=" if family == "debian" else "-"
    names = [f"{p.name}{joint}{p.version}" if p.version else p.name for p in wanted]
    if family == "debian":
        yield script(_APT, module, remedy, *names, limit=LIMITS.here().build)
    else:
        ignored = "" if locked else "--disableplugin=versionlock"
        yield script(_DNF, module, remedy, ignored, *names, limit=LIMITS.here().build)
