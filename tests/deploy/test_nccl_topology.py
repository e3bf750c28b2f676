"""NCCL's topology file: its content, whether NCCL's own parser would read it, and the script that reads the node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.spec.node import from_mapping
from tasks import nccl, nccl_topology
from tasks.hardware import Hardware
from tasks.nccl_topology import HEADER, PciFunction, PciTopology
from tests.deploy.conftest import Answers, Node, Result, files
from tests.deploy.hardware import CONNECTX, SECOND, V2, VF, VIRTIO, function, hardware, has, nics, rdma

MASKS = {"0": "00000000,0000ffff", "1": "00000000,ffff0000"}
GPU = "gpu 0000:1b:00.0 nvidia"
ROOT = "/sys/devices/pci0000:16/0000:16:02.0"
SWITCH = f"{ROOT}/0000:17:00.0"
TOPOLOGY_SCRIPT = "max_link_speed"
NEW = "/etc/.nccl-topology.xml.new"


def pci(
    path: str, kind: str = "0x060400", numa: str = "0", speed: str = "32.0 GT/s PCIe", width: str = "16"
) -> PciFunction:
    return PciFunction(path, kind, "0x15b3", "0x1976", "0x15b3", "0x0058", numa, speed, width)


def topology(*functions: PciFunction, **more: Any) -> PciTopology:
    intel = {"architecture": "x86_64", "vendor": "GenuineIntel", "family": "6", "model": "143"}
    return PciTopology({each.address: each for each in functions}, MASKS, **{**intel, **more})


# A GPU and a ConnectX behind one PCIe switch, and a second ConnectX alone at the other socket.
NODE = topology(
    pci(ROOT),
    pci(SWITCH),
    pci(f"{SWITCH}/0000:18:00.0"),
    pci(f"{SWITCH}/0000:18:01.0"),
    pci(f"{SWITCH}/0000:18:00.0/0000:1b:00.0", "0x030200"),
    pci(f"{SWITCH}/0000:18:01.0/0000:21:00.0", "0x020700"),
    pci(f"{SWITCH}/0000:18:01.0/0000:21:00.1", "0x020700"),
    pci("/sys/devices/pci0000:40/0000:40:01.0", numa="1", speed="16.0 GT/s PCIe", width="8"),
    pci("/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0", "0x020700", numa="1"),
    pci("/sys/devices/pci0000:00/0000:00:05.0", "0x020000", numa="-1"),
)
FILE = (
    HEADER
    + """\
<system version="1">
  <cpu numaid="0" affinity="00000000,0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:17:00.0" class="0x060400" vendor="0x15b3" device="0x1976" subsystem_vendor="0x15b3" \
subsystem_device="0x0058" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:1b:00.0" class="0x030200" vendor="0x15b3" device="0x1976" subsystem_vendor="0x15b3" \
subsystem_device="0x0058" link_speed="32.0 GT/s PCIe" link_width="16"/>
      <pci busid="0000:21:00.0" class="0x020700" vendor="0x15b3" device="0x1976" subsystem_vendor="0x15b3" \
subsystem_device="0x0058" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0"/>
        </nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="00000000,ffff0000" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:41:00.0" class="0x020700" vendor="0x15b3" device="0x1976" subsystem_vendor="0x15b3" \
subsystem_device="0x0058" link_speed="16.0 GT/s PCIe" link_width="8">
      <nic>
        <net name="mlx5_1"/>
      </nic>
    </pci>
  </cpu>
</system>
"""
)


# --- NCCL's parser, by the rules of src/graph/xml.cc: stricter than XML ------------------------------------

CHILDREN = {
    "": {"system"},
    "system": {"cpu"},
    "cpu": {"pci", "nic"},
    "pci": {"pci", "gpu", "nic", "pcilink"},
    "nic": {"net"},
    "net": set[str](),
}
LONGEST, MOST_ATTRIBUTES, MOST_CHILDREN, MOST_ELEMENTS = 255, 16, 32, 256


class Reader:
    """The file character by character. After a tag's name and after each value one space, '/' or '>' must follow."""

    def __init__(self, text: str) -> None:
        self._left = iter(text)
        self.count = 0

    def token(self) -> tuple[str, str | None, str]:
        """A name, its value if '=' follows, and the character after it."""
        name = ""
        for char in self._left:
            if char == "=":
                assert next(self._left) == '"'
                value = "".join(iter(lambda: next(self._left), '"'))
                assert len(value) < LONGEST - 1, value
                return name, value, next(self._left)
            if char in " >/\n":
                return name, None, char
            name += char
        raise AssertionError("unexpected end")

    def element(self, parent: str) -> tuple[str, dict[str, str]] | None:
        """The next element below ``parent`` with its attributes, its children read; None at the end of ``parent``."""
        char = next((char for char in self._left if char not in " \n"), "")
        if not char:
            assert parent == ""
            return None
        assert char == "<", char
        name, value, char = self.token()
        assert value is None
        if name.startswith("!--"):
            while not (name := name + char).endswith("-->"):
                char = next(self._left)
            return self.element(parent)
        if name == "" and char == "/":
            assert self.token() == (parent, None, ">")
            return None
        attributes = {}
        while char == " ":
            key, value, char = self.token()
            assert value is not None
            attributes[key] = value
        assert len(attributes) <= MOST_ATTRIBUTES
        assert name in CHILDREN[parent], f"{name} in {parent}"
        self.count += 1
        if char == "/":
            assert self.token() == ("", None, ">")
            return name, attributes
        assert char == ">"
        assert len(list(iter(lambda: self.element(name), None))) <= MOST_CHILDREN
        return name, attributes


