"""Builds the kernel modules of an OFED, and makes sure that the loaded modules are the installed ones.

After an upgrade the old modules stay loaded until they are reloaded. So the srcversion of each loaded module is compared with
that of the file that modprobe would load. This covers the loaded modules that were built for the running kernel under the
vendor's names: mlx5_core, mlx5_ib, ib_core and all others of the profile.
"""

from __future__ import annotations

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import disruption, reboot
from tasks.common.commands import Commands, refuse, script, warn
from tasks.common.facts import FactBase, Lines
from tasks.drivers.ofed.users import AUXILIARY, PEER_MEMORY, STORAGE, OfedUsers
from tasks.host import kernel
from tasks.packages import dkms, signatures
from tasks.packages.dkms import Module
from tasks.time_limits import LIMITS

NAMES = ("mlnx-ofed-kernel", "mlnx-ofa_kernel", "iser", "isert", "srp", "mlnx-nvme", "mlnx-nfsrdma")
"""The vendor's names: of DKMS modules (the first on Debian, the second on RHEL; the others are built against it), of folders in
extra/ and weak-updates/, and of packages NAME-modules (deb without DKMS)."""


@frozen
class Stack:
    """An OFED's modules. ``built``: how many there are for the running kernel. ``modules``: those of them that are loaded.

    ``dkms``: DKMS has their sources, and can build them for another kernel.
    """

    kernel: str = ""
    dkms: bool = False
    built: int = 0
    modules: tuple[Module, ...] = ()

    @property
    def stale(self) -> tuple[Module, ...]:
        """The loaded modules that are not the installed ones."""
        return tuple(module for module in self.modules if module.stale)

    @property
    def shadowed(self) -> tuple[Module, ...]:
        """The modules for which modprobe would load the kernel's own file instead of OFED's."""
        return tuple(module for module in self.modules if not module.out_of_tree)


# DKMS keeps the modules it builds in NAME/VERSION/KERNEL/ARCH/module. Packages without DKMS contain the modules.
_STACK = (
    dkms.MODULE
    + """
root=$1; shift
kernel=$(uname -r)
echo "kernel $kernel"
lib=$root/lib/modules/$kernel
for name; do if [ -e "$root/var/lib/dkms/$name" ]; then echo "dkms $name"; fi; done
for name; do
  for file in "$root/var/lib/dkms/$name"/*/"$kernel"/*/module/*.ko*; do if [ -e "$file" ]; then echo "$file"; fi; done
  for folder in extra weak-updates; do
    if [ -d "$lib/$folder/$name" ]; then find "$lib/$folder/$name" -name '*.ko*'; fi
  done
  if [ -e "$root/var/lib/dpkg/info/$name-modules.list" ]; then
    grep "/lib/modules/$kernel/.*\\.ko" "$root/var/lib/dpkg/info/$name-modules.list" || true
  fi
done | sed 's,.*/,,; s,\\.ko.*,,; y,-,_,' | sort -u | while read -r name; do
  echo "built $name"
  if [ -d "$root/sys/module/$name" ]; then module "$name" "$root"; fi
done
"""
)


class OfedStack(FactBase[Stack]):
    """OFED's modules for the running kernel."""

    default = Stack
    shell = _STACK
    words = ("", *NAMES)

    def process(self, output: list[str]) -> Stack:
        """Parse lines of a word and its value, and a block of such lines for each loaded module."""
        words, values = zip(*(line.partition(" ")[::2] for line in output), strict=True)
        starts = [at for at, word in enumerate(words) if word == "module"]
        loaded = (Module.parse(output[at:end]) for at, end in zip(starts, [*starts, None][1:], strict=True))
        return Stack(values[words.index("kernel")], "dkms" in words, words.count("built"), tuple(loaded))


@operation()
def build() -> Commands:
    """Have DKMS build the vendor's modules for the running kernel, in the order of their dependencies."""
    if kernel.skip_until_booted("the modules are built"):
        return
    running = host.get_fact(dkms.RunningKernel)
    builds = host.get_fact(dkms.Builds)
    for name in NAMES:
        of_name = dkms.newest(each for each in builds if each.module == name)
        if of_name and not dkms.is_installed(of_name, running):
            yield dkms.build(name, of_name[-1].version, running, LIMITS.here().build)


# The vendor's procedure (entrypoint.sh in Mellanox/doca-driver-build): unload the storage modules and the auxiliary drivers,
# then nvidia_peermem; restart openibd; load the former again.
# Exit codes are ignored, and the loaded modules are read afterwards: openibd's code is unreliable, and `modprobe -r` also fails
# if it has removed the module but a dependency is in use. The init script is preferred: if systemd does not know that openibd
# runs, `systemctl restart` only starts it, which unloads nothing.
_RELOAD = (
    """
storage=$1 peers=$2
unloaded=
unload() {
  for module in "$@"; do
    [ -d "/sys/module/$module" ] || continue
    modprobe -r "$module" || true
    [ -d "/sys/module/$module" ] || unloaded="$module $unloaded"
  done
}
# shellcheck disable=SC2086  # a module is a word
{ unload $storage """
    + AUXILIARY
    + """; unload $peers; }
failed=
if [ -x /etc/init.d/openibd ]; then /etc/init.d/openibd restart || failed=$?
elif systemctl cat openibd.service >/dev/null 2>&1; then systemctl restart openibd.service || failed=$?
else echo 'the node has no openibd, which loads the modules again'
fi
if [ -n "$failed" ]; then
  echo "openibd restart failed with exit code $failed"
  journalctl --unit=openibd.service --lines=20 --output=cat --no-pager 2>/dev/null || true
  dmesg | tail -n 10
fi
for module in $unloaded; do modprobe "$module" || true; done
udevadm settle --timeout=30 || true
"""
)

