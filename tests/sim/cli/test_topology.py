"""`trackbed topology`: devices and queues at their place, on a simulated machine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from agent.report.records import to_plain
from cli.__main__ import cli
from cli.hwloc import LOADS, MISPLACED
from cli.topology import EVERYWHERE, Load, arrange, render
from tests.debian import program
from tests.sim.kernel import Kernel
from tests.sim.passes import spec_of
from tests.sim.two_nics import NAME0, NAME1, PF0, PF1, two_nics

CPU = "/sys/devices/system/cpu"
GPU = "/sys/bus/pci/devices/0000:65:00.0"


@pytest.fixture
def kernel() -> Kernel:
    """Two sockets of one NUMA node each, with two CPUs and a NIC; the second NIC's queue is on a CPU of the first socket."""
    kernel = two_nics()
    for cpu in range(4):
        kernel.tree.put(f"{CPU}/cpu{cpu}/topology/physical_package_id", str(cpu // 2))
    arrives(kernel, PF0, 50, f"{NAME0}-TxRx-0", "0")
    arrives(kernel, PF0, 51, f"{NAME0}-TxRx-1", "0")
    arrives(kernel, PF1, 52, f"{NAME1}-TxRx-0", "1")
    return kernel


def arrives(kernel: Kernel, address: str, number: int, action: str, cpu: str) -> None:
    kernel.interrupts.request(address, number, action)
    kernel.tree.put(f"/proc/irq/{number}/effective_affinity_list", cpu)


def lines(kernel: Kernel, width: int = 100) -> list[str]:
    spec = spec_of({"name": "rail0", "select": {"pci": PF0}})
    return [line for line, _ in render(arrange(kernel.machine(), spec), width)]


def test_devices_and_queues_are_shown_at_their_place(kernel: Kernel) -> None:
    assert lines(kernel) == [
        "socket 0",
        "  NUMA node 0",
        f"    NIC {PF0} {NAME0} (igb) NIC rail0 of the spec",
        "    last-level cache of CPUs 0-1",
        f"      CPU 0: {NAME0} txrx-0, {NAME0} txrx-1",
        f"      CPU 1: {NAME1} txrx-0!",
        "socket 1",
        "  NUMA node 1",
        f"    NIC {PF1} {NAME1} (igb)",
        "    last-level cache of CPUs 2-3",
        "      CPU 2",
        "      CPU 3",
    ]


def test_the_load_of_a_core_is_compared_with_the_even_share_of_its_numa_node(kernel: Kernel) -> None:
    def loads() -> list[str]:
        return [load for line, load in render(arrange(kernel.machine()), 100) if "CPU " in line]

    assert loads() == ["even", "even", "none", "none"]
    for number in range(60, 64):
        arrives(kernel, PF0, number, f"{NAME0}-TxRx-{number}", "0")
    # Six and one: four would be even.
    assert loads() == ["double", "even", "none", "none"]


def drawn(kernel: Kernel, folder: Path, picture: str) -> Result:
    """What the command says that draws this machine elsewhere."""
    source = folder / "topology.json"
    source.write_text(json.dumps(to_plain(arrange(kernel.machine()))))
    return CliRunner().invoke(cli, ["topology", "--input", str(source), "--picture", picture])


def test_another_machine_shows_the_same_tree(kernel: Kernel, tmp_path: Path) -> None:
    source = tmp_path / "topology.json"
    source.write_text(json.dumps(to_plain(arrange(kernel.machine()))))
    shown = CliRunner().invoke(cli, ["topology", "--input", str(source)], env={"COLUMNS": "100"})
    assert shown.output.splitlines() == [line for line, _ in render(arrange(kernel.machine()), 100)]


@pytest.fixture
def hwloc(monkeypatch: pytest.MonkeyPatch) -> None:
    path, environment = program("hwloc", "usr/bin/lstopo")
    monkeypatch.setenv("LD_LIBRARY_PATH", environment.get("LD_LIBRARY_PATH", ""))
    monkeypatch.setenv("PATH", f"{path.parent}:{environment['PATH']}")


def describe(kernel: Kernel, folder: Path) -> Path:
    """What lstopo is given."""
    assert drawn(kernel, folder, str(folder / "n1.xml")).exit_code == 0
    return folder / "n1.xml"


@pytest.mark.usefixtures("hwloc")
def test_a_picture_is_drawn_of_what_another_machine_has_printed(kernel: Kernel, tmp_path: Path) -> None:
    for name, begins in (("n1.png", b"\x89PNG"), ("n1.svg", b"<?xml")):
        said = drawn(kernel, tmp_path, str(tmp_path / name))
        assert (said.exit_code, said.output) == (0, "")
        assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.usefixtures("hwloc")
def test_hwloc_finds_devices_and_queues_at_their_place(kernel: Kernel, tmp_path: Path) -> None:
    for file, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "-1")):
        kernel.tree.put(f"{GPU}/{file}", text)
    command = ["lstopo-no-graphics", "--of", "console", "--physical", "--input", str(describe(kernel, tmp_path))]
    read = subprocess.run(command, capture_output=True, text=True, check=True)
    assert read.stderr == ""
    # It prints sizes of memory and caches, which are not in there.
    assert [re.sub(r" \(0KB\)| \([^)]*total[^)]*\)", "", line) for line in read.stdout.splitlines()] == [
        "Machine",
        "  Package(socket) P#0",
        "    NUMANode(NUMA node) P#0",
        "    L3(last-level cache)",
        "      Core P#0 + PU(CPU) P#0",
        f"        Misc {NAME0} txrx-0 txrx-1",
        "      Core P#1 + PU(CPU) P#1",
        f"        Misc ! {NAME1} txrx-0",
        f"    Misc NIC {PF0} (igb)",
        f"      Misc {NAME0}",
        "  Package(socket) P#1",
        "    NUMANode(NUMA node) P#1",
        "    L3(last-level cache)",
        "      Core P#2 + PU(CPU) P#2",
        "      Core P#3 + PU(CPU) P#3",
        f"    Misc NIC {PF1} (igb)",
        f"      Misc {NAME1}",
        "  Misc no NUMA node",
        "    Misc GPU 0000:65:00.0",
    ]


