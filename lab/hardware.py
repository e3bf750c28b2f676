"""What each virtual server is made of: one frozen table that tests and inventories import."""

import attrs


@attrs.frozen
class Nic:
    """A fabric card, an Intel 82576 (`igb`) with seven virtual functions, wired to its namesake on the other machine."""

    name: str
    mac: str
    numa_node: int
    slot: int
    # The expander bus it sits below. The root port takes this number and the card the next one.
    bus: int

    @property
    def pci(self) -> str:
        """The physical function's address."""
        return f"0000:{self.bus + 1:02x}:00.0"

    @property
    def netdev(self) -> str:
        """The physical function's name by systemd's rules; its first VF appends v0."""
        return f"ens{self.slot}f0"

    @property
    def vf_pcis(self) -> tuple[str, ...]:
        """Addresses of the virtual functions: this card starts at 10.0 and steps by two."""
        return tuple(f"0000:{self.bus + 1:02x}:{0x10 + vf * 2 // 8:02x}.{vf * 2 % 8}" for vf in range(VFS_PER_NIC))


@attrs.frozen
class Machine:
    """One virtual server."""

    name: str
    machine_id: str
    mgmt_mac: str
    # Machines share no management network, yet their addresses differ: Kubernetes tells nodes apart by address.
    mgmt_ip: str
    nics: tuple[Nic, ...]


VFS_PER_NIC = 7
CPUS = 4
NUMA_NODES = 2
MEMORY_MIB = 2048

MACHINES = (
    Machine(
        name="node1",
        machine_id="7261636b62656400000000000000a001",
        mgmt_mac="52:54:00:7b:01:00",
        mgmt_ip="10.0.2.11",
        nics=(
            Nic(name="fab0", mac="52:54:00:7b:01:10", numa_node=0, slot=1, bus=32),
            Nic(name="fab1", mac="52:54:00:7b:01:20", numa_node=1, slot=2, bus=64),
        ),
    ),
    Machine(
        name="node2",
        machine_id="7261636b62656400000000000000a002",
        mgmt_mac="52:54:00:7b:02:00",
        mgmt_ip="10.0.2.12",
        nics=(
            Nic(name="fab0", mac="52:54:00:7b:02:10", numa_node=0, slot=1, bus=32),
            Nic(name="fab1", mac="52:54:00:7b:02:20", numa_node=1, slot=2, bus=64),
        ),
    ),
)
