"""The kernel modules of an OFED: those that its packages brought, and whether they are what runs.

Packages are no proof: after an upgrade the old modules run on until they are loaded again. So the loaded module's srcversion is
compared with that of the file which modprobe would take. What counts is what was built for the running kernel under the
vendor's own names, and is loaded: mlx5_core, mlx5_ib, ib_core and all others that a profile has.
"""

from __future__ import annotations

from attrs import evolve, frozen
from pyinfra import logger
from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.report.printable import printable
from tasks import kernel, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.packages import dkms

NAMES = ("mlnx-ofed-kernel", "mlnx-ofa_kernel", "iser", "isert", "srp", "mlnx-nvme", "mlnx-nfsrdma")
"""What the vendor calls its modules: DKMS's names (the first is Debian's, the second RHEL's; the others are built against
them), folders below extra/ and weak-updates/, or packages NAME-modules (deb, without DKMS)."""

STORAGE = ("ib_iser", "ib_isert", "ib_srp", "ib_srpt", "nvme_rdma", "nvmet_rdma", "rpcrdma", "xprtrdma")
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")


@frozen
class Module:
    """A loaded module, by the srcversion that runs and by that of the file at ``path``; empty where it has none."""

    name: str
    loaded: str
    installed: str
    path: str

    @property
    def stale(self) -> bool:
        """Whether another one runs than is installed."""
        return self.loaded != self.installed

    @property
    def unversioned(self) -> bool:
        """Whether there is nothing to compare: a kernel as Debian's gives a srcversion only to modules that have a version."""
        return not self.loaded and not self.installed

    @property
    def outside(self) -> bool:
        """Whether modprobe would take a file beside the kernel's own ones."""
        return any(folder in self.path for folder in dkms.OUT_OF_TREE)


@frozen
class Stack:
    """What an OFED brought. ``built`` counts its modules for the running kernel, ``modules`` are the loaded ones of them.

    ``dkms``: DKMS has their sources, and can build them for another kernel.
    """

    kernel: str
    dkms: bool
    built: int
    modules: tuple[Module, ...]

    @property
    def stale(self) -> tuple[Module, ...]:
        """Those that are not what is installed."""
        return tuple(module for module in self.modules if module.stale)

    @property
    def inside(self) -> tuple[Module, ...]:
        """Those that modprobe would take from the kernel's own folder, though the OFED has them, too."""
        return tuple(module for module in self.modules if not module.outside)


# DKMS keeps what it built in NAME/VERSION/KERNEL/ARCH/module; packages without DKMS have the modules as their files.
_STACK = """
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
done | sed 's,.*/,,; s,\\.ko.*,,; y,-,_,' | sort -u | while read -r module; do
  echo "built $module"
  if [ -d "$root/sys/module/$module" ]; then
    read -r loaded < "$root/sys/module/$module/srcversion" 2>/dev/null || loaded=
    installed=$(modinfo -F srcversion "$module" 2>/dev/null || true)
    echo "loaded $module|$loaded|$installed|$(modinfo -n "$module" 2>/dev/null || true)"
  fi
done
"""


class OfedStack(FactBase[Stack | None]):
    """The modules that an OFED brought for the running kernel; None: unknown."""

    def command(self) -> StringCommand:
        """One script for all names."""
        return script(_STACK, "", *NAMES)

    def process(self, output: list[str]) -> Stack:
        """Lines of a word and what it tells."""
        told = [line.partition(" ") for line in output]
        modules = (Module(*rest.split("|")) for word, _, rest in told if word == "loaded")
        kernel = next(rest for word, _, rest in told if word == "kernel")
        words = [word for word, _, _ in told]
        return Stack(kernel, "dkms" in words, words.count("built"), tuple(modules))


def read_stack() -> Stack | None:
    """For an operation: the modules; those without a srcversion are told apart by their build IDs."""
    stack = host.get_fact(OfedStack)
    if stack is None:
        return None
    return evolve(stack, modules=tuple(_by_build_id(module) for module in stack.modules))


def _by_build_id(module: Module) -> Module:
    if not module.unversioned:
        return module
    state = host.get_fact(dkms.ModuleState, module=module.name)
    return evolve(module, loaded=state.loaded or "", installed=state.installed or "")


@operation()
def built() -> Commands:
    """Have DKMS build what it knows of the vendor's for the running kernel, in the order in which they need each other."""
    if kernel.waits("the modules are built"):
        return
    running = host.get_fact(dkms.RunningKernel)
    builds = host.get_fact(dkms.Builds)
    for name in NAMES:
        mine = [found for found in builds if found.module == name]
        if mine and not any((found.kernel, found.state) == (running, "installed") for found in mine):
            yield dkms.build(name, mine[-1].version, running)


