"""Configures what must be set at boot: kernel arguments, module options in the initramfs, sysctls needed before the agent runs.

The spec's sysctls and hugepages are not configured here. The agent sets them at each boot before the kubelet starts, checks
them, and keeps their original values (docs/decisions/0023-which-half-persists.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from string import Template
from typing import Any

from attrs import Attribute, field, frozen
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.report.names import STATE_FOLDER
from agent.spec.node import HugepagePool, NodeSpec
from agent.spec.sysctl_names import meaning, parsed, zeroed_by
from tasks import packages, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.common.failures import NodeError
from tasks.common.texts import HEADER, written
from tasks.host import kernel_modules, kubelet_states, sysctls
from tasks.host.kernel_arguments import missing_arguments, rival, split
from tasks.reboot import NodeRebootRequests

DROP_IN = "/etc/default/grub.d/95-trackbed.cfg"
GRUBBY_STATE = f"{STATE_FOLDER}/kernel-arguments"
"""The arguments that Trackbed has set through grubby, which does not record who set an argument."""

GRUB_PENDING = f"{STATE_FOLDER}/grub-pending"
"""This file exists from a change of GRUB's drop-in until update-grub has succeeded."""

INITRAMFS_STATE = f"{STATE_FOLDER}/initramfs"

# GRUB's configuration is a shell script, so characters that are special to a shell or to GRUB are not allowed. One is: a `;`
# separates the devices of pci=disable_acs_redir=. GRUB takes it as the end of the command, so such an argument is quoted.
ARGUMENT = re.compile(r"[A-Za-z0-9_.-]+(=[A-Za-z0-9_.,:;/=@+%-]*)?")

NOT_OURS = ("root", "rootflags", "rootfstype", "ro", "rw", "initrd", "init", "BOOT_IMAGE")
"""Arguments that belong to the boot loader: with a wrong value the node would not boot."""


