"""The scripts that read a node's hardware and how its kubelet starts, run for real in a folder of the test."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.report.records import Report
from agent.spec.node import from_mapping
from tasks import hardware
from tasks.hardware import Gpu, NodeHardware, shared
from tasks.kubernetes.kubelet_arguments import _KUBELET, ENVIRONMENT, KubeletArguments, NodeKubelet
from tasks.readiness import MARGIN
from tests.deploy.conftest import Node, status
from tests.deploy.hardware import CONNECTX, ERDMA, SECOND, VF, VIRTIO, printed
from tests.deploy.hardware import hardware as node_hardware
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

REPORT = Report("node-a", "abc", "boot", "1-a", ready=True, up_to_date=True)
ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth1\t00000000\t0102000A\t0003\t0\t0\t200\t00000000\t0\t0\t0
eth0\t00000000\t0202000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0002000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
tun0\t00000000\t0102010A\t0003\t0\t0\t0\t00000080\t0\t0\t0
*\t00000000\t00000000\t0200\t0\t0\t50\t00000000\t0\t0\t0
"""


EMPTY = """echo '{"functions": [], "other_rdma": [], "rdma_cm": false}'"""


def pci(root: Path, address: str, vendor: str, code: str, driver: str | None = None) -> None:
    folder = root / "sys/bus/pci/devices" / address
    text_file(folder / "vendor", f"0x{vendor}\n")
    (folder / "class").write_text(f"0x{code}\n")
    if driver:
        (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
        (folder / "driver").symlink_to(f"../../drivers/{driver}")


def _read(command: Path, root: Path) -> list[str]:
    program(root / "bin/ip", f'[ "$*" = "-o addr show scope global" ] && cat {root}/addresses; true')
    return sh(hardware._HARDWARE, command, root, programs=root / "bin")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pci(tmp_path, "0000:00:02.0", "1234", "030000", "bochs")
    pci(tmp_path, "0000:50:00.0", "10de", "030200", "nvidia")
    pci(tmp_path, "0000:51:00.0", "10de", "030000")
    pci(tmp_path, "0000:52:00.0", "10de", "068000", "nvswitch")
    for netdev in ("eth0", "lo"):
        (tmp_path / "sys/class/net" / netdev).mkdir(parents=True)
    text_file(tmp_path / "proc/modules", "ib_uverbs 1 2 - Live 0x0\nmlx5_core 1 0 - Live 0x0\n")
    text_file(tmp_path / "proc/net/route", ROUTES)
    return tmp_path


def test_the_hardware_of_a_node_is_read(root: Path) -> None:
    (root / "inspection").write_text(
        json.dumps({"functions": [{**CONNECTX, "nic": "rail0"}, ERDMA], "other_rdma": [], "rdma_cm": True}, indent=1)
    )
    lo, eth0 = "1: lo    inet 192.0.2.1/32 scope global lo", "2: eth0    inet 10.2.0.1/24 scope global eth0"
    (root / "addresses").write_text(f"{lo}\n{eth0}\n")
    command = root / "trackbed"
    program(command, f'[ "$*" = "inspect --json" ] && cat {root}/inspection')
    fact = NodeHardware().process(_read(command, root))
    assert fact is not None
    assert fact.gpus == (Gpu("0000:50:00.0", "nvidia"), Gpu("0000:51:00.0", None))
    assert fact.modules == {"ib_uverbs", "mlx5_core"}
    assert [function.nic for function in fact.functions] == ["rail0", None]
    assert fact.netdevs == ("eth0", "lo")
    assert (fact.route, fact.addressed) == ("eth0", frozenset({"eth0"}))
    assert [function.address for function in fact.all_functions()] == [
        CONNECTX["address"],
        VF["address"],
        ERDMA["address"],
    ]
    assert [function.address for function in hardware.shared(fact.all_functions())] == [CONNECTX["address"]]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ["ens1f0", "0000:41:00.0", "ens5"]),
        ([{"name": "rail0", "select": {"pci": "0000:21:00.0"}}], ["rail0", None, None]),
    ],
)
def test_a_spec_without_nics_means_all_functions(given: list[Any], meant: list[str | None]) -> None:
    spec = from_mapping({"node_name": "a", "nics": given})
    named = {**CONNECTX, "nic": "rail0" if given else None}
    hardware = node_hardware(named, {**SECOND, "netdevs": []}, VIRTIO).with_nics_of(spec)
    assert [function.nic for function in hardware.functions] == meant
    assert [vf.nic for vf in hardware.functions[0].vfs] == meant[:1]


