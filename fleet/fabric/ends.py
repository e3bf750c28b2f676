"""The ends of the fabric. An end is a NIC of a node, with its RDMA device and what its tests need."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

OLD_SOURCE_OPTION = "--source_ip"
"""perftest 4.5's option for a client's own address. Later versions have `--bind_source_ip` for that."""


@frozen
class End:
    """A NIC of a node.

    ``rail``: NICs of one rail are attached to the same network of a rail-optimised fabric. ``pci``: the PCI address of the
    function with the RDMA device ``device``. ``address``: the IP address by which a peer reaches it. ``gid_index`` is None
    where GIDs are not needed (InfiniBand, iWARP). ``cpus``: those of the NIC's NUMA node, as taskset takes them; empty if
    unknown. ``gpu``: the PCI address of a GPU of that NUMA node. ``group``: hardware that is alike has the same rates.
    ``floors``: by test, the least Gbit/s (or, of a latency, the most microseconds) that is accepted.
    ``source_option``: the option of the node's perftest for a client's own address. ``programs``: the node's programs for the
    collective stage. ``identity``: the firmware, driver and port that were tested, by name.
    """

    node: str
    nic: str
    rail: int
    group: str
    pci: str = ""
    device: str = ""
    port: int = 1
    netdev: str = ""
    address: str = ""
    gid_index: int | None = None
    cpus: str = ""
    gpu: str | None = None
    floors: Mapping[str, float] = field(factory=dict)
    source_option: str = OLD_SOURCE_OPTION
    programs: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(factory=dict)

    @property
    def name(self) -> str:
        """The name in results and reports."""
        return f"{self.node}/{self.nic}"


Ends = Mapping[str, End]
"""All ends by their names."""


def by_name(ends: tuple[End, ...]) -> Ends:
    """The ends by their names, sorted."""
    return {end.name: end for end in sorted(ends, key=lambda end: end.name)}
