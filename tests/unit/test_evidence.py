"""The operators' checks find the NICs of a spec by the output of the node's own tools."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import testinfra

from agent.spec.node import from_mapping, to_json
from tests.node.evidence import FUNCTIONS, Node, read_node
from tests.node.test_modules import in_force

LISTED = """pf|0000:c1:00.0|15b3|1021|mlx5_core|ens3|1|02:00:00:00:03:00|-
pf|0000:21:00.0|15b3|1021|mlx5_core|ens1|0|02:00:00:00:01:00|-
vf|0|0000:21:00.1|ens1v0
pf|0000:41:00.0|15b3|1021|mlx5_core|ens2|0|02:00:00:00:02:00|-
pf|0000:01:00.0|8086|10c9|igb|eno1|0|02:00:00:00:09:00|-
"""


CPUS = {"lscpu": "0,0,0,0:0\n1,1,0,0:0\n", "isolated": "", "cpu_manager_state": "{}", "distance": ""}


class Shell:
    """A host on which `cat` prints the spec, the script of the functions LISTED, and `ip` nothing. It has two CPUS."""

    backend: Any

    def __init__(self, spec: dict[str, Any], **answers: str) -> None:
        self.backend = self
        self._answers = CPUS | answers
        self._spec = to_json(from_mapping({"node_name": "n1", **spec}))

    def get_pytest_id(self) -> str:
        return "ssh://n1"

    def run(self, command: str, *arguments: str) -> Any:
        for part, answer in self._answers.items():
            if any(part in argument for argument in arguments[:1]):
                return type("Done", (), {"rc": 0, "stdout": answer, "stderr": ""})
        printed = self._spec if command.startswith("cat") else "[]" if "ip -j" in arguments[0] else LISTED
        return type("Done", (), {"rc": 0, "stdout": printed, "stderr": ""})


def node(*nics: dict[str, Any]) -> Node:
    return read_node(Shell({"nics": list(nics)}))  # type: ignore[arg-type]


def rails(**select: Any) -> dict[str, Any]:
    return {"name": "rail{index}", "select": {"vendor": "15b3", "each": True, **select}, "vfs": {"count": 1}}


STORAGE = {"name": "storage", "select": {"mac": "02:00:00:00:02:00"}}


def test_each_function_is_a_nic_in_the_order_of_the_addresses() -> None:
    nics = node(rails(min=3, max=3)).nics()
    assert [(nic.want.name, nic.pci) for nic in nics] == [
        ("rail0", "0000:21:00.0"),
        ("rail1", "0000:41:00.0"),
        ("rail2", "0000:c1:00.0"),
    ]
    assert [vf.label for vf in nics[0].vfs] == ["ens1v0 (0000:21:00.1, NIC rail0, VF 0)"]


@pytest.mark.parametrize(("vfs", "derived"), [({}, True), ({"derive_macs": False}, False)], ids=str)
def test_an_address_is_expected_of_a_vf_only_where_one_is_derived_or_given(vfs: dict[str, Any], derived: bool) -> None:
    (nic,) = node({"name": "rail", "select": {"pci": "0000:21:00.0"}, "vfs": {"count": 1, **vfs}}).nics()
    assert (nic.vfs[0].want.mac is not None) is derived


def test_another_entry_s_function_is_not_counted() -> None:
    nics = node(rails(without=["storage"]), STORAGE).nics()
    assert [(nic.want.name, nic.netdev) for nic in nics] == [("rail0", "ens1"), ("rail1", "ens3"), ("storage", "ens2")]


@pytest.mark.parametrize("bounds", [{"min": 4}, {"max": 2}], ids=str)
def test_another_number_fails_the_check_and_names_them(bounds: dict[str, int]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"NIC rail\{index\} .*found .*0000:41:00.0 \(ens2\)"):
        node(rails(**bounds)).nics()
    assert node({**rails(**bounds), "required": False}).nics() == ()


def test_programs_do_not_translate_what_they_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    here = Node(testinfra.get_host("local://"), "here", from_mapping({"node_name": "here"}), "")
    assert here.run('printf %s "$LC_ALL"') == "C"


@pytest.mark.parametrize(
    ("name", "queue"),
    [
        ("ens1-TxRx-3", 3),
        ("ens1-rx-0", 0),
        ("ens1-rxtx-2", 2),
        ("ens1-fp-1", 1),
        ("virtio3-input.0", 0),
        ("i40e-ens1-TxRx-5", 5),
        ("i40e-0000:21:00.0:fdir-TxRx-0", None),
        ("ice-0000:21:00.0:ctrl-TxRx-0", None),
        ("i40e-0000:21:00.0:misc", None),
    ],
)
def test_a_queue_is_recognised_by_the_name_of_its_interrupt(name: str, queue: int | None) -> None:
    assert by_driver("i40e", [name]) == [queue]


def by_driver(driver: str, names: list[str]) -> list[int | None]:
    """The queue of each interrupt with one of these names, the first of which is number 98."""
    listed = list(enumerate(names, start=98))
    shell = Shell(
        {},
        lspci=f"Slot:\t0000:21:00.0\nDriver:\t{driver}\n",
        msi_irqs="".join(f"0000:21:00.0|{n}|1|1\n" for n, _ in sorted(listed, key=lambda each: str(each[0])))
        + "           CPU0       CPU1\n"
        + "".join(f" {n}:  5  6  PCI-MSI 1-edge  {name}\n" for n, name in listed),
    )
    interrupts = read_node(shell).interrupts["0000:21:00.0"]  # type: ignore[arg-type]
    ordered = sorted(interrupts, key=lambda each: each.number)
    assert [interrupt.name for interrupt in ordered] == names
    return [interrupt.queue for interrupt in ordered]


def test_each_family_names_the_interrupts_of_its_queues_in_its_own_way() -> None:
    mana = ["mana_hwc@pci:0000:21:00.0", "mana_msi1@pci:0000:21:00.0", "mana_msi2@pci:0000:21:00.0"]
    assert by_driver("mana", mana) == [None, 0, 1]
    gve = [*(f"gve-ntfy-blk{n}@pci:0000:21:00.0" for n in range(4)), "gve-mgmnt@pci:0000:21:00.0"]
    assert by_driver("gve", gve) == [0, 1, 0, 1, None]
    assert by_driver("sfc", ["ens1-0", "ens1-1", "ens1-ptp"]) == [0, 1, None]
    assert by_driver("bnxt_en", ["enp65s0f0np0-TxRx"] * 3) == [0, 1, 2]
    ionic = ["ionic-0000:21:00.0-L0-adminq0", "ionic-ens1-L0-rx0", "ionic-ens1-L0-rx1"]
    assert by_driver("ionic", ionic) == [None, 0, 1]
    assert by_driver("mlx5_core", ["mlx5_async0@pci:0000:21:00.0", "mlx5_comp7@pci:0000:21:00.0"]) == [None, 7]
    assert by_driver("mlx5_core", ["mlx5_combined0@pci:0000:21:00.0"]) == [0]
    assert by_driver("igb", ["ens1", "ens1-TxRx-0", "ens1-TxRx-0"]) == [None, 0, None]
    assert by_driver("mana", ["mana_intr"] * 3) == [None, 0, 1]
    assert by_driver("atlantic", ["ens1"] * 3) == [0, 1, 2]
    two_ports = ["ens1f4", "ens1f4-Rx0", "ens1f4-Rx1", "ens1f4d1-Rx0", "ens1f4d1-Rx1"]
    assert by_driver("cxgb4", two_ports) == [None, 0, 1, 2, 3]
    mlx4 = ["mlx4-async@pci:0000:21:00.0", "mlx4-17@0000:21:00.0", "mlx4-18@0000:21:00.0"]
    assert by_driver("mlx4_core", mlx4) == [None, 0, 1]


@pytest.mark.parametrize(
    ("given", "actual", "same"), [("0x1f", "31", True), ("31", "0x0000001f", True), ("1", "Y", True), ("8", "9", False)]
)
def test_a_module_s_parameter_may_be_in_another_notation_than_the_kernel_s(given: str, actual: str, same: bool) -> None:
    answers = {"for file in": f"options mlx5_core prof_sel={given}\n", "/sys/module": actual}
    host: Any = Shell({"nics": []}, **answers)
    [finding] = in_force(read_node(host))
    assert finding.ok is same


def put(root: Path, pci: str, *netdevs: tuple[str, int, int, str], vpd: bytes = b"") -> None:
    """A ConnectX-7 on InfiniBand; its netdevs with dev_port, index and phys_port_name."""
    folder = root / "sys/bus/pci/devices" / pci
    folder.mkdir(parents=True)
    for file, text in (("class", "0x020700"), ("vendor", "0x15b3"), ("device", "0x1021"), ("numa_node", "0")):
        (folder / file).write_text(f"{text}\n")
    (folder / "vpd").write_bytes(vpd)
    for name, dev_port, ifindex, port in netdevs:
        (folder / "net" / name).mkdir(parents=True)
        for file, text in (("dev_port", str(dev_port)), ("ifindex", str(ifindex)), ("phys_port_name", port)):
            (folder / "net" / name / file).write_text(f"{text}\n")


def test_the_functions_of_a_node_are_read_without_representors_other_ports_and_nvlink_bridges(tmp_path: Path) -> None:
    put(tmp_path, "0000:18:00.0", ("eth0", 0, 9, "pf0vf0"), ("ens1", 0, 3, "p0"))
    put(tmp_path, "0000:3a:00.0", ("ens2", 0, 4, ""), vpd=b"\x90\x12\x00VA\x0fMLX:SMDL=SW_MNG\x78")
    put(tmp_path, "0000:41:00.0", ("eth1", 1, 5, ""), ("eth2", 0, 6, ""))
    put(tmp_path, "0000:51:00.0", ("eth3", 0, 7, "1"))
    script = FUNCTIONS.replace("/sys/", f"{tmp_path}/sys/")
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[3].startswith("pf|0000:51:00.0|15b3|1021|-|-|0|")
    found = printed.rpartition("pf|")[0]
    nics = read_node(Shell({"nics": [rails(max=2)]}, **{"permanent=": found})).nics()  # type: ignore[arg-type]
    assert [(nic.pci, nic.netdev) for nic in nics] == [("0000:18:00.0", "ens1"), ("0000:41:00.0", "eth2")]


def test_cpus_that_the_containers_of_a_pod_share_are_owned() -> None:
    owned = '{"entries": {"a": {"app": "0"}}, "podEntries": {"b": {"cpuSet": "2"}}}'
    shell = Shell({}, lspci="", msi_irqs="", lscpu=f"{CPUS['lscpu']}2,2,0,0:0\n", cpu_manager_state=owned)
    assert read_node(shell).cpus.owned == {0, 2}  # type: ignore[arg-type]
