"""`trackbed inspect`: derived values, devices that go away while they are read, and the printed text."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import fields

from agent.hardware.rdma import CharDevice, Gid, RdmaDevice, RdmaPort
from agent.machine import VfInfo
from agent.report.records import to_plain
from cli import pci_ids
from cli.inspection import Inspection, Interrupt, Netdev, NetworkFunction, inspect, render
from tests.sim.kernel import Kernel
from tests.sim.seams import seen

PCI_IDS = """\
# a comment
15b3  Mellanox Technologies
\t101d  MT2892 Family [ConnectX-6 Dx]
\t\t15b3 0016  a subsystem
\t101e  ConnectX Family mlx5Gen Virtual Function
8086  Intel Corporation
\t0041  Core Processor
\t10c9  82576 Gigabit Network Connection
# Classes
C 02  Network controller
\t00  Ethernet controller
"""


@pytest.mark.parametrize(
    ("vendor", "device", "name"),
    [
        ("8086", "10c9", "Intel Corporation 82576 Gigabit Network Connection"),
        ("15b3", "101e", "Mellanox Technologies ConnectX Family mlx5Gen Virtual Function"),
        ("15b3", "0041", "Mellanox Technologies"),
        ("1ded", "107f", ""),
        ("", "", ""),
    ],
)
def test_pci_name(vendor: str, device: str, name: str) -> None:
    assert pci_ids.name(PCI_IDS, vendor, device) == name


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ENODEV, errno.EIO, errno.EACCES, errno.ENOTDIR])
def test_devices_that_go_while_they_are_read_leave_gaps_not_errors(error: int) -> None:
    """Only the names of entries can be read."""
    kernel, pf = Kernel(), "/sys/bus/pci/devices/0000:01:00.0"
    entries = [pf, *(f"{pf}/{each}" for each in ("virtfn0", "net/ens1", "infiniband/rocep1s0", "msi_irqs/30"))]
    entries += [f"/sys/class/infiniband/{each}" for each in ("rocep1s0", "siw0/ports/1")]
    entries += [f"/sys/class/infiniband_verbs/{each}" for each in ("abi_version", "uverbs0")]
    for entry in entries:
        kernel.tree.folder(entry)
    folders = {*(entry.rpartition("/")[0] for entry in entries), "/sys/class/infiniband"}

    def gone(method: str, arguments: str) -> None:
        if method == "netlink.link" or (method.startswith("files.") and arguments not in folders):
            raise OSError(error, arguments)

    machine = seen(kernel.machine(), gone)
    inspection = inspect(machine)
    assert [function.address for function in inspection.functions] == ["0000:01:00.0"]
    assert [device.name for device in inspection.functions[0].rdma] == ["rocep1s0"]
    assert [device.name for device in inspection.other_rdma] == ["siw0"]
    assert inspection.functions[0].model == ""
    assert "0000:01:00.0" in render(inspection)
    assert to_plain(inspection)["rdma_cm"] is False


GIDS = (
    Gid(0, "RoCE v1", "fe80::ba59:9fff:fe00:1", "ens1f0np0"),
    Gid(1, "RoCE v2", "fe80::ba59:9fff:fe00:1", "ens1f0np0"),
    Gid(3, "RoCE v2", "10.0.0.1", "ens1f0np0"),
)


def port(netdev: str) -> RdmaPort:
    return RdmaPort(1, netdev, "Ethernet", "ACTIVE", "LinkUp", "100 Gb/sec (4X EDR)", gids=GIDS, lid=0, lmc=0, sm_lid=0)


INFINIBAND = RdmaPort(
    1, "ibp94s0", "InfiniBand", "ACTIVE", "LinkUp", "400 Gb/sec (4X NDR)", lid=17, lmc=0, sm_lid=1
)  # fmt: skip


def vf(index: int, **reported: Any) -> VfInfo:
    return VfInfo(index, **reported)


EXAMPLE = Inspection(
    functions=(
        NetworkFunction(
            address="0000:3b:00.0",
            model="ConnectX-6 Dx EN adapter card, 100GbE, Dual-port QSFP56, PCIe 4.0 x16",
            vendor="15b3",
            device="101d",
            driver="mlx5_core",
            firmware="22.39.2048 (MT_0000000359)",
            numa_node=0,
            netdevs=(
                Netdev("ens1f0np0", 4, True, True, 9000, "b8:59:9f:00:00:01", "b8:59:9f:00:00:01", ("enp59s0f0np0",),
                       ("10.0.0.1/24", "fe80::ba59:9fff:fe00:1/64"), "22.39.2048 (MT_0000000359)"),
            ),
            rdma=(
                RdmaDevice("rocep59s0f0", "RoCE", "b859:9f03:0000:0001", "22.39.2048", (port("ens1f0np0"),),
                           (CharDevice("uverbs0", True), CharDevice("umad0", False)),
                           "b859:9f03:0000:0001", "0", "MT_0000000359"),
            ),
            interrupts=(
                Interrupt("management-0", 90, "mlx5_async0@pci:0000:3b:00.0", "0-15", "3"),
                *(Interrupt(f"comp-{n}", 91 + n, f"mlx5_comp{n}@pci:0000:3b:00.0", str(n), str(n)) for n in range(8)),
            ),
            total_vfs=8,
            vfs=(
                NetworkFunction("0000:3b:00.2", "", "15b3", "101e", "mlx5_core", None, None, (), (), (), 0,
                                vf(0, mac="02:00:00:00:00:01", vlan=100, trust=True)),
                NetworkFunction("0000:3b:00.3", "", "15b3", "101e", None, None, None, (), (), (), 1),
                NetworkFunction("0000:3b:00.4", "", "15b3", "101e", "vfio-pci", None, None, (), (), (), 2,
                                vf(2, mac="02:00:00:00:00:03", vlan=7, qos=5, vlan_protocol="802.1ad", trust=True,
                                       rss_query=False, link_state="enable", min_tx_rate=10, max_tx_rate=100,
                                       node_guid="00:11:22:33:44:55:66:77", port_guid="00:11:22:33:44:55:66:78")),
            ),
            serials=("b8-59-9f-ff-ff-00-00-01", "MT2231X001"),
        ),
    ),
    other_rdma=(
        RdmaDevice("rxe0", "RoCE", None, None, (port("eth0"),), ()),
        RdmaDevice("ibp94s0", "InfiniBand", None, None, (INFINIBAND,), ()),
    ),
    rdma_cm=False,
)  # fmt: skip

SHOWN = """\
0000:3b:00.0  ConnectX-6 Dx EN adapter card, 100GbE, Dual-port QSFP56, PCIe 4.0 x16  [15b3:101d]
  driver mlx5_core  firmware 22.39.2048 (MT_0000000359)
  serial b8-59-9f-ff-ff-00-00-01  serial MT2231X001  NUMA node 0  VFs 3 of 8
  netdev   ens1f0np0  up  MTU 9000  b8:59:9f:00:00:01  10.0.0.1/24
           fe80::ba59:9fff:fe00:1/64
  rdma     rocep59s0f0  RoCE  node GUID b859:9f03:0000:0001
           system image GUID b859:9f03:0000:0001  hardware revision 0
           board MT_0000000359  uverbs0  umad0 (not in /dev/infiniband)
           port 1  ACTIVE/LinkUp  Ethernet  100 Gb/sec (4X EDR)  ens1f0np0
           GID 1 RoCE v2 fe80::ba59:9fff:fe00:1  GID 3 RoCE v2 10.0.0.1
  irqs     management-0 0-15 (on 3)  comp-0 0  comp-1 1  comp-2 2  comp-3 3
           comp-4 4  comp-5 5  comp-6 6  comp-7 7
  VF 0  0000:3b:00.2  [15b3:101e]
    driver mlx5_core
    granted  02:00:00:00:00:01  vlan 100  trust on
    netdev   none in this network namespace
  VF 1  0000:3b:00.3  [15b3:101e]
    driver none
  VF 2  0000:3b:00.4  [15b3:101e]
    driver vfio-pci
    granted  02:00:00:00:00:03  vlan 7 qos 5 802.1ad  trust on  rss query off
             link enable  at least 10 Mbit/s  at most 100 Mbit/s
             node GUID 00:11:22:33:44:55:66:77
             port GUID 00:11:22:33:44:55:66:78

