"""One pass on the simulated machine by an agent with more files: those of FOLDER/kinds, FOLDER/probes and
FOLDER/spec/vf_attributes, and with the rows of FOLDER/driver_families.py.

    python -m tests.unit.extended FOLDER [ATTRIBUTES]

ATTRIBUTES is the JSON of what each VF of a NIC is to have. It prints the conditions, the files that the pass was to set, and
what became of the attributes. A process of its own: what is in these folders is looked up once in each.
"""

import json
import sys
from pathlib import Path
from typing import Any

from agent.spec import vf_attributes

NIC, PF = "0000:61:00.0", "0000:21:00.0"
BALANCING = "/proc/sys/kernel/numa_balancing"
TEMPERATURE = "/sys/class/thermal/thermal_zone0/temp"
IRQS = {"management": 95, "queue": 96}


def main(folder: str, given: dict[str, Any]) -> None:
    vf_attributes.__path__.append(f"{folder}/spec/vf_attributes")
    # These imports read that folder.
    from agent import driver_families, kinds, probes
    from agent.engine.context import Goal, Memory
    from agent.engine.converge import converge
    from agent.spec import node
    from tests.sim.kernel import PCI, Kernel

    for package in (kinds, probes):
        package.__path__.append(f"{folder}/{package.__name__.rpartition('.')[2]}")
    node.PROBES |= {path.stem for path in Path(folder, "probes").glob("*.py")}
    if (rows := Path(folder, "driver_families.py")).exists():
        driver_families.FAMILIES += eval(f"({rows.read_text()})", vars(driver_families))  # noqa: S307
    kernel = Kernel()
    kernel.tree.put(BALANCING, "1")
    kernel.tree.put(TEMPERATURE, "91000")
    for file, text in (("class", "0x020000"), ("vendor", "0x1234"), ("device", "0x5678"), ("numa_node", "1")):
        kernel.tree.put(f"{PCI}/{NIC}/{file}", text)
    kernel.set_driver(NIC, "acme")
    kernel.interrupts.request(NIC, IRQS["management"], f"acme-admin@pci:{NIC}")
    kernel.interrupts.request(NIC, IRQS["queue"], f"acme-ring0@pci:{NIC}")
    kernel.add_nic(PF, "ens1", "02:00:00:00:00:01")
    spec = node.from_mapping(
        {
            "node_name": "n1",
            "nics": [
                {"name": "acme0", "select": {"pci": NIC}},
                {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": 2, "defaults": given}},
            ],
            "readiness": {"probes": {"temperature": {"severity": "warn"}}},
        }
    )
    result = converge(kernel.machine(), Goal(spec), Memory(lambda: 0.0))
    conditions = {condition.type: [condition.status, condition.reason] for condition in result.conditions}
    irqs = {name: kernel.files.read(f"/proc/irq/{number}/smp_affinity_list") for name, number in IRQS.items()}
    answer = {"conditions": conditions, "numa_balancing": kernel.files.read(BALANCING), "irqs": irqs}
    print(json.dumps({**answer, **_vfs(kernel, given)}))  # noqa: T201


def _vfs(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The same attributes as the PF reports them, in what `inspect` prints, and read back from a netlink message."""
    from attrs import asdict

    from agent.linux.messages import HEADER, IFINFOMSG, attributes
    from agent.linux.vf_config import decode, request
    from agent.spec.node import to_json
    from cli.as_spec import derive_spec
    from cli.inspection import inspect, render
    from cli.schema import schema

    message = request(5, 1, {"mac": "02:00:00:00:00:02", **given})
    message.encode()
    ((_, listed),) = attributes(bytes(message.data), HEADER.size + IFINFOMSG.size)
    ((_, entry),) = attributes(listed)
    (nic,) = json.loads(to_json(derive_spec(kernel.machine(), "n1", [PF]).spec))["nics"]
    return {
        "reported": [asdict(vf) for vf in kernel.vfs(PF)],
        "message": asdict(decode(entry)),
        "inspect": render(inspect(kernel.machine())),
        "as_spec": nic["vfs"]["defaults"],
        "schema": schema()["$defs"]["VfGroup"]["properties"],
        "reference": [[each.name, each.meaning, each.unit, each.default] for each in vf_attributes.ordered()],
    }


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
