"""VFs on a real kernel: their attributes, their drivers, their names, and the network managers that ignore them."""

from typing import Any

from lab import MACHINES, Node
from tests.lab.conftest import eventually, settled, spec, take_up

PF, OTHER = MACHINES[0].nics
VFS = [f"/sys/bus/pci/devices/{address}" for address in PF.vf_pcis]


def change_vfs(node: Node, **vf: Any) -> None:
    """Give VF 6 of the first NIC these attributes, and wait until the node is ready by that spec."""
    wanted = spec(node)
    nic = next(nic for nic in wanted["nics"] if nic["name"] == PF.name)
    nic["vfs"]["groups"] = [{"index": "6", **vf}]
    take_up(node, wanted)
    settled(node)


def netdev(node: Node, index: int) -> str:
    """What a VF is called in the host's namespace; empty if it is in another one."""
    return node.run(["ls", f"{VFS[index]}/net"]).stdout.strip()


def test_the_attributes_that_igb_supports_are_set(node: Node) -> None:
    change_vfs(node, vlan=100, qos=3, max_tx_rate=100)
    line = node.sh(f"ip link show {PF.netdev} | grep 'vf 6 '")
    assert "vlan 100, qos 3" in line
    assert "max_tx_rate 100Mbps" in line


def test_a_vf_goes_to_vfio_and_back(node: Node) -> None:
    node.sh("modprobe vfio-pci")
    change_vfs(node, driver="vfio-pci")
    assert node.sh(f"basename $(readlink {VFS[6]}/driver)").strip() == "vfio-pci"
    node.sh(f"test -c /dev/vfio/$(basename $(readlink {VFS[6]}/iommu_group))")
    change_vfs(node, driver="netdevice")
    assert node.sh(f"basename $(readlink {VFS[6]}/driver)").strip() == "igbvf"


def test_vfs_that_come_back_from_a_dead_namespace_get_their_names_back(node: Node) -> None:
    """One VF comes back with its name from the container. The other's name is in use by then, so it is dev<ifindex>."""
    name = PF.netdev
    node.sh(
        "ip netns add pod;"
        f"ip link set {name}v0 netns pod; ip -n pod link set {name}v0 name net1; ip -n pod link set net1 up;"
        f"ip link set {name}v1 netns pod; ip -n pod link set {name}v1 name {name}v2"
    )
    assert not any(netdev(node, index) for index in (0, 1))
    node.sh("ip netns del pod")
    eventually("the names", lambda: [netdev(node, 0), netdev(node, 1)] == [f"{name}v0", f"{name}v1"])
    settled(node)


def test_networkd_ignores_vfs_whatever_their_names(node: Node) -> None:
    site = "[Match]\nDriver=igbvf\n\n[Link]\nMTUBytes=1400\n"
    node.write("/etc/systemd/network/20-site.network", site)
    node.sh(f"networkctl reload; echo 0 > /sys/bus/pci/devices/{PF.pci}/sriov_numvfs")
    eventually("new VFs", lambda: node.run(["test", "-e", f"/sys/class/net/{PF.netdev}v6"]).returncode == 0)
    settled(node)

    def setups() -> list[str]:
        """What networkd says of each VF."""
        listed = [line.split() for line in node.sh("networkctl --no-legend --no-pager").splitlines()]
        return [words[-1] for words in listed if words[1].startswith((f"{PF.netdev}v", f"{OTHER.netdev}v"))]

    # It says "pending" of a netdev that udev is not done with.
    eventually("networkd's word", lambda: "pending" not in setups())
    assert setups() == ["unmanaged"] * 11
