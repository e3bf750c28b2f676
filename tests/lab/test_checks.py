"""The checks that operators run on their own nodes, run on ours: none may fail, and only the named ones be skipped."""

import os
import subprocess
import sys

from lab import Node
from tests.lab.conftest import ROOT

# igb has no such call, or takes it only while the PF's link is up; and irqbalance is either off or has our interrupts banned.
MAY_SKIP = ("link_state", "min_tx_rate", "max_tx_rate", "banned")


def check(nodes: tuple[Node, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests/node over ssh, as an operator does."""
    hosts = ",".join(f"ssh://{node.name}" for node in nodes)
    command = [sys.executable, "-m", "pytest", "tests/node", f"--hosts={hosts}", f"--ssh-config={nodes[0].ssh_config}"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRACKBED_NO_SKIP": "1", "TRACKBED_MAY_SKIP": ",".join(MAY_SKIP)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_operators_checks_hold(nodes: tuple[Node, ...]) -> None:
    checked = check(nodes)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(MAY_SKIP) * len(nodes)} skipped" in checked.stdout


def test_the_operators_checks_see_what_is_broken(node: Node) -> None:
    first, second = node.machine.nics
    node.sh("systemctl stop trackbed")
    node.sh(f"ip link set {first.netdev} vf 2 trust off")
    node.sh(f"ip link set {first.netdev}v1 mtu 1500")
    node.sh(f"echo 0-3 > /proc/irq/$(ls /sys/bus/pci/devices/{second.pci}/msi_irqs | tail -1)/smp_affinity_list")
    node.sh(f"echo 0 > /sys/class/net/{first.netdev}v0/queues/rx-0/rps_cpus")
    checked = check((node,))
    for group in ("test_sriov", "test_links", "test_irq", "test_rps", "test_ready"):
        assert f"FAILED tests/node/{group}.py" in checked.stdout, checked.stdout
