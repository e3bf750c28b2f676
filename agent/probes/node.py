"""Checks of the node as a whole: its clock, its daemons, its modules."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from agent.hardware.sysfs import names_in, read_or
from agent.kinds.host import hugepages, irqbalance
from agent.kinds.host.sysctls import KUBELETS
from agent.machine import Machine
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import HOST, Condition
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

PLUGINS = "/var/lib/kubelet/device-plugins"
"""The folder of the kubelet's registration socket, even if the kubelet has another ``--root-dir``."""

SOCKET = "kubelet.sock"

RUNTIMES = {"containerd": "containerd", "dockerd": "docker", "crio": "crio"}
"""The units of container runtimes, by the name of their process."""

# The modules that RDMA and GPUDirect need, besides the drivers of the wanted NICs.
WATCHED = frozenset(
    {
        *("ib_core", "ib_uverbs", "ib_umad", "rdma_cm", "rdma_ucm", "mlx5_core", "mlx5_ib", "mlx_compat", "erdma"),
        *("bnxt_re", "irdma", "ionic_rdma", "mana_ib", "qedr", "iw_cxgb4", "mlx4_ib", "hns_roce_hw_v2", "efa"),
        *("nvidia", "nvidia_uvm", "nvidia_peermem", "gdrdrv"),
    }
)


def _clock(want: Wanted, have: Snapshot, facts: bool) -> list[Condition]:
    if facts:
        return [condition("ClockSynchronised", "Synchronised")]
    message = "nothing has set the clock for hours, or since the boot"
    return [condition("ClockSynchronised", "NotSynchronised", message)]


def _device_plugins(want: Wanted, have: Snapshot, facts: bool) -> list[Condition]:
    if have.processes.isdisjoint(KUBELETS):
        return [condition("DevicePlugins", "NoKubelet")]
    if facts:
        return [condition("DevicePlugins", "Served")]
    return [condition("DevicePlugins", "NoSocket", f"the kubelet runs, and {PLUGINS}/{SOCKET} is not there")]


