"""MLNX_OFED: NVIDIA's bundle of drivers and libraries, with an installer of its own.

24.10 is the last; it knows cards up to ConnectX-7 and BlueField-2. From vendor documents: not run with NVIDIA's own.

/var/lib/trackbed/ofed/installed   what was installed last: SHA256, the words of `ofed_info -s`, and the packages that are held
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from attrs import field, frozen
from pyinfra.api.command import FileUploadCommand, StringCommand
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.validators import Matches
from tasks import kernel
from tasks.common.commands import Commands, script
from tasks.ofed import modules
from tasks.packages import System

FOLDER = "/var/lib/trackbed/ofed"

# NVIDIA's names; RHEL's bundles serve its rebuilds, too.
BUNDLE = re.compile(
    r"MLNX_OFED_LINUX-[\d.]+-[\d.]+-(?P<distribution>[a-z]+)(?P<release>[\d.]+)-(?P<arch>\w+)\.(?:tgz|tar\.gz)"
)
OF_THEIR_OWN = ("ubuntu", "debian", "ol", "anolis", "alinux")


def _installer_options(_: object, __: object, value: tuple[str, ...]) -> None:
    for option in value:
        if not re.fullmatch(r"-[!-~]+", option):
            raise ValueError(f"options: {option!r} is no option; give each as `mlnxofedinstall --help` has it")
        if "fw-update" in option:
            raise ValueError(f"options: {option!r} is what firmware_update says; leave it out")


@frozen
class MlnxOfed:
    """A bundle as NVIDIA offers it, a file on the control host. ``options`` are more of its installer's."""

    bundle: str
    sha256: str = field(validator=Matches(re.compile("[0-9a-f]{64}"), "give the 64 digits that sha256sum prints"))
    firmware_update: bool = False
    options: tuple[str, ...] = field(default=(), validator=_installer_options)


def check(wanted: MlnxOfed, system: System, arch: str) -> None:
    """Look at the bundle before any node is touched.

    :raises DeployError: for one that is not there, has another checksum, or is made for another system by its name.
    """
    where = f"{host.name}.ofed: mlnx_ofed"
    path = Path(wanted.bundle)
    try:
        found = _sha256(path)
    except OSError as error:
        message = f"{where}.bundle: {wanted.bundle}: {error.strerror}; give the path of the .tgz on this control host"
        raise DeployError(message) from None
    if found != wanted.sha256:
        raise DeployError(
            f"{where}.sha256: {wanted.bundle} has {found}, and not {wanted.sha256}; fetch it again, and compare with "
            "what NVIDIA publishes"
        )
    named = BUNDLE.fullmatch(path.name)
    if named is None:
        return
    mine = (system.identity if system.identity in OF_THEIR_OWN else "rhel", str(system.major), arch)
    if mine != (named["distribution"], named["release"].partition(".")[0], named["arch"]):
        raise DeployError(
            f"{where}.bundle: {path.name} is for {named['distribution']} {named['release']} on {named['arch']}, and this "
            f"is {system} on {arch}; give the host, or its group, the bundle that is made for it"
        )


@cache
def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@frozen
class Installed:
    """The bundle that was installed last. ``told``: what `ofed_info -s` said then; ``tells``: what it says now."""

    sha256: str
    told: str
    tells: str


_INSTALLED = """
if [ -r "$1/installed" ]; then head -n 2 "$1/installed"; else echo none; echo none; fi
ofed_info -s 2>/dev/null || true
"""


class InstalledBundle(FactBase[Installed | None]):
    """What the node's record says, and MLNX_OFED itself; None: unknown."""

    def command(self) -> StringCommand:
        """The record that our installation left, and ofed_info."""
        return script(_INSTALLED, FOLDER)

    def process(self, output: list[str]) -> Installed:
        """Three lines, of which the last may be missing."""
        return Installed(output[0], output[1], output[2] if len(output) > 2 else "")


# The installer removes the distribution's packages, and its own of an earlier bundle: those that are held it could not.
# What its exit codes mean: "mlnxofedinstall Return Codes" of the vendor's manual.
_INSTALL = """
bundle=$1 sha256=$2 folder=$3; shift 3
fail() { echo "ofed: $1" >&2; exit 1; }
work=
trap 'rm -rf "$work" "$bundle"' EXIT
kernel=$(uname -r)
[ -e "/lib/modules/$kernel/build/include" ] ||
  fail "the headers of the running kernel $kernel are missing, with which the drivers are built: the key 'kernel' installs them"
echo "$sha256  $bundle" | sha256sum --check --status || fail 'the bundle did not arrive as it was sent (SHA256); deploy again'
work=$(mktemp -d "$folder/unpacked.XXXXXX")
tar -xf "$bundle" -C "$work" --no-same-owner
installer=$(find "$work" -mindepth 1 -maxdepth 2 -type f -name mlnxofedinstall)
[ -n "$installer" ] || fail 'the bundle has no mlnxofedinstall; give the .tgz of MLNX_OFED_LINUX'
held=
if [ -r "$folder/installed" ]; then held=$(tail -n +3 "$folder/installed"); fi
if [ -n "$held" ]; then apt-mark unhold $held; fi
rm -f "$folder/installed"
cd "${installer%/*}"
code=0
./mlnxofedinstall "$@" || code=$?
if [ "$code" != 0 ] && [ -n "$held" ]; then apt-mark hold $held || true; fi
case $code in
  0) ;;
  2) echo 'the installer has no firmware for a card' ;;
  22) fail 'mlnxofedinstall does not know one of the options' ;;
  28) fail 'there is not enough free space for mlnxofedinstall' ;;
  171) fail 'mlnxofedinstall finds no card that it supports (its option --skip-unsupported-devices-check lets others be)' ;;
  172) fail 'mlnxofedinstall misses something that it needs; its words are above' ;;
  173) fail 'mlnxofedinstall could not start the mst driver' ;;
  *) fail 'mlnxofedinstall failed; its words are above, its logs in /tmp/MLNX_OFED_LINUX.*.logs' ;;
esac
brought=
for deb in DEBS/*.deb; do
  [ -e "$deb" ] || continue
  package=$(dpkg-deb -f "$deb" Package)
  if dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$'; then brought="$brought $package"; fi
done
cd /
if [ -n "$brought" ]; then apt-mark hold $brought; fi
{ echo "$sha256"; ofed_info -s; for package in $brought; do echo "$package"; done; } > "$folder/installed.new"
mv "$folder/installed.new" "$folder/installed"
"""


@operation()
def bundle(wanted: MlnxOfed) -> Commands:
    """Install the bundle, unless it is there, with modules for the running kernel, or such that DKMS can build for it."""
    if kernel.waits("MLNX_OFED is installed"):
        return
    have = host.get_fact(InstalledBundle)
    stack = host.get_fact(modules.OfedStack)
    same = have is not None and have.sha256 == wanted.sha256 and have.told == have.tells
    if same and stack is not None and (stack.built or stack.dkms):
        host.noop("MLNX_OFED is installed")
        return
    uploaded = f"{FOLDER}/bundle.tgz"
    yield script('mkdir -p "$1"', FOLDER)
    yield FileUploadCommand(wanted.bundle, uploaded, remote_temp_filename=host.get_temp_filename(uploaded))
    firmware = [] if wanted.firmware_update else ["--without-fw-update"]
    yield script(_INSTALL, uploaded, wanted.sha256, FOLDER, "--force", *firmware, *wanted.options)
