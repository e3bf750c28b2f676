"""Installs a kernel release and its headers (DKMS needs them), and holds the kernel packages at their versions.

For the RHEL family dnf's version locks were run. For the kernel's packages and grubby only the commands are tested.
"""

from __future__ import annotations

import re

from attrs import field, frozen
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.validators import Matches
from tasks import packages, reboot
from tasks.common.commands import Commands, refuse
from tasks.common.data import Key, host_data, record
from tasks.common.facts import FactBase, Yes
from tasks.common.texts import Texts
from tasks.packages import Family, OperatingSystem, dkms, holds, vendor_repository
from tasks.packages.dkms import RunningKernel
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import Package

TASK = "kernel"

# Metapackages such as linux-image-amd64 or linux-generic-hwe-22.04, which depend on the newest kernel. (The package
# linux-image-6.1.0-9-amd64 is one kernel.) Ubuntu's linux-modules-nvidia-580-generic depends on NVIDIA's signed modules for the
# newest kernel, and they on that kernel.
META = re.compile(
    r"linux-((image|headers|modules-extra)-[a-z]\S*|(generic|virtual|lowlatency|aws|azure|gcp|oracle|oem)\S*"
    r"|modules-nvidia-(?!\S*-\d+\.\d+\.\d+-)\S+)|proxmox-(default-)?(kernel|headers)(-\d+\.\d+)?"
)
DNF5_LOCKS = "/etc/dnf/versionlock.toml"
RHEL = re.compile(r"kernel(-(core|modules|modules-core|modules-extra|devel|devel-matched|(uek|64k|rt|ml|lt)\S*))?")
_OLD_REAL_TIME = re.compile(r"\.rt\d+\.")
_ELREPO = re.compile(r"\.elrepo$")
_PROXMOX = "-pve"
_WITH_MATCHED = ("rhel", "centos", "rocky", "almalinux", "ol", "fedora")
BUILT_BY_DKMS = ("erdma", "gpu_driver", "ofed")
"""The inventory's keys whose drivers DKMS may build."""


@frozen
class Kernel:
    """The wanted kernel.

    ``release``: as `uname -r` prints it; None: the running one. ``headers``: install its headers. ``hold``: True keeps the
    distribution's updates from installing another kernel, False removes such holds, None leaves them alone.
    """

    release: str | None = field(
        default=None,
        validator=Matches(
            re.compile(r"\d+\.\d+[a-zA-Z0-9.+~_-]+"), "give it as `uname -r` prints it, as 6.1.0-44-amd64"
        ),
    )
    headers: bool = True
    hold: bool | None = None


KERNEL = Key[Kernel | None]("kernel", None, record(Kernel))


def pending_release() -> str | None:
    """For an operation: the wanted release, if another one runs.

    Operations that build or load modules for the running kernel are skipped until the wanted one runs: the running kernel's
    headers may no longer be available, and are not needed. After the reboot these operations run again.
    """
    wanted = KERNEL.here()
    if wanted is None or wanted.release is None or host.get_fact(RunningKernel) == wanted.release:
        return None
    return wanted.release


def skip_until_booted(what: str) -> bool:
    """For an operation: whether to skip it because another kernel is to run. Then the log says that ``what`` happens later."""
    release = pending_release()
    if release is not None:
        host.noop(f"{what} once the kernel {release} runs")
    return release is not None


