"""The online CPUs, and the NUMA nodes, cores and last-level caches that they belong to."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping

from attrs import frozen

from agent.hardware.cpu_owners import NOBODY, CpuOwners, read_owners
from agent.hardware.sysfs import names_in, numbered, parsed, ranges, read_or
from agent.machine import Machine
from agent.spec.ranges import parse_ranges

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"


@frozen
class Cpu:
    """An online CPU. ``core`` is the lowest CPU of its core, ``llc`` the lowest that shares its last-level cache."""

    id: int
    node: int
    core: int
    llc: int


@frozen
class Topology:
    """The online CPUs by number; the CPUs that the kernel keeps free (isolcpus, nohz_full); the distances between NUMA nodes.

    ``owners``: whom other CPUs belong to for a while.
    """

    cpus: Mapping[int, Cpu]
    isolated: frozenset[int]
    distances: Mapping[int, Mapping[int, int]]
    owners: CpuOwners = NOBODY


def read_topology(machine: Machine, owners: CpuOwners = NOBODY) -> Topology:
    """The online CPUs and their NUMA nodes, cores and last-level caches, from sysfs. ``owners``: of the reading before."""
    files = machine.files

    def numbers(path: str, parse: Callable[[str], tuple[int, ...]] = parse_ranges) -> tuple[int, ...]:
        return parsed(parse, files.read(path), path)

    nodes = numbered(names_in(files, NODE), "node")
    node_of = {id: node for node, name in nodes.items() for id in numbers(f"{NODE}/{name}/cpulist")}
    distances = {
        node: dict(
            zip(nodes, numbers(f"{NODE}/{name}/distance", lambda text: (*map(int, text.split()),)), strict=False)
        )
        for node, name in nodes.items()
    }
    kept_free = ((f"{CPU}/{name}", read_or(files, f"{CPU}/{name}", "")) for name in ("isolated", "nohz_full"))
    # The kernel prints "(null)" for a mask that was never allocated.
    isolated = [parsed(parse_ranges, text, path) for path, text in kept_free if "(null)" not in text]
    cpus = {}
    online = numbers(f"{CPU}/online")
    if not online:
        raise OSError(errno.EPROTO, "it says that no CPU is online", f"{CPU}/online")
    for id in online:
        # The last index is the last level. A last-level cache never spans sockets.
        caches = [name for name in names_in(files, f"{CPU}/cpu{id}/cache") if name.startswith("index")]
        siblings = (ranges(files, f"{CPU}/cpu{id}/topology/{name}_list") for name in ("core_cpus", "thread_siblings"))
        core = next(filter(None, siblings), (id,))  # before Linux 5.3 the file has only the second name
        llc = ranges(files, f"{CPU}/cpu{id}/cache/{caches[-1]}/shared_cpu_list") if caches else ()
        node = node_of.get(id, 0)
        cpus[id] = Cpu(id, node, core[0], llc[0] if llc else node)
    return Topology(cpus, frozenset().union(*isolated), distances, read_owners(files, owners))
