"""The operators' checks (tests/node), run on the lab over ssh as an operator runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab.node import Node

ROOT = Path(__file__).parent.parent

# igb does not support some settings, or only while the PF's link is up; it has no InfiniBand. irqbalance is either off, or its
# policy bans the agent's interrupts. Only the lab's cluster has a kubelet and pods, whose netdevs are steered. The image has
# neither DKMS nor a container engine. The fabric has no IPv4 address, so no GID for NCCL.
MAY_SKIP = (
    *("link_state", "min_tx_rate", "max_tx_rate", "node_guid", "port_guid", "banned", "gate", "DKMS", "gid"),
    *("addresses", "rule", "ARP", "rps.netdevs"),
    *("docker", "containerd", "CDI"),
)
"""How the reason of a permitted skip may end. Any other skip is a failure."""


def command(nodes: tuple[Node, ...], *arguments: str) -> list[str]:
    """The command line."""
    hosts = ",".join(f"ssh://{node.name}" for node in nodes)
    chosen = [f"--hosts={hosts}", f"--ssh-config={nodes[0].ssh_config}", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "tests/node", *chosen, *arguments]


def run(nodes: tuple[Node, ...], *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the checks; their output goes to the terminal, or is returned."""
    # They judge the limits of a login, and the shared connection may be older than the deploy that has set these.
    for node in nodes:
        node.log_in_anew()
    return subprocess.run(
        command(nodes, *arguments),
        cwd=ROOT,
        env={**os.environ, "TRACKBED_NO_SKIP": "1", "TRACKBED_MAY_SKIP": ",".join(MAY_SKIP)},
        capture_output=capture,
        text=True,
        timeout=900,
        check=False,
    )
