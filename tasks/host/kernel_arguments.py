"""What the arguments of a kernel's command line set, if several of them are about the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent.spec.node import HUGEPAGE_SIZE, HugepagePool

LAST = frozenset((
    *("apparmor", "selinux"),  # security/apparmor/lsm.c, security/selinux/hooks.c
    *("clocksource", "skew_tick"),  # kernel/time/clocksource.c, kernel/time/tick-sched.c
    "iommu.strict",  # drivers/iommu/iommu.c
    *("irqaffinity", "rcu_nocbs"),  # kernel/irq/irqdesc.c, kernel/rcu/tree_nocb.h
    *("mitigations", "preempt"),  # kernel/cpu.c, kernel/sched/core.c
    *("numa_balancing", "transparent_hugepage"),  # mm/mempolicy.c, mm/huge_memory.c
    # kernel/params.c: module parameters that are one number or one text.
    *("intel_idle.max_cstate", "processor.max_cstate", "nvme_core.io_timeout", "nvme_core.multipath", "module_blacklist"),
    "systemd.unified_cgroup_hierarchy",  # src/basic/proc-cmdline.c of systemd
))  # fmt: skip
"""Arguments whose last value replaces the values before. The values of any other argument add up, as those of console and
modprobe.blacklist, or it is not known whether they do."""

OPTIONS = frozenset(("amd_iommu", "intel_iommu", "iommu", "pci"))
"""Arguments whose value is a list of options. If an argument stands there twice, all its options count. If two options
are about the same, the last one counts
(drivers/iommu/amd/init.c, drivers/iommu/intel/iommu.c, arch/x86/kernel/pci-dma.c, drivers/pci/pci.c)."""

SAME = {
    **dict.fromkeys(("iommu=pt", "iommu.passthrough=1"), ("iommu.passthrough", "1")),
    **dict.fromkeys(("iommu=nopt", "iommu.passthrough=0"), ("iommu.passthrough", "0")),
    **{f"{name}={value}": (name, value) for name in ("amd_iommu", "intel_iommu") for value in ("on", "off")},
    **{f"intel_iommu=sm_{value}": ("intel_iommu=sm", value) for value in ("on", "off")},
    **{f"pci=pcie_bus_{value}": ("pci=pcie_bus", value) for value in ("tune_off", "safe", "perf", "peer2peer")},
    **dict.fromkeys(("audit=1", "audit=on"), ("audit", "on")),
    **dict.fromkeys(("audit=0", "audit=off"), ("audit", "off")),
}
"""What options set that are about the same, and to which value."""

FIRST = frozenset(("default_hugepagesz", "isolcpus=domain", "isolcpus=managed_irq", "nohz_full"))
"""What keeps its first value (mm/hugetlb.c, kernel/sched/isolation.c). Linux before 5.18 also refuses an isolcpus or nohz_full
whose CPUs are not those of the one before, even if they are about different things."""

OFF_FOR_GOOD = frozenset(("amd_iommu", "audit"))
"""What no later value switches on again (drivers/iommu/amd/init.c, kernel/audit.c)."""

OVERRIDES = {
    # kernel/crash_reserve.c
    "crashkernel": ("crashkernel,high", "crashkernel,low"),
    # drivers/iommu/intel/iommu.c, drivers/iommu/amd/init.c
    "iommu=off": ("intel_iommu", "iommu.passthrough"),
}
"""What has no effect beside another argument, wherever that stands."""

Settings = dict[str, tuple[str, str]]
"""What is set: the value, and the argument that has set it."""


def split(line: str) -> tuple[str, ...]:
    """The arguments of a command line. A pool of huge pages is one."""
    return tuple(re.findall(r"hugepagesz=\S+ hugepages=\S+|\S+", line))


def missing_arguments(wanted: tuple[str, ...], present: str) -> list[str]:
    """The wanted arguments that are not in ``present``, or that another argument there overrides."""
    there = _settings(present)
    return [each for each in wanted if any(there.get(what, ("",))[0] != value for what, value in _values(each).items())]


def rival(argument: str, present: str) -> str:
    """The argument in ``present`` that sets what a missing one should set; "" if there is none."""
    there = _settings(present)
    others = (there[what] for what, value in _values(argument).items() if what in there and there[what][0] != value)
    return next((word for _, word in others), "")


def _values(argument: str) -> dict[str, str]:
    return {what: value for what, (value, _) in _settings(argument).items()}


def _settings(line: str) -> Settings:
    """What a command line sets. What follows `--` is for init."""
    made: Settings = {}
    words = f" {line} ".partition(" -- ")[0].split()
    for word in words:
        for what, value in _parts(word):
            if what not in made or not (what in FIRST or (what in OFF_FOR_GOOD and made[what][0] == "off")):
                made[what] = value, word
    overridden = {what: made[by] for by, whats in OVERRIDES.items() if by in made for what in whats if what in made}
    return made | overridden | _pools(words)


def _parts(word: str) -> Iterator[tuple[str, str]]:
    """What an argument sets, and to which value. One that is not known sets itself."""
    name, _, value = word.partition("=")
    if word in SAME:
        yield SAME[word]
    elif name in OPTIONS:
        for option in value.split(","):
            what, _, given = option.partition("=")
            yield SAME.get(f"{name}={option}", (f"{name}={what}", given or "on"))
    elif name == "isolcpus":
        *flags, cpus = re.split("(?<=[a-z]),", value)
        for flag in flags or ["domain"]:
            yield "nohz_full" if flag == "nohz" else f"isolcpus={flag}", cpus
    elif name == "crashkernel":
        yield re.sub(r"=.*?(,high|,low|,cma|)$", r"\1", word), value
    elif name in LAST or name in FIRST:
        yield name, value or "on"
    elif name not in ("hugepages", "hugepagesz"):
        yield word, "on"


def _pools(words: list[str]) -> Settings:
    """The pools of huge pages, as mm/hugetlb.c makes them.

    A size counts once, and after default_hugepagesz only if that had no number. A number before all sizes is that of the
    default size, whatever its pool says.
    """
    made: Settings = {}
    seen: set[str] = set()
    default = implied = last = ""
    size: str | None = ""  # of the next number; None: mm/hugetlb.c ignores that
    for word in words:
        name, _, value = word.partition("=")
        if name in ("hugepagesz", "default_hugepagesz"):
            last, size = word, f"hugepagesz={_size(value)}"
            if name == "hugepagesz":
                ignored = size in seen and (size != default or size in made)
            elif not (ignored := bool(default)):
                default = size
            seen.add(size)
            size = None if ignored else size
        elif name == "hugepages" and size:
            made.setdefault(size, (value, f"{last} {word}"))
        elif name == "hugepages" and size is not None:
            implied = implied or word
    if implied:
        made[default or "hugepagesz=2M"] = implied.partition("=")[2], implied
    return made


def _size(text: str) -> str:
    """2M for 2048k."""
    return HugepagePool(text.upper(), 0).size if HUGEPAGE_SIZE.fullmatch(text.upper()) else text
