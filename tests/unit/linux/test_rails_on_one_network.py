"""Two rails on one IP network, on this machine's kernel: a rail does not answer ARP for the other rail's address."""

import json
import subprocess
import sys
from typing import Any

from agent import linux
from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.spec.node import from_mapping
from bench.namespace import devices
from tests.contract.asking import soon
from tests.private_namespace import in_namespace

PFS = {"0000:01:00.0": "fab0", "0000:02:00.0": "fab2"}
# The neighbour, in a namespace of its own, is at the other end of the second rail alone.
MADE = """
mount -t tmpfs none /run
mkdir -p /run/NetworkManager/devices /run/systemd/netif/links
ip link set lo up
ip link add fab0 type veth peer name fab1
ip link add fab2 type veth peer name fab3
ip link set fab1 up
ip netns add neighbour
ip link set fab3 netns neighbour
for netdev in fab0 fab2; do echo ADMIN_STATE=unmanaged > /run/systemd/netif/links/$(cat /sys/class/net/$netdev/ifindex); done
"""
NEIGHBOUR = """
ip address add 10.3.0.99/16 dev fab3
ip link set fab3 up
echo 50 > /proc/sys/net/ipv4/neigh/fab3/retrans_time_ms
"""
SEND = "import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', (sys.argv[1], 9))"


SPEC = {
    "node_name": "n1",
    "nics": [
        {"name": f"rail{rail}", "select": {"pci": pci}, "rail": rail, "addresses": [f"10.3.0.{17 + rail}/16"]}
        for rail, pci in enumerate(PFS)
    ],
}


def neighbour(*words: str) -> str:
    """Run a command in the neighbour's namespace."""
    return subprocess.run(
        ["ip", "netns", "exec", "neighbour", *words], check=True, capture_output=True, text=True
    ).stdout


def answered_by(address: str) -> str | None:
    """The MAC address that the neighbour gets for an IP address by ARP; None if nobody answers."""
    neighbour("ip", "neigh", "flush", "all")
    neighbour(sys.executable, "-c", SEND, address)

    def resolved() -> dict[str, Any] | None:
        (entry,) = json.loads(neighbour("ip", "-json", "neigh", "show", address)) or [{}]
        return entry if {"REACHABLE", "STALE", "DELAY", "FAILED"} & set(entry.get("state", ())) else None

    return soon(resolved, f"an end of ARP for {address}").get("lladdr")


@in_namespace(MADE, within=90)
def test_a_rail_answers_arp_for_its_own_address_only() -> None:
    """Compare who answers with the agent's settings, and without them."""
    neighbour("sh", "-euc", NEIGHBOUR)
    with devices(PFS):
        this = linux.machine()
        link = this.netlink.link("fab2")
        assert link is not None
        converge(this, Goal(from_mapping(SPEC)), Memory(lambda: 0.0))
        assert (answered_by("10.3.0.18"), answered_by("10.3.0.17")) == (link.mac, None)
        # The same addresses, and what the kernel does with them by itself.
        for netdev in ("all", *PFS.values()):
            this.files.write(f"/proc/sys/net/ipv4/conf/{netdev}/arp_ignore", "0")
        assert answered_by("10.3.0.17") == link.mac
