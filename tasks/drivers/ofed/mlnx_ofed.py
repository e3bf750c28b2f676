"""Installs MLNX_OFED: NVIDIA's bundle of drivers and libraries, which has its own installer.

24.10 is the last release; it supports cards up to ConnectX-7 and BlueField-2. Written from vendor documents; not run with
NVIDIA's bundle.

/var/lib/trackbed/ofed/installed   the last installation: the bundle's SHA256, the output of `ofed_info -s`, and the held
packages
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from attrs import field, frozen
from pyinfra.api.command import FileUploadCommand
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.report.names import STATE_FOLDER
from agent.spec.validators import Matches
from tasks.common import site
from tasks.common.commands import Commands, refuse, script
from tasks.common.connection import BY_CONTROL_HOST, deploys_itself
from tasks.common.facts import FactBase
from tasks.common.failures import NodeError
from tasks.drivers.ofed import modules
from tasks.host import kernel
from tasks.packages import UNDISTURBED, Family, OperatingSystem, holds, installed, signatures
from tasks.time_limits import LIMITS

FOLDER = f"{STATE_FOLDER}/ofed"

# NVIDIA's file names. RHEL's bundles are also for its rebuilds.
BUNDLE = re.compile(
    r"MLNX_OFED_LINUX-[\d.]+-[\d.]+-(?P<distribution>[a-z]+)(?P<release>[\d.]+)-(?P<arch>\w+)\.(?:tgz|tar\.gz)"
)
OF_THEIR_OWN = ("ubuntu", "debian", "ol", "anolis", "alinux")


def _installer_options(_: object, __: object, value: tuple[str, ...]) -> None:
    for option in value:
        if not re.fullmatch(r"-[!-~]+", option):
            raise ValueError(f"options: {option!r} is not an option; give each as `mlnxofedinstall --help` prints it")
        if "fw-update" in option:
            raise ValueError(f"options: {option!r} is set by firmware_update; leave it out")


@frozen
class MlnxOfed:
    """NVIDIA's bundle, a file on the control host. ``options``: more options of its installer."""

    bundle: str
    sha256: str = field(validator=Matches(re.compile("[0-9a-f]{64}"), "give the 64 digits that sha256sum prints"))
    firmware_update: bool = False
    options: tuple[str, ...] = field(default=(), validator=_installer_options)


def check(wanted: MlnxOfed, system: OperatingSystem, arch: str) -> None:
    """Check the bundle before any node is changed.

    :raises DeployError: it cannot be read, or has another checksum.
    :raises NodeError: it is for another distribution by its name.
    """
    where = f"{host.name}.ofed: mlnx_ofed"
    path = site.path(wanted.bundle)
    try:
        actual = wanted.sha256 if _only_elsewhere(wanted) else _sha256(path)
    except OSError as error:
        message = f"{where}.bundle: {wanted.bundle}: {error.strerror}; give the path of the .tgz on this control host"
        raise DeployError(message) from None
    if actual != wanted.sha256:
        raise DeployError(
            f"{where}.sha256: {wanted.bundle} has {actual}, not {wanted.sha256}; download it again, and compare with "
            "the checksum that NVIDIA publishes"
        )
    named = BUNDLE.fullmatch(path.name)
    if named is None:
        return
    mine = (system.identity if system.identity in OF_THEIR_OWN else "rhel", str(system.major), arch)
    if mine != (named["distribution"], named["release"].partition(".")[0], named["arch"]):
        raise NodeError(
            f"{where}.bundle: {path.name} is for {named['distribution']} {named['release']} on {named['arch']}, but this host "
            f"is {system} on {arch}; give the host or its group the bundle for it"
        )


def _only_elsewhere(wanted: MlnxOfed) -> bool:
    """Whether the bundle is on the control host only, since this node deploys itself."""
    return deploys_itself(host) and not site.path(wanted.bundle).exists()


@cache
def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@frozen
class Installed:
    """The last installed bundle. ``recorded``: the output of `ofed_info -s` right after it; ``current``: the one now."""

    sha256: str = ""
    recorded: str = ""
    current: str = ""


_INSTALLED = """
if [ -r "$1/installed" ]; then head -n 2 "$1/installed"; else echo none; echo none; fi
ofed_info -s 2>/dev/null || true
"""


class InstalledBundle(FactBase[Installed]):
    """The last installed bundle."""

    default = Installed
    shell = _INSTALLED
    words = (FOLDER,)

    def process(self, output: list[str]) -> Installed:
        """Parse three lines, of which the last may be missing."""
        return Installed(*output[:3])


HOLDS: dict[Family, str] = {
    "debian": """
bundle_packages() {
  for file in DEBS/*.deb; do
    [ -e "$file" ] || continue
    package=$(dpkg-deb -f "$file" Package)
    if dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$'; then echo "$package"; fi
  done
}
hold() { noted "$holds" apt-mark hold "$@"; }
release() {
  for package; do if dpkg-query -W "$package" >/dev/null 2>&1; then marking apt-mark unhold "$package"; fi; done
}
""",
    "rhel": """
bundle_packages() {
  for file in RPMS/*.rpm; do
    [ -e "$file" ] || continue
    package=$(rpm --query --queryformat '%{NAME}' --package "$file" 2>/dev/null)
    if rpm --quiet --query "$package"; then echo "$package"; fi
  done
}
hold() {
  # shellcheck disable=SC2086  # a lock is a word
  locks=$(rpm --query --queryformat '%{NAME}-%{EPOCHNUM}:%{VERSION}-%{RELEASE}.* ' "$@") &&
    noted "$holds" dnf versionlock add --raw $locks
}
release() { dnf versionlock delete "$@"; }
""",
}
"""Shell functions. `bundle_packages` runs in the bundle's folder, and prints those of its packages that are installed. `hold`
and `release` set and remove the holds of packages."""