def read_as_nccl_does(text: str) -> int:
    """The number of elements; the first must be a system of version 1."""
    reader = Reader(text)
    element = reader.element("")
    assert element is not None
    assert element[0] == "system"
    assert int(element[1]["version"]) == 1
    assert reader.element("") is None
    assert reader.count <= MOST_ELEMENTS
    return reader.count


@pytest.mark.parametrize(
    "text",
    [
        '<?xml version="1.0"?>\n<system version="1"></system>\n',
        '<system version="1"><cpu numaid="0"  arch="x86_64"/></system>',
        '<system version="1"><pci busid="0000:17:00.0"/></system>',
        '<system version="1"><cpu numaid="0" affinity="' + "f" * 260 + '"/></system>',
        '<system version="1"><cpu numaid="0"/>',
    ],
)
def test_nccl_s_parser_is_stricter_than_xml(text: str) -> None:
    with pytest.raises((AssertionError, StopIteration)):
        read_as_nccl_does(text)


# --- the file ----------------------------------------------------------------------------------------------


def text(*functions: Any, of: PciTopology = NODE, others: tuple[str, ...] = (GPU,)) -> str:
    return nccl_topology.text(of, meant(*functions, others=others))


def meant(*functions: Any, others: tuple[str, ...]) -> Hardware:
    spec = from_mapping({"node_name": "n1", "nics": nics(*functions)})
    return hardware(*functions, others=others).with_nics_of(spec)


def test_the_file_has_switches_without_their_other_ports_and_no_root_ports() -> None:
    assert text(CONNECTX, SECOND) == FILE
    assert read_as_nccl_does(FILE) == 11


def test_the_ports_of_a_card_are_one_nic() -> None:
    other = function("0000:21:00.1", "15b3:101b", "ens1f1", rdma("mlx5_3", V2))
    made = text({**CONNECTX, "vfs": []}, other)
    assert '<net name="mlx5_0"/>\n          <net name="mlx5_3"/>' in made
    assert "0000:21:00.1" not in made
    read_as_nccl_does(made)


def test_with_roce_lag_the_device_that_two_ports_share_is_one_net() -> None:
    other = function("0000:21:00.1", "15b3:101b", "ens1f1", rdma("mlx5_bond_0", V2))
    made = text({**CONNECTX, "rdma": [rdma("mlx5_bond_0", V2)], "vfs": []}, other)
    assert made.count("mlx5_bond_0") == 1


def test_a_vf_s_device_stands_below_the_pf_whose_link_it_uses() -> None:
    made = text({**CONNECTX, "rdma": [], "vfs": [{**VF, "address": "0000:21:01.2"}]})
    assert '<pci busid="0000:21:00.0"' in made
    assert '<net name="mlx5_2"/>' in made
    assert "0000:21:01.2" not in made


def test_the_devices_are_those_that_nccl_is_given() -> None:
    chosen = {**CONNECTX, "nic": "rail0"}
    assert "mlx5_1" not in text(chosen, SECOND)
    assert "0000:41:00.0" not in text(chosen, SECOND)


def test_a_link_is_as_fast_and_as_wide_as_its_slower_end() -> None:
    assert 'link_speed="16.0 GT/s PCIe" link_width="8"' in text(SECOND, others=())


def test_values_that_sysfs_lacks_are_left_to_nccl() -> None:
    alone = pci("/sys/devices/pci0000:00/0000:21:00.0", "0x020000", "", speed="Unknown", width="0")
    made = text({**CONNECTX, "vfs": []}, of=PciTopology({"0000:21:00.0": alone}, architecture="riscv64"), others=())
    assert '<cpu numaid="-1">' in made
    assert "link_" not in made
    read_as_nccl_does(made)


def test_a_mask_that_is_too_long_for_nccl_is_left_out() -> None:
    masks = {"0": ",".join(["ffffffff"] * 40)}
    made = nccl_topology.text(
        PciTopology(NODE.functions, masks, "x86_64", "AuthenticAMD", "25", "17"), meant(CONNECTX, others=(GPU,))
    )
    assert "affinity" not in made
    assert 'vendor="AuthenticAMD">' in made
    read_as_nccl_does(made)


