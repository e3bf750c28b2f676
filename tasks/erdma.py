"""Alibaba Cloud's eRDMA: its driver from the vendor's installer, from a DKMS package or from the kernel, and its mode.

From vendor documents: the installer was not run on such an instance; the lab runs one of that shape, and a DKMS package of the
kernel's own driver. The driver builds against OFED's modules where there are any (ofa_kernel), so this comes after OFED.
"""

from __future__ import annotations

import re
from io import StringIO
from typing import Any, Literal

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.validators import Matches
from tasks import kernel, packages, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.kernel_modules import HEADER, MODULE_OPTIONS
from tasks.packages import System, dkms, vendor_repository
from tasks.packages.vendor_repository import PACKAGE_NAME, PACKAGE_VERSION, URL, Package, Repository

MODULE = "erdma"
AT_BOOT = "/etc/modules-load.d/trackbed-erdma.conf"
OPTIONS = "/etc/modprobe.d/trackbed-erdma.conf"
INSTALLED = "/var/lib/trackbed/erdma-installer"
"""The checksum of the installer that ran to its end."""

# The documented systems, by ID in os-release, of those that Trackbed knows; RHEL's kin by their first number.
INSTALLER_SYSTEMS = {"alinux": ("3",), "ubuntu": ("22.04", "24.04"), "anolis": ("8",), "rocky": ("8",)}

Source = Literal["installer", "dkms", "in-tree"]


def _lower(given: Any) -> Any:
    return given.lower() if isinstance(given, str) else given


@frozen
class Installer:
    """The vendor's archive erdma_installer-VERSION.tar.gz: where nodes fetch it, and the checksum that the vendor gives."""

    url: str = field(validator=Matches(URL, "give a URL, http:// or https://"))
    sha256: str = field(
        converter=_lower,
        validator=Matches(re.compile(r"[0-9a-f]{64}"), "give the archive's SHA-256, 64 hexadecimal digits"),
    )


@frozen
class DkmsPackage:
    """A package that brings the driver's source to DKMS, under the name `erdma`."""

    repository: Repository
    version: str = field(validator=PACKAGE_VERSION)
    package: str = field(default="erdma-dkms", validator=PACKAGE_NAME)


@frozen
class Erdma:
    """Where the driver comes from, and its mode: ``compat_mode`` False is the iWARP port, True is compatible with RoCE."""

    source: Source
    installer: Installer | None = None
    dkms: DkmsPackage | None = None
    compat_mode: bool | None = None

    def __attrs_post_init__(self) -> None:
        if self.source == "installer" and self.installer is None:
            raise ValueError("installer: it is missing; give its url and sha256")
        if self.source == "dkms" and self.dkms is None:
            raise ValueError("dkms: it is missing; give its repository and version")
        if self.source == "in-tree" and self.compat_mode:
            raise ValueError(
                "compat_mode: the kernel's own driver has no such mode; take the installer or a DKMS package"
            )


ERDMA = Key[Erdma | None]("erdma", None, record(Erdma))
KEYS = (ERDMA,)


@frozen
class Loaded:
    """The loaded driver: its mode (None: it has no such parameter), and how many use it."""

    compat_mode: bool | None = None
    users: int = 0


# A program that has opened a device counts as a user of the module (ib_uverbs_open); the kernel's own, such as NVMe over
# RDMA, do not: their queue pairs tell.
_LOADED = """
module=/sys/module/erdma
[ -d "$module" ] || exit 0
echo "mode $(cat "$module/parameters/compat_mode" 2>/dev/null)"
echo "users $(cat "$module/refcnt")"
for device in /sys/class/infiniband/*; do
  [ "$(basename "$(readlink "$device/device/driver/module")")" = erdma ] || continue
  rdma resource show qp link "$(basename "$device")" | grep -v 'comm \\[ib_core\\]' | sed 's/.*/queue-pair/' || true
done
"""


class LoadedDriver(FactBase[Loaded]):
    """The loaded driver's mode, read back from the kernel, and its users."""

    default = Loaded

    def command(self) -> StringCommand:
        """One script; a driver that is not loaded is no error."""
        return script(_LOADED)

    def process(self, output: list[str]) -> Loaded:
        """Lines of a word and its value."""
        found = dict(line.partition(" ")[::2] for line in output)
        mode = {"Y": True, "N": False}.get(found.get("mode", ""))
        return Loaded(mode, int(found.get("users") or 0) + output.count("queue-pair"))


