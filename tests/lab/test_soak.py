"""Faults on a node for TRACKBED_TEST_SOAK minutes: the agent repairs each, and uses no more memory at the end.

Meanwhile a VF carries iperf3 and ib_write_bw to the other node. A soak of an hour or more breaks one value a minute. A
shorter one breaks the next value as soon as the last is repaired.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from functools import partial

import pytest

from lab import MACHINES, Node
from tests.agent_size import DESCRIPTORS, MEMORY
from tests.lab.conftest import eventually, report, settled, wait_ready

MINUTES = float(os.environ.get("TRACKBED_TEST_SOAK", "30"))
NICS = MACHINES[0].nics
COUNTS = (7, 4)
PACE = 60.0 if MINUTES >= 60 else 0.0
"""Seconds from one drift to the next."""

LOADED = f"{NICS[0].netdev}v1"
ADDRESSES = ("10.79.0.1", "10.79.0.2")
DONE = "/run/soak-load"
# The soak also deletes the VFs. A new VF needs its address again, and has another RDMA device.
_LOAD = """
while sleep 1; do
  ip address replace {address}/24 dev {netdev} || continue
  device=$(rdma link | sed -n 's,^link \\([^/]*\\)/.* netdev {netdev} .*,\\1,p')
  {work}
done
"""
_SERVE = "timeout 120 iperf3 --server --one-off; timeout 120 ib_write_bw --ib-dev=$device -R"
_SEND = (
    f"timeout 120 iperf3 --client {ADDRESSES[1]} --time 10 && echo iperf3 >> {DONE};"
    f" timeout 120 ib_write_bw --ib-dev=$device -R --duration 10 {ADDRESSES[1]} && echo ib_write_bw >> {DONE}"
)


def load(nodes: tuple[Node, ...]) -> None:
    """Have a VF of the first node send to the other's, from now on."""
    for node, address, work in zip(reversed(nodes), reversed(ADDRESSES), (_SERVE, _SEND), strict=True):
        node.sh("modprobe -a ib_uverbs rdma_ucm")
        text = _LOAD.format(address=address, netdev=LOADED, work=work)
        node.run(
            ["systemd-run", "--quiet", "--collect", "--unit=soak-load", "sh", "-c", text.replace("$", "$$")], check=True
        )


def drifts() -> list[tuple[str, str]]:
    """Commands that each break one value, and the check that it is repaired. A value that broke twice would be contended."""
    pairs = []
    for nic, count in zip(NICS, COUNTS, strict=True):
        for index in range(count):
            vf = f"{nic.netdev}v{index}"
            pairs += [
                (f"ip link set {vf} mtu 1500", f"test $(cat /sys/class/net/{vf}/mtu) = 9000"),
                (f"ip link set {vf} down", f"ip link show {vf} | grep -q '[<,]UP[,>]'"),
            ]
        # The kernel sends no event for this: the next full reading finds it.
        rps = f"/sys/class/net/{nic.netdev}v0/queues/rx-0/rps_cpus"
        pairs.append((f"echo 0 > {rps}", f"test $((0x$(cat {rps}))) != 0"))
        numvfs = f"/sys/bus/pci/devices/{nic.pci}/sriov_numvfs"
        pairs += [
            (f"ip link set {nic.netdev} vf 0 trust off", f"ip link show {nic.netdev} | grep -q 'vf 0 .*trust on'"),
            (f"ip link set {nic.netdev} down", f"ip link show {nic.netdev} | grep -q '[<,]UP[,>]'"),
            (f"echo 0 > {numvfs}", f"test $(cat {numvfs}) = {count}"),
        ]
    return pairs


def succeeds(node: Node, command: str) -> bool:
    """Whether a shell command on the node ends with 0."""
    return node.run(["sh", "-c", command]).returncode == 0


@pytest.mark.campaign
def test_the_agent_survives_hours_of_faults_without_growing(nodes: tuple[Node, ...]) -> None:
    node = nodes[0]
    load(nodes)
    chance = random.Random(20260304)  # noqa: S311  the same order each time
    end = time.monotonic() + MINUTES * 60
    took: list[float] = []
    memory, descriptors = [], []
    for number in itertools.count():
        order = drifts()
        chance.shuffle(order)
        for break_it, repaired in order:
            began = time.monotonic()
            node.sh(break_it)
            took.append(eventually(break_it, partial(succeeds, node, repaired)))
            # New VFs have netdevs only at the end of the pass.
            wait_ready(node)
            time.sleep(max(0.0, began + PACE - time.monotonic()))  # the soak's pace; nothing is waited for
        if number % 2:
            node.sh("modprobe -r igb; modprobe igb", timeout=300)
        settled(node)
        memory.append(int(node.sh(MEMORY)))
        descriptors.append(int(node.sh(DESCRIPTORS)))
        if time.monotonic() > end:
            break
    carried = node.run(["cat", DONE]).stdout.split()
    print(  # noqa: T201  the figures of docs/campaign/lab.md
        f"{len(took)} drifts, {number // 2} driver reloads; PSS {memory} kB; descriptors {descriptors}; "
        f"{carried.count('iperf3')} runs of iperf3 and {carried.count('ib_write_bw')} of ib_write_bw; "
        f"seconds until one was seen repaired: median {sorted(took)[len(took) // 2]:.1f}, most {max(took):.1f}"
    )
    assert node.sh("systemctl show --property=NRestarts --value trackbed").strip() == "0"
    assert report(node)["ready"]
    assert {"iperf3", "ib_write_bw"} <= set(carried)
    # The first round is when everything is looked at for the first time.
    assert max(memory[1:], default=0) <= memory[0] + 8_000
    assert descriptors[-1] <= descriptors[0] + 2
