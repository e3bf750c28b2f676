"""The loaded drivers are the installed ones: after an upgrade the old code runs until a module is loaded again.

Compared are ``/sys/module/M/srcversion`` and the module's file as modprobe would find it. A module that has no
srcversion (those of some distributions' kernels have none) or no file (it is part of the kernel) tells nothing and is
passed over.
"""

from __future__ import annotations

from attrs import frozen

from agent.hardware.sysfs import read_or
from agent.machine import Machine
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "KernelModules"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # an upgrade reaches a whole fleet at once, and what is loaded still works
PERIOD = 300.0  # files are opened and unpacked; nothing of it is urgent

# What RDMA and GPUDirect stand on, beside the drivers of the wanted NICs.
WATCHED = frozenset(
    {
        *("ib_core", "ib_uverbs", "ib_umad", "rdma_cm", "rdma_ucm", "mlx5_core", "mlx5_ib", "mlx_compat", "erdma"),
        *("nvidia", "nvidia_uvm", "nvidia_peermem", "gdrdrv"),
    }
)


@frozen
class Loaded:
    """A loaded module's source version, and that of its file."""

    module: str
    loaded: str
    installed: str


def read(machine: Machine, want: Wanted) -> tuple[Loaded, ...]:
    """The modules of which both are known, by name."""
    drivers = {nic.function.driver.replace("-", "_") for nic in want.nics.values() if nic.function.driver}
    found = []
    for module in sorted(drivers | WATCHED):
        loaded = read_or(machine.files, f"/sys/module/{module}/srcversion", "")
        installed = machine.system.installed_srcversion(module) if loaded else None
        if installed:
            found.append(Loaded(module, loaded, installed))
    return tuple(found)


def judge(want: Wanted, have: Snapshot, facts: tuple[Loaded, ...]) -> list[Condition]:
    """False names the modules that are not what is installed."""
    stale = [f"{m.module} (loaded {m.loaded}, installed {m.installed})" for m in facts if m.loaded != m.installed]
    if not stale:
        return [Condition(TYPE, "True", "AsInstalled" if facts else "NothingToCompare")]
    message = f"not what is installed: {', '.join(stale)}; load them again, or reboot; if it stays, update-initramfs or dracut"
    return [Condition(TYPE, "False", "ModulesStale", message)]
