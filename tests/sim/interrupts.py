"""The simulated machine's CPUs, and the interrupts and packets that they serve."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from attrs import define

from agent.hardware.placement import from_mask, mask
from agent.spec.ranges import format_ranges, parse_ranges
from tests.sim.tree import Tree, error

PCI = "/sys/bus/pci/devices"
CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"


@define
class Interrupts:
    """``cpus`` and NUMA ``nodes``: how many there are; each node has as many CPUs as any other."""

    tree: Tree
    cpus: int
    nodes: int
    _next: int = 24

    def boot(self) -> None:
        self.tree.put(f"{CPU}/online", f"0-{self.cpus - 1}")
        self.tree.put(f"{CPU}/isolated", "")
        for node in range(self.nodes):
            self.tree.put(f"{NODE}/node{node}/cpulist", format_ranges(self._of_node(node)))
            distances = " ".join("10" if other == node else "20" for other in range(self.nodes))
            self.tree.put(f"{NODE}/node{node}/distance", distances)
            for cpu in self._of_node(node):
                self.tree.put(f"{CPU}/cpu{cpu}/topology/core_cpus_list", str(cpu))
                self.tree.put(f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list", format_ranges(self._of_node(node)))

    def _of_node(self, node: int) -> range:
        per_node = self.cpus // self.nodes
        return range(node * per_node, (node + 1) * per_node)

    # --- what a test does to the world --------------------------------------------------------------------

    def set_online(self, online: str) -> None:
        """CPUs go off or come back; an interrupt that has none left may go to all, and it stays so."""
        self.tree.put(f"{CPU}/online", online)
        cpus = set(parse_ranges(online))
        for node in range(self.nodes):
            self.tree.put(f"{NODE}/node{node}/cpulist", format_ranges(cpus & set(self._of_node(node))))
        for path in [path for path in self.tree.files if path.endswith("/smp_affinity_list")]:
            if not cpus & set(parse_ranges(self.tree.files[path])):
                self.tree.put(path, online)

    def isolate(self, cpus: str) -> None:
        """Boot with isolcpus=."""
        self.tree.put(f"{CPU}/isolated", cpus)

    def renumber(self) -> None:
        """Every interrupt gets another number, and keeps its affinity."""
        for folder in [path for path in self.tree.folders if path.endswith("/msi_irqs")]:
            for number in sorted(self.tree.folders[folder], key=int):
                new = self._next
                self._next += 1
                for of_irq in ("/sys/kernel/irq/{}/actions", "/proc/irq/{}/smp_affinity_list"):
                    self.tree.put(of_irq.format(new), self.tree.files[of_irq.format(number)])
                self.tree.put(f"{folder}/{new}", "msix")
                self._forget(folder, number)

    def request(self, function: str, number: int, action: str) -> None:
        self.tree.put(f"{PCI}/{function}/msi_irqs/{number}", "msix")
        self.tree.put(f"/sys/kernel/irq/{number}/actions", action)
        self.tree.put(f"/proc/irq/{number}/smp_affinity_list", f"0-{self.cpus - 1}")

    # --- what drivers do ----------------------------------------------------------------------------------

    def request_all(self, function: str, actions: Iterable[str]) -> None:
        """An interrupt for each action, by the next numbers."""
        for action in actions:
            number = self._next
            self._next += 1
            self.request(function, number, action)

    def free(self, function: str) -> None:
        folder = f"{PCI}/{function}/msi_irqs"
        for number in list(self.tree.folders.get(folder, ())):
            self._forget(folder, number)

    def _forget(self, folder: str, number: str) -> None:
        for path in (f"/sys/kernel/irq/{number}", f"/proc/irq/{number}", f"{folder}/{number}"):
            self.tree.remove(path)

    # --- what is written ----------------------------------------------------------------------------------

    def affinity(self, text: str) -> str:
        """What smp_affinity_list has after a write: the CPUs that are online."""
        online = sorted(set(parse_ranges(text)) & set(parse_ranges(self.tree.files[f"{CPU}/online"])))
        if not online:
            raise error(errno.EINVAL, "smp_affinity_list")
        return format_ranges(online)

    def steered(self, path: str, text: str) -> str:
        """What rps_cpus or xps_cpus has after a write: no isolated CPU for RPS."""
        if text.startswith("0x"):
            raise error(errno.EINVAL, path)
        if max(cpus := from_mask(text), default=0) >= self.cpus:
            raise error(errno.EOVERFLOW, path)
        if path.endswith("/rps_cpus") and cpus:
            cpus -= frozenset(parse_ranges(self.tree.files[f"{CPU}/isolated"]))
            if not cpus:
                raise error(errno.EINVAL, path)
        return mask(cpus)
