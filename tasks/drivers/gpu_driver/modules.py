"""Builds the modules of NVIDIA's driver, and loads those that are installed, unless a process has a GPU open.

From vendor documents. On a GPU (one H100) only :class:`GpuUsers` and :class:`LoadedVersion` were run.
"""

from __future__ import annotations

import re

from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.report.printable import printable
from tasks import disruption, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.facts import FactBase, Lines
from tasks.drivers.device_nodes import HOLDERS
from tasks.drivers.peer_memory import MODULE as PEER_MODULE
from tasks.drivers.peer_memory import OPEN, PEER_MEMORY, PeerMemorySupport
from tasks.host import kernel
from tasks.packages import dkms, signatures

TASK = "gpu_driver"
MODULE = "nvidia"
NOUVEAU = "nouveau"
REPLACED = (NOUVEAU, "nova_core", "nova_drm")
"""The kernel's own drivers of these GPUs. While one has a GPU, NVIDIA's finds none (modprobe: No such device). Ubuntu 26.04's
kernel has nova_core."""

# The driver's names in DKMS: nvidia, nvidia-open, nvidia-srv. nvidia-fs is not the driver but GPUDirect Storage.
_DKMS = re.compile(r"nvidia(-(open|srv|server))*")

# The services of the host that only serve or watch GPUs are stopped before the driver is unloaded. In a pod, such a program is
# a user as any other: only its cluster can stop it.
_SERVICES = "services='nvidia-dcgm dcgm nvidia-imex nvidia-fabricmanager nvidia-persistenced'\n"

_USERS = (
    HOLDERS
    + _SERVICES
    + r"""
root=$1
holders "$root" /dev/nvidia | cut -d ' ' -f 1 | sort -n -u | while read -r pid; do
  read -r name < "$root/proc/$pid/comm" 2>/dev/null || continue
  unit=$(sed -n 's,.*/system.slice/\([^/]*\)\.service$,\1,p' "$root/proc/$pid/cgroup" 2>/dev/null | head -n 1) || true
  case " $services " in *" ${unit:-none} "*) continue ;; esac
  echo "$name ($pid)"
done
"""
)


class GpuUsers(Lines):
    """The processes that have a GPU open, each as `python3 (4711)`."""

    prefetched = False
    shell = _USERS


def named(users: list[str]) -> str:
    """The processes, for a message."""
    return ", ".join(users[:8]) + (f" and {len(users) - 8} more" if len(users) > 8 else "")


@operation()
def build(version: str) -> Commands:
    """Have DKMS build the modules for the running kernel. A package's own script skips that if the headers are missing.

    If OFED is newer, they are built again: nvidia_peermem loads only with the ib_core that it was built against.
    """
    if kernel.skip_until_booted("the modules are built"):
        return
    builds = [each for each in host.get_fact(dkms.Builds) if _DKMS.fullmatch(each.module) and each.version == version]
    missing = f"gpu_driver: DKMS has no module {MODULE} {version}: the packages did not install its source"
    if builds or host.state.is_executing:
        yield from dkms.install(builds, host.get_fact(dkms.RunningKernel), missing, _other_ofed)


def _other_ofed(kernel: str) -> bool:
    peer_memory = PEER_MEMORY.here()
    needs_ofed = peer_memory is not None and peer_memory.method == PEER_MODULE
    return needs_ofed and bool(host.get_fact(dkms.NewerInput, module=PEER_MODULE, kernel=kernel))


def reboot_due() -> bool:
    """For an operation: whether this task waits for a reboot."""
    requests = host.get_fact(reboot.NodeRebootRequests)
    return requests is not None and any(each.task == TASK for each in requests.requests)


# gdrdrv is of GDRCopy, nvidia_fs of GPUDirect Storage. Each of these modules goes before those that it holds.
_LOAD = (
    _SERVICES
    + """
reload=$1 remedy=$2
stopped= unloaded=
if [ "$reload" = yes ]; then
  for unit in $services; do
    if systemctl --quiet is-active "$unit"; then systemctl stop "$unit"; stopped="$unit $stopped"; fi
  done
  for module in gdrdrv nvidia_fs nvidia_peermem nvidia_drm nvidia_modeset nvidia_uvm nvidia; do
    [ -d "/sys/module/$module" ] || continue
    rmmod "$module" || break
    unloaded="$module $unloaded"
  done
fi
modprobe nvidia || { dmesg | tail -n 10; echo "$remedy"; exit 1; } >&2
missing=
for module in $unloaded; do modprobe "$module" || missing="$missing $module"; done
for unit in $stopped; do systemctl start "$unit" || true; done
[ -z "$missing" ] || {
  dmesg | tail -n 10
  echo "gpu_driver: modules that were unloaded with nvidia do not load again:$missing; build and install them for this driver"
  exit 1
} >&2
"""
)
_NOT_LOADED = (
    "gpu_driver: nvidia does not load; the kernel's last messages are above. Without a supported GPU remove the key; open must "
    "be False for GPUs before Turing, True for Blackwell and Grace Hopper; with Secure Boot, enroll DKMS' key (mokutil)"
)


