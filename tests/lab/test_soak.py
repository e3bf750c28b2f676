"""A node to which something happens all the time, for as long as TRACKBED_TEST_SOAK says (minutes): it stays as it was."""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest

from lab import MACHINES, Node
from tests.agent_size import DESCRIPTORS, MEMORY
from tests.lab.conftest import eventually, report, settled, wait_ready

MINUTES = float(os.environ.get("TRACKBED_TEST_SOAK", "30"))
NICS = MACHINES[0].nics
COUNTS = (7, 4)


def drifts() -> list[tuple[str, str]]:
    """What breaks something, and what tells that it is mended; no value is in it twice, or that would be a fight."""
    found = []
    for nic, count in zip(NICS, COUNTS, strict=True):
        for index in range(count):
            vf = f"{nic.netdev}v{index}"
            found += [
                (f"ip link set {vf} mtu 1500", f"test $(cat /sys/class/net/{vf}/mtu) = 9000"),
                (f"ip link set {vf} down", f"ip link show {vf} | grep -q '[<,]UP[,>]'"),
            ]
        # No event tells of this: the next full reading finds it.
        rps = f"/sys/class/net/{nic.netdev}v0/queues/rx-0/rps_cpus"
        found.append((f"echo 0 > {rps}", f"test $((0x$(cat {rps}))) != 0"))
        numvfs = f"/sys/bus/pci/devices/{nic.pci}/sriov_numvfs"
        found += [
            (f"ip link set {nic.netdev} vf 0 trust off", f"ip link show {nic.netdev} | grep -q 'vf 0 .*trust on'"),
            (f"ip link set {nic.netdev} down", f"ip link show {nic.netdev} | grep -q '[<,]UP[,>]'"),
            (f"echo 0 > {numvfs}", f"test $(cat {numvfs}) = {count}"),
        ]
    return found


@pytest.mark.campaign
def test_the_agent_survives_hours_of_faults_without_growing(node: Node) -> None:
    chance = random.Random(20260304)  # noqa: S311  the same order each time
    end = time.monotonic() + MINUTES * 60
    took: list[float] = []
    memory, descriptors = [], []
    for number in itertools.count():
        order = drifts()
        chance.shuffle(order)
        for break_it, mended in order:
            node.sh(break_it)
            took.append(eventually(break_it, lambda mended=mended: node.run(["sh", "-c", mended]).returncode == 0))  # type: ignore[misc]
            # VFs that were made anew have netdevs only at the end of the pass.
            wait_ready(node)
        if number % 2:
            node.sh("modprobe -r igb; modprobe igb", timeout=300)
        settled(node)
        memory.append(int(node.sh(MEMORY)))
        descriptors.append(int(node.sh(DESCRIPTORS)))
        if time.monotonic() > end:
            break
    print(  # noqa: T201  the figures of docs/campaign.md
        f"{len(took)} drifts, {number // 2} driver reloads; PSS {memory} kB; descriptors {descriptors}; "
        f"seconds until one was seen mended: median {sorted(took)[len(took) // 2]:.1f}, most {max(took):.1f}"
    )
    assert node.sh("systemctl show --property=NRestarts --value trackbed").strip() == "0"
    assert report(node)["ready"]
    # The first round is when everything is looked at for the first time.
    assert max(memory[1:], default=0) <= memory[0] + 8_000
    assert descriptors[-1] <= descriptors[0] + 2