def test_the_picture_shows_load_and_misplaced_queues_by_colour(kernel: Kernel, tmp_path: Path) -> None:
    root = ElementTree.fromstring(describe(kernel, tmp_path).read_text())  # noqa: S314  the command has written it
    painted = {
        (each.get("name") or f"core {each.get('os_index')}", style.attrib["value"].partition(";")[0])
        for each in root.iter("object")
        if (style := each.find("info[@name='lstopoStyle']")) is not None
    }
    loads: dict[str, Load] = {"core 0": "even", "core 1": "even", "core 2": "none", "core 3": "none"}
    assert {(name, f"Background={LOADS[load]}") for name, load in loads.items()} < painted
    assert (f"! {NAME1} txrx-0", f"Background={MISPLACED}") in painted
    assert f"{NAME0} txrx-0 txrx-1" not in {name for name, _ in painted}


def test_a_picture_that_cannot_be_made_is_one_message(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = drawn(kernel, tmp_path, str(tmp_path / "n1.svg"))
    assert missing.exit_code == 1
    assert missing.output.count("\n") == 1
    assert "lstopo is not installed; install hwloc" in missing.output
    assert drawn(kernel, tmp_path, str(tmp_path / "n1.jpg")).exit_code == 2
    (tmp_path / "bad.json").write_text('[{"number": 1}]')
    bad = CliRunner().invoke(cli, ["topology", "--input", str(tmp_path / "bad.json")])
    assert bad.exit_code == 1
    assert "bad.json is not what `trackbed topology --json` prints" in bad.output


def test_queues_that_do_not_fit_into_a_box_are_counted(kernel: Kernel) -> None:
    assert f"      CPU 0: {NAME0} txrx-0 and 1 more" in lines(kernel, width=40)


def test_a_gpu_and_a_device_without_a_node_are_shown(kernel: Kernel) -> None:
    for file, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200"), ("numa_node", "-1")):
        kernel.tree.put(f"{GPU}/{file}", text)
    assert lines(kernel)[-2:] == ["no NUMA node", "    GPU 0000:65:00.0"]
    kernel.tree.link(f"{GPU}/driver", "../../../bus/pci/drivers/nvidia")
    assert lines(kernel)[-1] == "    GPU 0000:65:00.0 (nvidia)"
    assert arrange(kernel.machine())[-1].number == EVERYWHERE
