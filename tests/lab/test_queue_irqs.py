"""The queue that each interrupt serves, by the kernel and by the names of interrupts: a table by driver.

TRACKBED_LAB_DEBIAN selects the kernel of the nodes.
"""

import json
from collections import Counter

import pytest

from lab import Node
from tests.lab.conftest import settled

pytestmark = pytest.mark.campaign

TOO_OLD, NONE, AGREE, DIFFER = "the kernel is too old", "the driver gives none", "agree", "differ"

# By the kernel's source, as docs/inventory/host.md says; None: not up to 7.3.
SINCE: dict[str, tuple[int, ...] | None] = {"igb": (6, 16), "igbvf": None, "virtio_net": None}
ASKABLE_SINCE = (6, 8)

PROGRAM = """
import json, re, sys
from pathlib import Path
sys.path[:0] = ["/opt/trackbed/current"]
from attrs import evolve
from agent.hardware.interrupts import function_irqs
from agent.linux import machine

class Silent:
    def queue_irqs(self, ifindex):
        return {}

kernel, rows = machine(), []
for netdev in sorted(Path("/sys/class/net").iterdir()):
    if not (netdev / "device/driver").exists():
        continue
    pci = re.findall(r"/([0-9a-f:]+[.][0-7])", str((netdev / "device").resolve()))[-1]
    napis = kernel.netlink.napis(int((netdev / "ifindex").read_text()))
    names = {irq.number: irq.name for irq in function_irqs(evolve(kernel, netlink=Silent()), pci)}
    rows.append({
        "driver": (netdev / "device/driver").resolve().name,
        "netdevs": 1,
        "queues": len(list((netdev / "queues").iterdir())),
        "napis": len(napis),
        "with_irq": sum("irq" in has for has in napis.values()),
        "agreeing": sum(irq.linked and names[irq.number] == irq.name for irq in function_irqs(kernel, pci)),
    })
print(json.dumps(rows))
"""
"""Counts the queues, NAPI instances and interrupts of each netdev that has a driver."""


def verdict(counts: Counter[str], askable: bool) -> str:
    """What the numbers of a driver say."""
    if not askable:
        return TOO_OLD
    if not counts["with_irq"]:
        return NONE
    return AGREE if counts["agreeing"] == counts["with_irq"] else DIFFER


def by_source(kernel: tuple[int, ...], since: tuple[int, ...] | None) -> str:
    """The verdict that the source of a kernel lets one expect."""
    if kernel < ASKABLE_SINCE:
        return TOO_OLD
    return AGREE if since and kernel >= since else NONE


def test_the_kernel_and_the_names_agree_on_the_queue_of_each_interrupt(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    settled(node)
    release = node.sh("uname -r").strip()
    kernel = tuple(int(part) for part in release.split(".")[:2])
    counts: dict[str, Counter[str]] = {}
    for row in json.loads(node.run(["python3", "-I", "-c", PROGRAM], check=True, timeout=300).stdout):
        counts.setdefault(row.pop("driver"), Counter()).update(row)
    askable = any(of_driver["napis"] for of_driver in counts.values())
    verdicts = {driver: verdict(of_driver, askable) for driver, of_driver in sorted(counts.items())}
    with capsys.disabled():
        for driver, said in verdicts.items():
            print(f"\n{release} {driver}: {dict(counts[driver])}: {said}")  # noqa: T201
    assert verdicts == {driver: by_source(kernel, since) for driver, since in SINCE.items()}