# The default is a path in GRUB's menu, as 0, 1>2, TITLE>TITLE or ID>ID. In place of an entry that is not there GRUB boots the
# first one (get_entry_number in grub-core/normal/menu.c). grub-reboot and grub-set-default write to the file grubenv.
# The pattern of files leaves out rescue images.
_NEXT = r"""
root=$1
menu=$root/boot/grub/grub.cfg
saved() { sed -n "s/^$1=//p" "$root/boot/grub/grubenv" 2>/dev/null || true; }
if command -v grubby >/dev/null && ! command -v update-grub >/dev/null; then
  grubby --default-kernel
elif [ -e "$menu" ]; then
  default=$(sed -n 's/^[[:space:]]*set default="\(.*\)"$/\1/p' "$menu" | grep -vF '{next_entry}' | tail -n 1) || true
  case $default in *'{saved_entry}'*) default=$(saved saved_entry) ;; esac
  once=$(saved next_entry)
  awk -v path="${once:-$default}" '
    BEGIN { levels = split(path, wanted, ">"); matched[0] = 1 }
    /\{[ \t]*$/ {
      opened++
      if ($1 == "menuentry" || $1 == "submenu") {
        split($0, title, "\047"); name = wanted[++level]
        id = $0; sub(/.*menuentry_id_option \047/, "", id); sub(/\047.*/, "", id)
        here = level > levels || name == number[level] + 0 "" || name == title[2] || name == id
        matched[level] = matched[level - 1] && here
        number[level]++; number[level + 1] = 0; of[opened] = 1
      }
    }
    $1 == "linux" { if (!first) first = $2; if (level >= levels && matched[level]) { found = $2; exit } }
    /^[ \t]*\}/ { if (of[opened]) level--; of[opened--] = 0 }
    END { print found ? found : first }' "$menu"
else
  # shellcheck disable=SC2012  # the names of kernels have no blanks
  ls -1v "$root"/boot/vmlinuz-[0-9]* 2>/dev/null | tail -n 1
fi
"""


class NextKernel(FactBase[str | None]):
    """The release of the next boot: grubby's or GRUB's default, or without both the newest one."""

    shell = _NEXT

    def process(self, output: list[str]) -> str | None:
        """Take the release from the path."""
        return output[0].rpartition("vmlinuz-")[2] if output else None


# A kernel's installation in the RHEL family, and an update before the deploy anywhere, may end without one, or with a part of
# one: /boot was full. Both programs fail at the end of a part. A list that also fails for the running kernel's says nothing.
_NO_INITRAMFS = """
root=$1
image() { for each in "$root/boot/initrd.img-$1" "$root/boot/initramfs-$1.img"; do [ ! -s "$each" ] || echo "$each"; done; }
listed() { if command -v lsinitramfs; then lsinitramfs "$1"; else lsinitrd "$1"; fi >/dev/null 2>&1; }
whole=$(image "$2") next=$(image "$3")
if [ -e "$root/boot/vmlinuz-$3" ] && [ -n "$whole" ] && [ "$2" != "$3" ]; then
  if [ -z "$next" ] || { listed "$whole" && ! listed "$next"; }; then echo missing; fi
fi
"""


class NoInitramfs(Yes):
    """Whether a kernel in /boot has no initramfs, or only a part of one, and the running one has all of it."""

    prefetched = False

    def command(self, running: str, release: str) -> StringCommand:
        """Look for the files."""
        return self.script(_NO_INITRAMFS, "", running, release)


def would_not_boot(release: str) -> str:
    """For an operation: why a boot would not find its root file system with this kernel; empty if it would."""
    running = host.get_fact(RunningKernel)
    if not host.state.is_executing or not host.get_fact(NoInitramfs, running=running, release=release):
        return ""
    return (
        f"kernel {release} has no complete initramfs, so the node would not come back from a boot; see whether /boot is full "
        f"(df), and make one (update-initramfs -c -k {release}, or dracut --force --kver {release})"
    )


@deploy("Kernel")
def pin() -> None:
    """Install, hold and boot the wanted kernel; without the key, do nothing."""
    wanted = KERNEL.here()
    if wanted is None:
        return
    system = packages.system()
    install(name="Kernel and headers", release=wanted.release, headers=wanted.headers, system=system)
    if wanted.hold is not None:
        hold(
            name="Kernel updates held" if wanted.hold else "Kernel updates allowed",
            held=wanted.hold,
            family=system.family,
        )
    boot(name="Kernel of the next boot", release=wanted.release, family=system.family)