@pytest.mark.parametrize("address", [pytest.param(f"20010db8{1:024}", id="cluster-api-provider-proxmox-144")])
def test_a_node_without_ipv4_has_the_netdev_of_its_ipv6_default_route(root: Path, address: str) -> None:
    zeros = "0" * 32
    routes = (
        f"{zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n"
        f"{zeros} 00 {zeros} 00 {address} 00000401 00000001 00000000 00000003     eth1\n"
        f"{zeros} 00 {zeros} 00 {address} 00000400 00000001 00000000 00000003     eth0\n"
        f"{zeros} 01 {zeros} 00 {address} 00000001 00000001 00000000 00000003     tun0\n"
    )
    (root / "proc/net/ipv6_route").write_text(routes)
    program(root / "trackbed", EMPTY)
    (root / "proc/net/route").write_text(ROUTES.replace("eth0", "eth2"))
    of_both = NodeHardware().process(_read(root / "trackbed", root))
    (root / "proc/net/route").write_text("")
    of_ipv6 = NodeHardware().process(_read(root / "trackbed", root))
    assert [fact and fact.route for fact in (of_both, of_ipv6)] == ["eth2", "eth0"]


def test_the_hardware_is_read_once_udev_has_renamed_its_devices(root: Path) -> None:
    """As those of VFs, which the first pass of a boot makes."""
    named = {**CONNECTX, "rdma": [{"name": "rocep33s0f0", "transport": "RoCE"}]}
    (root / "renamed").write_text(json.dumps({"functions": [named], "other_rdma": [], "rdma_cm": True}))
    program(root / "bin/udevadm", f'[ "$1" = settle ] && mv {root}/renamed {root}/inspection')
    program(root / "trackbed", f"cat {root}/inspection")
    fact = NodeHardware().process(_read(root / "trackbed", root))
    assert fact is not None
    assert [device.name for device in fact.functions[0].rdma] == ["rocep33s0f0"]


def test_a_node_without_modules_and_routes_is_read(tmp_path: Path) -> None:
    program(tmp_path / "trackbed", EMPTY)
    assert NodeHardware().process(_read(tmp_path / "trackbed", tmp_path)) == hardware.Hardware(())


def test_the_hardware_of_a_node_without_an_agent_is_unknown(root: Path) -> None:
    assert NodeHardware().process(_read(root / "trackbed", root)) is None
    assert NodeHardware().process(printed()[:-2]) is None


def kubelet(root: Path, unit: str | None = None, environment: str = "", **files: str) -> KubeletArguments:
    """What is read of a node whose kubelet has this unit, environment, and files with KUBELET_EXTRA_ARGS."""
    for name, text in files.items():
        text_file(root / name[1:], f"{text}\n")
    shown = f"case $1 in show) said='Environment={environment}' ;; *) said='{unit}' ;; esac; printf '%s\\n' \"$said\""
    program(root / "bin/systemctl", shown if unit else "exit 1")
    return NodeKubelet().process(sh(_KUBELET, root, ENVIRONMENT, PATH=f"{root / 'bin'}:/usr/bin:/bin"))


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("KUBELET_EXTRA_ARGS=--v=4", "--v=4"),
        ('KUBELET_EXTRA_ARGS="--v=4 --node-ip=10.0.0.1"', "--v=4 --node-ip=10.0.0.1"),
        ("KUBELET_EXTRA_ARGS='--v=4'", "--v=4"),
        (r'KUBELET_EXTRA_ARGS="--config-dir=\"/a b\""', '--config-dir="/a b"'),
        (r'KUBELET_EXTRA_ARGS="--x=\d+\\"', "--x=\\d+\\"),
        (r"KUBELET_EXTRA_ARGS=--x=a\ b", "--x=a b"),
        ("KUBELET_EXTRA_ARGS=--v=4 \\\n  --node-ip=10.0.0.1 \\\n  --x=1", "--v=4   --node-ip=10.0.0.1   --x=1"),
        ('KUBELET_EXTRA_ARGS="--v=4 \\\n--x=1"\nOTHER=1', "--v=4 --x=1"),
        ("KUBELET_EXTRA_ARGS=--v=4 \\", "--v=4"),
        ("KUBELET_EXTRA_ARGS=", ""),
        ("# KUBELET_EXTRA_ARGS=--v=4", ""),
        ("KUBELET_EXTRA_ARGS=--v=2\nKUBELET_EXTRA_ARGS=--v=4", "--v=4"),
    ],
)
def test_the_kubelets_arguments_are_read(tmp_path: Path, line: str, arguments: str) -> None:
    assert kubelet(tmp_path, **{"/etc/default/kubelet": line}) == KubeletArguments(arguments, None)


def test_a_kubelet_whose_unit_does_not_pass_arguments_on_is_recognised(tmp_path: Path) -> None:
    assert kubelet(tmp_path, "ExecStart=kubelet") == KubeletArguments("", False)


