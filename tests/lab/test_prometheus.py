"""A real Prometheus on this host scrapes the reporters of both nodes, through ssh, as they listen on their loopback."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lab import MACHINES, Node
from tests.lab.conftest import eventually, settled
from tests.prometheus_server import Prometheus, scraping

PF = MACHINES[0].nics[0]
NUMVFS = f"/sys/bus/pci/devices/{PF.pci}/sriov_numvfs"

EVERY = 5
"""Seconds between two scrapes. An emulated node may take some of them to answer."""


@contextmanager
def forwarded(node: Node) -> Iterator[int]:
    """A port of this host's loopback that leads to the node's reporter."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["ssh", "-F", str(node.ssh_config), "-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes", "-N"]
    with subprocess.Popen([*command, "-L", f"127.0.0.1:{port}:127.0.0.1:9809", node.name]) as process:
        try:
            eventually("the forwarded port", lambda: _listens(port) or process.poll() is not None)
            assert process.poll() is None
            yield port
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def by_node(prometheus: Prometheus, query: str) -> dict[str, float]:
    return {labels["instance"]: value for labels, value in prometheus.values(query)}


@pytest.fixture
def prometheus(nodes: tuple[Node, ...], tmp_path: Path) -> Iterator[Prometheus]:
    with ExitStack() as open_ports:
        ports = {node.name: open_ports.enter_context(forwarded(node)) for node in nodes}
        server = open_ports.enter_context(scraping(tmp_path, ports, EVERY))
        ready = {node.name: 1.0 for node in nodes}
        server.wait("both nodes", lambda p: by_node(p, "trackbed_ready") == ready)
        yield server


def test_vfs_that_are_deleted_are_an_alert_of_their_node_although_they_come_back_at_once(
    nodes: tuple[Node, ...], prometheus: Prometheus
) -> None:
    broken, healthy = nodes
    deleted = ("TrackbedVfsDeleted", broken.name)
    counted = 'trackbed_drift_repairs_total{kind="vfs"}'
    before = by_node(prometheus, counted)
    assert deleted not in prometheus.firing()
    broken.sh(f"echo 0 > {NUMVFS}")
    prometheus.wait("the alert", lambda p: deleted in p.firing())
    assert by_node(prometheus, counted)[broken.name] > before[broken.name]
    assert by_node(prometheus, counted)[healthy.name] == before[healthy.name]
    assert ("TrackbedVfsDeleted", healthy.name) not in prometheus.firing()
    settled(broken)
    prometheus.wait("its end", lambda p: deleted not in p.firing())


def test_a_vf_that_is_missing_while_others_are_in_use_is_an_alert_until_it_is_back(
    nodes: tuple[Node, ...], prometheus: Prometheus
) -> None:
    broken, healthy = nodes
    not_ready = ("TrackbedNodeNotReady", broken.name)
    # A VF in another network namespace is in use, so the agent may not make the others again.
    broken.sh(
        f"systemctl stop trackbed; echo 0 > {NUMVFS}; echo 3 > {NUMVFS}; udevadm settle; ip netns add pod;"
        f" ip link set $(ls /sys/bus/pci/devices/{PF.pci}/virtfn0/net) netns pod; systemctl start trackbed",
        timeout=180,
    )
    prometheus.wait("the alert", lambda p: not_ready in p.firing())
    prometheus.wait(
        "the deferred change", lambda p: by_node(p, 'trackbed_outcomes{result="deferred"}').get(broken.name, 0) > 0
    )
    assert not_ready in prometheus.firing()
    assert ("TrackbedNodeNotReady", healthy.name) not in prometheus.firing()
    broken.sh("ip netns del pod")
    prometheus.wait("its end", lambda p: not_ready not in p.firing())
    settled(broken)
    assert broken.sh(f"cat {NUMVFS}").strip() == "7"
