"""Measures how fast drift is repaired on a node of the lab, beside the same repair by a shell: `python -m bench.repair`.

Both sides do the same work between the same two moments, by the node's own clock. It begins before the write that breaks
something, since the kernel sends the first event before that write returns. It ends when `ip` and sysfs read as before: the
number of VFs, what the PF grants each, and each VF's driver, name, address, MTU and state. For the agent a second figure is the
time until the report was ready again; for that, interrupts must be pinned, too. It pauses between two readings, since one
thread of this host emulates all CPUs of the node.
"""

from __future__ import annotations

import json
import shlex
import statistics
from typing import Any

import click
from attrs import frozen
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lab
from agent.report import names
from bench.nodes import nodes

NIC = lab.MACHINES[0].nics[0]
SYSFS = f"/sys/bus/pci/devices/{NIC.pci}"

# What must read as before. A VF's carrier comes later, and igb reports none of its own state.
STATE = f"""
state() {{
  cat {SYSFS}/sriov_numvfs
  ip link show {NIC.netdev} | grep ' vf '
  for vf in {SYSFS}/virtfn*; do
    net=$(echo "$vf"/net/*)
    echo "${{vf##*/}}" $(basename $(readlink "$vf/driver")) "${{net##*/}}" $(cat "$net/mtu" "$net/address" "$net/flags")
  done
}}
"""

SCRIPT = """
{state}
before=$(state)
began=$(date +%s%N)
{broken}
{restore}
until test "$(state 2>/dev/null)" = "$before"; do sleep 0.05; done
echo $((($(date +%s%N) - began) / 1000000))
until {ready}; do sleep 0.05; done
echo $((($(date +%s%N) - began) / 1000000))
"""

READY = f"grep -q '\"ready\": true' {names.RUN_FOLDER}/{names.REPORT}"


@frozen
class Drift:
    """One kind of drift: the command that breaks the value, and the commands that restore it by hand."""

    name: str
    broken: str
    restore: str


def _drifts(node: lab.Node) -> tuple[Drift, ...]:
    return (
        Drift("a VF's trust", f"ip link set {NIC.netdev} vf 2 trust off", f"ip link set {NIC.netdev} vf 2 trust on"),
        Drift("a VF's MTU", f"ip link set {NIC.netdev}v3 mtu 1500", f"ip link set {NIC.netdev}v3 mtu 9000"),
        Drift("all VFs deleted", f"echo 0 > {SYSFS}/sriov_numvfs", _by_hand(node)),
    )


def _by_hand(node: lab.Node) -> str:
    """The shell commands that create all VFs as they are now, unbound, so that each driver finds its MAC at once."""
    links: dict[str, dict[str, Any]] = {link["ifname"]: link for link in json.loads(node.sh("ip -j -d link"))}
    vfs = links[NIC.netdev]["vfinfo_list"]
    lines = [f"echo 0 > {SYSFS}/sriov_drivers_autoprobe", f"echo {len(vfs)} > {SYSFS}/sriov_numvfs"]
    for vf in vfs:
        trust, spoofchk = ("on" if vf[name] else "off" for name in ("trust", "spoofchk"))
        words = ["ip", "link", "set", NIC.netdev, "vf", str(vf["vf"]), "mac", vf["address"]]
        lines.append(shlex.join([*words, "trust", trust, "spoofchk", spoofchk]))
    # Without it the kernel binds a VF to no driver, also by drivers_probe.
    lines.append(f"echo 1 > {SYSFS}/sriov_drivers_autoprobe")
    for vf in vfs:
        name = f"{NIC.netdev}v{vf['vf']}"
        # A VF's driver gives up while its PF is still resetting; udev names the netdev a moment after it is there.
        probe = f"basename $(readlink {SYSFS}/virtfn{vf['vf']}) > /sys/bus/pci/drivers_probe"
        lines.append(f"until test -e /sys/class/net/{name}; do {{ {probe}; }} 2>/dev/null || true; sleep 0.05; done")
        lines.append(shlex.join(["ip", "link", "set", name, "mtu", str(links[name]["mtu"]), "up"]))
    return "\n".join(lines)


def _measure(node: lab.Node, broken: str, restore: str, ready: str) -> tuple[int, int]:
    """Milliseconds until all reads as before, and until ``ready`` holds, too."""
    text = SCRIPT.format(state=STATE, broken=broken, restore=restore, ready=ready)
    first, second = node.sh(text, timeout=400).split()
    return int(first), int(second)


def _by_agent(node: lab.Node, drift: Drift) -> tuple[int, int]:
    took = _measure(node, drift.broken, ":", READY)
    # Not `wait`: `apply` also resets the count of how often the value was put back.
    node.run(["trackbed", "apply", "--timeout", "120"], timeout=150, check=True)
    # Wait for the passes that the repair's own events cause.
    node.sh("udevadm settle")
    return took


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Measurements of each kind of drift.")
def main(rounds: int) -> None:
    """Print the milliseconds from drift to repair, by the agent and by hand."""
    (node, *_) = nodes()
    drifts = _drifts(node)
    ours = {
        drift.name: [_by_agent(node, drift) for _ in track(range(rounds), f"agent: {drift.name}")] for drift in drifts
    }
    columns = ("agent: median", "longest", "report ready: median", "by hand: median", "longest", "ratio")
    table = Table("drift", *columns, title="milliseconds")
    node.sh("systemctl stop trackbed")
    try:
        for drift in drifts:
            rows = track(range(rounds), f"by hand: {drift.name}")
            bare = [_measure(node, drift.broken, drift.restore, "true")[0] for _ in rows]
            done, ready = ([took[which] for took in ours[drift.name]] for which in (0, 1))
            middle = statistics.median(done), statistics.median(bare)
            figures = (middle[0], max(done), statistics.median(ready), middle[1], max(bare))
            table.add_row(drift.name, *(f"{figure:.0f}" for figure in figures), f"{middle[0] / middle[1]:.2f}")
    finally:
        node.sh("systemctl start trackbed")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
