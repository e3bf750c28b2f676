"""A vendor's package repository: its key by fingerprint, its source for apt or dnf, and packages of a version that is held.

For other tasks: `add` and then `packages`. The RHEL half is asserted by its commands: not run.
"""

from __future__ import annotations

import re
from io import StringIO
from typing import Any, get_args

from attrs import field, frozen
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.validators import Matches
from tasks.common.commands import Commands, script
from tasks.packages import APT, Family, dkms, installed

HEADER = "# Written by Trackbed; changes here are overwritten.\n"
URL = re.compile(r"https?://[!-~]+")
# dpkg's and rpm's own characters; what they mean to a shell or to apt (a trailing - removes) is left out.
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9+._-]*[a-zA-Z0-9+]")
VERSION = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.+:~^_-]*")
LOCK_PLUGIN = "python3-dnf-plugin-versionlock"

FETCH = """
fetch() {
  if [ -x /usr/lib/apt/apt-helper ]; then
    # apt's own proxy and certificates; it is there where curl is not.
    /usr/lib/apt/apt-helper -qq -oAPT::Sandbox::User=root download-file "$1" "$2" >&2
  else
    curl --fail --silent --show-error --location --retry 2 --output "$2" -- "$1"
  fi || { echo "$1 cannot be fetched; see the line above, and look at it from the node" >&2; exit 1; }
}
"""
"""A shell function: ``fetch URL FILE``, or the script ends with an error that names the URL."""

LOCKS = """
locks() {  # of dnf's versionlock, below a root folder
  list=$(sed -n 's/^locklist *= *//p' "$1/etc/dnf/plugins/versionlock.conf" 2>/dev/null || true)
  sed '/^#/d; /^[[:space:]]*$/d' "$1${list:-/etc/dnf/plugins/versionlock.list}" 2>/dev/null || true
}
"""
"""A shell function: the locks, a line each. `dnf versionlock list` prints these lines, after it has loaded every repository."""

_FINGERPRINTS = """
fingerprints() {
  gpg --homedir "$2" --batch --quiet --with-colons --show-keys "$1" 2>/dev/null |
    awk -F: '$1 == "pub" { primary = 1 } $1 == "fpr" && primary { print $10; primary = 0 }'
}
"""


def _compact(value: Any) -> Any:
    return "".join(value.split()).upper() if isinstance(value, str) else value


_URL = Matches(URL, "give a URL, http:// or https://")


@frozen
class Repository:
    """Where a vendor's packages come from: an inventory's mapping.

    ``key`` is the URL of the key that signs it; it may come over plain HTTP, for only the key of this ``fingerprint`` is
    installed. For apt, ``suite`` and ``components`` are as in sources.list (a flat repository: ``./`` and none); dnf has no
    such thing, and takes ``uri`` as its baseurl. ``repo_gpgcheck`` as in dnf.conf: the key signs the repository's metadata,
    which has the packages' checksums, and not each package.
    """

    uri: str = field(validator=_URL)
    key: str = field(validator=_URL)
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
            raise ValueError("components: they are missing; give ['main'], say, or a suite that ends in /")
        for component in self.components:
            if not NAME.fullmatch(component):
                raise ValueError(f"components: {component!r} is not valid; give names such as 'main'")


@frozen
class Package:
    """A package, and the version that it shall have (as ``dpkg -l`` or ``rpm -q`` prints it); None: whichever is there."""

    name: str
    version: str | None = None


PACKAGE_NAME = Matches(NAME, "give a package's name")
PACKAGE_VERSION = Matches(VERSION, "give it as the package manager prints it")


class KeyFingerprints(FactBase[list[str]]):
    """The fingerprints of the primary keys in a keyring; empty if there is no such file, or no gpg to read it."""

    default = list

    def command(self, keyring: str) -> StringCommand:
        """Gpg gets a home of its own: root's is left alone."""
        return script(
            _FINGERPRINTS
            + """
[ -e "$1" ] && command -v gpg >/dev/null || exit 0
home=$(mktemp -d); trap 'rm -rf "$home"' EXIT
fingerprints "$1" "$home"
""",
            keyring,
        )

    def process(self, output: list[str]) -> list[str]:
        """One fingerprint a line."""
        return output


