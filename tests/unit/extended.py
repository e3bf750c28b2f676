"""One pass on the simulated machine by an agent with more files: those of FOLDER/kinds, FOLDER/probes and FOLDER/vendors.

    python -m tests.unit.extended FOLDER

prints the conditions, and the files that the pass was to set. A process of its own: kinds, probes and vendors are looked up
once in each.
"""

from __future__ import annotations

import json
import sys

from agent import kinds, probes, vendors
from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.spec.node import from_mapping
from tests.sim.kernel import PCI, Kernel

NIC = "0000:61:00.0"
BALANCING = "/proc/sys/kernel/numa_balancing"
TEMPERATURE = "/sys/class/thermal/thermal_zone0/temp"
IRQS = {"management": 95, "queue": 96}


def main(folder: str) -> None:
    for package in (kinds, probes, vendors):
        package.__path__.append(f"{folder}/{package.__name__.rpartition('.')[2]}")
    kernel = Kernel()
    kernel.tree.put(BALANCING, "1")
    kernel.tree.put(TEMPERATURE, "91000")
    for file, text in (("class", "0x020000"), ("vendor", "0x1234"), ("device", "0x5678"), ("numa_node", "1")):
        kernel.tree.put(f"{PCI}/{NIC}/{file}", text)
    kernel.tree.link(f"{PCI}/{NIC}/driver", "../../../../bus/pci/drivers/acme")
    kernel.request_irq(NIC, IRQS["management"], f"acme-admin@pci:{NIC}")
    kernel.request_irq(NIC, IRQS["queue"], f"acme-ring0@pci:{NIC}")
    spec = from_mapping(
        {
            "node_name": "n1",
            "nics": [{"name": "acme0", "select": {"pci": NIC}}],
            "readiness": {"probes": {"temperature": {"severity": "warn"}}},
        }
    )
    found = converge(kernel.machine(), Goal(spec), Memory(lambda: 0.0))
    conditions = {condition.type: [condition.status, condition.reason] for condition in found.conditions}
    irqs = {name: kernel.read(f"/proc/irq/{number}/smp_affinity_list") for name, number in IRQS.items()}
    print(json.dumps({"conditions": conditions, "numa_balancing": kernel.read(BALANCING), "irqs": irqs}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
