"""The CPUs of a node, by the distribution's own tools."""

import re
from collections.abc import Callable, Mapping

from attrs import frozen

from agent.hardware.cpu_owners import assigned
from agent.spec.ranges import parse_ranges


@frozen
class Cpus:
    """The online CPUs as lscpu numbers their cores, nodes and last-level caches.

    ``usable``: neither isolated nor excluded. ``owned``: those that the kubelet has given to pods.
    """

    core: Mapping[int, str]
    node: Mapping[int, int]
    cache: Mapping[int, str]
    usable: frozenset[int]
    nearest: Mapping[int, tuple[int, ...]]
    owned: frozenset[int] = frozenset()

    def local(self, numa_node: int) -> frozenset[int]:
        """The usable CPUs of a NUMA node, or of the nearest one that has some; all of them for node -1.

        Those of pods are none of them, unless all are.
        """
        for near in self.nearest.get(numa_node, ()):
            if cpus := frozenset(cpu for cpu in self.usable if self.node[cpu] == near):
                return cpus - self.owned or cpus
        return self.usable - self.owned or self.usable or frozenset(self.core)

    def sharing_cache(self, cpu: int) -> frozenset[int]:
        """The online CPUs that share a CPU's last-level cache; those of its NUMA node if the kernel shows no cache."""
        by: Mapping[int, object] = self.cache if self.cache[cpu] else self.node
        return frozenset(other for other in self.core if by[other] == by[cpu])


def read_cpus(run: Callable[[str], str], excluded: str) -> Cpus:
    """Those of a node on which ``run`` runs scripts. ``excluded``: the CPUs that its spec excludes."""
    rows = [line.split(",") for line in run("lscpu -p=CPU,CORE,NODE,CACHE").splitlines() if line[0] != "#"]
    core = {int(row[0]): row[1] for row in rows}
    unusable = set(parse_ranges(excluded))
    for kept_free in run("cat /sys/devices/system/cpu/isolated /sys/devices/system/cpu/nohz_full").split():
        unusable.update(parse_ranges(kept_free) if kept_free != "(null)" else ())
    nearest = {}
    for line in run("grep . /sys/devices/system/node/node*/distance /dev/null").splitlines():
        path, _, distances = line.partition(":")
        own = int(re.findall(r"node(\d+)/", path)[0])
        # The distances are in the order of the online nodes' numbers, those without CPUs included.
        by_distance = sorted(enumerate(map(int, distances.split())), key=lambda d: (d[0] != own, d[1], d[0]))
        nearest[own] = tuple(number for number, _ in by_distance)
    return Cpus(
        core=core,
        node={int(row[0]): int(row[2] or 0) for row in rows},
        # The last level is last; what is between the levels, and before them, depends on lscpu's version.
        cache={int(row[0]): row[-1].rpartition(":")[2] for row in rows},
        usable=frozenset(core) - unusable,
        nearest=nearest,
        owned=frozenset(assigned(run("cat /var/lib/kubelet/cpu_manager_state 2>/dev/null || echo {}"))),
    )
