"""The traffic of an RDMA device or a netdev: the counters of every vendor under four common names, and their rates.

From vendor documents and driver sources; run on rxe and netdevs, not on mlx5, eRDMA, EFA, bnxt_re or irdma. RDMA traffic
bypasses the kernel and is not in a netdev's counters (mlx5 has it in ethtool's `*_rdma_*`), so both are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import define, field, frozen

from agent.hardware.bonds import bonded, rdma_devices
from agent.hardware.functions import NET, PCI, RDMA, port_netdevs
from agent.hardware.sysfs import names_in, numbered, read_or, whole
from agent.machine import Files

FIELDS = ("rx_bytes", "rx_packets", "tx_bytes", "tx_packets")

IB_UNIT = 4
"""Octets in one unit of port_{rcv,xmit}_data (Documentation/ABI/stable/sysfs-class-infiniband)."""

# Files below ports/N. The first entry whose files all exist counts; the files of an entry are added up.
# counters: InfiniBand's own (mlx5 and others that answer the PMA). hw_counters: bnxt_re and EFA; erdma, as Alibaba's driver and
# as Linux (drivers/infiniband/hw/erdma/erdma_verbs.c) call them; irdma, by IP version; rxe, which counts packets only.
RDMA_COUNTERS: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "rx_bytes": (
        (IB_UNIT, ("counters/port_rcv_data",)),
        (1, ("hw_counters/rx_bytes",)),
        (1, ("hw_counters/hw_rx_bytes_cnt",)),
        (1, ("hw_counters/rx_bytes_cnt",)),
        (1, ("hw_counters/ip4InOctets", "hw_counters/ip6InOctets")),
    ),
    "rx_packets": (
        (1, ("counters/port_rcv_packets",)),
        (1, ("hw_counters/rx_pkts",)),
        (1, ("hw_counters/hw_rx_packets_cnt",)),
        (1, ("hw_counters/rx_packets_cnt",)),
        (1, ("hw_counters/ip4InPkts", "hw_counters/ip6InPkts")),
        (1, ("hw_counters/rcvd_pkts",)),
    ),
    "tx_bytes": (
        (IB_UNIT, ("counters/port_xmit_data",)),
        (1, ("hw_counters/tx_bytes",)),
        (1, ("hw_counters/hw_tx_bytes_cnt",)),
        (1, ("hw_counters/tx_bytes_cnt",)),
        (1, ("hw_counters/ip4OutOctets", "hw_counters/ip6OutOctets")),
    ),
    "tx_packets": (
        (1, ("counters/port_xmit_packets",)),
        (1, ("hw_counters/tx_pkts",)),
        (1, ("hw_counters/hw_tx_packets_cnt",)),
        (1, ("hw_counters/tx_packets_cnt",)),
        (1, ("hw_counters/ip4OutPkts", "hw_counters/ip6OutPkts")),
        (1, ("hw_counters/sent_pkts",)),
    ),
}


class NoDevice(ValueError):
    """There is no such device, or several match; the message lists the devices."""


@frozen
class Source:
    """Something that has counters: a netdev, or a port of an RDMA device (``port`` is None for a netdev)."""

    name: str
    port: int | None = None

    @property
    def folder(self) -> str:
        """The folder of its counters."""
        return f"{NET}/{self.name}/statistics" if self.port is None else f"{RDMA}/{self.name}/ports/{self.port}"

    def __str__(self) -> str:
        return f"{self.name} (netdev)" if self.port is None else f"{self.name} port {self.port} (RDMA)"


def sources(files: Files, device: str | None) -> tuple[Source, ...]:
    """The sources of a device's counters: first the ports of its RDMA devices, then its netdevs.

    :param device: an RDMA device, a netdev or a PCI address; None is the only RDMA device.
    :raises NoDevice: no device matches, several do, or it has neither RDMA devices nor netdevs.
    """
    rdma = names_in(files, RDMA)
    netdevs = names_in(files, NET)
    if device is None:
        if len(rdma) != 1:
            choice = f"one of {', '.join(rdma)}" if rdma else "a netdev: this node has no RDMA device"
            raise NoDevice(f"which device? give -d {choice}")
        device = rdma[0]
    if device in rdma:
        beside = _beside(files, device)
        found_rdma, found_netdevs = [device], [name for name in netdevs if name in beside]
    elif device in netdevs:
        found_rdma, found_netdevs = [name for name in rdma if device in _beside(files, name)], [device]
    elif names_in(files, f"{PCI}/{device}"):
        found_rdma, found_netdevs = rdma_devices(files, device), port_netdevs(files, device)
    else:
        raise NoDevice(f"{device} is not an RDMA device, netdev or PCI address here; see: trackbed inspect")
    ports = [
        Source(name, number) for name in found_rdma for number in numbered(names_in(files, f"{RDMA}/{name}/ports"))
    ]
    matching = (*ports, *(Source(name) for name in found_netdevs))
    if not matching:
        raise NoDevice(f"{device} has neither an RDMA device nor a netdev here; another network namespace may have it")
    return matching


def _beside(files: Files, rdma: str) -> frozenset[str]:
    """An RDMA device's netdevs: of its GIDs, of ``parent`` (rxe, siw), else of its function; and those of its bond (RoCE LAG).

    In switchdev mode a function has representors, too, but no GID names those.
    """
    ports = [f"{RDMA}/{rdma}/ports/{port}" for port in names_in(files, f"{RDMA}/{rdma}/ports")]
    named = [read_or(files, f"{port}/gid_attrs/ndevs/0", "") for port in ports]
    named.append(read_or(files, f"{RDMA}/{rdma}/parent", ""))
    slaves = [slave for name in filter(None, named) for slave in bonded(files, name)]
    own = [name for name in named if name] or names_in(files, f"{RDMA}/{rdma}/device/net")
    return frozenset((*own, *slaves))


def read(files: Files, source: Source) -> dict[str, int]:
    """A source's totals, under the names of :data:`FIELDS`, without those that its driver does not count."""
    if source.port is None:
        totals: dict[str, int | None] = {name: _number(files, f"{source.folder}/{name}") for name in FIELDS}
    else:
        totals = {name: _first(files, source.folder, RDMA_COUNTERS[name]) for name in FIELDS}
    return {name: value for name, value in totals.items() if value is not None}