# A file's change time is when it came onto this disk, however old a package says that it is.
_BEHIND = """
kernel=$1
module=$(modinfo -k "$kernel" -n erdma 2>/dev/null) || exit 0
made=$(stat -c %Z -- "$module")
for symbols in "/usr/src/ofa_kernel/$(uname -m)/$kernel/Module.symvers" /usr/src/ofa_kernel/default/Module.symvers; do
  [ -e "$symbols" ] || continue
  if [ "$(stat -c %Z -- "$symbols")" -gt "$made" ]; then echo "$symbols"; fi
  break
done
"""


class BehindOfed(FactBase[str | None]):
    """OFED's symbol versions, if they are newer than the installed driver: it was built against another OFED, or none."""

    def command(self, kernel: str) -> StringCommand:
        """Compare the two files."""
        return script(_BEHIND, kernel)

    def process(self, output: list[str]) -> str | None:
        """The path of OFED's file."""
        return output[0] if output else None


class InstallerRun(FactBase[str | None]):
    """The checksum of the installer that ran on this node to its end."""

    def command(self) -> StringCommand:
        """Our own note."""
        return script('if [ -e "$1" ]; then cat "$1"; fi', INSTALLED)

    def process(self, output: list[str]) -> str | None:
        """Its only line."""
        return output[0].strip() if output else None


@deploy("eRDMA")
def install() -> None:
    """Carry out what the inventory gives; without the key, nothing.

    :raises DeployError: for a system that the installer does not know, and a mode that is given twice.
    """
    wanted = ERDMA.here()
    if wanted is None:
        return
    system = packages.system()
    _check(wanted, system)
    # First of all, so that a wrong key leaves the node as it was.
    if wanted.dkms is not None and wanted.source == "dkms":
        vendor_repository.add("erdma", wanted.dkms.repository, system.family)
    else:
        vendor_repository.remove("erdma", system.family)
    # Then the options: a vendor's package may load the driver.
    options = f"{HEADER}softdep erdma pre: ib_uverbs\n"
    if wanted.compat_mode is not None and wanted.source != "in-tree":
        options += f"options erdma compat_mode={_letter(wanted.compat_mode)}\n"
    files.put(name="Driver's options", src=StringIO(options), dest=OPTIONS, mode="644")
    pinned = kernel.KERNEL.here()
    release = pinned.release if pinned else None
    if wanted.dkms is not None and wanted.source == "dkms":
        vendor_repository.packages(
            name="DKMS package",
            wanted=(Package(wanted.dkms.package, wanted.dkms.version), *_user_space(system)),
            family=system.family,
            module=MODULE,
        )
    if wanted.installer is not None and wanted.source == "installer":
        run_installer(name="Installer", installer=wanted.installer)
    if wanted.source != "in-tree":
        build(name="Driver built", release=release, package=wanted.source == "dkms")
    files.put(name="Driver at boot", src=StringIO(f"{HEADER}ib_core\nib_uverbs\nerdma\n"), dest=AT_BOOT, mode="644")
    load(name="Driver loaded", wanted=wanted, release=release)


def _check(wanted: Erdma, system: System) -> None:
    if wanted.source == "installer":
        supported = INSTALLER_SYSTEMS.get(system.identity, ())
        if system.version not in supported and str(system.major) not in supported:
            known = ", ".join(
                f"{packages.DISTRIBUTIONS[name].name} {' and '.join(versions)}"
                for name, versions in INSTALLER_SYSTEMS.items()
            )
            raise DeployError(
                f"{host.name}.erdma.source: the installer does not support {system}, only {known}; "
                "give the source 'dkms' or 'in-tree'"
            )
    if wanted.compat_mode is not None and "compat_mode" in MODULE_OPTIONS.here().get(MODULE, {}):
        raise DeployError(f"{host.name}.erdma.compat_mode: kernel_module_options gives it, too; leave it out there")


def _user_space(system: System) -> tuple[Package, ...]:
    """The provider of rdma-core: Debian's is a package of its own, RHEL's comes with libibverbs."""
    return (Package("ibverbs-providers"),) if system.family == "debian" else ()


def _letter(mode: bool) -> str:
    return "Y" if mode else "N"


# Not in /tmp, which may be mounted noexec.
_INSTALL = (
    vendor_repository.FETCH
    + dkms.CAUSE
    + """
url=$1 want=$2 note=$3
work=$(mktemp -d -p /var/tmp erdma.XXXXXX); trap 'rm -rf "$work"' EXIT
fetch "$url" "$work/archive"
found=$(sha256sum "$work/archive"); found=${found%% *}
if [ "$found" != "$want" ]; then
  echo "$url has the SHA-256 $found, expected is $want; nothing of it was run:" >&2
  echo "fetch it again, or give the checksum that the vendor publishes for this version" >&2
  exit 1
fi
mkdir "$work/tree"
tar -xzf "$work/archive" -C "$work/tree" --no-same-owner
installer=$(find "$work/tree" -maxdepth 2 -name install.sh -type f)
[ -f "$installer" ] || { echo "$url has no install.sh at its top; it is not the vendor's installer" >&2; exit 1; }
cd "${installer%/*}"
ERDMA_CM_NO_BOUND_IF=1 ./install.sh --batch >&2 || { cause erdma "$(uname -r)"; exit 1; }
mkdir -p "${note%/*}"
echo "$want" > "$note"
"""
)