def test_more_than_nccl_reads_is_refused() -> None:
    many = [pci(f"/sys/devices/pci0000:00/0000:{bus:02x}:00.0", "0x030200") for bus in range(40)]
    with pytest.raises(ValueError, match="more than NCCL reads; leave topology out"):
        text(VIRTIO, of=topology(*many), others=tuple(f"gpu {each.address} nvidia" for each in many))


# --- the operation -------------------------------------------------------------------------------------------


def lines(tree: PciTopology) -> list[str]:
    """What the script prints."""
    given = [f"{name}|{getattr(tree, name)}" for name in ("architecture", "vendor", "family", "model")]
    functions = [
        "|".join(
            (
                "pci", each.path, each.kind, each.vendor, each.device, each.subsystem_vendor, each.subsystem_device,
                each.numa_node, each.link_speed, each.link_width,
            )
        )
        for each in tree.functions.values()
    ]  # fmt: skip
    return [*functions, *(f"node|{node}|{mask}" for node, mask in tree.cpus.items()), *given]


def answers(*functions: Any, there: dict[str, str] | None = None) -> Answers:
    return {TOPOLOGY_SCRIPT: lines(NODE), **has(*functions, others=(GPU,)), **files(**(there or {}))}


def deploy(node: Node, given: dict[str, Any] | None, answers: Answers) -> Result:
    node.data = {} if given is None else {"nccl": given}
    return node.deploy(nccl_topology.configure, answers)


def test_the_file_is_written_if_the_key_asks_for_it(node: Node) -> None:
    result = deploy(node, {"network_type": 1, "topology": True}, answers(CONNECTX, SECOND))
    assert result.uploads[NEW].decode() == FILE
    assert result.flat[-1].endswith(f"sh put {nccl.TOPOLOGY} --")


def test_nothing_is_done_if_the_file_is_in_place(node: Node) -> None:
    there = answers(CONNECTX, SECOND, there={nccl.TOPOLOGY: FILE})
    assert deploy(node, {"network_type": 1, "topology": True}, there).flat == []


@pytest.mark.parametrize("given", [None, {"network_type": 1}])
def test_without_the_key_only_trackbed_s_file_is_removed(node: Node, given: dict[str, Any] | None) -> None:
    assert deploy(node, given, files(**{nccl.TOPOLOGY: "<system/>"})).flat == []
    assert deploy(node, given, files(**{nccl.TOPOLOGY: FILE})).flat[0].endswith(f"sh remove {nccl.TOPOLOGY} --")


def test_a_node_without_gpu_and_rdma_device_is_refused(node: Node) -> None:
    neither = {**answers(VIRTIO), **has(VIRTIO)}
    result = deploy(node, {"network_type": 2, "topology": True}, neither)
    assert result.failed
    assert "nccl.topology: the node has neither a GPU nor an RDMA device for NCCL" in "\n".join(result.log)


# --- the script ------------------------------------------------------------------------------------------------


def made(root: Path, path: str, **texts: str) -> Path:
    folder = root / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, given in texts.items():
        (folder / name).write_text(f"{given}\n")
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / folder.name).symlink_to(os.path.relpath(folder, root / "sys/bus/pci/devices"))
    return folder


def printed(root: Path) -> Iterator[str]:
    done = subprocess.run(
        ["sh", "-ec", nccl_topology._TOPOLOGY, "sh", str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    yield from done.stdout.splitlines()


def test_the_script_reads_functions_nodes_and_the_kind_of_cpu(tmp_path: Path) -> None:
    made(tmp_path, ROOT, **{"class": "0x060400"})
    card = made(tmp_path, f"{ROOT}/0000:21:00.0", **{
        "class": "0x020700", "vendor": "0x15b3", "device": "0x1021", "subsystem_vendor": "0x15b3", "numa_node": "0",
        "subsystem_device": "0x0041", "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16",
    })  # fmt: skip
    (made(tmp_path, f"{ROOT}/0000:21:00.2", **{"class": "0x020000"}) / "physfn").symlink_to(card)
    used = made(tmp_path, f"{ROOT}/0000:21:00.3", **{"class": "0x020000"})
    (used / "physfn").symlink_to(card)
    (used / "infiniband").mkdir()
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node0/cpumap").write_text("0000ffff\n")
    (tmp_path / "proc").mkdir()
    cpu = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\n\n"
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{cpu}processor\t: 1\n{cpu}")
    fact = nccl_topology.NodeTopology().process(list(printed(tmp_path)))
    assert sorted(fact.functions) == ["0000:16:02.0", "0000:21:00.0", "0000:21:00.3"]
    assert fact.functions["0000:21:00.0"] == PciFunction(
        str(card), "0x020700", "0x15b3", "0x1021", "0x15b3", "0x0041", "0", "32.0 GT/s PCIe", "16"
    )
    assert fact.cpus == {"0": "0000ffff"}
    assert (fact.vendor, fact.family, fact.model) == ("GenuineIntel", "6", "143")
    assert fact.architecture == os.uname().machine


def test_the_script_on_a_machine_without_pci_and_nodes(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\n")
    assert list(printed(tmp_path)) == [f"architecture|{os.uname().machine}"]
