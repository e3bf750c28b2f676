"""The hardware of each virtual server: a table that tests and inventories import."""

import attrs


@attrs.frozen
class Nic:
    """A fabric NIC: an Intel 82576 (`igb`) with seven VFs, connected to the NIC of the same name on the other machine."""

    name: str
    mac: str
    numa_node: int
    slot: int
    # The number of its expander bus. The root port has this bus number, and the card the next one.
    bus: int

    @property
    def pci(self) -> str:
        """The physical function's address."""
        return f"0000:{self.bus + 1:02x}:00.0"

    @property
    def netdev(self) -> str:
        """The PF's name by systemd's rules. The name of its first VF adds v0."""
        return f"ens{self.slot}f0"

    @property
    def vf_pcis(self) -> tuple[str, ...]:
        """The VFs' addresses: they start at 10.0, and every second function is a VF."""
        return tuple(f"0000:{self.bus + 1:02x}:{0x10 + vf * 2 // 8:02x}.{vf * 2 % 8}" for vf in range(VFS_PER_NIC))


@attrs.frozen
class Machine:
    """One virtual server."""

    name: str
    machine_id: str
    mgmt_mac: str
    # Machines share no management network. Their addresses differ because Kubernetes identifies nodes by address.
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