# The installer removes the packages of an earlier bundle, so their holds are removed first. Its exit codes are listed in the
# vendor's manual under "mlnxofedinstall Return Codes".
_INSTALL = (
    UNDISTURBED
    + signatures.OF_RPMS
    + """
bundle=$1 sha256=$2 folder=$3 holds=$4; shift 4
fail() { echo "ofed: $1" >&2; exit 1; }
work=
trap 'rm -rf "$work" "$bundle"' EXIT
# Without this, dash ends at a signal without the trap above. SIGKILL leaves the folder to the next run.
trap 'exit 129' HUP INT TERM
rm -rf "$folder"/unpacked.*
kernel=$(uname -r)
[ -e "/lib/modules/$kernel/build/include" ] ||
  fail "the headers of the running kernel $kernel are missing, which the drivers' build needs; give the key 'kernel'"
echo "$sha256  $bundle" | sha256sum --check --status || fail 'the bundle was damaged in the upload (SHA256); deploy again'
work=$(mktemp -d "$folder/unpacked.XXXXXX")
tar -xf "$bundle" -C "$work" --no-same-owner
installer=$(find "$work" -mindepth 1 -maxdepth 2 -type f -name mlnxofedinstall)
[ -n "$installer" ] || fail 'the bundle has no mlnxofedinstall; give the .tgz of MLNX_OFED_LINUX'
if enforced; then accept_rpms ofed "${installer%/*}"/RPMS/kmod-*.rpm; fi
cd "${installer%/*}"
# mlnxofedinstall runs dpkg, which does not wait for another one. To read no selections takes its locks and changes nothing.
if [ -d DEBS ]; then
  marking dpkg --set-selections < /dev/null || fail 'dpkg cannot be used, as it says above; deploy again once it can'
fi
held=
if [ -r "$folder/installed" ]; then held=$(tail -n +3 "$folder/installed"); fi
# shellcheck disable=SC2086  # a package is a word
if [ -n "$held" ]; then release $held; fi
# If the installer fails, or is interrupted, the next deploy releases them again.
{ echo none; echo none; for package in $held; do echo "$package"; done; } > "$folder/installed.new"
put "$folder/installed.new" "$folder/installed"
code=0
./mlnxofedinstall "$@" || code=$?
# shellcheck disable=SC2086  # a package is a word
if [ "$code" != 0 ] && [ -n "$held" ]; then hold $held || true; fi
case $code in
  0) ;;
  2) echo 'the installer has no firmware for a card' ;;
  22) fail 'mlnxofedinstall does not know one of the options' ;;
  28) fail 'there is not enough free space for mlnxofedinstall' ;;
  171) fail 'mlnxofedinstall supports none of the cards (the option --skip-unsupported-devices-check disables the check)' ;;
  172) fail 'mlnxofedinstall lacks a prerequisite; its output is above' ;;
  173) fail 'mlnxofedinstall could not start the mst driver' ;;
  *) fail 'mlnxofedinstall failed; its output is above, its logs are in /tmp/MLNX_OFED_LINUX.*.logs' ;;
esac
packages=$(bundle_packages)
cd /
# shellcheck disable=SC2086  # a package is a word
if [ -n "$packages" ]; then hold $packages; fi
{ echo "$sha256"; ofed_info -s; for package in $packages; do echo "$package"; done; } > "$folder/installed.new"
put "$folder/installed.new" "$folder/installed"
"""
)


@operation()
def bundle(wanted: MlnxOfed, family: Family) -> Commands:
    """Install the bundle, unless it is installed and has modules for the running kernel, or DKMS can build them."""
    if kernel.skip_until_booted("MLNX_OFED is installed"):
        return
    have = host.get_fact(InstalledBundle)
    stack = host.get_fact(modules.OfedStack)
    same = have.sha256 == wanted.sha256 and have.recorded == have.current
    if same and (stack.built or stack.dkms):
        host.noop("MLNX_OFED is installed")
        return
    if _only_elsewhere(wanted):
        yield refuse(f"ofed: mlnx_ofed.bundle: the node has no {wanted.bundle} to install; {BY_CONTROL_HOST}")
        return
    if problem := signatures.refusal_of_packages("ofed", family):
        yield refuse(problem)
        return
    if family == "rhel":
        yield from holds.lock_plugin(installed(family))
    uploaded = f"{FOLDER}/bundle.tgz"
    yield script('mkdir -p "$1"', FOLDER)
    yield FileUploadCommand(
        str(site.path(wanted.bundle)), uploaded, remote_temp_filename=host.get_temp_filename(uploaded)
    )
    firmware = [] if wanted.firmware_update else ["--without-fw-update"]
    options = ("--force", *firmware, *wanted.options)
    words = (uploaded, wanted.sha256, FOLDER, holds.PATH, *options)
    yield script(holds.NOTED + HOLDS[family] + _INSTALL, *words, limit=LIMITS.here().build)
