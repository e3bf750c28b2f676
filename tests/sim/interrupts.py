"""The simulated machine's CPUs, and the interrupts and packets that they serve."""

import errno
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import inf

from attrs import define, field

from agent.hardware.placement import from_mask, mask
from agent.spec.ranges import format_ranges, parse_ranges
from tests.sim.tree import Tree, error

PCI = "/sys/bus/pci/devices"
CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
LOAD = frozenset({"/proc/uptime", "/proc/stat", "/proc/net/softnet_stat", "/proc/interrupts"})
"""The files from which it is read what CPUs do."""


@define
class Interrupts:
    """``cpus`` and NUMA ``nodes``: how many there are; each node has as many CPUs as any other.

    ``vectors``: how many interrupts a CPU can serve, for a CPU whose number is limited. ``serving``: each interrupt's CPU.
    ``managed``: the interrupts that the kernel places itself, by the paths of their affinity. ``seconds`` since the boot, of
    which a CPU has spent ``busy`` ticks of 10 ms on packets. ``squeezed``: how often it left some for later. ``counts``: how
    often a CPU served an interrupt, by number and CPU.
    """

    tree: Tree
    cpus: int
    nodes: int
    vectors: dict[int, int] = field(factory=dict)
    serving: dict[str, int] = field(factory=dict)
    managed: set[str] = field(factory=set)
    seconds: float = 1000.0
    busy: Counter[int] = field(factory=Counter)
    squeezed: Counter[int] = field(factory=Counter)
    counts: Counter[tuple[int, int]] = field(factory=Counter)
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

    def show_load(self) -> None:
        """Write the counters of :data:`LOAD`, as they are now, into the tree."""
        online = parse_ranges(self.tree.files[f"{CPU}/online"])
        self.tree.put("/proc/uptime", f"{self.seconds:.2f} 0.00")
        ticks = [(cpu, self.busy[cpu], round(100 * self.seconds)) for cpu in online]
        stat = [f"cpu{cpu} 0 0 0 {every - busy} 0 0 {busy} 0 0 0" for cpu, busy, every in ticks]
        self.tree.put("/proc/stat", "\n".join(["cpu  0 0 0 0 0 0 0 0 0 0", *stat, "ctxt 1", "btime 1700000000"]))
        zeros = " ".join(["00000000"] * 9)
        softnet = [f"00000000 00000000 {self.squeezed[cpu]:08x} {zeros} {cpu:08x} 00000000 00000000" for cpu in online]
        self.tree.put("/proc/net/softnet_stat", "\n".join(softnet))
        rows = [
            f"{number:>4}: {' '.join(f'{self.counts[int(number), cpu]:>10}' for cpu in online)}  PCI-MSIX  {number}-edge  nic"
            for number in sorted(self.serving, key=int)
        ]
        header = " ".join(f"CPU{cpu}" for cpu in online)
        self.tree.put(
            "/proc/interrupts", "\n".join([header, *rows, f" LOC: {' '.join('7' for _ in online)}  Local timer"])
        )

    def affinities(self, *functions: str) -> dict[tuple[str, str], str]:
        """The CPUs of each interrupt, by function and by the driver's name for it. No ``functions``: all functions."""
        numbers = {
            function: self.tree.folders.get(f"{PCI}/{function}/msi_irqs", ())
            for function in functions or sorted(self.tree.folders[PCI])
        }
        return {
            (function, self.tree.read(f"/sys/kernel/irq/{number}/actions")): self.tree.read(
                f"/proc/irq/{number}/smp_affinity_list"
            )
            for function, of_function in numbers.items()
            for number in sorted(of_function, key=int)
        }

    def pass_time(self, seconds: float, needs: Mapping[int, float]) -> None:
        """Time goes by, in which each of these interrupts takes a share of its CPU's time, wherever it is served."""
        self.seconds += seconds
        for number, share in needs.items():
            cpu = self.serving[str(number)]
            self.busy[cpu] += round(100 * seconds * share)
            self.counts[number, cpu] += round(seconds * share * 1000)

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
        for number in [number for number, cpu in self.serving.items() if cpu not in cpus]:
            allowed = parse_ranges(self.tree.files[f"/proc/irq/{number}/smp_affinity_list"])
            found = (self._with_a_vector(cpus & set(allowed)), self._with_a_vector(cpus), min(cpus))
            self._serves(number, next(cpu for cpu in found if cpu is not None))

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
                self._serves(str(new), self.serving[number])
                self._forget(folder, number)

    def hint(self, number: int, cpu: int) -> None:
        """The driver sets an interrupt's affinity, and shows it as its wish (irq_set_affinity_and_hint)."""
        self.tree.put(f"/proc/irq/{number}/affinity_hint", mask({cpu}))
        self.tree.put(f"/proc/irq/{number}/smp_affinity_list", str(cpu))

    def manage(self, function: str) -> None:
        """A driver has the kernel place its interrupts (PCI_IRQ_AFFINITY), without the first: one CPU after the other."""
        _, *of_queues = sorted(self.tree.folders[f"{PCI}/{function}/msi_irqs"], key=int)
        for cpu, number in enumerate(of_queues):
            path = f"/proc/irq/{number}/smp_affinity_list"
            self.tree.put(path, str(cpu % self.cpus))
            self.managed.add(path)

    def request(self, function: str, number: int, action: str) -> None:
        self.tree.put(f"{PCI}/{function}/msi_irqs/{number}", "msix")
        self.tree.put(f"/sys/kernel/irq/{number}/actions", action)
        self.tree.put(f"/proc/irq/{number}/smp_affinity_list", f"0-{self.cpus - 1}")
        self.tree.put(f"/proc/irq/{number}/affinity_hint", "0")
        self._serve(str(number), set(parse_ranges(self.tree.files[f"{CPU}/online"])))

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
        self.serving.pop(number, None)

    # --- vectors of x86 -------------------------------------------------------------------------------------

    def free_vectors(self, cpu: int) -> float:
        """How many more interrupts a CPU can serve."""
        return self.vectors[cpu] - list(self.serving.values()).count(cpu) if cpu in self.vectors else inf

    def _with_a_vector(self, cpus: Iterable[int]) -> int | None:
        """The CPU with most free vectors, which irq_matrix_alloc (kernel/irq/matrix.c) chooses; None if none has any."""
        best = max(sorted(cpus), key=self.free_vectors, default=None)
        return best if best is not None and self.free_vectors(best) > 0 else None

    def _serve(self, number: str, cpus: Collection[int]) -> None:
        """An interrupt stays on its CPU if it may. Else it needs a vector (assign_vector_locked, arch/x86/kernel/apic)."""
        if self.serving.get(number) in cpus:
            return
        if (cpu := self._with_a_vector(cpus)) is None:
            raise error(errno.ENOSPC, f"/proc/irq/{number}/smp_affinity_list")
        self._serves(number, cpu)

    def _serves(self, number: str, cpu: int) -> None:
        self.serving[number] = cpu
        self.tree.put(f"/proc/irq/{number}/effective_affinity_list", str(cpu))

    # --- what is written ----------------------------------------------------------------------------------

    def affinity(self, path: str, text: str) -> str:
        """What smp_affinity_list has after a write: the CPUs that are online."""
        if path in self.managed:
            raise error(errno.EPERM, path)
        online = sorted(set(parse_ranges(text)) & set(parse_ranges(self.tree.files[f"{CPU}/online"])))
        if not online:
            raise error(errno.EINVAL, path)
        self._serve(path.split("/")[-2], online)
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
