"""The kernel: its release, its headers (DKMS builds against them), and updates that do not boot another one unasked.

The RHEL half is asserted by its commands: not run.
"""

from __future__ import annotations

import re

from attrs import field, frozen
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.validators import Matches
from tasks import packages, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.packages import Family, System, vendor_repository
from tasks.packages.dkms import RunningKernel
from tasks.packages.vendor_repository import HeldPackages, Package

TASK = "kernel"

# linux-image-6.1.0-9-amd64 is one kernel; linux-image-amd64 or linux-generic-hwe-22.04 depends on the newest.
META = re.compile(
    r"linux-((image|headers|modules-extra)-[a-z]\S*|(generic|virtual|lowlatency|aws|azure|gcp|oracle|oem)\S*)"
)
RHEL = re.compile(r"kernel(-(core|modules|modules-core|modules-extra|devel|uek\S*|64k\S*))?")


@frozen
class Kernel:
    """What the node's kernel shall be.

    ``release``: as `uname -r` prints it; None: whichever runs. ``headers``: its headers are installed. ``hold``: updates of the
    distribution bring no other kernel; False takes the holds off, None leaves them alone.
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
KEYS = (KERNEL,)


def awaited() -> str | None:
    """For an operation: the release that shall run, while another one runs.

    What is built for a kernel by itself, or loaded, waits for it: the running one may have no headers any more, and never needs
    them. After the reboot the operation runs again.
    """
    wanted = KERNEL.here()
    if wanted is None or wanted.release is None or host.get_fact(RunningKernel) == wanted.release:
        return None
    return wanted.release


def waits(what: str) -> bool:
    """For an operation: whether ``what`` is done once another kernel runs; then that is said, and there is nothing to do."""
    release = awaited()
    if release is not None:
        host.noop(f"{what} when {release} runs")
    return release is not None


# Rescue images and those that dracut keeps for itself are no kernels to boot.
_NEXT = """
if command -v grubby >/dev/null; then
  grubby --default-kernel
else
  ls -1v /boot/vmlinuz-[0-9]* 2>/dev/null | tail -n 1
fi
"""


class NextKernel(FactBase[str | None]):
    """The release that the boot loader takes next: grubby's default, and without grubby the newest, as GRUB sorts them."""

    def command(self) -> StringCommand:
        """A path such as /boot/vmlinuz-6.1.0-44-amd64."""
        return script(_NEXT)

    def process(self, output: list[str]) -> str | None:
        """The release in it."""
        return output[0].rpartition("vmlinuz-")[2] if output else None


@deploy("Kernel")
def pin() -> None:
    """Carry out what the inventory gives; without the key, nothing."""
    wanted = KERNEL.here()
    if wanted is None:
        return
    system = packages.system()
    have(name="Kernel and headers", release=wanted.release, headers=wanted.headers, system=system)
    if wanted.hold is not None:
        hold(
            name="Kernel updates held" if wanted.hold else "Kernel updates allowed",
            held=wanted.hold,
            family=system.family,
        )
    boot(name="The kernel that runs", release=wanted.release, family=system.family)


@operation()
def have(release: str | None, headers: bool, system: System) -> Commands:
    """Install the kernel of a release and the headers, or the headers of the running kernel."""
    target = release or host.get_fact(RunningKernel)
    remedy = (
        f"kernel: there may be no packages of {target} any more; give kernel.release one that the repository has, "
        "or add a repository that keeps older kernels (snapshots, RHEL's minor releases)"
    )
    wanted = _kernel(target, system) if release else ()
    if headers:
        wanted = (*wanted, _headers(target, system))
    yield from vendor_repository.packages._inner(wanted=wanted, family=system.family, hold=False, remedy=remedy)


def _kernel(release: str, system: System) -> tuple[Package, ...]:
    if system.family == "rhel":
        return (Package(*rpm(release)),)
    image = Package(f"linux-image-{release}")
    # Ubuntu has most drivers of NICs there, not in what the image depends on.
    extra = (Package(f"linux-modules-extra-{release}"),) if system.identity == "ubuntu" else ()
    return (image, *extra)


def _headers(release: str, system: System) -> Package:
    if system.family == "rhel":
        name, version = rpm(release)
        return Package(f"{name}-devel", version)
    return Package(f"linux-headers-{release}")


def rpm(release: str) -> tuple[str, str]:
    """Name and version of the package: 5.14.0-427.el9.aarch64+64k is of kernel-64k, 5.15.0-3.el9uek.x86_64 of kernel-uek."""
    named, _, variant = release.partition("+")
    version = re.sub(r"\.(x86_64|aarch64)$", "", named)
    if version.endswith("uek"):
        variant = "uek"
    return f"kernel-{variant}" if variant else "kernel", version


@operation()
def hold(held: bool, family: Family) -> Commands:
    """Hold the packages that bring the newest kernel, or let them go."""
    have = packages.installed(family)
    pattern = META if family == "debian" else RHEL
    found = sorted(name for name in have if pattern.fullmatch(name))
    on_hold = host.get_fact(HeldPackages, family=family)
    wrong = [name for name in found if (name in on_hold) != held]
    if not wrong:
        host.noop(f"{'held' if held else 'not held'}: {', '.join(found) or 'no kernel package'}")
    elif family == "debian":
        yield StringCommand("apt-mark", "hold" if held else "unhold", *map(QuoteString, wrong))
    else:
        if held and vendor_repository.LOCK_PLUGIN not in have:
            yield StringCommand("dnf", "install", "-y", vendor_repository.LOCK_PLUGIN)
        yield StringCommand("dnf", "versionlock", "add" if held else "delete", *map(QuoteString, wrong))


@operation()
def boot(release: str | None, family: Family) -> Commands:
    """See to it that the next boot takes the release, and wish for that boot if another one runs."""
    if release is None:
        yield from reboot.withdraw(TASK)
        return
    running, following = host.get_fact(RunningKernel), host.get_fact(NextKernel)
    if following not in (release, None) and family == "rhel":
        yield StringCommand("grubby", "--set-default", QuoteString(f"/boot/vmlinuz-{release}"))
    # Before it executes, the wanted kernel may not be there yet.
    elif following not in (release, None) and host.state.is_executing:
        yield refuse(
            f"kernel: release {release} is wanted, but {following} is installed, too, and GRUB boots the newest; "
            f"remove the packages of {following} (apt remove linux-image-{following}), or give that release"
        )
        return
    if running == release:
        yield from reboot.withdraw(TASK)
    else:
        yield from reboot.record(TASK, f"kernel {release} is installed, and {running} runs")
