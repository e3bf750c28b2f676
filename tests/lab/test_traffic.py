"""`trackbed stat` compared with the counts of perftest over rxe, and of iperf3 over TCP."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from lab import LabError, Node
from tests.lab.conftest import eventually
from tests.lab.drivers.test_ofed import between
from tests.lab.test_addresses import rails

__all__ = ["rails"]

pytestmark = pytest.mark.campaign

WITHIN = 0.02
ETHERNET, IPV4, UDP, TCP = 14, 20, 8, 32
BTH, RETH, ICRC = 12, 16, 4
"""The headers of InfiniBand's transport (IBTA 1.6, 9.2): of each packet, of a write's first packet, and the checksum."""

SERVER = "10.77.0.11"
RUNS = 5


def counted(node: Node, pci: str, moves: Callable[[], Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What `stat` counted of the RDMA device and of the netdev while ``moves`` ran, and what that returned."""
    command = f"exec trackbed stat -d {pci} -l --json > /run/stat.json"
    node.run(["systemd-run", "--quiet", "--unit=stat", "--property=KillSignal=SIGINT", "sh", "-c", command], check=True)
    lines = 0

    def looked() -> bool:
        return len(rates(node)) >= lines + 2

    try:
        eventually("the first rates", looked)
        result = moves()
        lines = len(rates(node))
        eventually("a look after the last packet", looked)
    finally:
        node.sh("systemctl stop stat")
    rdma, netdev = json.loads(rates(node)[-1])["devices"]
    return rdma, netdev, result


def rates(node: Node) -> list[str]:
    """The lines that `stat` has printed so far."""
    return node.run(["cat", "/run/stat.json"]).stdout.splitlines()


def discarded_packets(nodes: tuple[Node, ...], names: list[str]) -> list[str]:
    """rxe's counters of packets that came twice, not in order, or too late."""
    counters = "duplicate_request out_of_seq_request rcvd_seq_err completer_retry_err"
    return [
        node.sh(f"cd /sys/class/infiniband/{name}/ports/1/hw_counters && cat {counters}")
        for node, name in zip(nodes, names, strict=True)
    ]


def test_stat_counts_the_bytes_and_packets_that_perftest_sends_within_2_percent(rails: tuple[Node, ...]) -> None:
    client = rails[1]
    nic = client.machine.nics[0]
    names = [node.sh(f"ls /sys/bus/pci/devices/{nic.pci}/infiniband").strip() for node in rails]
    # The connection itself takes some 40 packets: few, beside those of 500 writes. There is one write at a time, since an
    # emulated node loses packets if there are more.
    options = "-R --size=65536 --iters=500 --tx-depth=1 --report_gbits"
    for _ in range(RUNS):
        before = discarded_packets(rails, names)
        try:
            rdma, netdev, result = counted(
                client,
                nic.pci,
                lambda: between(
                    rails, f"ib_write_bw -d {names[0]} {options}", f"ib_write_bw -d {names[1]} {options} {SERVER}"
                ),
            )
        except LabError as error:
            # perftest compares two clocks first, and gives up if an emulated CPU stood still meanwhile.
            if "Can't produce a report" not in error.what:
                raise
            continue
        # perftest does not count what was sent twice: packets are lost while one thread emulates all CPUs of a node.
        if discarded_packets(rails, names) == before:
            break
    else:
        pytest.skip(f"packets were lost, or perftest gave up, in each of {RUNS} runs")
    (mtu,) = map(int, re.findall(r"Mtu\s*:\s*(\d+)\[B\]", result))
    (size, writes) = map(int, re.findall(r"^ *(65536) +(\d+) ", result, re.MULTILINE)[0])
    packets = writes * size // mtu
    headers = packets * (ETHERNET + IPV4 + UDP + BTH + ICRC) + writes * RETH
    assert rdma["tx_packets"]["total"] == pytest.approx(packets, rel=WITHIN)
    assert netdev["tx_bytes"]["total"] == pytest.approx(size * writes + headers, rel=WITHIN)


def test_stat_counts_the_bytes_that_iperf3_sends_within_2_percent(rails: tuple[Node, ...]) -> None:
    server, client = rails
    nic = client.machine.nics[0]
    server.sh(f"systemd-run --quiet --collect --unit=peer iperf3 --server --one-off --bind {SERVER}")
    eventually("the server listens", lambda: server.sh("ss -Hltn sport = :5201").strip() != "")
    # iperf3 leaves bytes in the socket's buffer at the end, which are never sent: few, beside 128 MiB.
    iperf = ["iperf3", "--client", SERVER, "--bytes", "128M", "--json"]
    _, netdev, result = counted(client, nic.pci, lambda: json.loads(client.run(iperf, timeout=300, check=True).stdout))
    sent = result["end"]["sum_sent"]
    # iperf3 counts a byte once, however often TCP sends it.
    sent_again = sent["retransmits"] * result["start"]["tcp_mss_default"]
    expected = sent["bytes"] + sent_again + netdev["tx_packets"]["total"] * (ETHERNET + IPV4 + TCP)
    assert netdev["tx_bytes"]["total"] == pytest.approx(expected, rel=WITHIN)