def _arguments(_: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
    for argument in value:
        if not ARGUMENT.fullmatch(argument):
            raise ValueError(f"{attribute.name}: {argument!r} is not a kernel argument; give words such as 'iommu=pt'")
        if argument.partition("=")[0] in NOT_OURS:
            raise ValueError(f"{attribute.name}: {argument!r} belongs to the boot loader; leave it out")
        if argument.startswith(("hugepages=", "hugepagesz=")):
            raise ValueError(f"{attribute.name}: {argument!r}: use the key hugepages, and set boot.hugepages to True")
    duplicates = sorted({argument for argument in value if value.count(argument) > 1})
    if duplicates:
        raise ValueError(f"{attribute.name}: {', '.join(duplicates)} is given twice; give it once")


@frozen
class Boot:
    """``arguments``: kernel arguments. ``hugepages``: reserve the spec's hugepages by kernel arguments.

    ``sysctls``: written for systemd-sysctl.
    """

    arguments: tuple[str, ...] = field(default=(), validator=_arguments)
    hugepages: bool = False
    sysctls: Mapping[str, str] = field(factory=dict, converter=parsed)


BOOT = Key("boot", Boot(), record(Boot))


@deploy("Boot")
def configure(spec: NodeSpec) -> None:
    """Configure the next boot, and request a reboot if the current boot lacks a kernel argument.

    :raises DeployError: the spec sets a sysctl, too; naming host, key and remedy.
    :raises NodeError: the node has grubby, which cannot set the arguments.
    """
    wanted = BOOT.here()
    kept = spec.sysctls_kept()
    twice = [f"{name} is in {kept[name]}, too" for name in sorted(wanted.sysctls) if name in kept]
    zeroed = ((name, kept.get(zeroed_by(name, value))) for name, value in sorted(wanted.sysctls.items()))
    twice += [f"the kernel sets {name} to 0 for {key}" for name, key in zeroed if key is not None]
    if twice:
        raise DeployError(
            f"{host.name}.boot.sysctls: {', '.join(twice)}, which the agent sets at every boot; remove it here"
        )
    pools = hugepage_arguments(spec.hugepages) if wanted.hugepages else ()
    arguments = _settable(wanted.arguments, pools)
    set_arguments(name="Kernel arguments", wanted=arguments)
    if changed := kubelet_states.changes(spec, arguments):
        kubelet_states.check(name="State files of the kubelet", changed=changed)
    given = {**spec.sysctls, **wanted.sysctls}
    own = {name: value for name, value in sysctls.KUBELET_VALUES.items() if name in given}
    if others := tuple(name for name, value in own.items() if meaning(name, given[name]) != meaning(name, value)):
        sysctls.suit_kubelet(name="Sysctls of the kubelet", others=others)
    lines = "".join(f"{name} = {value}\n" for name, value in sorted(wanted.sysctls.items()))
    settings = written(name="Sysctls at boot", path=sysctls.PATH, text=lines and HEADER + lines)
    sysctls.load(name="Sysctls now", wanted=wanted.sysctls, settings=settings)
    initramfs(name="Initramfs", modules=tuple(kernel_modules.MODULE_OPTIONS.here()))


def _settable(arguments: tuple[str, ...], pools: tuple[str, ...]) -> tuple[str, ...]:
    """The kernel arguments, and those of the hugepage pools that the boot loader can set.

    grubby keeps only the last value of an argument, so it can reserve one page size. It reserves the largest, which is the
    hardest to allocate later; the agent reserves the others.
    """
    names = [argument.partition("=")[0] for argument in arguments]
    twice = sorted({name for name in names if names.count(name) > 1})
    several = [argument for argument in arguments if ";" in argument]
    if (not twice and not several and len(pools) < 2) or packages.system().family != "rhel":
        return (*arguments, *pools)
    if several:
        raise NodeError(
            f"{host.name}.boot.arguments: {', '.join(several)} has ';', at which GRUB ends the argument, and grubby (RHEL "
            "family) has no quotation marks for it; set it by hand, and remove it here"
        )
    if twice:
        raise NodeError(
            f"{host.name}.boot.arguments: {', '.join(twice)} is given with several values, and grubby (RHEL family) "
            "keeps only the last one; give one value"
        )
    return (*arguments, *pools[-1:])


def hugepage_arguments(pools: tuple[HugepagePool, ...]) -> tuple[str, ...]:
    """The kernel arguments that reserve the pools, one entry for each page size.

    See Documentation/admin-guide/kernel-parameters.txt. `hugepages=NODE:COUNT` needs Linux 5.15.
    """
    arguments = []
    for size, group in groupby(sorted(pools, key=lambda pool: (pool.kilobytes, pool.numa_node or 0)), lambda p: p.size):
        same_size = list(group)
        any_node = sum(pool.count for pool in same_size if pool.numa_node is None)
        nodes = ",".join(f"{pool.numa_node}:{pool.count}" for pool in same_size if pool.numa_node is not None)
        arguments.append(f"hugepagesz={size} hugepages={nodes or any_node}")
    return tuple(arguments)


@frozen
class Arguments:
    """Kernel arguments, each as one line of text.

    ``loader``: "grub" or "grubby", or "" if the host has neither. ``running``: the arguments of this boot. ``next``: those of
    the default boot entry. ``ours``: those that Trackbed has set. ``pending``: a change of GRUB's files has not ended yet.
    """

    loader: str = ""
    running: str = ""
    next: str = ""
    ours: str = ""
    pending: str = ""


# update-grub first: where both are, as on Ubuntu with a grubby of somebody's, it writes GRUB's menu anew. systemd-boot, which
# Proxmox has on ZFS beside GRUB's programs, names itself in LoaderInfo. A unified kernel image, which has its arguments in
# itself, names its stub (systemd-stub) in StubInfo.
# GRUB boots the first entry of its menu by default. With savedefault it may be another one, which has the same arguments. The
# last sed leaves out what GRUB takes as another command: all from the first `;` that is not quoted.
_ARGUMENTS = r"""
echo "running $(cat "$3/proc/cmdline")"
booted=$(cat "$3"/sys/firmware/efi/efivars/LoaderInfo-* "$3"/sys/firmware/efi/efivars/StubInfo-* 2>/dev/null | tr -d '\000')
case $booted in *systemd-stub*) exit 0 ;; esac
variables='s/^[[:space:]]*(set +)?(kernelopts|tuned_params)="?([^"]*)"?$/set \2=\3/p'
if command -v update-grub >/dev/null; then
  case $booted in *systemd-boot*) exit 0 ;; esac
  echo loader grub
  linux=$(sed -nE 's/^[[:space:]]*linux[[:space:]]+[^[:space:]]*[[:space:]]*//p' "$3/boot/grub/grub.cfg" 2>/dev/null || true)
  echo "next $(printf '%s\n' "$linux" | head -n 1 | sed -E "s/^(([^\"';\\\\]|'[^']*'|\"[^\"]*\"|\\\\.)*);.*/\1/; s/'//g")"
  sed -nE "$variables" "$3/boot/grub/grub.cfg" 2>/dev/null || true
  ours=$(sed -n 's/^GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT \(.*\)"$/\1/p' "$1" 2>/dev/null || true)
  echo "ours $(echo "$ours" | tr -d "'")"
  if [ -e "$4" ]; then echo pending yes; fi
elif command -v grubby >/dev/null; then
  echo loader grubby
  echo "next $(grubby --info=DEFAULT | sed -n 's/^args="\(.*\)"$/\1/p' | head -n 1)"
  sed -nE "$variables" "$3/boot/grub2/grubenv" 2>/dev/null || true
  echo "ours $(cat "$2" 2>/dev/null || true)"
fi
"""


class KernelArguments(FactBase[Arguments]):
    """The kernel arguments of this boot (/proc/cmdline) and of the next."""

    default = Arguments
    shell = _ARGUMENTS
    words = (DROP_IN, GRUBBY_STATE, "", GRUB_PENDING)

    def process(self, output: list[str]) -> Arguments:
        """Parse lines of NAME and text, and put in the variables of GRUB's, which TuneD also uses."""
        lines = [(name, text.strip()) for name, _, text in (line.partition(" ") for line in output)]
        variables = dict(text.split("=", 1) for name, text in lines if name == "set")
        given = {name: text for name, text in lines if name != "set"}
        following = Template(given.get("next", "")).safe_substitute(variables)
        return Arguments(**{**given, "next": following})


_GRUB = """
mkdir -p "${4%/*}"
: > "$4"
if [ -n "$2" ]; then
  mkdir -p "$(dirname "$1")"
  quoted=$(printf '%s\\n' "$2" | sed "s/[^ ]*;[^ ]*/'&'/g")
  printf '%s\\n' "$3" "GRUB_CMDLINE_LINUX_DEFAULT=\\"\\$GRUB_CMDLINE_LINUX_DEFAULT $quoted\\"" > "$1.new"
  mv -T "$1.new" "$1"
else
  rm -f "$1"
fi
output=$(update-grub 2>&1) || { printf '%s\\n' "$output" >&2; exit 1; }
rm "$4"
"""

# Written from Red Hat's documents; not run on RHEL.
_GRUBBY = """
mkdir -p "$(dirname "$1")"
# Until the end all of them are ours, so that the next deploy removes what this one leaves if it is interrupted.
printf '%s\\n' "$2 $3" > "$1"
if [ -n "$3" ]; then grubby --update-kernel=ALL --remove-args="$3"; fi
if [ -n "$2" ]; then grubby --update-kernel=ALL --args="$2"; fi
printf '%s\\n' "$2" > "$1"
"""


_STILL_IN_EFFECT = "kernel arguments {} are still in effect"


def _removed_before(pending: bool) -> list[str]:
    """For an operation: the arguments that were removed before, and whose removal still needs a reboot.

    :param pending: the boot loader's change has not ended, so a reboot since the request did not remove them either.
    """
    have = host.get_fact(NodeRebootRequests)
    before, after = _STILL_IN_EFFECT.split("{}")
    requests = (have.requests if pending else have.due()) if have else ()
    reasons = [each.reason for each in requests if each.task == "boot-former"]
    return [word for reason in reasons for word in split(reason.removeprefix(before).removesuffix(after))]


@operation()
def set_arguments(wanted: tuple[str, ...]) -> Commands:
    """Set kernel arguments for the next boot, and remove those that Trackbed has set and that are no longer wanted.

    On Debian and Ubuntu: by the last drop-in of GRUB's, so that it overrides arguments of the same name, and by update-grub.
    Entries of the recovery mode do not get them. In the RHEL family: by grubby, for all installed kernels.

    Request a reboot while the current boot lacks one of the arguments.
    """
    have = host.get_fact(KernelArguments)
    text = " ".join(wanted)
    missing = missing_arguments(wanted, have.running)
    if missing and not have.loader:
        yield refuse(
            f"kernel arguments {' '.join(missing)} are not in effect, and this host boots by neither GRUB (update-grub) "
            "nor grubby; set them where the host gets its kernel from"
        )
        return
    if have.loader and (have.ours != text or have.pending or missing_arguments(wanted, have.next)):
        yield from _set(have, text)
        yield from _check_next(wanted)
    if missing:
        yield from reboot.request("boot", f"kernel arguments {' '.join(missing)} are not in effect")
    else:
        yield from reboot.withdraw("boot")
    yield from reboot.expire("boot-former")


def _set(have: Arguments, text: str) -> Commands:
    former = missing_arguments(split(have.ours), text)
    # First: after an interruption in between, the next deploy would find nothing to remove, and request nothing.
    removed = missing_arguments((*_removed_before(bool(have.pending)), *former), text)
    if active := [argument for argument in dict.fromkeys(removed) if not missing_arguments((argument,), have.running)]:
        yield from reboot.expire("boot-former")
        yield from reboot.request("boot-former", _STILL_IN_EFFECT.format(" ".join(active)))
    else:
        yield from reboot.withdraw("boot-former")
    if have.loader == "grub":
        yield script(_GRUB, DROP_IN, text, HEADER.strip(), GRUB_PENDING)
    else:
        yield script(_GRUBBY, GRUBBY_STATE, text, " ".join(former))


def _check_next(wanted: tuple[str, ...]) -> Commands:
    """Refuse if the boot loader's default entry, as it is now, does not make the kernel take an argument."""
    have = host.get_fact(KernelArguments)
    # A host without an installed kernel has no entries.
    if not have.next or not (missing := missing_arguments(wanted, have.next)):
        return
    if other := rival(missing[0], have.next):
        problem = (
            f"the kernel takes {other} instead; remove that (/etc/default/grub, /etc/default/grub.d, or by grubby)"
        )
    elif have.loader == "grub":
        problem = f"a file after {DROP_IN}, or /etc/grub.d, replaces GRUB_CMDLINE_LINUX_DEFAULT; change it there"
    else:
        problem = "grubby did not set it; set it by hand (grubby(8))"
    yield refuse(
        f"kernel argument {missing[0]} is not in effect at the next boot, which has {have.next}: {problem}, or remove it from "
        "boot.arguments"
    )


# Prints one line that changes when the initramfs or the options change, then that line as it was after the last check.
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

# Listing an initramfs takes seconds and making one takes minutes, so both are done only after a change. An initramfs that is
# newer than the options contains them.
_UPDATE_INITRAMFS = f"""{reboot.REQUEST}
options=$1 state=$2 image=$3 requests=$4 task=$5 reason=$6
shift 6
boot=$(cat /proc/sys/kernel/random/boot_id) sum=$(sha256sum < "$options" 2>/dev/null || true)
mkdir -p "$(dirname "$state")"
if [ ! -e "$options" ] || [ "$options" -nt "$image" ]; then
  if command -v lsinitramfs >/dev/null; then list=$(lsinitramfs "$image"); else list=$(lsinitrd "$image"); fi
  wanted=
  case "$list" in *"${{options#/}}"*) wanted=yes ;; esac
  for module; do
    if printf '%s\\n' "$list" | tr - _ | grep -q "/$(printf %s "$module" | tr - _)\\.ko"; then wanted=yes; fi
  done
  if [ -n "$wanted" ]; then
    # The host has booted with the options of the last check, if that was of this image, and no change followed in this boot.
    if ! grep -qs "^$boot " "$state.boot"; then
      of=$image was=''
      if [ -e "$state" ]; then read -r of _ _ was < "$state" || true; fi
      if [ "$of" != "$image" ]; then was=unknown; fi
      echo "$boot $was" > "$state.boot"
    fi
    # First: after an interruption in between, the image would be newer than the options, and nothing would request the reboot.
    request "$requests" "$task" "$reason"
    if command -v update-initramfs >/dev/null; then update-initramfs -u -k "$(uname -r)"; else dracut --force "$image"; fi
  fi
fi
if [ "$(cat "$state.boot" 2>/dev/null || true)" = "$boot $sum" ]; then rm -f "$requests/$task"; fi
echo "$image $(stat -c '%Y %s' "$image") $sum" > "$state"
"""


class Initramfs(FactBase[tuple[str, str] | None]):
    """The state of the running kernel's initramfs and the modules' options: now, and after the last check.

    None: there is no initramfs.
    """

    shell = _INITRAMFS
    words = (kernel_modules.OPTIONS, INITRAMFS_STATE)

    def process(self, output: list[str]) -> tuple[str, str] | None:
        """Take one line or two."""
        return (output[0].strip(), output[1].strip() if len(output) > 1 else "") if output else None


@operation()
def initramfs(modules: tuple[str, ...]) -> Commands:
    """Rebuild the initramfs if the options of a module in it have changed; they take effect at the next boot.

    If they are again what the host has booted with, the request of a reboot is withdrawn.
    """
    yield from reboot.expire("initramfs")
    have = host.get_fact(Initramfs)
    if have is None or (not modules and not have[1]) or have[0] == have[1]:
        host.noop("the initramfs has the modules' options")
        return
    image = have[0].split()[0]
    yield script(
        _UPDATE_INITRAMFS,
        *(kernel_modules.OPTIONS, INITRAMFS_STATE, image),
        *(reboot.FOLDER, "initramfs", f"options of modules in {image} have changed"),
        *modules,
    )
