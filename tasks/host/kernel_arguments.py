"""If a kernel's command line has several arguments with one name: which of them the kernel takes."""

from __future__ import annotations

LAST = (
    *("apparmor", "audit", "clocksource", "crashkernel", "intel_idle.max_cstate", "iommu.passthrough", "iommu.strict"),
    *("irqaffinity", "mitigations", "module_blacklist", "numa_balancing", "nvme_core.io_timeout"),
    *(
        "nvme_core.multipath",
        "preempt",
        "processor.max_cstate",
        "selinux",
        "skew_tick",
        "systemd.unified_cgroup_hierarchy",
    ),
    "transparent_hugepage",
)
"""Arguments whose last value replaces the values before. The values of any other argument add up, as those of console, pci,
intel_iommu and modprobe.blacklist, or it is not known whether they do."""

FIRST = ("default_hugepagesz", "hugepagesz", "isolcpus", "nohz_full")
"""Arguments whose first value the kernel keeps: see mm/hugetlb.c (for hugepagesz: the first of each size), and
kernel/sched/isolation.c."""

PARTS = (",high", ",low", ",cma")
"""Values of crashkernel that stand beside others (kernel/crash_reserve.c)."""

OPPOSITES = {
    **{"intel_iommu=off": "intel_iommu=on", "intel_iommu=on": "intel_iommu=off"},
    **{"iommu=nopt": "iommu=pt", "iommu=pt": "iommu=nopt"},
}
"""The value that undoes another one of an argument whose values add up (drivers/iommu/intel, arch/x86/kernel/pci-dma.c)."""


def missing_arguments(wanted: tuple[str, ...], present: str) -> list[str]:
    """The wanted arguments that are not in ``present``, or do not count there.

    Several words (hugepagesz=1G hugepages=4) must be there as a whole.
    """
    return [argument for argument in wanted if rival(argument, present) != ""]


def rival(argument: str, present: str) -> str | None:
    """The argument in ``present`` that the kernel takes instead; "" if there is none; None if the argument is not there."""
    present, name = f" {present} ", argument.partition("=")[0]
    if f" {argument} " not in present:
        return None
    before, after = present.partition(f" {argument} ")[0].split(), present.rpartition(f" {argument} ")[2].split()
    if name == "hugepagesz":
        others = [word for word in before if word == argument.split()[0]]
    elif argument in OPPOSITES:
        others = [word for word in after if word == OPPOSITES[argument]]
    elif argument.endswith(PARTS) or name not in (*LAST, *FIRST):
        return ""
    else:
        replacing = after if name in LAST else before
        others = [word for word in replacing if word.startswith(f"{name}=") and not word.endswith(PARTS)]
    return others[-1] if others else ""
