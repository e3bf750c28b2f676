"""RDMA devices, RoCE and the RDMA subsystem on a real kernel: rxe, siw, and DCB on a driver that the lab gives it (dcbsim)."""

import re
from typing import Any

from lab import MACHINES, Node
from tests.lab.conftest import condition, eventually, ready, spec, take_up, wait_ready

NICS = MACHINES[0].nics
ON_VFS = {"pf": False, "vfs": True, "link_layer": "Ethernet", "rate": 2, "gid_type": "RoCE v2"}


def give(node: Node, nic: dict[str, Any], **more: Any) -> None:
    """Add to the spec of each NIC, and of the node."""
    wanted = spec(node)
    take_up(node, {**wanted, "nics": [{**each, **nic} for each in wanted["nics"]], **more})


def test_a_vf_s_rdma_device_that_goes_is_named_and_one_that_comes_back_is_seen(node: Node) -> None:
    node.sh("modprobe -a ib_umad rdma_ucm")
    give(node, {"rdma": ON_VFS})
    wait_ready(node)
    name = node.sh(f"ls /sys/bus/pci/devices/{NICS[0].vf_pcis[1]}/infiniband").strip()
    netdev = node.sh(f"ls /sys/bus/pci/devices/{NICS[0].vf_pcis[1]}/net").strip()
    node.sh(f"rdma link delete {name}")
    # The first report after the event may say only that the node is being checked.
    eventually(
        "its name", lambda: f"{NICS[0].pci}#1: no RDMA device" in condition(node, "RdmaDevices").get("message", "")
    )
    assert not ready(node)
    node.sh(f"rdma link add rx1 type rxe netdev {netdev}")
    wait_ready(node)


def test_a_module_that_makes_no_character_devices_is_named(node: Node) -> None:
    give(node, {"rdma": ON_VFS})
    eventually("a word on umad", lambda: "(load ib_umad)" in condition(node, "RdmaCharDevices").get("message", ""))
    assert condition(node, "RdmaDevices")["status"] == condition(node, "RdmaPorts")["status"] == "True"


def test_iwarp_needs_no_umad(node: Node) -> None:
    node.sh("modprobe -a siw rdma_ucm")
    for number, nic in enumerate(NICS):
        node.sh(f"rdma link add siw{number} type siw netdev {nic.netdev}")
    give(node, {"rdma": {"link_layer": "Ethernet"}})
    wait_ready(node)
    assert condition(node, "RdmaCharDevices")["status"] == "True"


def test_roce_is_set_and_repaired(node: Node) -> None:
    pf = NICS[0].netdev
    node.sh(f"modprobe rdma_ucm; modprobe dcbsim netdev={pf}")
    first, *others = spec(node)["nics"]
    give(node, {}, nics=[{**first, "roce": {"trust": "dscp", "pfc": "3", "cm_tos": 106}}, *others])
    wait_ready(node)
    assert "3:on" in node.sh(f"dcb pfc show dev {pf}")
    assert "AF31:3" in node.sh(f"dcb app show dev {pf} dscp-prio")
    assert node.run(["trackbed", "plan"]).returncode == 0

    def drift_is_planned() -> bool:
        node.sh(f"dcb pfc set dev {pf} prio-pfc all:off; dcb app flush dev {pf}")
        planned = node.run(["trackbed", "plan"])
        return planned.returncode == 2 and bool(re.search(r"roce pfc +none -> 3", planned.stdout))

    # A resync of the agent may come between the drift and the plan.
    eventually("a plan of the repair", drift_is_planned)
    eventually("PFC again, at the next resync", lambda: "3:on" in node.sh(f"dcb pfc show dev {pf}"))


def test_a_driver_without_dcb_is_said_to_be_unsupported(node: Node) -> None:
    give(node, {"roce": {"pfc": "3"}})
    eventually("the outcome", lambda: condition(node, "Converged").get("reason") == "Unsupported")


def test_the_netns_mode_is_changed_unless_a_namespace_is_there(node: Node) -> None:
    node.sh("ip netns add container")
    give(node, {}, rdma={"netns_mode": "exclusive"})
    eventually("the remedy", lambda: "then reboot" in condition(node, "Converged").get("message", ""))
    node.sh("ip netns delete container")
    wait_ready(node)
    assert "netns exclusive" in node.sh("rdma system show")
