"""`trackbed topology` on a real node, compared with the kernel's own files."""

import json
import re
from pathlib import Path
from typing import Any

from agent.report.records import to_plain
from cli import topology
from cli.as_inventory import derive_inventory
from cli.inspection import inspect
from lab import Node
from tests.lab.conftest import ROOT
from tests.sim.machine_file import load

QUEUE = re.compile(r"^ *(\d+):.*\s(\S+)-TxRx-(\d+)$", re.MULTILINE)
"""igb's interrupts in /proc/interrupts: the number, the netdev and the queue."""


def test_each_queue_of_a_pf_is_at_the_cpu_where_its_interrupt_arrives(node: Node) -> None:
    shown = {
        (served["device"], served["queue"]): served["cpu"]
        for numa in json.loads(node.sh("trackbed topology --json"))
        for cache in numa["caches"]
        for core in cache["cores"]
        for served in core["serves"]
    }
    expected = {
        (netdev, f"txrx-{queue}"): int(node.sh(f"cat /proc/irq/{number}/effective_affinity_list"))
        for number, netdev, queue in QUEUE.findall(node.sh("cat /proc/interrupts"))
    }
    assert {netdev for netdev, _ in expected} == {nic.netdev for nic in node.machine.nics}
    assert {key: shown.get(key) for key in expected} == expected


def functions(inspection: dict[str, Any]) -> list[dict[str, Any]]:
    """What an inspection says of each function that is no VF, but for what a boot or the spec decides."""
    kept = ("address", "vendor", "device", "driver", "numa_node", "total_vfs", "nvlink_bridge")
    return [
        {key: function[key] for key in kept} | {"netdevs": [netdev["name"] for netdev in function["netdevs"]]}
        for function in inspection["functions"]
        if function["index"] is None
    ]


def places(nodes: list[dict[str, Any]]) -> list[object]:
    """The CPUs of each core and the PFs of each NUMA node."""
    return [
        (
            numa["number"],
            numa["socket"],
            [core["cpus"] for cache in numa["caches"] for core in cache["cores"]],
            [device["address"] for device in numa["devices"] if device["address"].endswith(":00.0")],
        )
        for numa in nodes
    ]


def test_a_node_that_describes_itself_is_loaded_as_what_it_is(node: Node, tmp_path: Path) -> None:
    program = (ROOT / "tests/zoo/describe.py").read_text()
    described = node.run(["env", "PYTHONPATH=/opt/trackbed/current", "python3", "-"], check=True, stdin=program)
    (tmp_path / "node.yaml").write_text(described.stdout)
    loaded = load(tmp_path / "node.yaml").kernel.machine()
    assert functions(to_plain(inspect(loaded))) == functions(json.loads(node.sh("trackbed inspect --json")))
    assert places(to_plain(topology.arrange(loaded))) == places(json.loads(node.sh("trackbed topology --json")))
    # Their settings differ, since the deploy has made some.
    chosen = re.compile(r"^# \S+: (\S+ \[\S+\])", re.MULTILINE)
    live = chosen.findall(node.sh("trackbed inspect --as-inventory"))
    assert len(live) == len(node.machine.nics)
    assert live == chosen.findall(derive_inventory(loaded, node.name, node.name, ()).text)
