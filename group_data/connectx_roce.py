"""GPU servers with eight ConnectX-7 rails for RoCE. From vendor documents: not run on such hardware.

The addresses are those of NVIDIA's DGX H100 (its user guide lists them); read those of your servers with
`lspci -D -d 15b3:`.
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
        # Address and kind: a card in the wrong slot is refused, not configured.
        "select": {"pci": address, "vendor": "15b3", "device": "1021"},
        # RoCE's largest MTU is 4096; the frame needs 4200, and the fabric's switches carry 9000.
        "mtu": 9000,
        "vfs": {"count": 8, "defaults": {"trust": True, "spoofchk": False}},
    }
    for index, address in enumerate(_RAILS)
]

# CPUs of the system services, two a socket: interrupts stay away from them.
irqs = {"exclude_cpus": "0-1,56-57"}

# An address is told by its own rail alone (ARP): the others' RDMA devices do not have it. docs/inventory.md says more.
sysctls = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}
