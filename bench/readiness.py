"""Measures for how long a node still says that it is ready after it has lost a device: `python -m bench.readiness`.

It runs on the first node of the lab. A watcher on the node looks at the kernel and at the report ten times a second. It
measures how long the report says "ready" while the PF has too few VFs or is gone. It only lists folders: reading `sriov_numvfs`
would wait for the lock that the kernel holds while it deletes VFs, ten seconds and more on such a node.
"""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lab
from bench.nodes import nodes
from lab.hardware import VFS_PER_NIC

NIC = lab.MACHINES[0].nics[0]
DEVICE = f"/sys/bus/pci/devices/{NIC.pci}"

BREAKS = {
    "all VFs deleted": f"echo 0 > {DEVICE}/sriov_numvfs",
    "PCI function removed, and a rescan": f"echo 1 > {DEVICE}/remove; sleep 5; echo 1 > /sys/bus/pci/rescan",
    "driver reloaded": "modprobe -r igb; modprobe igb",
}

# argv: the PF's folder, the number of its VFs, the command that breaks something.
WATCH = """
import glob, json, subprocess, sys, time
device, count, broken = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def same():
    return len(glob.glob(device + "/virtfn*")) == count
def ready():
    try:
        return json.load(open("/run/trackbed/report.json"))["ready"]
    except OSError:
        return False
breaking = subprocess.Popen(["sh", "-c", broken])
lies, since, gone, differed = [], None, 0.0, False
while not (differed and breaking.poll() is not None and same() and ready()):
    now = time.monotonic()
    if not same():
        differed = True
        if ready():
            since = now if since is None else since
        elif since is not None:
            lies.append(now - since)
            since = None
    elif since is not None:
        lies.append(now - since)
        since = None
    gone = max(gone, time.monotonic() - now)
    time.sleep(0.1)
print(json.dumps({"longest": max(lies, default=0.0), "reading": gone}))
"""


@click.command()
@click.option("--rounds", default=3, show_default=True, help="How often each is broken.")
def main(rounds: int) -> None:
    """Print the seconds for which the node said ready while the kernel differed from its spec."""
    (node, *_) = nodes()
    columns = ("longest while not so", "longest reading of the watcher")
    table = Table("what happened", *columns, title="seconds of saying ready")
    for name, broken in BREAKS.items():
        seen = []
        for _ in track(range(rounds), name):
            done = node.run(["python3", "-c", WATCH, DEVICE, str(VFS_PER_NIC), broken], timeout=400, check=True)
            seen.append(json.loads(done.stdout))
            node.run(["trackbed", "apply", "--timeout", "180"], timeout=200, check=True)
            node.sh("udevadm settle")
        table.add_row(name, *(f"{max(each[key] for each in seen):.1f}" for key in ("longest", "reading")))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
