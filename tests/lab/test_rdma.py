"""RDMA devices, RoCE and the RDMA subsystem on a real kernel: rxe, siw, and DCB on a driver that the lab gives it (dcbsim)."""

import json
import re
from typing import Any

from lab import MACHINES, Node
from tests.lab.conftest import eventually, ready, report, wait_ready

NICS = MACHINES[0].nics
ON_VFS = {"pf": False, "vfs": True, "link_layer": "Ethernet", "rate": 2, "gid_type": "RoCE v2"}


def give(node: Node, nic: dict[str, Any], **more: Any) -> None:
    """Add to the spec of each NIC, and of the node; wait until the report is of that spec."""
    before = report(node)["spec_hash"]
    spec = json.loads(node.sh("cat /etc/trackbed/node.json"))
    spec["nics"] = [{**each, **nic} for each in spec["nics"]]
    node.run(["sh", "-c", "cat > /etc/trackbed/node.json"], check=True, stdin=json.dumps({**spec, **more}))
    node.sh("systemctl reload trackbed")
    eventually("a report of the new spec", lambda: report(node)["spec_hash"] != before)


def said(node: Node, type: str) -> dict[str, Any]:
    """A condition of the report, empty if it is not there."""
    return next((c for c in report(node)["conditions"] if c["type"] == type), {})


def test_a_vf_s_rdma_device_that_goes_is_named_and_one_that_comes_back_is_seen(node: Node) -> None:
    node.sh("modprobe -a ib_umad rdma_ucm")
    give(node, {"rdma": ON_VFS})
    wait_ready(node)
    name = node.sh(f"ls /sys/bus/pci/devices/{NICS[0].vf_pcis[1]}/infiniband").strip()
    netdev = node.sh(f"ls /sys/bus/pci/devices/{NICS[0].vf_pcis[1]}/net").strip()
    node.sh(f"rdma link delete {name}")
    # The first report after the event may say only that the node is being checked.
    eventually("its name", lambda: f"{NICS[0].pci}#1: no RDMA device" in said(node, "RdmaDevices").get("message", ""))
    assert not ready(node)
    node.sh(f"rdma link add rx1 type rxe netdev {netdev}")
    wait_ready(node)


def test_a_module_that_makes_no_character_devices_is_named(node: Node) -> None:
    give(node, {"rdma": ON_VFS})
    eventually("a word on umad", lambda: "(load ib_umad)" in said(node, "RdmaCharDevices").get("message", ""))
    assert said(node, "RdmaDevices")["status"] == said(node, "RdmaPorts")["status"] == "True"


def test_iwarp_needs_no_umad(node: Node) -> None:
    node.sh("modprobe -a siw rdma_ucm")
    for number, nic in enumerate(NICS):
        node.sh(f"rdma link add siw{number} type siw netdev {nic.netdev}")
    give(node, {"rdma": {"link_layer": "Ethernet"}})
    wait_ready(node)
    assert said(node, "RdmaCharDevices")["status"] == "True"


def test_roce_is_set_and_repaired(node: Node) -> None:
    pf = NICS[0].netdev
    node.sh(f"modprobe rdma_ucm; modprobe dcbsim netdev={pf}")
    spec = json.loads(node.sh("cat /etc/trackbed/node.json"))
    give(node, {}, nics=[{**spec["nics"][0], "roce": {"trust": "dscp", "pfc": "3", "cm_tos": 106}}, *spec["nics"][1:]])
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
    eventually("the outcome", lambda: said(node, "Converged").get("reason") == "Unsupported")


def test_the_netns_mode_is_changed_unless_a_namespace_is_there(node: Node) -> None:
    node.sh("ip netns add container")
    give(node, {}, rdma={"netns_mode": "exclusive"})
    eventually("the remedy", lambda: "then reboot" in said(node, "Converged").get("message", ""))
    node.sh("ip netns delete container")
    wait_ready(node)
    assert "netns exclusive" in node.sh("rdma system show")
