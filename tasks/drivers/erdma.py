"""Installs the driver of Alibaba Cloud's eRDMA, by the vendor's installer, by a DKMS package or from the kernel; sets its mode.

Written from vendor documents; the installer was not run on such an instance. The lab runs a stand-in for it, and a DKMS
package of the kernel's driver. The driver is built against OFED's modules where OFED is installed (ofa_kernel), so this runs
after OFED.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from attrs import field, frozen
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.report.names import STATE_FOLDER
from agent.spec.validators import Matches
from tasks import disruption, packages, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.common.failures import NodeError
from tasks.common.texts import HEADER, Texts, written
from tasks.host import kernel
from tasks.host.kernel_modules import MODULE_OPTIONS
from tasks.packages import UNDISTURBED, Family, OperatingSystem, dkms, signatures, vendor_repository
from tasks.packages.vendor_repository import PACKAGE_NAME, PACKAGE_VERSION, WEB, Package, Repository
from tasks.time_limits import LIMITS

MODULE = "erdma"
AT_BOOT = "/etc/modules-load.d/trackbed-erdma.conf"
OPTIONS = "/etc/modprobe.d/trackbed-erdma.conf"
BUILD_OPTIONS = "/etc/dkms/erdma.conf"
"""DKMS reads it after the source's own dkms.conf, at each build (dkms(8))."""
LEFTOVERS = (AT_BOOT, OPTIONS, BUILD_OPTIONS, *vendor_repository.files_of(MODULE))
INSTALLED = f"{STATE_FOLDER}/erdma-installer"
"""The checksum of the installer that has completed."""

# The distributions that the vendor documents, by ID in os-release: Ubuntu by release, the others by major release.
INSTALLER_SYSTEMS = {"alinux": ("3",), "ubuntu": ("22.04", "24.04"), "anolis": ("8",), "rocky": ("8",)}

# As the vendor's own controller installs them before it runs install.sh (AliyunContainerService/alibabacloud-erdma-controller,
# internal/drivers). build-essential: there as a recommendation of dpkg-dev.
INSTALLER_NEEDS: dict[Family, tuple[str, ...]] = {
    "debian": ("build-essential", "debhelper", "autotools-dev", "dkms", "libnl-3-dev", "libnl-route-3-dev", "cmake"),
    "rhel": ("gcc-c++", "dkms", "cmake"),
}
"""The packages with which the installer builds the driver and its library. It does not install them itself."""

Source = Literal["installer", "dkms", "in-tree"]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


@frozen
class Installer:
    """The vendor's archive erdma_installer-VERSION.tar.gz: the URL for nodes, and the checksum that the vendor publishes."""

    url: str = field(validator=WEB)
    sha256: str = field(
        converter=_lower,
        validator=Matches(re.compile(r"[0-9a-f]{64}"), "give the archive's SHA-256, 64 hexadecimal digits"),
    )


@frozen
class DkmsPackage:
    """A package that installs the driver's source for DKMS, under the name `erdma`."""

    repository: Repository
    version: str = field(validator=PACKAGE_VERSION)
    package: str = field(default="erdma-dkms", validator=PACKAGE_NAME)


@frozen
class Erdma:
    """Where the driver comes from, and its mode. ``compat_mode``: False is iWARP, True is compatible with RoCE."""

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
                "compat_mode: the kernel's own driver does not support it; give the source 'installer' or 'dkms'"
            )


ERDMA = Key[Erdma | None]("erdma", None, record(Erdma))


@frozen
class LoadedErdma:
    """The loaded driver: its mode (None: it has no such parameter), and the number of its users."""

    compat_mode: bool | None = None
    users: int = 0


# A program that has opened a device counts in the module's refcnt (ib_uverbs_open). Users in the kernel, such as NVMe over
# RDMA, do not: they are counted by their queue pairs.
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


class LoadedDriver(FactBase[LoadedErdma]):
    """The loaded driver's mode as the kernel reports it, and its users."""

    default = LoadedErdma
    prefetched = False
    shell = _LOADED

    def process(self, output: list[str]) -> LoadedErdma:
        """Parse lines of a word and its value, and count the queue pairs."""
        values = dict(line.partition(" ")[::2] for line in output)
        mode = {"Y": True, "N": False}.get(values.get("mode", ""))
        return LoadedErdma(mode, int(values.get("users") or 0) + output.count("queue-pair"))


