"""The loaded drivers are the installed ones: after an upgrade the old code runs until the module is loaded again.

The probe compares ``/sys/module/M/srcversion`` with the srcversion of the file that modprobe would load. It skips modules
without a srcversion (some distributions have none) and modules without a file (built into the kernel).
"""

from __future__ import annotations

from attrs import frozen

from agent.hardware.sysfs import read_or
from agent.machine import Machine
from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "KernelModules"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # an upgrade reaches a whole fleet at once, and the loaded modules still work
PERIOD = 300.0  # a reading opens and unpacks the files of the modules, and its result is not urgent

# The modules that RDMA and GPUDirect need, besides the drivers of the wanted NICs.
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
    """The modules for which both versions are known, by name."""
    drivers = {nic.function.driver.replace("-", "_") for nic in want.nics.values() if nic.function.driver}
    modules = []
    for module in sorted(drivers | WATCHED):
        loaded = read_or(machine.files, f"/sys/module/{module}/srcversion", "")
        installed = machine.system.installed_srcversion(module) if loaded else None
        if installed:
            modules.append(Loaded(module, loaded, installed))
    return tuple(modules)


def judge(want: Wanted, have: Snapshot, facts: tuple[Loaded, ...]) -> list[Condition]:
    """False if loaded modules differ from the installed ones; the message names them."""
    stale = [f"{m.module} (loaded {m.loaded}, installed {m.installed})" for m in facts if m.loaded != m.installed]
    if not stale:
        return [condition(TYPE, "AsInstalled" if facts else "NothingToCompare")]
    return [condition(TYPE, "ModulesStale", f"not what is installed: {', '.join(stale)}")]