@pytest.mark.parametrize(
    ("environment", "file", "read", "arguments"),
    [
        ('A=1 "KUBELET_EXTRA_ARGS=--v=4 --node-labels=a=b"', None, True, "--v=4 --node-labels=a=b"),
        (r'"KUBELET_EXTRA_ARGS=--a=\"1\" --b=\\2 --c=\$3" KUBELET=--d', None, True, r'--a="1" --b=\2 --c=$3'),
        (r'A=1 KUBELET_EXTRA_ARGS=--v=4\x20--a="1"\x20--c=\x5cd B=2', None, True, r'--v=4 --a="1" --c=\d'),
        ("KUBELET_EXTRA_ARGS=--v=4", "--v=5", True, "--v=5"),
        ("KUBELET_EXTRA_ARGS=--v=4", "", True, ""),
        ("KUBELET_EXTRA_ARGS=--v=4", "--v=5", False, "--v=4"),
        ("", None, True, ""),
    ],
)
def test_arguments_in_the_units_environment_are_kept_unless_a_file_that_it_reads_overrides_them(
    tmp_path: Path, environment: str, file: str | None, read: bool, arguments: str
) -> None:
    """As the nodes of EKS have them: a drop-in with Environment='KUBELET_EXTRA_ARGS=...'."""
    unit = "EnvironmentFile=-/etc/sysconfig/kubelet\n" * read + "ExecStart=kubelet $KUBELET_EXTRA_ARGS"
    there = {} if file is None else {"/etc/sysconfig/kubelet": f"KUBELET_EXTRA_ARGS={file}"}
    assert kubelet(tmp_path, unit, environment, **there) == KubeletArguments(arguments, True)


@pytest.mark.parametrize(
    ("unit", "arguments"),
    [
        ("EnvironmentFile=-/var/lib/kubelet/extra_args\n", "--node-ip=10.0.0.1"),
        ("EnvironmentFile=/etc/default/kubelet\nEnvironmentFile=-/var/lib/kubelet/extra_args\n", "--node-ip=10.0.0.1"),
        ("EnvironmentFile=-/var/lib/kubelet/extra_args\nEnvironmentFile=/etc/default/kubelet\n", "--v=4"),
        ("EnvironmentFile=-/etc/default/kubelet\nEnvironmentFile=\n", ""),
        ("#EnvironmentFile=/etc/default/kubelet\n", ""),
        (f"EnvironmentFile=-/etc/default/kubelet\nEnvironmentFile={ENVIRONMENT}\n", "--v=4"),
    ],
    ids=["its own file", "the last one", "the last one of two", "forgotten", "a comment", "trackbed's own"],
)
def test_arguments_in_whatever_file_the_unit_reads_are_kept(tmp_path: Path, unit: str, arguments: str) -> None:
    """As in clusters of Gardener: the drop-in names a file of its own. Trackbed's drop-in comes later, and overrides it."""
    there = {
        "/var/lib/kubelet/extra_args": "KUBELET_EXTRA_ARGS=--node-ip=10.0.0.1",
        "/etc/default/kubelet": "KUBELET_EXTRA_ARGS=--v=4",
        ENVIRONMENT: "KUBELET_EXTRA_ARGS=--v=4 --register-with-taints=x",
    }
    made = kubelet(tmp_path, f"{unit}ExecStart=kubelet $KUBELET_EXTRA_ARGS", **there)
    assert made == KubeletArguments(arguments, True)


def settle() -> None:
    hardware.settle(version="1-a", spec_hash="abc")


def test_there_is_no_wait_if_no_task_reads_the_hardware(node: Node) -> None:
    assert node.deploy(settle, {}).planned == {}


def test_a_task_that_reads_the_hardware_waits_until_the_node_is_ready_or_a_timeout(node: Node) -> None:
    node.data = {"labels": {}, "ready_timeout": 7}
    result = node.deploy(settle, {})
    (waits,) = result.flat
    assert waits.endswith("sh /usr/local/bin/trackbed abc 7")
    # The agent's time, and some for the connection.
    assert dict(result.arguments)[waits]["_timeout"] == 7 + MARGIN
    assert node.deploy(settle, status(REPORT)).flat == []


@pytest.mark.parametrize("selected", [False, True])
def test_an_nvlink_bridge_is_a_nic_only_if_the_spec_selects_it(selected: bool) -> None:
    bridge = {**SECOND, "nvlink_bridge": True, **({"nic": "bridge"} if selected else {})}
    nics = [{"name": "bridge", "select": {"pci": SECOND["address"]}}] if selected else []
    hardware = node_hardware(CONNECTX, bridge).with_nics_of(from_mapping({"node_name": "a", "nics": nics}))
    assert [each.address for each in shared(hardware.all_functions())] == [
        (SECOND if selected else CONNECTX)["address"]
    ]


FLAGS = 'KUBELET_KUBEADM_ARGS="--node-ip=10.0.0.1{}--pod-infra-container-image=x"\n'


@pytest.mark.parametrize(
    ("file", "text", "taints"),
    [
        pytest.param(
            "kubeadm-flags.env", FLAGS.format(" --register-with-taints=team=a:NoSchedule,x:NoExecute "),
            ("team=a:NoSchedule,x:NoExecute",), id="kubeadm-1619",
        ),
        ("kubeadm-flags.env", FLAGS.format(" "), ()),
        ("config.yaml", "kind: KubeletConfiguration\nregisterWithTaints:\n- key: team\n", ("registerWithTaints",)),
        ("config.yaml", "kind: KubeletConfiguration\nregisterWithTaints: []\n", ()),
    ],
)  # fmt: skip
def test_taints_that_others_give_the_kubelet_are_read(
    tmp_path: Path, file: str, text: str, taints: tuple[str, ...]
) -> None:
    assert kubelet(tmp_path, **{f"/var/lib/kubelet/{file}": text}) == KubeletArguments("", None, taints)