@deploy("eRDMA")
def install() -> None:
    """Install and load the driver as the inventory says; without the key, do nothing.

    :raises NodeError: the installer does not support the distribution.
    :raises DeployError: the mode is given twice.
    """
    wanted = ERDMA.here()
    if wanted is None:
        return
    system = packages.system()
    _check(wanted, system)
    package = wanted.dkms if wanted.source == "dkms" else None
    # The repository comes first, so that a wrong key leaves the node unchanged.
    vendor_repository.configure(MODULE, package.repository if package else None, system.family)
    # The options come before the package, which may load the driver.
    options = f"{HEADER}softdep erdma pre: ib_uverbs\n"
    if wanted.compat_mode is not None and wanted.source != "in-tree":
        options += f"options erdma compat_mode={_letter(wanted.compat_mode)}\n"
    written(name="Driver's options", path=OPTIONS, text=options)
    text = build_options(bool(wanted.compat_mode)) if wanted.source != "in-tree" else ""
    written(name="Build's options", path=BUILD_OPTIONS, text=text)
    pinned = kernel.KERNEL.here()
    release = pinned.release if pinned else None
    if package:
        vendor_repository.packages(
            name="DKMS package",
            wanted=(Package(package.package, package.version), *_user_space(system)),
            family=system.family,
            module=MODULE,
        )
    if wanted.installer is not None and wanted.source == "installer":
        packages.present(name="Installer's packages", names=INSTALLER_NEEDS[system.family], family=system.family)
        run_installer(name="Installer", installer=wanted.installer, compat_mode=bool(wanted.compat_mode))
    if wanted.source != "in-tree":
        build(name="Driver built", release=release, package=wanted.source == "dkms")
    written(name="Driver at boot", path=AT_BOOT, text=f"{HEADER}ib_core\nib_uverbs\nerdma\n")
    load(name="Driver loaded", wanted=wanted, release=release)


def _check(wanted: Erdma, system: OperatingSystem) -> None:
    if wanted.source == "installer":
        supported = INSTALLER_SYSTEMS.get(system.identity, ())
        if system.version not in supported and str(system.major) not in supported:
            known = ", ".join(
                f"{packages.DISTRIBUTIONS[name].name} {' and '.join(versions)}"
                for name, versions in INSTALLER_SYSTEMS.items()
            )
            raise NodeError(
                f"{host.name}.erdma.source: the installer does not support {system}; it supports {known}; "
                "give the source 'dkms' or 'in-tree'"
            )
    if wanted.compat_mode is not None and "compat_mode" in MODULE_OPTIONS.here().get(MODULE, {}):
        raise DeployError(f"{host.name}.erdma.compat_mode: kernel_module_options sets it, too; remove it there")


def build_options(compat_mode: bool) -> str:
    """DKMS's file of options for the driver, by which each build of it has the environment that the vendor's controller gives.

    The driver's PRE_BUILD script configures the build by these variables (kernel/conf of alibaba/elastic-rdma-drivers). A build
    that follows an upgrade of the kernel has none of them otherwise. In RoCE's mode, connections need management datagrams.
    DKMS takes PRE_BUILD for a path below its tree, so the path of env begins there.
    """
    variables = "ERDMA_CM_NO_BOUND_IF=1" + (" ERDMA_FORCE_MAD_ENABLE=1" if compat_mode else "")
    return f'{HEADER}if [ -n "$PRE_BUILD" ]; then PRE_BUILD="{"../" * 12}usr/bin/env {variables} $PRE_BUILD"; fi\n'


def _user_space(system: OperatingSystem) -> tuple[Package, ...]:
    """The package with rdma-core's eRDMA provider: its own on Debian, part of libibverbs on RHEL."""
    return (Package("ibverbs-providers"),) if system.family == "debian" else ()


def _letter(mode: bool) -> str:
    return "Y" if mode else "N"


# In the record's folder, since /tmp and /var/tmp may be mounted noexec.
_INSTALL = (
    UNDISTURBED
    + vendor_repository.FETCH
    + dkms.CAUSE
    + """
url=$1 want=$2 record=$3 mad=$4
mkdir -p "${record%/*}"
rm -rf "${record%/*}"/unpacked.*
work=$(mktemp -d -p "${record%/*}" unpacked.XXXXXX); trap 'rm -rf "$work"' EXIT; trap 'exit 129' HUP INT TERM
fetch "$url" "$work/archive"
actual=$(sha256sum "$work/archive"); actual=${actual%% *}
if [ "$actual" != "$want" ]; then
  echo "$url has the SHA-256 $actual, expected is $want; it was not run:" >&2
  echo "deploy again, or give the checksum that the vendor publishes for this version" >&2
  exit 1
fi
mkdir "$work/tree"
tar -xzf "$work/archive" -C "$work/tree" --no-same-owner
installer=$(find "$work/tree" -maxdepth 2 -name install.sh -type f)
[ -f "$installer" ] || { echo "$url has no install.sh in its top folder; it is not the vendor's installer" >&2; exit 1; }
cd "${installer%/*}"
export ERDMA_CM_NO_BOUND_IF=1
if [ "$mad" = yes ]; then export ERDMA_FORCE_MAD_ENABLE=1; fi
./install.sh --batch >&2 || { cause erdma "$(uname -r)"; exit 1; }
echo "$want" > "$record"
"""
)


