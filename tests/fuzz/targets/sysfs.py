"""The text of files in /sys and /proc: a pass on the simulated machine, in which some files have other texts.

The first three bytes choose the files, the rest is their text. A pass may find a device or the whole node unreadable
(OSError).
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

from attrs import define, evolve

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.machine import DcbState, Files
from agent.report.records import Report, report_from_json, report_to_json
from agent.spec.node import from_mapping
from cli.inspection import inspect, render
from tests.sim.kernel import Kernel

NICS = {"0000:21:00.0": "ens1", "0000:41:00.0": "ens2"}
SETTINGS: dict[str, Any] = {
    "mtu": 9000,
    "channels": {"combined": 1},
    "max_read_request": 4096,
    "vfs": {"count": 2, "defaults": {"trust": True}},
    "rdma": {"pf": True},
}
SPEC = from_mapping(
    {
        "node_name": "n1",
        "nics": [{"name": f"rail{at}", "select": {"pci": pci}, **SETTINGS} for at, pci in enumerate(NICS)],
        **{name: {"enable": True} for name in ("rps", "rfs", "xps")},
        "sysctls": {"net.core.somaxconn": "4096"},
        "hugepages": [{"size": "2M", "count": 16}],
        "irqs": {"follow_load": True},
    }
)
PASSES = 2


@define(eq=False)
class Garbled:
    """Files; one in ``among`` has the content ``text``. Paths decide which, so the order of reading does not matter."""

    inner: Files
    among: int
    which: int
    text: str

    def read(self, path: str) -> str:
        real = self.inner.read(path)
        return self.text if crc32(path.encode()) % self.among == self.which % self.among else real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def check(data: bytes) -> None:
    """Make a pass."""
    which, among, text = int.from_bytes(data[:2], "big"), data[2] + 1 if len(data) > 2 else 1, data[3:]
    kernel = Kernel()
    for number, (address, name) in enumerate(NICS.items()):
        kernel.add_nic(address, name, f"02:00:00:00:01:0{number}", node=number)
    kernel.rdma.add("0000:21:00.0", "rocep33s0", "ens1")
    kernel.rdma.dcb["ens1"] = DcbState(frozenset({0}))
    machine = kernel.machine()
    # As the files are read: what is no UTF-8 is replaced.
    said = text.decode(errors="replace").rstrip()
    garbled = evolve(machine, files=Garbled(machine.files, among, which, said))
    for _ in range(PASSES):
        with suppress(OSError):
            made = converge(garbled, Goal(SPEC), Memory(lambda: 0.0))
            report = Report("n1", "h", "b", "v", False, True, conditions=made.conditions, outcomes=made.outcomes)
            report_from_json(report_to_json(report))
    render(inspect(garbled))


def seeds() -> Sequence[bytes]:
    """Contents of such files."""
    texts: tuple[bytes, ...] = (
        b"4",
        b"0-3,8",
        b"ff,ffffffff",
        b"0x15b3",
        b"-1",
        b"2.5 GT/s PCIe",
        b"100 Gb/sec (4X EDR)",
        b"4: ACTIVE",
    )
    texts += (b"fe80:0000:0000:0000:0000:00ff:fe00:0100", b"Y", b"igb", b"", b"  24:  1 2 3 4 PCI-MSI ens1-TxRx-0\n")
    return [at.to_bytes(2, "big") + bytes([among]) + text for text in texts for at, among in ((0, 0), (3, 6), (1, 30))]
