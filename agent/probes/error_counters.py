"""Error counters do not rise: a bad cable or transceiver shows there first.

The probe reads each NIC's netdev (``statistics``) and RDMA devices (``ports/N/counters`` and ``ports/N/hw_counters``). Packets
that were dropped for lack of buffers are left out: they mean load, not a fault. The hardware counters are from vendor documents
and drivers' sources, not run on such devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise

from attrs import frozen

from agent.hardware.functions import NET, RDMA, device_path, netdev
from agent.hardware.sysfs import names_in, read_or, whole
from agent.machine import Files, Machine
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "ErrorCounters"

RISING = "ErrorsRising"
WINDOW = 600.0
"""Seconds within which no counter may rise."""

NETDEV = ("rx_errors", "tx_errors", "rx_crc_errors")
PORT = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors"),
    "excessive_buffer_overrun_errors",
)
# mlx5 and rxe have the first names. Other drivers have names of their own: bnxt_re (hw_counters.c), ionic (its firmware), efa
# (efa_verbs.c), mana (counters.c), irdma (verbs.c), cxgb4 (provider.c), hns (hns_roce_main.c). erdma, siw and qedr count none.
HARDWARE = (
    *("packet_seq_err", "local_ack_timeout_err", "rx_icrc_encapsulated", "rcvd_seq_err", "retry_exceeded_err"),
    *("seq_err_naks_rcvd", "to_retransmits", "max_retry_exceeded"),
    *("req_rx_pkt_seq_err", "tx_rdma_ack_timeout", "req_tx_retry_excd_err"),
    *("retrans_timeout_events", "unresponsive_remote_events", "impaired_remote_conn_events"),
    *("requester_oos_nak", "requester_timeout", "requester_retries_exceeded"),
    *("rx_roce_errors", "tx_roce_errors", "completer_retry_err"),
    *("ip4InTruncatedPkts", "ip6InTruncatedPkts", "tcpInOptErrors", "tcpInProtoErrors", "tcpRetransSegs"),
    *("ip4RetransSegs", "ip6RetransSegs", "rx_err_pkt", "tx_err_pkt"),
)

FULL = dict(zip(PORT, (0xFFFF, 0xFF, 0xFF, 0xFFFF, 0xF, 0xF), strict=True))
"""The largest values (PORT_PMA_ATTR in drivers/infiniband/core/sysfs.c): a counter stays there until somebody clears it."""

Counters = Mapping[tuple[str, str], int]
"""By the function's PCI address, and by device and name: ``ens1f0 rx_errors``."""


@frozen
class Sample:
    """The counters at one time (seconds)."""

    time: float
    counters: Counters


def read(machine: Machine, want: Wanted) -> Counters:
    """Every counter that the wanted functions have."""
    return {
        (address, name): value for address in sorted(want.nics) for name, value in _function(machine.files, address)
    }


def _function(files: Files, address: str) -> Iterator[tuple[str, int]]:
    name = netdev(files, address)
    if name is not None:
        yield from _folder(files, f"{NET}/{name}/statistics", NETDEV, name)
    for device in names_in(files, f"{device_path(address)}/infiniband"):
        ports = f"{RDMA}/{device}/ports"
        for port in names_in(files, ports):
            yield from _folder(files, f"{ports}/{port}/counters", PORT, f"{device}/{port}")
            yield from _folder(files, f"{ports}/{port}/hw_counters", HARDWARE, f"{device}/{port}")


def _folder(files: Files, folder: str, names: tuple[str, ...], owner: str) -> Iterator[tuple[str, int]]:
    for name in names:
        # Some drivers report "N/A (no PMA)".
        if (number := whole(read_or(files, f"{folder}/{name}", ""))) is not None:
            yield f"{owner} {name}", number


def remember(before: tuple[Sample, ...] | None, now: float, have: Snapshot, facts: Counters) -> tuple[Sample, ...]:
    """The samples within the window, the oldest first."""
    return (*(sample for sample in before or () if now - sample.time <= WINDOW), Sample(now, facts))


def rises(samples: tuple[Sample, ...]) -> dict[tuple[str, str], int]:
    """How much each counter rose. A counter that fell was reset, by a reload of the driver: its whole value is the rise."""
    risen: dict[tuple[str, str], int] = {}
    for earlier, later in pairwise(samples):
        for name, value in later.counters.items():
            base = earlier.counters.get(name, value)
            risen[name] = risen.get(name, 0) + (value - base if value >= base else value)
    return {name: rise for name, rise in sorted(risen.items()) if rise}


def judge(want: Wanted, have: Snapshot, facts: tuple[Sample, ...]) -> list[Condition]:
    """False if counters rose within the window, or cannot rise any more; the message names them."""
    said = {each: f"{each[1]} +{rise}" for each, rise in rises(facts).items()}
    for each, value in facts[-1].counters.items():
        if value == FULL.get(each[1].rpartition(" ")[2]):
            said[each] = f"{each[1]} is full ({value}: clear it by perfquery -R)"
    if not said:
        return [condition(TYPE, "NoErrors")]
    faults = [
        FunctionFault(address, RISING, ", ".join(said[each] for each in of_function))
        for address, of_function in groupby(sorted(said), lambda each: each[0])
    ]
    message = ", ".join(fault.message for fault in faults)
    return [condition(TYPE, RISING, f"within {WINDOW / 60:.0f} minutes: {message}", faults=faults)]


PROBES = (
    Probe(
        name="error_counters",
        type=TYPE,
        stage="network",
        severity="warn",
        read=read,
        remember=remember,
        judge=judge,
        of_nics=True,
    ),
)
