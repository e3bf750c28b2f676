"""The lab has the hardware that the tests assume, and the real kernel behaves as the simulated one."""

import pytest

from lab import MACHINES, Node
from tests.lab.conftest import ROOT, eventually

RUNNER = """
import sys
sys.path[:0] = [sys.argv[1], "/opt/trackbed/current"]
from tests.contract.__main__ import main
sys.exit(main(sys.argv[2]))
"""


def test_each_nic_is_on_its_own_numa_node(nodes: tuple[Node, ...]) -> None:
    for node, machine in zip(nodes, MACHINES, strict=True):
        numa_nodes = [int(node.sh(f"cat /sys/bus/pci/devices/{nic.pci}/numa_node")) for nic in machine.nics]
        assert numa_nodes == [nic.numa_node for nic in machine.nics] == [0, 1]


def test_the_real_kernel_keeps_the_contract(node: Node) -> None:
    """On a PF that the agent leaves alone meanwhile."""
    node.sh("systemctl stop trackbed")
    files = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "tests" / "contract").rglob("*.py"))}
    node.sh("mkdir -p /tmp/contract")
    node.copy(files, "/tmp/contract")
    ran = node.run(["python3", "-I", "-c", RUNNER, "/tmp/contract", MACHINES[0].nics[0].pci], timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed vfs_appear_with_addresses_and_go_again" in ran.stdout


def test_vfs_talk_to_vfs_of_the_other_node(nodes: tuple[Node, ...]) -> None:
    for number, node in enumerate(nodes, start=1):
        node.sh(f"ip address add 192.168.77.{number}/24 dev {MACHINES[0].nics[0].netdev}v0")
    nodes[0].sh("ping -c 2 -W 5 192.168.77.2")


@pytest.mark.parametrize("nic", [0, 1])
def test_each_vf_has_an_active_rdma_device(node: Node, nic: int) -> None:
    function = MACHINES[0].nics[nic].vf_pcis[0]
    states = f"cat /sys/bus/pci/devices/{function}/infiniband/*/ports/1/state"
    eventually("an ACTIVE RDMA device", lambda: "ACTIVE" in node.run(["sh", "-c", states]).stdout)
