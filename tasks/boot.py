"""What only a boot can give: kernel arguments, options of modules in the initramfs, sysctls that hold before the agent runs.

The spec's sysctls and hugepages are not written down for the boot: the agent sets them at each boot before the kubelet starts,
looks whether they hold, and knows what they were (docs/decisions/0023-which-half-persists.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from itertools import groupby
from typing import Any

from attrs import Attribute, field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.node import HugepagePool, NodeSpec
from agent.spec.sysctl_names import faults, identity, path
from tasks import kernel_modules, packages, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record

DROP_IN = "/etc/default/grub.d/95-trackbed.cfg"
GRUBBY_STATE = "/var/lib/trackbed/kernel-arguments"
"""What was given by grubby, which keeps no account of who wanted what."""

SYSCTLS = "/etc/sysctl.d/90-trackbed.conf"
INITRAMFS_STATE = "/var/lib/trackbed/initramfs"
HEADER = "# Written by Trackbed; changes here are overwritten.\n"

# A boot loader's file is a shell script: nothing that means something to a shell, or to grub.
ARGUMENT = re.compile(r"[A-Za-z0-9_.-]+(=[A-Za-z0-9_.,:;/=@+%-]*)?")

NOT_OURS = ("root", "rootflags", "rootfstype", "ro", "rw", "initrd", "init", "BOOT_IMAGE")
"""Without the right one of these a node does not come back."""


def _arguments(_: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
    for argument in value:
        if not ARGUMENT.fullmatch(argument):
            raise ValueError(f"{attribute.name}: {argument!r} is no kernel argument; give words such as 'iommu=pt'")
        if argument.partition("=")[0] in NOT_OURS:
            raise ValueError(f"{attribute.name}: {argument!r} is the boot loader's own; leave it out")
        if argument.startswith(("hugepages=", "hugepagesz=")):
            raise ValueError(f"{attribute.name}: {argument!r}: give the key hugepages, and boot.hugepages True")
    doubled = sorted({argument for argument in value if value.count(argument) > 1})
    if doubled:
        raise ValueError(f"{attribute.name}: {', '.join(doubled)} is given twice; give it once")


def _sysctls(_: object, attribute: Attribute[Any], value: Mapping[str, str]) -> None:
    if found := list(faults(attribute.name, value)):
        raise ValueError("\n".join(found))


@frozen
class Boot:
    """``arguments``: of the kernel. ``hugepages``: reserve those of the spec by arguments. ``sysctls``: of systemd-sysctl."""

    arguments: tuple[str, ...] = field(default=(), validator=_arguments)
    hugepages: bool = False
    sysctls: Mapping[str, str] = field(factory=dict, validator=_sysctls)


BOOT = Key("boot", Boot(), record(Boot))
KEYS = (BOOT,)


@deploy("Boot")
def configure(spec: NodeSpec) -> None:
    """Write down what the next boot needs, and wish for it where this boot does not have it.

    :raises DeployError: a sysctl is the agent's as well, or grubby cannot give the arguments; naming host, key and remedy.
    """
    wanted = BOOT.here()
    kept = spec.sysctls_kept()
    twice = [f"{name} is in {kept[identity(name)]}" for name in sorted(wanted.sysctls) if identity(name) in kept]
    if twice:
        raise DeployError(
            f"{host.name}.boot.sysctls: {', '.join(twice)}, too, which the agent keeps at every boot; give it once, there"
        )
    pools = hugepage_arguments(spec.hugepages) if wanted.hugepages else ()
    given = _once_each(wanted.arguments, pools)
    give(name="Kernel arguments", wanted=given)
    wish(name="Kernel arguments of this boot", wanted=given)
    settings = _sysctl_file(wanted.sysctls)
    load_sysctls(name="Sysctls now", wanted=wanted.sysctls, settings=settings)
    initramfs(name="Initramfs", modules=tuple(kernel_modules.MODULE_OPTIONS.here()))


def _once_each(arguments: tuple[str, ...], pools: tuple[str, ...]) -> tuple[str, ...]:
    """Both, as far as the boot loader can give them: grubby has one value for a name, and puts the last in the others' place.

    So by grubby the largest pages alone are reserved at boot, which need it most; the agent reserves the others.
    """
    names = [argument.partition("=")[0] for argument in arguments]
    twice = sorted({name for name in names if names.count(name) > 1})
    if (not twice and len(pools) < 2) or packages.system().family != "rhel":
        return (*arguments, *pools)
    if twice:
        raise DeployError(
            f"{host.name}.boot.arguments: {', '.join(twice)} is given with several values, and grubby (the RHEL "
            "family's) keeps the last one alone; give one"
        )
    return (*arguments, *pools[-1:])


def hugepage_arguments(pools: tuple[HugepagePool, ...]) -> tuple[str, ...]:
    """The arguments that reserve the pools, one entry a page size.

    Documentation/admin-guide/kernel-parameters.txt; `hugepages=NODE:COUNT` is understood since Linux 5.15.
    """
    made = []
    for size, group in groupby(sorted(pools, key=lambda pool: (pool.kilobytes, pool.numa_node or 0)), lambda p: p.size):
        found = list(group)
        spread = sum(pool.count for pool in found if pool.numa_node is None)
        nodes = ",".join(f"{pool.numa_node}:{pool.count}" for pool in found if pool.numa_node is not None)
        made.append(f"hugepagesz={size} hugepages={nodes or spread}")
    return tuple(made)


@frozen
class Arguments:
    """Kernel arguments, each list in its order, as text.

    ``loader``: "grub", "grubby" or "" where neither is there. ``running``: of this boot; ``next``: of the default entry;
    ``ours``: what Trackbed gave last time.
    """

    loader: str = ""
    running: str = ""
    next: str = ""
    ours: str = ""


_GIVEN_BY_GRUBBY = """
given_by_grubby() {  # to the next boot
  grubby --info=DEFAULT | sed -n 's/^args="\\(.*\\)"$/\\1/p' | head -n 1
}
"""

# The first entry of grub's menu is the default one, which savedefault may change, to an entry with the same arguments.
_ARGUMENTS = (
    _GIVEN_BY_GRUBBY
    + """