# Each line is a user. The arguments are the modules that would be unloaded.
_USERS = """
root=$1 storage=$2 peers=$3; shift 3
ours=" $* "
sys=$root/sys

# Users that are not modules: a module that stands on it is counted, too.
others() {
  [ -r "$sys/module/$1/refcnt" ] || { echo 0; return; }
  read -r count < "$sys/module/$1/refcnt"
  for holder in "$sys/module/$1"/holders/*; do if [ -e "$holder" ]; then count=$((count - 1)); fi; done
  echo "$count"
}
for module in $peers; do
  if [ "$(others "$module")" -gt 0 ]; then echo "$module: $(others "$module") in use (GPU memory that is registered)"; fi
done
for module in $storage; do
  if [ "$(others "$module")" -gt 0 ]; then echo "$module: $(others "$module") in use (storage over RDMA)"; fi
done
for file in "$sys"/class/nvme/*/transport; do
  [ -e "$file" ] || continue
  read -r transport < "$file"
  if [ "$transport" = rdma ]; then file=${file%/transport}; echo "${file##*/} is NVMe over RDMA"; fi
done
awk '$4 ~ /(^|,)proto=rdma(,|$)/ || ($3 == "lustre" && $1 ~ /@o2ib/) { print $2 " is mounted over RDMA" }' \\
  "$root/proc/1/mounts"

# A descriptor of an RDMA device keeps its driver; the kernel's own users do not.
find "$root"/proc/[0-9]*/fd -lname '/dev/infiniband/*' -printf '%h %l\\n' 2>/dev/null | sort -u | while read -r fd device; do
  pid=${fd%/fd}; pid=${pid##*/}
  read -r comm < "$root/proc/$pid/comm" 2>/dev/null || continue
  echo "$comm (pid $pid) has ${device##*/} open"
done

# Netdevs that would go, by the module of their driver; and what stands on them.
managed=$(ss -Htnp state established 2>/dev/null |
  awk '/"sshd/ { sub(/:[0-9]+$/, "", $3); gsub(/[][]/, "", $3); print $3 }' | sort -u)
routed=$({ ip -o route show table all; ip -o -6 route show table all; } 2>/dev/null |
  awk '/ via / { for (i = 1; i < NF; i++) if ($i == "dev") print $(i + 1) }' | sort -u)
carries() {
  for word in $routed; do if [ "$word" = "$1" ]; then echo "a route goes through $1"; fi; done
  for address in $(ip -o addr show dev "$1" 2>/dev/null | awk '{ sub(/\\/.*/, "", $4); print $4 }'); do
    for word in $managed; do if [ "$word" = "$address" ]; then echo "$1 has the management address ($address)"; fi; done
  done
  for upper in "$sys/class/net/$1"/upper_*; do
    if [ -e "$upper" ]; then echo "${upper##*/upper_} stands on $1"; carries "${upper##*/upper_}"; fi
  done
}
for netdev in "$sys"/class/net/*; do
  [ -e "$netdev/device/driver/module" ] || continue
  module=$(readlink "$netdev/device/driver/module"); module=${module##*/}
  case "$ours" in *" $module "*) carries "${netdev##*/}" ;; esac
done

# VFs that a container or a virtual machine has.
for driver in "$sys"/bus/pci/drivers/*; do
  [ -e "$driver/module" ] || continue
  module=$(readlink "$driver/module"); module=${module##*/}
  case "$ours" in *" $module "*) ;; *) continue ;; esac
  for function in "$driver"/*:*:*.*; do
    [ -e "$function/class" ] || continue
    read -r class < "$function/class"
    case "$class" in 0x0200*) [ -e "$function/net" ] || echo "${function##*/} is in another network namespace" ;; esac
    for vf in "$function"/virtfn*; do
      case "$(readlink "$vf/driver" 2>/dev/null || true)" in
        */vfio-pci) vf=$(readlink "$vf"); echo "${vf##*/} is bound to vfio-pci" ;;
      esac
    done
  done
done
"""


class OfedUsers(FactBase[list[str] | None]):
    """Who would lose what if the given modules were unloaded, a line each; None: unknown."""

    def command(self, modules: tuple[str, ...]) -> StringCommand:
        """One script; an end marker tells an empty answer from none."""
        return script(_USERS + "echo end\n", "", " ".join(STORAGE), " ".join(PEER_MEMORY), *modules)

    def process(self, output: list[str]) -> list[str]:
        """All lines but the marker."""
        return list(dict.fromkeys(output[:-1]))


# What the vendor documents: storage and mlx5_vdpa out, nvidia_peermem just before, openibd restart, and what was out in again.
# openibd's exit code proves nothing either way; what is loaded afterwards is read anew. The script comes first: systemd would
# only start a unit that it does not know to be running, and that unloads nothing. `modprobe -r` also fails if a module that was
# to go with the one that is gone is in use by others.
_RELOAD = """
storage=$1 peers=$2
out=
unload() {
  for module in "$@"; do
    [ -d "/sys/module/$module" ] || continue
    modprobe -r "$module" || true
    [ -d "/sys/module/$module" ] || out="$module $out"
  done
}
unload $storage mlx5_vdpa
unload $peers
failed=
if [ -x /etc/init.d/openibd ]; then /etc/init.d/openibd restart || failed=$?
elif systemctl cat openibd.service >/dev/null 2>&1; then systemctl restart openibd.service || failed=$?
else echo 'there is no openibd to load the modules again'
fi
if [ -n "$failed" ]; then
  echo "openibd restart ended with $failed"
  journalctl --unit=openibd.service --lines=20 --output=cat --no-pager 2>/dev/null || true
  dmesg | tail -n 10
fi
for module in $out; do modprobe "$module" || true; done
udevadm settle --timeout=30 || true
"""

