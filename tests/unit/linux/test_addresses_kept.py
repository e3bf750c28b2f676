"""The agent's worker keeps addresses in a network namespace of this machine: if one is removed, an event wakes the worker.

Its full reading comes once a minute, and no wait here is as long.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.linux.netlink import LinuxNetlink
from agent.machine import Route, Rule
from agent.spec.addresses import PRIORITY
from bench.agent import keep
from bench.namespace import ADDRESS
from tests.contract.asking import soon
from tests.private_namespace import in_namespace, ip, sh

TABLE = 479103
SPEC = {
    "node_name": "n1",
    "node_number": 17,
    "nics": [
        {
            "name": "rail3",
            "select": {"pci": ADDRESS},
            "rail": 3,
            "addresses": [
                {"network": "10.{rail}.0.0/16", "gateway": "10.{rail}.255.254"},
                {"network": "fd00:0:0:{rail}::/64"},
            ],
        }
    ],
}
# A /run of its own: this machine's udev does not see the namespace. No network manager configures the netdev.
MADE = """
mount -t tmpfs none /run
ip link set lo up
ip link add fab0 type veth peer name fab1
ip link set fab1 up
mkdir -p /run/NetworkManager/devices /run/systemd/netif/links
echo ADMIN_STATE=unmanaged > /run/systemd/netif/links/$(cat /sys/class/net/fab0/ifindex)
"""
MESSAGES = Path("/run/messages")


def whole(netlink: LinuxNetlink, ifindex: int) -> bool:
    """Whether the rail has all that the spec gives it."""
    return (
        {"10.3.0.17/16", "fd00:0:0:3::11/64"} <= set(netlink.addresses().get(ifindex, ()))
        and set(netlink.routes({TABLE}))
        == {
            Route("10.3.0.0/16", TABLE, ifindex, None, "10.3.0.17"),
            Route("0.0.0.0/0", TABLE, ifindex, "10.3.255.254", "10.3.0.17"),
            Route("fd00:0:0:3::/64", TABLE, ifindex, None, "fd00:0:0:3::11"),
        }
        and {Rule("10.3.0.17", TABLE, PRIORITY), Rule("fd00:0:0:3::11", TABLE, PRIORITY)} <= set(netlink.rules())
    )


def wait_until_kept(netlink: LinuxNetlink, ifindex: int) -> None:
    """Until the rail has it all, and the worker has ended the pass in which it saw that: what comes then must be an event."""

    def kept() -> bool | None:
        if not whole(netlink, ifindex):
            return None
        lines = MESSAGES.read_text().splitlines() or [""]
        return True if '"ready": true' in lines[-1] else None

    soon(kept, "addresses, routes and rules")


@contextmanager
def worker() -> Iterator[tuple[LinuxNetlink, int]]:
    """The agent's worker keeps the spec, and everything is there. Gives netlink, and the index of fab0."""
    child = os.fork()
    if not child:
        with MESSAGES.open("w") as out:
            keep("fab0", out, SPEC)
        os._exit(1)
    try:
        netlink, ifindex = LinuxNetlink(), socket.if_nametoindex("fab0")
        wait_until_kept(netlink, ifindex)
        yield netlink, ifindex
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "commands",
    [
        ("address del 10.3.0.17/16 dev fab0", "-6 address del fd00:0:0:3::11/64 dev fab0"),
        (f"route del 10.3.0.0/16 table {TABLE}", f"-6 route flush table {TABLE}"),
        ("rule del from 10.3.0.17", "-6 rule del from fd00:0:0:3::11"),
        ("link set fab0 down",),
    ],
    ids=["addresses", "routes", "rules", "link"],
)
@in_namespace(MADE, within=90)
def test_addresses_and_routes_are_kept_on_this_kernel(commands: tuple[str, ...]) -> None:
    with worker() as (netlink, ifindex):
        for command in commands:
            ip(*command.split())
            wait_until_kept(netlink, ifindex)


@in_namespace(MADE, within=90)
def test_packets_from_the_rail_s_address_leave_by_the_rail() -> None:
    def way(*words: str) -> str:
        return subprocess.run(["ip", "route", "get", *words], check=True, capture_output=True, text=True).stdout

    with worker():
        # Another netdev on the same network, with a better route in the table main.
        sh("ip link add fab2 type veth peer name fab3; ip link set fab2 up; ip link set fab3 up")
        sh("ip address add 10.3.0.200/16 dev fab2; ip route del 10.3.0.0/16 dev fab0 table main")
        assert "dev fab2" in way("10.3.0.99")
        assert f"dev fab0 table {TABLE}" in way("10.3.0.99", "from", "10.3.0.17")
        assert f"via 10.3.255.254 dev fab0 table {TABLE}" in way("10.9.0.99", "from", "10.3.0.17")