def _irqbalance(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if it runs although the policy is ``disabled``, or runs without Trackbed's script under the policy ``banned``."""
    policy = want.spec.irqs.irqbalance
    if policy == "disabled" and irqbalance.PROCESS in have.processes:
        return [condition("IrqbalancePolicy", "IrqbalanceRunning", "irqbalance runs and moves interrupts away")]
    bans: irqbalance.Bans | None = have[irqbalance.NAME].get(HOST)
    if policy == "banned" and bans is None:
        message = f"{irqbalance.LIST} or irqbalance's command line cannot be read; Converged says why"
        return [condition("IrqbalancePolicy", "NotRead", message)]
    if policy == "banned" and bans is not None and not bans.asked:
        message = f"irqbalance runs without --policyscript={irqbalance.SCRIPT} and moves interrupts away"
        return [condition("IrqbalancePolicy", "IrqbalanceUnbanned", message)]
    return [condition("IrqbalancePolicy", "PolicyHeld")]


@frozen
class Loaded:
    """A loaded module's source version, and that of the file that modprobe would load."""

    module: str
    loaded: str
    installed: str


def _read_modules(machine: Machine, want: Wanted) -> tuple[Loaded, ...]:
    """The modules for which both versions are known, by name.

    Some distributions have no srcversion, and what is built into the kernel has no file.
    """
    drivers = {nic.function.driver.replace("-", "_") for nic in want.nics.values() if nic.function.driver}
    modules = []
    for module in sorted(drivers | WATCHED):
        loaded = read_or(machine.files, f"/sys/module/{module}/srcversion", "")
        installed = machine.system.installed_srcversion(module) if loaded else None
        if installed:
            modules.append(Loaded(module, loaded, installed))
    return tuple(modules)


def _modules(want: Wanted, have: Snapshot, facts: tuple[Loaded, ...]) -> list[Condition]:
    stale = [f"{m.module} (loaded {m.loaded}, installed {m.installed})" for m in facts if m.loaded != m.installed]
    if not stale:
        return [condition("KernelModules", "AsInstalled" if facts else "NothingToCompare")]
    return [condition("KernelModules", "ModulesStale", f"not what is installed: {', '.join(stale)}")]


def _hugepages(want: Wanted, have: Snapshot, facts: Mapping[str, tuple[int, int]]) -> list[Condition]:
    """A kubelet counts huge pages only when it starts. If the agent changes a pool after that, the Node keeps the old number.

    No condition where nobody asks for huge pages.
    """
    if not facts:
        return [condition("KubeletHugepages", "Counted")] if want.spec.hugepages else []
    listed = ", ".join(f"{counted} of {size}, and there are {now}" for size, (counted, now) in sorted(facts.items()))
    message = f"the kubelet has counted these huge pages at its start: {listed}"
    return [condition("KubeletHugepages", "CountedBefore", message)]


def _memlock(want: Wanted, have: Snapshot, facts: Mapping[str, int]) -> list[Condition]:
    """Memory that is registered for RDMA counts against RLIMIT_MEMLOCK.

    A container inherits it from its runtime unless it has CAP_IPC_LOCK. ``facts``: the limit of each running runtime in bytes;
    -1 is unlimited.
    """
    limited = {name: limit for name, limit in sorted(facts.items()) if limit >= 0}
    if not limited:
        return [condition("ContainerMemlock", "Unlimited" if facts else "NoRuntime")]
    listed = ", ".join(f"{name} {limit} bytes ({RUNTIMES[name]}.service)" for name, limit in limited.items())
    message = f"locked memory of containers is limited: {listed}"
    return [condition("ContainerMemlock", "MemlockLimited", message)]


PROBES = (
    Probe(
        name="clock",
        type="ClockSynchronised",
        stage="device",
        severity="warn",  # all nodes share the time service: its outage must not make a whole fleet unready
        holds="The clock is synchronised, as `timedatectl` judges: certificates, leases and logs of several nodes need it.",
        read=lambda machine, want: machine.system.clock_synchronised(),
        judge=_clock,
        period=900.0,  # a lost time service shows only after hours
        recheck=60.0,  # at boot the clock is set a moment after the first reading
        deadline=90.0,  # a reading may have to wait until D-Bus has started timedated
    ),
    Probe(
        name="device_plugins",
        type="DevicePlugins",
        stage="cluster",
        holds="The kubelet accepts device plugins: without its registration socket no pod gets a VF or an RDMA device.",
        read=lambda machine, want: SOCKET in names_in(machine.files, PLUGINS),
        judge=_device_plugins,
        # A starting kubelet removes its socket and creates it again.
        fail_after=2,
        of=2,
    ),
    Probe(
        name="irqbalance",
        type="IrqbalancePolicy",
        stage="device",
        holds="irqbalance follows the spec's policy. Otherwise it moves interrupts that the agent has pinned.",
        judge=_irqbalance,
    ),
    Probe(
        name="kernel_modules",
        type="KernelModules",
        stage="device",
        severity="warn",  # an upgrade reaches a whole fleet at once, and the loaded modules still work
        holds="The loaded drivers are the installed ones: after an upgrade the old code runs until the module is loaded again.",
        read=_read_modules,
        judge=_modules,
        period=300.0,  # a reading opens and unpacks the files of the modules, and also a new NIC's driver is not urgent
    ),
    Probe(
        name="kubelet_hugepages",
        type="KubeletHugepages",
        stage="cluster",
        severity="warn",  # pods that ask for no huge pages do not notice
        holds="The running kubelet has counted the huge pages that there are now.",
        read=lambda machine, want: hugepages.stale(machine),
        judge=_hugepages,
    ),
    Probe(
        name="memlock",
        type="ContainerMemlock",
        stage="cluster",
        severity="warn",  # the runtimes' packages set 8 MiB, and pods with CAP_IPC_LOCK have no limit
        holds="Containers may lock memory without limit.",
        read=lambda machine, want: machine.processes.memlock(frozenset(RUNTIMES)),
        judge=_memlock,
    ),
)
