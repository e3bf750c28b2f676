"""GPU servers with eight ConnectX-7 rails for RoCE. Written from vendor documents; not run on such hardware.

The PCI addresses are those of NVIDIA's DGX H100, from its user guide. `lspci -D -d 15b3:` prints those of your servers.
"""

_RAILS = (
    "0000:18:00.0",
    "0000:40:00.0",
    "0000:4f:00.0",
    "0000:5e:00.0",
    "0000:9a:00.0",
    "0000:c0:00.0",
    "0000:ce:00.0",
    "0000:dc:00.0",
)

nics = [
    {
        "name": f"rail{index}",
        # Address and PCI ID: the agent refuses to configure another card in this slot.
        "select": {"pci": address, "vendor": "15b3", "device": "1021"},
        # RoCE's largest MTU of 4096 needs frames of 4200 bytes; the switches of the fabric carry 9000.
        "mtu": 9000,
        "vfs": {"count": 8, "defaults": {"trust": True, "spoofchk": False}},
    }
    for index, address in enumerate(_RAILS)
]

# Two CPUs of each socket are for system services: the agent places no interrupts there.
irqs = {"exclude_cpus": "0-1,56-57"}

# Only the rail that has an address answers ARP for it: the RDMA devices of the other rails do not have it (docs/inventory.md).
sysctls = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}
