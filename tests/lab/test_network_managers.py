"""NetworkManager and netplan on a real node: a netdev that they configure is left alone, and the message names them."""

from collections.abc import Iterator

import pytest

from lab import Node
from lab.packages import toolchain
from tests.lab.conftest import condition, eventually, ready, wait_ready
from tests.lab.drivers.conftest import as_debian_makes_it
from tests.lab.test_addresses import addresses, give_addresses

pytestmark = pytest.mark.campaign

OURS, THEIRS = "10.77.0.11", "192.0.2.99"
KEEP_OFF = "/etc/NetworkManager/conf.d/50-lab.conf"
PLAN = "/etc/netplan/50-lab.yaml"


def keep_off(*others: str) -> str:
    """A configuration of NetworkManager by which it manages no netdev but these."""
    but = "".join(f",except:interface-name:{netdev}" for netdev in others)
    return f"[main]\nno-auto-default=*\n\n[keyfile]\nunmanaged-devices=*{but}\n"


@pytest.fixture
def netdev(node: Node) -> Iterator[str]:
    """A PF with an address of the spec, on a node that can install both."""
    with as_debian_makes_it(node, toolchain.mirror(node.image, "network-manager", "netplan.io")):
        # Before there is a second manager, so that the address is there first.
        give_addresses(node, 11)
        yield node.machine.nics[0].netdev


def install(node: Node, package: str) -> None:
    """Install a package of the node's mirror."""
    node.sh(
        f"apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qqy --no-install-recommends install {package}",
        timeout=900,
    )


def left_alone(node: Node, netdev: str, who: str) -> None:
    """Wait until the node says who configures the netdev, and look that its address stays away."""
    eventually("their address", lambda: THEIRS in node.sh(f"ip address show dev {netdev}"))
    node.sh(f"ip address del {OURS}/24 dev {netdev} || true")
    eventually("their name", lambda: who in condition(node, "Converged").get("message", ""))
    assert not ready(node)
    assert OURS not in addresses(node, netdev)


def test_a_netdev_of_networkmanager_is_left_alone_until_it_is_released(node: Node, netdev: str) -> None:
    node.write(KEEP_OFF, keep_off(netdev), mode="600")
    install(node, "network-manager")
    # A profile with ipv6.method disabled would set disable_ipv6, and leave it so.
    node.sh(
        f"nmcli connection add type ethernet con-name rail ifname {netdev} ipv4.method manual ipv4.addresses {THEIRS}/24"
        " ipv6.method ignore; nmcli connection up rail"
    )
    left_alone(node, netdev, f"NetworkManager configures {netdev}")
    # The remedy that the message gives.
    node.write(KEEP_OFF, keep_off(), mode="600")
    node.sh(f"nmcli device set {netdev} managed no; nmcli connection delete rail; nmcli general reload")
    eventually("our address", lambda: OURS in addresses(node, netdev))
    wait_ready(node)


def test_a_netdev_of_netplan_is_left_alone_until_it_is_released(node: Node, netdev: str) -> None:
    install(node, "netplan.io")
    node.write(
        PLAN,
        f"network: {{version: 2, ethernets: {{{netdev}: {{addresses: [{THEIRS}/24], link-local: []}}}}}}\n",
        mode="600",
    )
    node.sh("netplan apply", timeout=180)
    left_alone(node, netdev, f"netplan configures {netdev}, by systemd-networkd")
    node.sh(f"rm {PLAN}; netplan apply", timeout=180)
    eventually("our address", lambda: OURS in addresses(node, netdev))
    wait_ready(node)
