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


def _machine(number: int) -> Machine:
    mac = f"52:54:00:7b:{number:02x}"
    return Machine(
        name=f"node{number}",
        machine_id=f"7261636b62656400000000000000a0{number:02x}",
        mgmt_mac=f"{mac}:00",
        mgmt_ip=f"10.0.2.{10 + number}",
        nics=(
            Nic(name="fab0", mac=f"{mac}:10", numa_node=0, slot=1, bus=32),
            Nic(name="fab1", mac=f"{mac}:20", numa_node=1, slot=2, bus=64),
        ),
    )


MACHINES = (_machine(1), _machine(2))
"""The machines of a lab by default."""

ALL_MACHINES = (*MACHINES, _machine(3))
"""All machines that a lab can have."""