# Why it does not go. And an initramfs that is older than a module's file, and has that module, would bring the old one back.
_HOLDERS = """
for module; do
  for holder in "/sys/module/$module"/holders/*; do
    if [ -e "$holder" ]; then echo "$module is held by ${holder##*/}"; fi
  done
done
"""


class ModuleHolders(FactBase[list[str]]):
    """Which modules hold the given ones, a line each."""

    default = list

    def command(self, modules: tuple[str, ...]) -> StringCommand:
        """Look into sysfs."""
        return script(_HOLDERS, *modules)

    def process(self, output: list[str]) -> list[str]:
        """As printed."""
        return output


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


class OldInitramfs(FactBase[list[str]]):
    """Those of the given modules' files of which the running kernel's initramfs has an older one, by name."""

    default = list

    def command(self, files: tuple[str, ...]) -> StringCommand:
        """Look into the initramfs only if it is older than a file."""
        return script(_OLD_INITRAMFS, "", *files)

    def process(self, output: list[str]) -> list[str]:
        """One a line."""
        return output


_MAKE_INITRAMFS = """
if command -v update-initramfs >/dev/null; then update-initramfs -u -k "$(uname -r)"
else dracut --force --kver "$(uname -r)"
fi
"""


def gone(before: Stack, after: Stack) -> list[str]:
    """Modules that were loaded, and are not any more."""
    return sorted({module.name for module in before.modules} - {module.name for module in after.modules})


def remedy(holders: list[str]) -> list[str]:
    """What is known of modules that do not go: the vendor's own NVMe driver holds `mlx_compat`."""
    nvme = [line for line in holders if line.startswith("mlx_compat ") and line.split()[-1].startswith("nvme")]
    if nvme:
        return [*nvme, "that is the vendor's NVMe driver; without NVMe over RDMA, remove its package (mlnx-nvme-dkms)"]
    return holders


@operation()
def in_force(task: str) -> Commands:
    """Have the installed modules be the loaded ones: load them again where nobody uses them, else wish for a reboot.

    :param task: under whose name the wish is kept.
    """
    if kernel.waits("the modules are loaded"):
        return
    stack = read_stack()
    if stack is None or not stack.built:
        yield refuse(
            "ofed: the packages are installed, and there are no modules of theirs for the running kernel; `dkms status` tells "
            "which were not built, and /var/lib/dkms/NAME/VERSION/build/make.log why"
        )
        return
    if stack.inside:
        names = ", ".join(f"{module.name} ({module.path or 'no file'})" for module in stack.inside)
        yield refuse(
            f"ofed: modprobe would take the kernel's own modules, not those of OFED: {names}; run `depmod -a`, and look for "
            "`override` and `search` lines in /etc/depmod.d"
        )
        return
    if not stack.stale:
        host.noop("the loaded modules are the installed ones")
        yield from reboot.withdraw(task)
        return
    users = host.get_fact(OfedUsers, modules=tuple(module.name for module in stack.modules))
    if users is None or users:
        _say("the modules are not loaded again now", users or ["it is unknown who uses them"])
        yield from _wish(task, stack)
        return
    yield script(_RELOAD, " ".join(STORAGE), " ".join(PEER_MEMORY))
    after = read_stack()
    if after is None or (missing := gone(stack, after)):
        names = ", ".join(missing) if after else "it is unknown which"
        yield refuse(
            f"ofed: after openibd's restart modules are not loaded any more: {names}; its words are above. "
            "`modprobe` says why; with Secure Boot, the key that DKMS signs with must be enrolled (mokutil)"
        )
    elif after.stale:
        left = tuple(module.name for module in after.stale)
        _say("the modules did not go", remedy(host.get_fact(ModuleHolders, modules=left)))
        yield from _wish(task, after)
    else:
        yield from reboot.withdraw(task)


def _wish(task: str, stack: Stack) -> Commands:
    """A reboot loads the installed ones; the wish names them by srcversion, so that it is another one after an upgrade."""
    if host.get_fact(OldInitramfs, files=tuple(module.path for module in stack.stale)):
        yield script(_MAKE_INITRAMFS)
    versions = ", ".join(f"{module.name} ({module.installed})" for module in stack.stale)
    yield from reboot.record(task, f"installed modules are not the loaded ones: {versions}")


def _say(what: str, why: list[str]) -> None:
    host.log_styled(printable(f"ofed: {what}: {'; '.join(why)}"), fg="yellow", log_func=logger.warning)