echo "running $(cat "$3/proc/cmdline")"
if command -v grubby >/dev/null; then
  echo loader grubby
  echo "next $(given_by_grubby)"
  echo "ours $(cat "$2" 2>/dev/null || true)"
elif command -v update-grub >/dev/null; then
  echo loader grub
  menu=$3/boot/grub/grub.cfg
  next=$(sed -n 's/^[[:space:]]*linux[[:space:]]\\{1,\\}[^[:space:]]*[[:space:]]*//p' "$menu" 2>/dev/null || true)
  echo "next $(printf '%s\\n' "$next" | head -n 1)"
  echo "ours $(sed -n 's/^GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT \\(.*\\)"$/\\1/p' "$1" 2>/dev/null || true)"
fi
"""
)


class KernelArguments(FactBase[Arguments]):
    """The arguments of this boot (/proc/cmdline) and of the next."""

    default = Arguments

    def command(self) -> StringCommand:
        """One script; the boot loader's own tool says what it would boot."""
        return script(_ARGUMENTS, DROP_IN, GRUBBY_STATE, "")

    def process(self, output: list[str]) -> Arguments:
        """Lines of NAME and text."""
        return Arguments(**{name: text.strip() for name, _, text in (line.partition(" ") for line in output)})


def lacking(wanted: tuple[str, ...], present: str) -> list[str]:
    """Those that are not there; one of several words must be there in one piece."""
    return [argument for argument in wanted if f" {argument} " not in f" {present} "]


_GRUB = """
if [ -n "$2" ]; then
  mkdir -p "$(dirname "$1")"
  printf '%s\\n' "$3" "GRUB_CMDLINE_LINUX_DEFAULT=\\"\\$GRUB_CMDLINE_LINUX_DEFAULT $2\\"" > "$1.new"
  mv -T "$1.new" "$1"
else
  rm -f "$1"
fi
said=$(update-grub 2>&1) || { printf '%s\\n' "$said" >&2; exit 1; }
"""

# From Red Hat's documents: not run on RHEL.
_GRUBBY = (
    _GIVEN_BY_GRUBBY
    + """
if [ -n "$3" ]; then grubby --update-kernel=ALL --remove-args="$3"; fi
if [ -n "$2" ]; then grubby --update-kernel=ALL --args="$2"; fi
mkdir -p "$(dirname "$1")"
printf '%s\\n' "$2" > "$1"
next=$(given_by_grubby)
for argument in $2; do
  case " $next " in *" $argument "*) continue ;; esac
  echo "grubby was told $argument, and the next boot has $next; give it by hand, as grubby(8) says, or leave it out" >&2
  exit 1
done
"""
)


@operation()
def give(wanted: tuple[str, ...]) -> Commands:
    """Have the boot loader give the kernel these arguments, and take back what Trackbed gave and nobody wants any more.

    On Debian and Ubuntu by a drop-in of grub's, behind every other, and update-grub: above an argument of the same name, and
    not in the entries of the recovery mode. In the RHEL family by grubby, for all kernels that are installed.
    """
    have = host.get_fact(KernelArguments)
    text = " ".join(wanted)
    former = lacking(tuple(have.ours.split()), text)
    if not have.loader:
        if missing := lacking(wanted, have.running):
            yield refuse(
                f"kernel arguments {' '.join(missing)} are not in effect, and there is neither grub (update-grub) nor grubby "
                "on this host; give them where it gets its kernel from"
            )
        return
    if have.ours == text and not lacking(wanted, have.next):
        host.noop("the boot loader gives these arguments")
        return
    if have.loader == "grub":
        yield script(_GRUB, DROP_IN, text, HEADER.strip())
    else:
        yield script(_GRUBBY, GRUBBY_STATE, text, " ".join(former))
    if left := [argument for argument in former if not lacking((argument,), have.running)]:
        yield from reboot.record("boot-former", f"kernel arguments {' '.join(left)} are still in effect")