@operation()
def install(release: str | None, headers: bool, system: OperatingSystem) -> Commands:
    """Install the kernel of a release and its headers, or only the headers of the running kernel."""
    target = release or host.get_fact(RunningKernel)
    remedy = (
        f"kernel: the repositories may no longer have packages of {target}; give kernel.release one that they have, "
        "or add a repository that keeps older kernels (snapshots, RHEL's minor releases), or enable ELRepo's elrepo-kernel"
    )
    wanted = _kernel(target, system) if release else ()
    if headers:
        wanted = (*wanted, _headers(target, system), *_matched(target, system))
    yield from vendor_repository.packages._inner(wanted=wanted, family=system.family, hold=False, remedy=remedy)
    # Last: now apt has new indexes.
    if release and system.identity == "ubuntu" and (extra := _extra_modules(release)):
        yield from vendor_repository.packages._inner(wanted=extra, family=system.family, hold=False, remedy=remedy)


def _kernel(release: str, system: OperatingSystem) -> tuple[Package, ...]:
    if system.family == "rhel":
        name, version = rpm(release)
        # No other package requires it. On RHEL 10 it has br_netfilter, for one.
        extra = f"{name}-modules-extra"
        return (Package(name, version), *([Package(extra, version)] if extra in packages.installed("rhel") else ()))
    if release.endswith(_PROXMOX):
        # Either of the two, which conflict.
        have, unsigned = packages.installed(system.family), f"proxmox-kernel-{release}"
        return (Package(unsigned if unsigned in have else f"{unsigned}-signed"),)
    return (Package(f"linux-image-{release}"),)


def _extra_modules(release: str) -> tuple[Package, ...]:
    """For an operation: Ubuntu's package of a kernel with most NIC drivers, on which the image does not depend.

    Since Ubuntu 25.10, and in NVIDIA's kernels of all releases, these modules are in a package that the image depends on. So a
    kernel that the repositories have without this package needs none.
    """
    extra, modules = f"linux-modules-extra-{release}", f"linux-modules-{release}"
    known = {name for name, _ in host.get_fact(packages.AvailableVersions, names=(extra, modules), family="debian")}
    return (Package(extra),) if extra in known or modules not in known else ()


def _headers(release: str, system: OperatingSystem) -> Package:
    if system.family == "rhel":
        name, version = rpm(release)
        return Package(f"{name}-devel", version)
    return Package(f"{'proxmox' if release.endswith(_PROXMOX) else 'linux'}-headers-{release}")


def _matched(release: str, system: OperatingSystem) -> tuple[Package, ...]:
    """For an operation: the package kernel-devel-matched of a release, which holds kernel and headers at one version.

    EPEL's dkms requires it since RHEL 9, in any version. If none is there, dnf takes the newest, and with it the newest
    kernel-core, which the next boot would take, without its modules.
    """
    if system.identity not in _WITH_MATCHED or system.major < 9:
        return ()
    kernel, version = rpm(release)
    have, name = packages.installed(system.family), f"{kernel}-devel-matched"
    others = kernel.endswith("uek") or _OLD_REAL_TIME.search(version) or _ELREPO.search(version)
    if others or ("dkms" in have and name not in have):
        return ()
    if any(dkms.by_number(each) > dkms.by_number(version) for each in have.get(name, ())):
        # It has brought its kernel already, and a downgrade would not remove that.
        return ()
    # A node that has the headers may run a kernel that the repositories have no more.
    has_headers = version in have.get(f"{kernel}-devel", ())
    if has_headers and name not in have and all(host_data().get(key) is None for key in BUILT_BY_DKMS):
        return ()
    return (Package(name, version),)


