"""`trackbed stat` as a process, on a real netdev."""

import json
import signal
import socket
import subprocess
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.programs import failure
from tests.unit.commands.node_folder import ROOT, command, trackbed


def talk(until: Callable[[], bool]) -> None:
    """Datagrams of 1,000 bytes over the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        ours.bind(("127.0.0.1", 0))
        while not until():
            ours.sendto(bytes(1000), ours.getsockname())
            if wait([ours], 1):
                ours.recv(2000)


def test_stat_measures_the_traffic_of_a_real_netdev(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "stat", "-d", "lo", "-l", "--count", "3", "--interval", "0.2", "--json"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    talk(lambda: process.poll() is not None)
    assert process.stdout is not None
    intervals = [json.loads(line)["devices"][0] for line in process.stdout]
    assert [each["name"] for each in intervals] == ["lo"] * 3
    last = intervals[-1]
    assert last["elapsed"] > 0.5
    # Other programs talk over the loopback as well, so at least ours: a datagram is 1,000 bytes and 42 of headers.
    assert last["rx_packets"]["total"] > 100
    assert last["rx_bytes"]["total"] >= last["rx_packets"]["total"] * 500
    assert last["rx_bytes"]["min"] <= last["rx_bytes"]["average"] <= last["rx_bytes"]["max"]
    assert last["rx_bytes"]["average"] == pytest.approx(last["rx_bytes"]["total"] / last["elapsed"])


def test_stat_ends_with_ctrl_c_and_its_sums(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "stat", "-d", "lo", "-l", "--interval", "0.1"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "lo (netdev)  rx_bytes" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=20) == 0
    assert "average" in rest
    assert rest.splitlines()[-1].startswith("elapsed ")


def test_stat_without_live_has_every_counter(tmp_path: Path) -> None:
    (document,) = json.loads(trackbed(tmp_path, "stat", "-d", "lo", "--json").stdout)
    assert (document["name"], document["port"]) == ("lo", None)
    assert {"rx_bytes", "tx_dropped"} <= document["counters"].keys()
    assert "nonesuch0 is not an RDMA device" in failure(trackbed(tmp_path, "stat", "-d", "nonesuch0"))