_HOLDERS = """
for module; do
  for holder in "/sys/module/$module"/holders/*; do
    if [ -e "$holder" ]; then echo "$module is held by ${holder##*/}"; fi
  done
done
"""


class ModuleHolders(Lines):
    """Which modules keep the given ones from being unloaded, one line each."""

    def command(self, modules: tuple[str, ...]) -> StringCommand:
        """Read sysfs."""
        return self.script(_HOLDERS, *modules)


# An initramfs that contains an older version of a module would load that at the next boot.
_OLD_INITRAMFS = """
root=$1; shift
kernel=$(uname -r)
for image in "$root/boot/initrd.img-$kernel" "$root/boot/initramfs-$kernel.img"; do
  [ -e "$image" ] || continue
  for file; do
    [ "$image" -ot "$file" ] || continue
    name=${file##*/}; name=${name%%.ko*}
    if { lsinitramfs "$image" || lsinitrd "$image"; } 2>/dev/null | grep -q "/$name\\.ko"; then echo "$name"; fi
  done
done
"""


class OldInitramfs(Lines):
    """The names of the given modules of which the running kernel's initramfs has an older version."""

    def command(self, files: tuple[str, ...]) -> StringCommand:
        """List the initramfs only if it is older than a file."""
        return self.script(_OLD_INITRAMFS, "", *files)


def not_loaded_again(before: Stack, after: Stack) -> list[str]:
    """The modules that were loaded before and are not loaded after the restart of openibd."""
    return sorted({module.name for module in before.modules} - {module.name for module in after.modules})


def remedy(holders: list[str]) -> list[str]:
    """The holders, and the remedy for the known one: the vendor's NVMe driver holds `mlx_compat`."""
    nvme = [line for line in holders if line.startswith("mlx_compat ") and line.split()[-1].startswith("nvme")]
    if nvme:
        return [*nvme, "that is the vendor's NVMe driver; without NVMe over RDMA, remove its package (mlnx-nvme-dkms)"]
    return holders


@operation()
def load_installed(task: str) -> Commands:
    """Reload modules that are not the installed ones, if nothing uses them and the policy allows it; else request a reboot.

    :param task: the task's name in the reboot request.
    """
    if kernel.skip_until_booted("the modules are loaded"):
        return
    stack = host.get_fact(OfedStack)
    if not stack.built:
        yield refuse(
            "ofed: the packages are installed, but have no modules for the running kernel; `dkms status` shows which were not "
            "built, and /var/lib/dkms/NAME/VERSION/build/make.log why"
        )
        return
    if stack.shadowed:
        names = ", ".join(f"{module.name} ({module.path or 'no file'})" for module in stack.shadowed)
        yield refuse(
            f"ofed: modprobe would load the kernel's own modules instead of OFED's: {names}; run `depmod -a`, and check "
            "`override` and `search` lines in /etc/depmod.d"
        )
        return
    if not stack.stale:
        host.noop("the loaded modules are the installed ones")
        yield from reboot.withdraw(task)
        return
    if problem := signatures.refusal("ofed", *_files(stack)):
        yield refuse(problem)
        return
    if disruption.deferred("reload of OFED's modules", disruption.DRIVER_RELOAD, of_nics=True):
        yield from _request_reboot(task, stack)
        return
    users = host.get_fact(OfedUsers, modules=tuple(module.name for module in stack.modules))
    if users:
        _warn("the modules are not reloaded now", users)
        yield from _request_reboot(task, stack)
        return
    yield script(_RELOAD, " ".join(STORAGE), " ".join(PEER_MEMORY))
    after = host.get_fact(OfedStack)
    if missing := not_loaded_again(stack, after):
        yield refuse(
            f"ofed: modules are not loaded after the restart of openibd: {', '.join(missing)}; its output is above. `modprobe` "
            "shows the reason; with Secure Boot, the key that DKMS signs with must be enrolled (mokutil)"
        )
    elif after.stale:
        names_left = tuple(module.name for module in after.stale)
        _warn("the modules were not unloaded", remedy(host.get_fact(ModuleHolders, modules=names_left)))
        yield from _request_reboot(task, after)
    else:
        yield from reboot.withdraw(task)


def _files(stack: Stack) -> tuple[str, ...]:
    return tuple(module.path for module in stack.stale if module.path)


def _request_reboot(task: str, stack: Stack) -> Commands:
    """Request a reboot, which loads the installed modules. The reason has srcversions, so that it changes with an upgrade."""
    if host.get_fact(OldInitramfs, files=_files(stack)):
        yield script(dkms.MAKE_INITRAMFS)
    versions = ", ".join(f"{module.name} ({module.installed})" for module in stack.stale)
    yield from reboot.request(task, f"installed modules are not the loaded ones: {versions}")


def _warn(problem: str, reasons: list[str]) -> None:
    warn(host, f"ofed: {problem}: {'; '.join(reasons)}")
