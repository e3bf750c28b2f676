"""Addresses of rails on real nodes: RoCE carries data between fresh nodes, and networkd's netdevs are left alone."""

import json
import shlex
from ipaddress import ip_address

import pytest

from lab import Node, checks
from tests.lab.conftest import DEPLOYED, condition, eventually, ready, spec, take_up, wait_ready
from tests.lab.drivers.test_ofed import between

NETWORK = "10.77.{rail}.0/24"
ADDRESSED = "addressed"
FOREIGN = "/etc/systemd/network/05-foreign.network"


def give_addresses(node: Node, number: int) -> None:
    """The same NICs' data for each node, and the node's number. RDMA devices by rxe on the physical functions."""
    node.sh("modprobe -a rdma_rxe rdma_ucm ib_umad")
    for nic in node.machine.nics:
        node.sh(f"rdma link add rxe_{nic.netdev} type rxe netdev {nic.netdev}")
    before = spec(node)
    nics = [
        {
            **nic,
            "rail": rail,
            "addresses": [{"network": NETWORK}, {"network": "fd77:0:0:{rail}::/64"}],
            "rdma": {"gid_type": "RoCE v2", "gid_ipv4": True},
        }
        for rail, nic in enumerate(before["nics"])
    ]
    take_up(node, {**before, "nics": nics, "node_number": number})
    wait_ready(node)


@pytest.fixture
def rails(deployed: tuple[Node, ...]) -> tuple[Node, ...]:
    """Both nodes. Their node numbers are 11 and 12, and their NICs have the addresses of these numbers."""
    for number, node in enumerate(deployed, 11):
        if node.has(ADDRESSED):
            node.restore(ADDRESSED)
            continue
        node.restore(DEPLOYED)
        wait_ready(node)
        give_addresses(node, number)
        node.snapshot(ADDRESSED)
    for node in deployed:
        wait_ready(node)
    return deployed


def addresses(node: Node, netdev: str) -> set[str]:
    """The netdev's addresses of these tests."""
    entries = json.loads(node.sh(f"ip -json address show dev {netdev}"))[0]["addr_info"]
    return {each["local"] for each in entries if each["local"].startswith(("10.77.", "fd77:"))}


def test_rping_runs_between_the_rails_of_two_fresh_nodes(rails: tuple[Node, ...]) -> None:
    for rail in range(2):
        server, client = f"10.77.{rail}.11", f"10.77.{rail}.12"
        printed = between(rails, f"rping -s -a {server} -C 3", f"rping -c -v -C 3 -a {server} -I {client}")
        assert printed.count("ping data: rdma-ping-") == 3


def test_each_rail_s_packets_leave_by_its_own_device(rails: tuple[Node, ...]) -> None:
    node = rails[0]
    for rail, nic in enumerate(node.machine.nics):
        assert addresses(node, nic.netdev) == {f"10.77.{rail}.11", str(ip_address(f"fd77:0:0:{rail}::b"))}
        way = node.sh(f"ip route get 10.77.{rail}.12 from 10.77.{rail}.11")
        assert f"dev {nic.netdev} table {479100 + rail}" in way
    assert condition(node, "RdmaPorts")["status"] == "True"


def test_the_operators_checks_of_addresses_pass_and_fail_if_something_is_broken(rails: tuple[Node, ...]) -> None:
    checked = checks.run(rails, "-m", "addresses", capture=True)
    assert checked.returncode == 0 and f"{3 * len(rails)} passed" in checked.stdout, checked.stdout
    node = rails[0]
    node.sh("systemctl stop trackbed")
    first, second = (nic.netdev for nic in node.machine.nics)
    node.sh(f"ip rule del from 10.77.0.11; ip address del 10.77.1.11/24 dev {second}")
    node.sh(f"sysctl -qw net.ipv4.conf.{first}.arp_ignore=0")
    checked = checks.run((node,), "-m", "addresses", capture=True)
    assert "3 failed" in checked.stdout, checked.stdout
    node.sh("systemctl start trackbed")
    wait_ready(node)


def test_removed_addresses_return_and_a_restart_of_networkd_removes_none(rails: tuple[Node, ...]) -> None:
    node, netdev = rails[0], rails[0].machine.nics[0].netdev
    node.sh(f"ip address del 10.77.0.11/24 dev {netdev}; ip rule del from 10.77.0.11")
    eventually("the address", lambda: "10.77.0.11" in addresses(node, netdev))
    eventually("the rule", lambda: "from 10.77.0.11 lookup 479100" in node.sh("ip rule"))
    node.sh("systemctl restart systemd-networkd")
    eventually("the rule after networkd", lambda: "from 10.77.0.11 lookup 479100" in node.sh("ip rule"))
    wait_ready(node)


def test_a_netdev_of_networkd_is_left_alone_and_networkd_is_named(rails: tuple[Node, ...]) -> None:
    node, netdev = rails[0], rails[0].machine.nics[0].netdev
    text = f"[Match]\nName={netdev}\n\n[Network]\nAddress=192.0.2.99/24\nLinkLocalAddressing=no\n"
    node.sh(f"printf %s {shlex.quote(text)} > {FOREIGN}; networkctl reload; networkctl reconfigure {netdev}")
    eventually("networkd's address", lambda: "192.0.2.99" in node.sh(f"ip address show dev {netdev}"))
    node.sh(f"ip address del 10.77.0.11/24 dev {netdev} || true")
    eventually("not ready", lambda: not ready(node))
    eventually(
        "networkd's name",
        lambda: f"systemd-networkd configures {netdev} ({FOREIGN})" in condition(node, "Converged")["message"],
    )
    assert "10.77.0.11" not in addresses(node, netdev)
    node.sh(f"rm {FOREIGN}; networkctl reload; networkctl reconfigure {netdev} || true")
    wait_ready(node)