def rpm(release: str) -> tuple[str, str]:
    """For an operation: the name and version of a release's package.

    The name is kernel-64k for 5.14.0-427.el9.aarch64+64k, and kernel-uek for 5.15.0-3.el9uek.x86_64. Before RHEL 9.3 a release
    of the real-time kernel, kernel-rt, is 5.14.0-284.11.1.rt14.296.el9_2.x86_64. ELRepo's releases do not say whether they are
    of kernel-ml or kernel-lt: 6.12.9-1.el9.elrepo.x86_64.
    """
    base, _, variant = release.partition("+")
    version = re.sub(r"\.(x86_64|aarch64)$", "", base)
    if version.endswith("uek"):
        variant = "uek"
    elif _OLD_REAL_TIME.search(version):
        variant = "rt"
    elif _ELREPO.search(version):
        variant = _elrepo(version)
    return f"kernel-{variant}" if variant else "kernel", version


def _elrepo(version: str) -> str:
    """The variant, ml or lt, that the node, or else its repositories, have in this version."""
    have = packages.installed("rhel")
    for each in ("ml", "lt"):
        if version in have.get(f"kernel-{each}-core", ()):
            return each
    known = host.get_fact(packages.AvailableVersions, names=("kernel-lt-core",), family="rhel")
    return "lt" if ("kernel-lt-core", version.partition("-")[0]) in known else "ml"


@operation()
def hold(held: bool, family: Family) -> Commands:
    """Hold the packages through which updates install a newer kernel, or remove the holds."""
    have = packages.installed(family)
    if family == "rhel" and holds.has_dnf5(have):
        if held:
            yield refuse(holds.NO_LOCKS)
        elif locked := _locked_by_dnf5():
            yield refuse(
                f"kernel.hold: dnf on this node is dnf5, and the deploy cannot remove its version locks of "
                f"{', '.join(locked)}; remove them by `dnf versionlock delete {' '.join(locked)}`"
            )
        else:
            host.noop("dnf has no version locks of the kernel's packages")
        return
    pattern = META if family == "debian" else RHEL
    names = sorted(name for name in have if pattern.fullmatch(name))
    on_hold = host.get_fact(HeldPackages, family=family)
    wrong = [name for name in names if (name in on_hold) != held]
    if not wrong:
        host.noop(f"{'held' if held else 'not held'}: {', '.join(names) or 'no kernel package'}")
    elif not held:
        yield holds.release(family, *wrong)
    else:
        if family == "rhel":
            yield from holds.lock_plugin(have)
        yield holds.hold(family, *wrong)


def _locked_by_dnf5() -> list[str]:
    """For an operation: the kernel's packages in dnf5's file of version locks."""
    text = host.get_fact(Texts, paths=(DNF5_LOCKS,)).get(DNF5_LOCKS, "")
    names = re.findall(r'^\s*name\s*=\s*["\']([^"\']+)["\']', text, re.MULTILINE)
    return sorted({name for name in names if RHEL.fullmatch(name)})


@operation()
def boot(release: str | None, family: Family) -> Commands:
    """Make the release the one of the next boot, and request a reboot if another one runs."""
    if release is None:
        yield from reboot.withdraw(TASK)
        return
    running, following = host.get_fact(RunningKernel), host.get_fact(NextKernel)
    if following not in (release, None) and family == "rhel":
        yield StringCommand("grubby", "--set-default", QuoteString(f"/boot/vmlinuz-{release}"))
    # In pyinfra's prepare phase the wanted kernel may not be installed yet.
    elif following not in (release, None) and host.state.is_executing:
        yield refuse(
            f"kernel: release {release} is wanted, and GRUB boots {following}, as the newest or by GRUB_DEFAULT; remove "
            f"{following} (apt remove linux-image-{following}), set GRUB_DEFAULT, or give kernel.release that value"
        )
        return
    if running == release:
        yield from reboot.withdraw(TASK)
    elif why := would_not_boot(release):
        yield refuse(f"kernel: {why}")
    else:
        yield from reboot.request(TASK, f"kernel {release} is installed, and {running} runs")