def counters(files: Files, source: Source) -> dict[str, int]:
    """Every counter of a source, by the name that its driver gives it."""
    folders = ("",) if source.port is None else ("counters/", "hw_counters/")
    readings = {
        name: _number(files, f"{source.folder}/{folder}{name}")
        for folder in folders
        for name in names_in(files, f"{source.folder}/{folder}".rstrip("/"))
        if name != "lifespan"
    }
    return {name: value for name, value in readings.items() if value is not None}


def _first(files: Files, folder: str, choices: tuple[tuple[int, tuple[str, ...]], ...]) -> int | None:
    for unit, names in choices:
        values = [_number(files, f"{folder}/{name}") for name in names]
        if all(value is not None for value in values):
            return unit * sum(value for value in values if value is not None)
    return None


def _number(files: Files, path: str) -> int | None:
    """A counter's value; None if it does not exist or is not a number ("N/A (no PMA)")."""
    return whole(read_or(files, path, ""))


@define
class Rate:
    """One counter over the intervals so far: its rates per second, and the total. ``last``: its value."""

    last: int
    total: int = 0
    now: float = 0.0
    maximum: float = 0.0
    average: float = 0.0
    minimum: float = float("inf")


@define
class Meter:
    """The rates of one source. ``elapsed``: seconds since the first reading."""

    source: Source
    elapsed: float = field(default=0.0, init=False)
    _rates: dict[str, Rate] = field(factory=dict, init=False)
    _read: float | None = field(default=None, init=False)

    def take(self, totals: Mapping[str, int], now: float) -> None:
        """Add a reading made at ``now`` (seconds of a monotonic clock)."""
        interval = 0.0 if self._read is None else now - self._read
        self.elapsed, self._read = self.elapsed + interval, now
        for name in self._rates.keys() - totals.keys():
            self._rates[name].now = 0.0
        for name, value in totals.items():
            rate = self._rates.get(name)
            # A counter that went back was reset, or its device was created again: count from here.
            if rate is None or value < rate.last:
                self._rates.setdefault(name, Rate(value)).last = value
                continue
            grown, rate.last = value - rate.last, value
            rate.total += grown
            rate.now = grown / interval
            rate.maximum, rate.minimum = max(rate.maximum, rate.now), min(rate.minimum, rate.now)
        for rate in self._rates.values():
            rate.average = rate.total / self.elapsed if self.elapsed else 0.0

    def rates(self) -> Iterator[tuple[str, Rate]]:
        """The rates of the counters that exist, in the order of :data:`FIELDS`; none before the second reading."""
        for name in FIELDS:
            if name in self._rates and self._rates[name].minimum != float("inf"):
                yield name, self._rates[name]