def _newer_input(kernel: str) -> bool:
    """For an operation: whether what the driver was built with has changed since."""
    newer: bool = host.get_fact(dkms.NewerInput, module=MODULE, kernel=kernel, options=BUILD_OPTIONS)
    return newer


@operation()
def run_installer(installer: Installer, compat_mode: bool) -> Commands:
    """Verify and run the vendor's installer, unless it has completed since OFED was installed and the build got its options."""
    # The installer builds only for the running kernel.
    if kernel.skip_until_booted("the installer runs"):
        return
    running = host.get_fact(dkms.RunningKernel)
    completed = host.get_fact(Texts, paths=(INSTALLED,)).get(INSTALLED, "").strip()
    if completed == installer.sha256 and not _newer_input(running):
        host.noop("the installer has completed")
        return
    if problem := signatures.refusal(MODULE, signatures.DKMS):
        yield refuse(problem)
        return
    mode = "yes" if compat_mode else "no"
    yield script(_INSTALL, installer.url, installer.sha256, INSTALLED, mode, limit=LIMITS.here().build)


@operation()
def build(release: str | None, package: bool) -> Commands:
    """Have DKMS build the driver for the wanted kernel, and again if OFED or the options have changed since.

    :param package: a package has installed the source. The installer does so only when the wanted kernel runs.
    """
    if not package and kernel.skip_until_booted("the installer runs"):
        return
    target = release or host.get_fact(dkms.RunningKernel)
    builds = dkms.newest(build for build in host.get_fact(dkms.Builds) if build.module == MODULE)
    missing = f"DKMS has no module {MODULE}: the package or installer did not install the driver's source"
    yield from dkms.install(builds, target, missing, _newer_input)


# rmmod, since `modprobe -r` removes erdma but then fails if its soft dependency (our options name one) is in use.
_LOAD = """
want=$1 reload=$2
if [ "$reload" = yes ]; then rmmod erdma; fi
modprobe erdma || { dmesg | tail -n 5 >&2; echo "erdma does not load; the kernel's last messages are above" >&2; exit 1; }
[ -n "$want" ] || exit 0
mode=$(cat /sys/module/erdma/parameters/compat_mode 2>/dev/null || echo missing)
if [ "$mode" != "$want" ]; then
  echo "compat_mode of the loaded erdma is $mode, wanted is $want; look for another setting: grep -r erdma /etc/modprobe.d" >&2
  exit 1
fi
"""


@operation()
def load(wanted: Erdma, release: str | None) -> Commands:
    """Load the driver. Reload it if another build or mode is loaded, or request a reboot if that is not allowed now."""
    running = host.get_fact(dkms.RunningKernel)
    if release not in (None, running):
        host.noop(f"the driver is loaded once the kernel {release} runs")
        return
    module = host.get_fact(dkms.ModuleState, module=MODULE)
    problem = _unsuitable(wanted, module, running)
    if problem and host.state.is_executing:
        yield refuse(problem)
        return
    have = host.get_fact(LoadedDriver)
    mode = wanted.compat_mode if wanted.source != "in-tree" else None
    letter = "" if mode is None else _letter(mode)
    other = module.path if module.stale or not module.is_loaded else None
    if other and (problem := signatures.refusal(MODULE, other)):
        yield refuse(problem)
        return
    if module.is_loaded and not module.stale and mode in (None, have.compat_mode):
        yield from reboot.withdraw(MODULE)
        return
    # It is built against OFED's modules, which that reboot loads.
    if host.state.is_executing and reboot.awaited_by("ofed"):
        host.noop("the driver is loaded once OFED's modules are")
        return
    if not module.is_loaded:
        yield from reboot.withdraw(MODULE)
        yield script(_LOAD, letter, "no")
        return
    # The srcversion makes the reason another one after an upgrade.
    reason = (
        f"the installed erdma ({module.installed}) is not the loaded one"
        if module.stale
        else f"compat_mode={letter} is wanted"
    )
    if have.users:
        yield from reboot.request(MODULE, f"{reason}, and the loaded driver is in use")
        return
    if disruption.deferred("reload of erdma", disruption.DRIVER_RELOAD, of_nics=True):
        yield from reboot.request(MODULE, reason)
        return
    yield from reboot.withdraw(MODULE)
    yield script(_LOAD, letter, "yes")


def _unsuitable(wanted: Erdma, module: dkms.Module, running: str) -> str | None:
    if module.path is None:
        hint = "Debian's does not; give the source 'dkms'" if wanted.source == "in-tree" else "DKMS installed none"
        return f"erdma: the kernel {running} does not have the module erdma ({hint})"
    if wanted.source == "in-tree" and module.out_of_tree:
        return (
            f"erdma: modprobe prefers {module.path} to the kernel's own driver; remove its package (see `dkms status`)"
        )
    if wanted.source != "in-tree" and not module.out_of_tree:
        return (
            f"erdma: modprobe prefers the kernel's own driver {module.path} to the one that DKMS built; "
            "check /etc/depmod.d and run depmod"
        )
    return None
