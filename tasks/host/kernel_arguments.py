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

# check_next judges what the boot loader has made as missing_arguments does.
CHECK_NEXT = f"""
rivals() {{  # arguments: an argument, the words of the command line where another value of its name replaces it
  case $1 in {" | ".join(f"*{part}" for part in PARTS)}) return ;; esac
  for word in $2; do
    case $word in
      {" | ".join(f"*{part}" for part in PARTS)}) ;;
      "$1") case $1 in hugepagesz=*) echo "$word" ;; esac ;;
      "${{1%%=*}}="*) case $1 in hugepagesz=*) ;; *) echo "$word" ;; esac ;;
    esac
  done
}}

check_next() {{  # arguments: the loader, the arguments of the next boot, the wanted ones, where else they may be set
  for argument in $3; do
    rival=
    case " $2 " in
      *" $argument "*)
        rest=" $2 "
        case $argument in
          {" | ".join(f"{name}=*" for name in LAST)}) rival=$(rivals "$argument" "${{rest##*" $argument "}}") ;;
          {" | ".join(OPPOSITES)})
            for word in ${{rest##*" $argument "}}; do
              case "$argument $word" in {" | ".join(f"'{one} {other}'" for one, other in OPPOSITES.items())})
                rival=$word ;;
              esac
            done ;;
          hugepagesz=*) rival=$(rivals "$argument" "${{rest#*" $argument "}}") ;;
          {" | ".join(f"{name}=*" for name in FIRST if name != "hugepagesz")})
            rival=$(rivals "$argument" "${{rest%%" $argument "*}}") ;;
        esac
        [ -n "$rival" ] || continue
        echo "the next boot has the kernel argument $argument, but the kernel takes $rival, which is there, too; remove that" \\
          "(/etc/default/grub, /etc/default/grub.d, or by grubby), or remove $argument from boot.arguments" >&2
        exit 1 ;;
    esac
    echo "$1 did not set the kernel argument $argument: the next boot has $2; $4, or remove it from boot.arguments" >&2
    exit 1
  done
}}
"""


def missing_arguments(wanted: tuple[str, ...], present: str) -> list[str]:
    """The wanted arguments that are not in ``present``, or do not count there.

    Several words (hugepagesz=1G hugepages=4) must be there as a whole.
    """
    return [argument for argument in wanted if not _counts(argument, f" {present} ")]


def _counts(argument: str, present: str) -> bool:
    if f" {argument} " not in present:
        return False
    name = argument.partition("=")[0]
    if name == "hugepagesz":
        return present.split().count(argument.split()[0]) == 1
    if argument in OPPOSITES:
        return OPPOSITES[argument] not in present.rpartition(f" {argument} ")[2].split()
    if argument.endswith(PARTS) or name not in (*LAST, *FIRST):
        return True
    before, after = present.partition(f" {argument} ")[0], present.rpartition(f" {argument} ")[2]
    others = (after if name in LAST else before).split()
    return not any(word.startswith(f"{name}=") and not word.endswith(PARTS) for word in others)