@operation()
def wish(wanted: tuple[str, ...]) -> Commands:
    """Wish for a reboot while this boot lacks one of the arguments."""
    have = host.get_fact(KernelArguments)
    if have.loader and (missing := lacking(wanted, have.running)):
        yield from reboot.record("boot", f"kernel arguments {' '.join(missing)} are not in effect")
    else:
        yield from reboot.withdraw("boot")
    yield from reboot.expire("boot-former")


def _sysctl_file(sysctls: Mapping[str, str]) -> OperationMeta:
    if not sysctls:
        return files.file(name="Sysctls at boot", path=SYSCTLS, present=False)
    text = HEADER + "".join(f"{name} = {value}\n" for name, value in sorted(sysctls.items()))
    return files.put(name="Sysctls at boot", src=StringIO(text), dest=SYSCTLS, mode="644")


_VALUES = 'for path; do if [ -r "$path" ]; then echo "$path $(cat "$path")"; fi; done'


class SysctlValues(FactBase[dict[str, str]]):
    """The values of sysctls, by their files."""

    default = dict

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Read the files."""
        return script(_VALUES, *paths)

    def process(self, output: list[str]) -> dict[str, str]:
        """White space in a value does not count."""
        return {path: " ".join(value.split()) for path, _, value in (line.partition(" ") for line in output)}


_LOAD = """
for program in /usr/lib/systemd/systemd-sysctl /lib/systemd/systemd-sysctl; do
  if [ -x "$program" ]; then exec "$program" "$1"; fi
done
exec sysctl --load="$1"
"""


@operation()
def load_sysctls(wanted: Mapping[str, str], settings: OperationMeta) -> Commands:
    """Set those that differ, as the boot does."""
    paths = {path(name): " ".join(value.split()) for name, value in wanted.items()}
    have = host.get_fact(SysctlValues, paths=tuple(paths)) if paths else {}
    changes = settings.did_change() if settings.is_complete() else settings.will_change
    if paths and (changes or have != paths):
        yield script(_LOAD, SYSCTLS)
    else:
        host.noop("the sysctls have these values")


# What decides whether the initramfs has to be looked at again, as one line. Without an initramfs there is nothing to do.
_INITRAMFS = """
options=$1 state=$2
kernel=$(uname -r)
for image in "$3/boot/initrd.img-$kernel" "$3/boot/initramfs-$kernel.img"; do
  [ -e "$image" ] || continue
  now="$image $(stat -c '%Y %s' "$image") $(sha256sum < "$options" 2>/dev/null || true)"
  echo "$now"
  cat "$state" 2>/dev/null || true
  break
done
"""

# Making it takes minutes, listing it seconds: neither is done before it is known that something has changed. One that is newer
# than the options was made with them.
_LOOK = """
options=$1 state=$2 image=$3
shift 3
if [ ! -e "$options" ] || [ "$options" -nt "$image" ]; then
  if command -v lsinitramfs >/dev/null; then list=$(lsinitramfs "$image"); else list=$(lsinitrd "$image"); fi
  wanted=
  case "$list" in *"${options#/}"*) wanted=yes ;; esac
  for module; do
    if printf '%s\\n' "$list" | tr - _ | grep -q "/$(printf %s "$module" | tr - _)\\.ko"; then wanted=yes; fi
  done
  if [ -n "$wanted" ]; then
    if command -v update-initramfs >/dev/null; then update-initramfs -u -k "$(uname -r)"; else dracut --force "$image"; fi
  fi
fi
mkdir -p "$(dirname "$state")"
echo "$image $(stat -c '%Y %s' "$image") $(sha256sum < "$options" 2>/dev/null || true)" > "$state"
"""


class Initramfs(FactBase[tuple[str, str] | None]):
    """The running kernel's initramfs and the options, now and when they were last seen to; None: there is no initramfs."""

    def command(self) -> StringCommand:
        """Times, sizes and sums."""
        return script(_INITRAMFS, kernel_modules.OPTIONS, INITRAMFS_STATE, "")

    def process(self, output: list[str]) -> tuple[str, str] | None:
        """One line or two."""
        return (output[0].strip(), output[1].strip() if len(output) > 1 else "") if output else None


@operation()
def initramfs(modules: tuple[str, ...]) -> Commands:
    """Make the initramfs again if the options of a module in it have changed; they take effect at the next boot."""
    yield from reboot.expire("initramfs")
    have = host.get_fact(Initramfs)
    if have is None or (not modules and not have[1]) or have[0] == have[1]:
        host.noop("the initramfs has the modules' options")
        return
    yield script(_LOOK, kernel_modules.OPTIONS, INITRAMFS_STATE, have[0].split()[0], *modules)
    after = host.get_fact(Initramfs)
    if after is not None and after[0].split()[:3] != have[0].split()[:3]:
        yield from reboot.record("initramfs", f"options of modules in {after[0].split()[0]} have changed")
