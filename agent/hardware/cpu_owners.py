"""Who owns CPUs: pods to which the kubelet gave CPUs of their own, claims of DRA, and cgroups that are partitions of cpusets.

The kubelet's static policy keeps its assignments in a file, which it replaces as a whole (pkg/kubelet/cm/cpumanager/state).
That file is read, not the PodResources API: it is also there while the kubelet is stopped, and a kubelet that has just started
answers that there are no pods. The file's checksum is not compared: it depends on how each version names its Go types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import filter as matching
from functools import cached_property
from typing import Any

from attrs import field, frozen

from agent.documents import load
from agent.hardware.sysfs import names_in, parsed, ranges, read_or
from agent.machine import Files
from agent.report.names import CGROUPS, CPU_CLAIMS, KUBELET_CPUS
from agent.spec.ranges import parse_ranges

# The sources of owners, as messages name them.
PARTITIONS, CLAIMS, PODS = "partitions of cpusets", "claims", "pods"

PARTITION = "cpuset.cpus.partition"
LARGEST = 1 << 20
"""Bytes of the kubelet's file. That of 110 pods has ten thousand."""

# The containers of a claim get this variable (pkg/driver/cdi.go of dra-driver-cpu).
CLAIM = re.compile(r'"DRA_CPUSET_([0-9a-f-]{36})=([0-9,-]+)"')


@frozen
class CpuOwners:
    """The owner of each CPU that has one, such as ``pod 235148fe-393f-47a8-a17d-bd55bc1a836b`` or ``cgroup /rt.slice``.

    ``sources``: the owners by the name of their source, then by CPU. A source that cannot be read has those of the reading
    before; ``fault`` says which one, and why.
    """

    sources: Mapping[str, Mapping[int, str]] = field(factory=dict)
    fault: str = ""

    @cached_property
    def pods(self) -> Mapping[int, str]:
        """The pods and claims that own CPUs, by CPU."""
        return {**self.sources.get(CLAIMS, {}), **self.sources.get(PODS, {})}

    @cached_property
    def of(self) -> Mapping[int, str]:
        """All owners, by CPU."""
        return {**self.sources.get(PARTITIONS, {}), **self.pods}


NOBODY = CpuOwners()
"""No CPU has an owner."""


def read_owners(files: Files, before: CpuOwners) -> CpuOwners:
    """The owners now. ``before``: those of the reading before."""
    sources, faults = dict(before.sources), []
    for source, read in _READERS.items():
        try:
            sources[source] = read(files)
        except (OSError, ValueError) as error:
            faults.append(f"the CPUs of {source} are unknown: {error}")
    return CpuOwners(sources, "; ".join(faults))


def _kubelet(files: Files) -> dict[int, str]:
    owners: dict[int, str] = {}
    for path in KUBELET_CPUS:
        try:
            owners |= assigned(files.read(path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # no kubelet has this folder, or none has run yet
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return owners


def assigned(text: str) -> Mapping[int, str]:
    """The owners in the kubelet's file, of any of its formats.

    :raises ValueError: it is damaged.
    """
    state = load(text, LARGEST)
    try:
        # The fourth format has all in a text of its own, and repeats a part for an older kubelet.
        state = load(state["data"], LARGEST) if "data" in state else state
        # By pod: the CPUs of each container, in the first format by container, in the third also those of the pod.
        given = [*state.get("entries", {}).items(), *state.get("podEntries", {}).items()]
        return {cpu: _name(holder, cpus) for holder, cpus in given for cpu in _cpus(cpus)}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"it has another form: {error}") from error


def _name(holder: str, cpus: Any) -> str:
    return f"pod {holder}" if isinstance(cpus, dict) else f"container {holder}"


def _cpus(given: Any) -> tuple[int, ...]:
    return parse_ranges(",".join(given.values() if isinstance(given, dict) else [given]))


def _claims(files: Files) -> dict[int, str]:
    folder, _, pattern = CPU_CLAIMS.rpartition("/")
    owners: dict[int, str] = {}
    for path in (f"{folder}/{name}" for name in matching(names_in(files, folder), pattern)):
        for claim, cpus in CLAIM.findall(read_or(files, path, "")):
            owners |= dict.fromkeys(parsed(parse_ranges, cpus, path), f"claim {claim}")
    return owners


def _partitions(files: Files, folder: str) -> dict[int, str]:
    """The CPUs of partitions, by the kernel's names for their state (Documentation/admin-guide/cgroup-v2.rst).

    A partition's parent is one, too, or has exclusive CPUs of its own. So few cgroups are looked at.
    """
    owners: dict[int, str] = {}
    for name in names_in(files, folder):
        group = f"{folder}/{name}"
        if not (state := read_or(files, f"{group}/{PARTITION}", "")):
            continue  # a file, or a cgroup without this controller
        exclusive = ranges(files, f"{group}/cpuset.cpus.exclusive.effective")  # Linux 6.7
        if state in ("root", "isolated"):
            cpus = exclusive or ranges(files, f"{group}/cpuset.cpus.effective")
            owners |= dict.fromkeys(cpus, f"cgroup {group.removeprefix(CGROUPS)}")
        elif exclusive:
            owners |= _partitions(files, group)
    return owners


_READERS: Mapping[str, Callable[[Files], Mapping[int, str]]] = {
    PARTITIONS: lambda files: _partitions(files, CGROUPS),
    CLAIMS: _claims,
    PODS: _kubelet,
}