class HeldPackages(FactBase[dict[str, str | None]]):
    """The packages that are held at their version; dnf's locks name it, apt's holds mean whichever is installed."""

    default = dict

    def command(self, family: Family) -> StringCommand:
        """Without dnf's plug-in there are no locks."""
        if family == "debian":
            return script("apt-mark showhold")
        return script(f"{LOCKS}locks ''")

    def process(self, output: list[str]) -> dict[str, str | None]:
        """``name``, or ``name-epoch:version-release.*``."""
        held: dict[str, str | None] = {}
        for line in output:
            locked = re.fullmatch(r"(\S+)-\d+:(\S+)\.\*", line.strip())
            held[locked[1] if locked else line.strip()] = locked[2] if locked else None
        return held


def add(name: str, repository: Repository, family: Family) -> None:
    """Deploy code: the key, then the source; a key with another fingerprint fails the host before the source is written.

    :param name: of the files, as ``doca``.
    """
    ring = keyring(name, family)
    key(
        name=f"{name}: key of its repository",
        url=repository.key,
        fingerprint=repository.fingerprint,
        family=family,
        ring=ring,
    )
    dest, text = source(name, repository, family)
    files.put(name=f"{name}: repository", src=StringIO(text), dest=dest, mode="644")


def remove(name: str, family: Family) -> None:
    """Deploy code: take the source and its key away; what was installed from it stays."""
    files.file(name=f"{name}: no repository", path=_source_path(name, family), present=False)
    files.file(name=f"{name}: no key of a repository", path=keyring(name, family), present=False)


def files_of(name: str) -> tuple[str, ...]:
    """The paths of a repository's files, whichever the family."""
    families: tuple[Family, ...] = get_args(Family)
    return tuple(path for family in families for path in (_source_path(name, family), keyring(name, family)))


def keyring(name: str, family: Family) -> str:
    """The path of the key's file."""
    if family == "debian":
        return f"/etc/apt/keyrings/trackbed-{name}.gpg"
    return f"/etc/pki/rpm-gpg/RPM-GPG-KEY-trackbed-{name}"


def source(name: str, repository: Repository, family: Family) -> tuple[str, str]:
    """Path and text of the source: sources.list(5) in its deb822 form, or dnf.conf(5)."""
    ring = keyring(name, family)
    if family == "debian":
        lines = ["Types: deb", f"URIs: {repository.uri}", f"Suites: {repository.suite}"]
        if repository.components:
            lines.append(f"Components: {' '.join(repository.components)}")
        lines.append(f"Signed-By: {ring}")
    else:
        lines = [f"[trackbed-{name}]", f"name={name}, by Trackbed", f"baseurl={repository.uri}"]
        checked = ["gpgcheck=0", "repo_gpgcheck=1"] if repository.repo_gpgcheck else ["gpgcheck=1"]
        lines += ["enabled=1", *checked, f"gpgkey=file://{ring}"]
    return _source_path(name, family), HEADER + "\n".join(lines) + "\n"


def _source_path(name: str, family: Family) -> str:
    if family == "debian":
        return f"/etc/apt/sources.list.d/trackbed-{name}.sources"
    return f"/etc/yum.repos.d/trackbed-{name}.repo"


# Only the wanted key is taken of a file with several.
_KEY = (
    FETCH
    + _FINGERPRINTS
    + """
url=$1 want=$2 ring=$3 armor=$4
umask 077; home=$(mktemp -d); trap 'rm -rf "$home"' EXIT
fetch "$url" "$home/key"
found=$(fingerprints "$home/key" "$home")
if ! printf '%s\\n' "$found" | grep -qxF "$want"; then
  echo "the key at $url has the fingerprint $(echo ${found:-none: it is no key}), expected is $want;" >&2
  echo "nothing was installed: ask the vendor which is right, and give that as fingerprint" >&2
  exit 1
fi
# Without its agent, which only private keys need, gpg imports the key and says that it failed: what it has is looked at.
gpg --homedir "$home" --batch --quiet --no-default-keyring --keyring "$home/ring" --import "$home/key" 2>/dev/null || true
gpg --homedir "$home" --batch --quiet --no-default-keyring --keyring "$home/ring" $armor --export "$want" > "$home/out"
[ "$(fingerprints "$home/out" "$home")" = "$want" ]
install -D -m 644 "$home/out" "$ring"
"""
)