class LoadedVersion(FactBase[str | None]):
    """The version of the loaded driver; None: none is loaded."""

    shell = "cat /sys/module/nvidia/version 2>/dev/null || true"


def _is_current(module: dkms.Module, version: str) -> bool:
    """For an operation: whether the loaded module is the installed one.

    srcversion does not see the version of NVIDIA's driver, which is a definition on the compiler's command line.
    """
    return module.is_loaded and not module.stale and host.get_fact(LoadedVersion) == version


GPUS = """
nvidia_gpus() {  # argument: the root folder
  for device in "$1"/sys/bus/pci/devices/*; do
    { read -r vendor < "$device/vendor" && read -r class < "$device/class"; } 2>/dev/null || continue
    case "$vendor $class" in "0x10de 0x0300"* | "0x10de 0x0302"*) ;; *) continue ;; esac
    [ ! -e "$device/physfn" ] || continue
    driver=$(readlink "$device/driver" || true)
    echo "${device##*/} ${driver##*/}"
  done
}
"""
"""A shell function that prints the PCI address of each of NVIDIA's GPUs, and its driver if one has it.

It finds them in sysfs: display controllers (class 0300) and 3D controllers (0302). VFs (of vGPUs) do not count."""


class GpuDrivers(FactBase[dict[str, str]]):
    """The driver that each of NVIDIA's GPUs is bound to, by PCI address; empty: none."""

    default = dict
    shell = f'{GPUS}nvidia_gpus "$1"'

    def process(self, output: list[str]) -> dict[str, str]:
        """Parse a line for each GPU."""
        return {address: driver for address, _, driver in (line.partition(" ") for line in output)}


def _given_away() -> str | None:
    """For an operation: why no GPU is left for the driver, as on a host that gives them to virtual machines; None if one is."""
    gpus = host.get_fact(GpuDrivers)
    others = {address: driver for address, driver in gpus.items() if driver not in ("", MODULE)}
    named = ", ".join(f"{address} ({driver})" for address, driver in sorted(others.items()))
    if others and len(others) < len(gpus):
        host.log(printable(f"gpu_driver: other drivers have these GPUs, and keep them: {named}"))
        return None
    return (
        f"gpu_driver: other drivers have all GPUs: {named}. For vfio-pci, take the GPUs out of vfio-pci.ids (kernel arguments, "
        "/etc/modprobe.d) or driver_override, and reboot; or remove the key on a host that gives its GPUs to virtual machines"
        if others
        else None
    )


@operation()
def load(wanted_open: bool, version: str) -> Commands:
    """Load the installed modules. Load them again if others are loaded, or request a reboot if that is not allowed now."""
    if kernel.skip_until_booted("the driver is loaded"):
        return
    module = host.get_fact(dkms.ModuleState, module=MODULE)
    if module.path is None:
        if host.state.is_executing:
            yield refuse(f"gpu_driver: the running kernel has no module {MODULE}; `dkms status` shows what was built")
        else:
            yield script(_LOAD, "no", _NOT_LOADED)
        return
    licence = host.get_fact(PeerMemorySupport).gpu_driver
    if licence and (licence == OPEN) != wanted_open and host.state.is_executing:
        yield refuse(
            f"gpu_driver: the licence of the installed {MODULE} is {licence}, which does not fit open {wanted_open}; remove "
            "the package of the other modules (`dkms status` names it), and deploy again"
        )
        return
    if not _is_current(module, version) and (problem := signatures.refusal(TASK, module.path)):
        yield refuse(problem)
        return
    if replaced := [name for name in REPLACED if host.get_fact(dkms.ModuleState, module=name).is_loaded]:
        yield from _request_reboot(f"{', '.join(replaced)} is loaded, which the driver {version} replaces")
        return
    if problem := _given_away():
        yield refuse(problem)
        return
    if _is_current(module, version):
        yield from reboot.withdraw(TASK)
        return
    # The srcversion makes it another reason after a build for another OFED.
    installed = f"the driver {version} ({module.installed})"
    users = host.get_fact(GpuUsers) if module.is_loaded else []
    if users:
        host.log(printable(f"gpu_driver: the loaded driver is in use by {named(users)}"))
        yield from _request_reboot(f"{installed} is installed, and another is loaded and in use")
        return
    if module.is_loaded and disruption.deferred("reload of the GPU driver", disruption.DRIVER_RELOAD, of_nics=False):
        yield from _request_reboot(f"{installed} is installed, and another is loaded")
        return
    yield script(_LOAD, "yes" if module.is_loaded else "no", _NOT_LOADED)
    if not module.is_loaded or not host.state.is_executing:
        yield from reboot.withdraw(TASK)
    elif not _is_current(host.get_fact(dkms.ModuleState, module=MODULE), version):
        yield from _request_reboot(f"{installed} is installed, and another could not be unloaded")
    else:
        yield from reboot.withdraw(TASK)


def _request_reboot(reason: str) -> Commands:
    requests = host.get_fact(reboot.NodeRebootRequests)
    if requests is None or (present := requests.of(TASK)) is None or present.reason != reason:
        # It may contain the kernel's own drivers, or the former modules.
        yield script(dkms.MAKE_INITRAMFS)
    yield from reboot.request(TASK, reason)