RDMA devices without a PCI function
  rdma     rxe0  RoCE
           port 1  ACTIVE/LinkUp  Ethernet  100 Gb/sec (4X EDR)  eth0
           GID 1 RoCE v2 fe80::ba59:9fff:fe00:1  GID 3 RoCE v2 10.0.0.1
  rdma     ibp94s0  InfiniBand
           port 1  ACTIVE/LinkUp  InfiniBand  400 Gb/sec (4X NDR)  ibp94s0
           LID 17  LMC 0  SM LID 1

/dev/infiniband/rdma_cm: missing (load rdma_ucm)"""


def test_the_keys_that_the_docs_give_for_ibv_devinfo_are_there() -> None:
    page = (Path(__file__).parents[3] / "docs/cli.md").read_text()
    table = page.partition("| `ibv_devinfo` | Key |\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [[re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:3]] for line in table]
    assert sum(len(theirs) for theirs, _ in rows) == 15
    known = {f.name for record in (NetworkFunction, RdmaDevice, RdmaPort) for f in fields(record)}
    assert all(len(theirs) == len(ours) and known >= set(ours) for theirs, ours in rows)


def test_the_text_of_inspect_is_as_expected() -> None:
    assert render(EXAMPLE) == SHOWN


def test_only_a_title_may_exceed_the_width() -> None:
    for width in (80, 100, 120):
        assert all(len(line) <= width for line in render(EXAMPLE, width).splitlines()[1:])


def test_a_machine_without_network() -> None:
    assert render(Inspection((), (), False)) == "no network function"