@operation()
def run_installer(installer: Installer) -> Commands:
    """Run the vendor's installer, unless it ran already, and is not older than OFED; its checksum is verified first."""
    if release := kernel.awaited():
        host.noop(f"the installer builds for the kernel that runs: it runs when {release} does")
        return
    running = host.get_fact(dkms.RunningKernel)
    if host.get_fact(InstallerRun) == installer.sha256 and not host.get_fact(BehindOfed, kernel=running):
        host.noop("the installer has run")
        return
    yield script(_INSTALL, installer.url, installer.sha256, INSTALLED)


@operation()
def build(release: str | None, package: bool) -> Commands:
    """Have DKMS build the driver for the kernel that is to run, and anew when OFED has changed since.

    :param package: its source comes by a package, and not by the installer, which waits for that kernel.
    """
    if not package and kernel.awaited():
        host.noop(f"the installer runs when {release} does")
        return
    target = release or host.get_fact(dkms.RunningKernel)
    builds = [found for found in host.get_fact(dkms.Builds) if found.module == MODULE]
    if not builds:
        yield refuse(f"DKMS knows no module {MODULE}; the package or installer does not bring what it should")
        return
    done = any((found.kernel, found.state) == (target, "installed") for found in builds)
    behind = host.get_fact(BehindOfed, kernel=target) if done else None
    if done and not behind:
        host.noop(f"{MODULE} is installed for {target}")
        return
    yield dkms.build(MODULE, builds[-1].version, target, force=bool(behind))


# Not `modprobe -r`: it fails, though erdma is gone, if what our options name as its soft dependency is in use by others.
_LOAD = """
want=$1 reload=$2
if [ "$reload" = yes ]; then rmmod erdma; fi
modprobe erdma || { dmesg | tail -n 5 >&2; echo "erdma does not load; the kernel's last lines are above" >&2; exit 1; }
[ -n "$want" ] || exit 0
found=$(cat /sys/module/erdma/parameters/compat_mode 2>/dev/null || echo missing)
if [ "$found" != "$want" ]; then
  echo "compat_mode of the loaded erdma is $found, wanted is $want; see who else gives it: grep -r erdma /etc/modprobe.d" >&2
  exit 1
fi
"""


@operation()
def load(wanted: Erdma, release: str | None) -> Commands:
    """Load the driver, or load it again if another build or mode is in memory; that waits for a reboot while it is in use."""
    running = host.get_fact(dkms.RunningKernel)
    if release not in (None, running):
        host.noop(f"the driver is loaded when {release} runs")
        return
    module = host.get_fact(dkms.ModuleState, module=MODULE)
    problem = _unsuitable(wanted, module, running)
    if problem and host.state.is_executing:
        yield refuse(problem)
        return
    have = host.get_fact(LoadedDriver)
    mode = wanted.compat_mode if wanted.source != "in-tree" else None
    letter = "" if mode is None else _letter(mode)
    if not module.is_loaded:
        yield from reboot.withdraw(MODULE)
        yield script(_LOAD, letter, "no")
        return
    if not module.stale and mode in (None, have.compat_mode):
        yield from reboot.withdraw(MODULE)
        return
    what = (
        "another build of erdma than the installed one is loaded" if module.stale else f"compat_mode={letter} is wanted"
    )
    if have.users:
        yield from reboot.record(MODULE, f"{what}, and the loaded driver is in use")
        return
    yield from reboot.withdraw(MODULE)
    yield script(_LOAD, letter, "yes")


def _unsuitable(wanted: Erdma, module: dkms.Module, running: str) -> str | None:
    if module.path is None:
        hint = "Debian's has none; give the source 'dkms'" if wanted.source == "in-tree" else "its build brought none"
        return f"erdma: the kernel {running} has no module erdma ({hint})"
    if wanted.source == "in-tree" and any(
        folder in module.path for folder in ("/updates/dkms/", "/extra/", "/weak-updates/")
    ):
        return (
            f"erdma: {module.path} stands before the kernel's own driver; remove its package (`dkms status` names it)"
        )
    if wanted.source != "in-tree" and not module.out_of_tree:
        return (
            f"erdma: modprobe takes {module.path}, the kernel's own driver, and not the one that DKMS built; "
            "see /etc/depmod.d and run depmod"
        )
    return None
