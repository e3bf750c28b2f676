"""The virtual machines that `make lab` boots. TRACKBED_LAB selects an instance of the lab."""

from typing import Any

from pyinfra.api.exceptions import InventoryError

import lab
from lab.hardware import VFS_PER_NIC

# By default a node answers ARP on each netdev for any of its addresses (arp_ignore in the kernel's ip-sysctl.rst). With
# several netdevs on one network, a peer may then send to a netdev whose RDMA device does not have the address, which drops
# RoCE packets.
SYSCTLS = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}


def _nics(machine: lab.Machine) -> list[dict[str, Any]]:
    first, second = machine.nics
    return [
        {
            "name": first.name,
            "select": {"pci": first.pci, "vendor": "8086", "device": "10c9"},
            "altnames": [first.name],
            "mtu": 9000,
            "txqueuelen": 2000,
            "coalescing": {"rx_usecs": 50},
            "vfs": {"count": VFS_PER_NIC, "defaults": {"trust": True}},
        },
        {
            "name": second.name,
            "select": {"mac": second.mac},
            "altnames": [second.name],
            "mtu": 9000,
            "txqueuelen": 2000,
            "vfs": {
                "count": 4,
                "defaults": {"spoofchk": True},
                "groups": [
                    {"index": "0-1", "vlan": 100, "qos": 3, "trust": True, "spoofchk": False},
                    # A locally administered address, made unique by the end of the machine's own.
                    {"index": "3", "mac": f"02:00:5e:{second.mac[-8:]}"},
                ],
            },
        },
    ]


def _host(node: lab.Node) -> tuple[str, dict[str, Any]]:
    data = {**node.connection, "nics": _nics(node.machine), "sysctls": SYSCTLS}
    if node.machine is lab.MACHINES[-1]:
        # Its Node has another name than its host, as in a managed Kubernetes.
        data["node_name"] = node.machine.mgmt_ip
        # Nobody logs in as root, as in the images of clouds.
        data |= {"ssh_user": "admin", "_sudo": True}
    return node.name, data


def _hosts() -> list[tuple[str, dict[str, Any]]]:
    try:
        return [_host(node) for node in lab.nodes()]
    except lab.LabError as error:
        raise InventoryError(f"the lab is not up; run `make lab` ({error.what})") from None


virtual = _hosts()