@operation()
def key(url: str, fingerprint: str, family: Family, ring: str) -> Commands:
    """Install the key of this fingerprint, and no other; gpg first, where it is missing."""
    gpg = "gpg" if family == "debian" else "gnupg2"
    if gpg not in installed(family):
        yield from _install(family, (Package(gpg),))
    if host.get_fact(KeyFingerprints, keyring=ring) == [fingerprint]:
        host.noop(f"{ring} has the key {fingerprint}")
        return
    yield script(_KEY, url, fingerprint, ring, "" if family == "debian" else "--armor")


@operation()
def packages(
    wanted: tuple[Package, ...], family: Family, hold: bool = True, module: str = "", remedy: str = ""
) -> Commands:
    """Have packages installed, those with a version at exactly that one (also if it is older), and held there.

    :param module: the DKMS module that they bring: if they cannot be installed, the cause is looked for in its build log.
    :param hold: without it, a version that dnf has locked does not keep another one from being installed.
    :param remedy: said after the package manager's own words if they cannot be installed.
    """
    have = installed(family)
    missing = tuple(p for p in wanted if p.name not in have or (p.version and p.version not in have[p.name]))
    held = host.get_fact(HeldPackages, family=family) if hold else {}
    loose = tuple(p for p in wanted if hold and p.version and not _is_held(p, held, family))
    if not missing and not loose:
        host.noop("installed: " + ", ".join(p.name for p in wanted))
        return
    if missing:
        if family == "rhel" and (locked := [p.name for p in missing if p.name in held]):
            yield StringCommand("dnf", "versionlock", "delete", *map(QuoteString, locked))
        yield from _install(family, missing, module, remedy, locked=hold)
    # apt takes a hold off what it upgrades.
    again = tuple(p for p in wanted if hold and p.version and (p in loose or p in missing))
    if again and family == "debian":
        yield StringCommand("apt-mark", "hold", *(QuoteString(p.name) for p in again))
    elif again:
        if LOCK_PLUGIN not in have:
            yield StringCommand("dnf", "install", "-y", LOCK_PLUGIN)
        yield StringCommand("dnf", "versionlock", "add", *(QuoteString(f"{p.name}-{p.version}") for p in again))


def _is_held(package: Package, held: dict[str, str | None], family: Family) -> bool:
    return package.name in held and (family == "debian" or held[package.name] == package.version)


_FAILED = (
    dkms.CAUSE
    + """
failed() {
  status=$?
  cause "$module" "$(uname -r)"
  if [ -n "$module" ] && command -v dnf >/dev/null && ! command -v dkms >/dev/null; then
    echo "there is no dkms, which the RHEL family has in EPEL: add that repository (epel-release) and CRB, or mirrors" >&2
  fi
  if [ -n "$remedy" ]; then echo "$remedy" >&2; fi
  exit "$status"
}
"""
)
_APT = (
    APT
    + _FAILED
    + """
module=$1 remedy=$2; shift 2
apt_update
apt_install --allow-downgrades --allow-change-held-packages install -- "$@" || failed
"""
)
_DNF = (
    _FAILED
    + """
module=$1 remedy=$2 options=$3; shift 3
dnf install -y --refresh $options -- "$@" || failed
"""
)


def _install(
    family: Family, wanted: tuple[Package, ...], module: str = "", remedy: str = "", locked: bool = True
) -> Commands:
    joint = "=" if family == "debian" else "-"
    names = [f"{p.name}{joint}{p.version}" if p.version else p.name for p in wanted]
    if family == "debian":
        yield script(_APT, module, remedy, *names)
    else:
        yield script(_DNF, module, remedy, "" if locked else "--disableplugin=versionlock", *names)
