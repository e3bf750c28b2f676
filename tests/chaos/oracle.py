"""Runs on the node beside the agent, and compares the kernel's state with the report. It does not use the agent.

`oracle.py baseline` prints what the kernel has now. `oracle.py watch BASELINE` looks ten times a second at what differs from
it. When it gets SIGTERM, it prints when each value differed, and for how long a fresh report said ready meanwhile. It reads
only what takes no lock that the kernel holds while it makes or deletes VFs: names of folders, and attributes in memory.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

PCI = "/sys/bus/pci/devices"
INTERRUPTS = "/proc/interrupts"
SPEC = "/etc/trackbed/node.json"
REPORT = "/run/trackbed/report.json"
STALE = 30.0
"""Seconds after which every reader of a report counts the node as not ready (docs/processes.md)."""

UP = 1
VOLATILE = ("ifindex", "link_index", "link_netnsid", "operstate", "num_tx_queues_used", "linkmode", "stats", "stats64")
"""What `ip -d -j link` says that changes with each new netdev, or by the peer at the cable's other end."""

# Values whose changes the kernel announces by events, and values that only a full reading compares.
EVENTS, SILENT = "told by events", "told by no event"


def _text(path: str) -> str:
    try:
        # Without a buffer, since an emulated CPU reads hundreds of files a second here.
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path).rpartition("/")[2]  # noqa: PTH115
    except OSError:
        return ""


def _vfs(pci: str) -> list[str]:
    return [name for name in _names(f"{PCI}/{pci}") if name.startswith("virtfn")]


def _functions() -> dict[str, bool]:
    """The addresses of the PFs that have VFs, and of these VFs. The value says whether it is a PF."""
    every = _names(PCI)
    pfs = [pci for pci in every if _vfs(pci)]
    return {pci: pci in pfs for pci in every if pci in pfs or _link(f"{PCI}/{pci}/physfn") in pfs}


def state_with_events(functions: dict[str, bool]) -> dict[str, str]:
    """The state whose changes cause a uevent or an rtnetlink event, by function. Each function here has one netdev."""
    state = {}
    for pci, is_pf in functions.items():
        state[pci] = " ".join([_link(f"{PCI}/{pci}/driver"), *(_vfs(pci) if is_pf else ())])
        for name in _names(f"{PCI}/{pci}/net"):
            netdev = f"{PCI}/{pci}/net/{name}"
            flags = int(_text(f"{netdev}/flags") or "0", 16) & UP
            state[f"{pci} netdev"] = f"{flags} {_text(f'{netdev}/mtu')} {_text(f'{netdev}/address')}"
            state[f"{pci} netdev name"] = name
    return state


def state_without_events(functions: dict[str, bool]) -> dict[str, str]:
    """The steering of each queue, by function; interrupts by their names, since a driver's start changes their numbers."""
    state = {}
    names = {words[0][:-1]: words[-1] for words in map(str.split, _text(INTERRUPTS).splitlines()[1:])}
    for pci in functions:
        for netdev in _names(f"{PCI}/{pci}/net"):
            queues = f"{PCI}/{pci}/net/{netdev}/queues"
            for queue in _names(queues):
                kind = "rps_cpus" if queue.startswith("rx") else "xps_cpus"
                state[f"{pci} netdev {queue}"] = _text(f"{queues}/{queue}/{kind}")
        for number in _names(f"{PCI}/{pci}/msi_irqs"):
            if name := names.get(number):
                # igb and igbvf call an interrupt NETDEV-QUEUE, and that of no queue NETDEV.
                role = re.sub("^[^-]+", "netdev", name)
                state[f"{pci} {role}"] = _text(f"/proc/irq/{number}/smp_affinity_list")
    return state


def links() -> dict[str, dict[str, Any]]:
    """Output of `ip -d -j link` for the netdevs of devices, by device, without volatile values."""
    done = subprocess.run(["ip", "-d", "-j", "link"], capture_output=True, text=True, check=True)
    netdevs = [link for link in json.loads(done.stdout) if "parentdev" in link]
    for link in netdevs:
        for name in VOLATILE:
            link.pop(name, None)
        link["flags"] = [flag for flag in link["flags"] if flag not in ("NO-CARRIER", "LOWER_UP")]
    return {f"{link['parentdev']} netdev": link for link in netdevs}


def baseline() -> dict[str, Any]:
    """All of this state, and whether the report says ready.

    The agent gives each VF the name by udev's rule. A PF may have any other name than one that the spec has.
    """
    functions = _functions()
    in_spec = re.findall(r"\w+", _text(SPEC))
    events = {
        key: value
        for key, value in state_with_events(functions).items()
        if not (key.endswith(" name") and functions[key.split()[0]] and value not in in_spec)
    }
    return {
        "functions": functions,
        EVENTS: events,
        SILENT: state_without_events(functions),
        "links": links(),
        "ready": says_ready(),
    }


def says_ready() -> bool:
    """Whether a fresh report of this boot says ready."""
    try:
        report = json.loads(_text(REPORT) or "{}")
    except ValueError:
        return False
    age = float(_text("/proc/uptime").split()[0]) - report.get("uptime", 0.0)
    fresh = report.get("boot_id") == _text("/proc/sys/kernel/random/boot_id") and 0 <= age <= STALE
    return bool(report.get("ready")) and fresh


def watch(wanted: dict[str, Any]) -> dict[str, Any]:
    """Watch until SIGTERM. A fault may set the clock, so times are counted from the boot, in seconds.

    ``differed``: for each class, the values that differed, each with the times between which it did. ``lies``: for each class,
    the longest time for which one value differed from a ready report, and its name.
    """
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    since: dict[tuple[str, str], float] = {}
    lying: dict[tuple[str, str], float] = {}
    differed: dict[str, list[tuple[str, float, float]]] = {EVENTS: [], SILENT: []}
    longest = {EVENTS: (0.0, ""), SILENT: (0.0, "")}
    functions = wanted["functions"]
    number, now = 0, 0.0
    while not ended:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        # There are many queues and interrupts, and no event would report a change of them within a second.
        classes = {EVENTS: state_with_events(functions)} | (
            {SILENT: state_without_events(functions)} if number % 10 == 0 else {}
        )
        ready = says_ready()
        for kind, have in classes.items():
            for key, value in wanted[kind].items():
                if have.get(key) == value:
                    if (began := since.pop((kind, key), None)) is not None:
                        differed[kind].append((key, began, now))
                else:
                    since.setdefault((kind, key), now)
                if have.get(key) == value or not ready:
                    lying.pop((kind, key), None)
                else:
                    longest[kind] = max(longest[kind], (now - lying.setdefault((kind, key), now), key))
        number += 1
        time.sleep(max(0.0, 0.1 - (time.clock_gettime(time.CLOCK_BOOTTIME) - now)))
    for (kind, key), began in since.items():
        differed[kind].append((key, began, now))
    lies = {kind: {"seconds": seconds, "what": what} for kind, (seconds, what) in longest.items()}
    return {"lies": lies, "differed": differed}


if __name__ == "__main__":
    if sys.argv[1] == "baseline":
        print(json.dumps(baseline(), sort_keys=True))  # noqa: T201
    else:
        with open(sys.argv[2]) as given:  # noqa: PTH123
            print(json.dumps(watch(json.load(given))), flush=True)  # noqa: T201
