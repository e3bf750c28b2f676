"""One trial: injects faults on a node, and judges the oracle's output."""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import field, frozen

from lab import LabError, Node
from tests.agent_size import DESCRIPTORS, MEMORY
from tests.chaos.faults import FIRST, PF, Fault
from tests.chaos.lies import Lie, in_api, too_long
from tests.chaos.oracle import EVENTS, SILENT
from tests.chaos.shown import Member, Seen, clock_ahead, longest, member, observed

FOLDER = "/dev/shm/chaos"
ORACLE = f"{FOLDER}/oracle.py"
RECOVERY = 120.0
"""Seconds within which the kernel must be as before, once the fault has ended; after a reboot, once it has booted."""

HELD = f"{PF}v5"
HELD_NETDEV = f"{FIRST.vf_pcis[5]} netdev"
"""Its name in the oracle's keys."""

HOLD = f"ip netns add pod; ip link set {HELD} netns pod; ip netns exec pod ip link set {HELD} up"
# It must not fail if the VF is already released: a trial may release it twice.
RELEASE = f"ip netns exec pod ip link set {HELD} netns 1 2>/dev/null || true; ip netns del pod 2>/dev/null || true"
# A netdev that was removed and created again has another ifindex.
WHO = f"ip netns exec pod sh -c 'cat /sys/class/net/{HELD}/ifindex /sys/class/net/{HELD}/mtu'"
SYSTEM = '. /etc/os-release; echo "$PRETTY_NAME, Linux $(uname -r)"'
AGENT = "trackbed --version"
FILES = "find /run/trackbed /var/lib/trackbed -type f | wc -l"


GROWTH = {"memory": 16_000, "descriptors": 8, "files": 10}
"""By how much supervisor and worker may have more than before the first fault, once the node is as before. Memory: kB."""

STATE = (EVENTS, SILENT, "links")
"""The parts of the oracle's output that a trial compares."""

NEVER = ("Traceback", "a fault of trackbed itself")
"""What the journal must never have."""

OFTEN = 30
"""How often one message may be in the journal of one trial. More is a flood, in which nobody finds what matters."""


@frozen
class Versions:
    """Those of a node's operating system and of its agent. ``system`` also says whether the node is in a cluster."""

    system: str
    agent: str


@frozen
class Before:
    """The state of a node before the first fault: the oracle's baseline, and the agent's memory and descriptors.

    ``member``: None outside of a cluster.
    """

    wanted: dict[str, Any]
    held: dict[str, int]
    member: Member | None


@frozen
class Outcome:
    """The result of a trial. ``lies``: the longest seconds of each class. ``recovery``: seconds; None if it did not recover."""

    faults: tuple[str, ...]
    group: str
    lies: dict[str, float] = field(factory=dict)
    recovery: float | None = None
    held: bool | None = None
    memory: int = 0
    descriptors: int = 0
    files: int = 0
    wrong: tuple[str, ...] = ()


def prepare(node: Node) -> dict[str, Any]:
    """Put the oracle on the node, and read its baseline."""
    node.write(ORACLE, Path(__file__).with_name("oracle.py").read_text())
    baseline: dict[str, Any] = json.loads(node.sh(f"python3 {ORACLE} baseline"))
    return baseline


def before_all(node: Node) -> Before:
    """Put the oracle on a restored node, and read all."""
    joined = member(node)
    if joined is not None:
        # Its connections in the snapshot are dead.
        node.sh("systemctl restart trackbed-reporter", timeout=120)
    return Before(prepare(node), _held(node), joined)


def versions(node: Node) -> Versions:
    """The versions on a node."""
    system = node.sh(SYSTEM).strip()
    return Versions(f"{system}, in a cluster" if member(node) else system, node.sh(AGENT).split()[-1])


def _held(node: Node) -> dict[str, int]:
    return dict(zip(GROWTH, (int(node.sh(script)) for script in (MEMORY, DESCRIPTORS, FILES)), strict=True))


def run(node: Node, faults: tuple[Fault, ...], before: Before, chance: random.Random) -> Outcome:
    """Inject the faults, one within the other, and judge."""
    with observed(before.member) as seen:
        return _trial(node, faults, before, chance, seen)


def _trial(
    node: Node, faults: tuple[Fault, ...], before: Before, chance: random.Random, seen: Sequence[Seen]
) -> Outcome:
    wrong: list[str] = []
    wanted = before.wanted
    since = node.sh("date +%s").strip()
    hold = all(fault.keeps_vfs for fault in faults)
    if hold:
        node.sh(HOLD)
        wanted = _settled(node, wanted, apart=HELD_NETDEV)
    held = node.sh(WHO) if hold else ""
    still: bool | None = None
    claimed = without(wanted, {fault.unclaimed for fault in faults})
    node.write(f"{FOLDER}/wanted.json", json.dumps(claimed))
    _inject(node, faults, chance)
    if hold and any(fault.repair_disturbs for fault in faults):
        wrong += _not_deferred(node)
        still = node.run(["sh", "-c", WHO]).stdout == held
        node.sh(RELEASE)
        wanted = before.wanted
    rebooted = any(fault.reboots for fault in faults)
    # Where CPUs are emulated, services still start long after the node answers.
    limit = RECOVERY + (node.accelerator.boot_s if rebooted else 0.0)
    recovery, _, missing = _awaited(node, wanted, limit=limit)
    if missing:
        wrong.append(f"after {limit:.0f} s not as before: {missing}")
    lies = {} if rebooted else _lies(node, seen)
    wrong += too_long(lies, faults)
    if hold and still is None:
        still = node.run(["sh", "-c", WHO]).stdout == held
    if still is False:
        wrong.append(f"{HELD}, in use by a pod, was removed, bound again or changed")
    wrong += of_journal(_journal(node, since))
    if hold:
        node.sh(RELEASE)
        _settled(node, before.wanted)
    now = _held(node)
    return Outcome(
        tuple(fault.name for fault in faults),
        faults[0].group if len(faults) == 1 else "two at once",
        {kind: round(lie.seconds, 1) for kind, lie in lies.items()},
        None if missing else round(recovery, 1),
        still,
        now["memory"],
        now["descriptors"],
        now["files"],
        (*wrong, *_grown(now, before.held)),
    )


def _journal(node: Node, since: str) -> str:
    units = ("-u", "trackbed", "-u", "trackbed-reporter")
    return node.run(["journalctl", "--no-pager", "-o", "cat", *units, "--since", f"@{since}"]).stdout


def _grown(now: dict[str, int], before: dict[str, int]) -> list[str]:
    return [
        f"{what}: {now[what]}, and {before[what]} before the first fault"
        for what, more in GROWTH.items()
        if now[what] > before[what] + more
    ]


def _inject(node: Node, faults: tuple[Fault, ...], chance: random.Random) -> None:
    """Start the oracle, then begin and end the faults."""
    if not any(fault.reboots for fault in faults):
        watcher = f"python3 {ORACLE} watch {FOLDER}/wanted.json > {FOLDER}/lies.json"
        node.sh(
            f"systemd-run --quiet --collect --unit=chaos-oracle --property=OOMScoreAdjust=-950 sh -c 'exec {watcher}'"
        )
    for fault in faults:
        _begin(node, fault, chance)
    for fault in reversed(faults):
        if fault.end:
            time.sleep(fault.holds)  # the fault lasts so long; nothing is waited for
            node.sh(fault.end, timeout=180)


def of_journal(text: str) -> list[str]:
    """What is wrong with the journal of a trial."""
    wrong = [f"the journal has {word!r}" for word in NEVER if word in text]
    # Numbers differ from one message to the next: times, counts, process IDs.
    same = Counter(re.sub(r"\d+", "N", line) for line in text.splitlines() if line.strip())
    return wrong + [f"the journal has {times} times: {line}" for line, times in same.items() if times > OFTEN]


def _begin(node: Node, fault: Fault, chance: random.Random) -> None:
    if fault.host is not None:
        fault.host(node, chance)
    else:
        # A fault may end the shell that makes it, or fail halfway beside another fault. The oracle judges what came of it.
        node.run(["sh", "-c", fault.begin], timeout=300)
    if fault.reboots:
        prepare(node)


def _settled(node: Node, wanted: dict[str, Any], apart: str = "") -> dict[str, Any]:
    """Wait until the node is ready and has this state; one netdev may differ. :returns: the state that the node has then."""
    _, have, missing = _awaited(node, wanted, apart)
    if missing:
        raise LabError(f"{node.name}: not as before the first fault: {missing}")
    return have


def _not_deferred(node: Node) -> list[str]:
    """What is wrong with a repair that has to wait for the user of a VF: the agent must say that it waits, and for whom."""
    deadline = time.monotonic() + RECOVERY
    while time.monotonic() < deadline:
        status = node.run(["trackbed", "status"], timeout=120)
        if status.returncode != 0 and "Deferred" in status.stdout and "another network namespace" in status.stdout:
            return []
        time.sleep(0.5)
    return [f"after {RECOVERY:.0f} s the agent did not say that the repair waits for the user of {HELD}"]


def _awaited(
    node: Node, wanted: dict[str, Any], apart: str = "", limit: float = RECOVERY
) -> tuple[float, dict[str, Any], str]:
    """Wait until the kernel has this state and the node is ready.

    :param apart: a netdev that may differ. :param limit: the seconds to wait at most.
    :returns: the seconds that it took, the last state that was read, and what was still wrong at the end (empty: nothing).
    """
    began = time.monotonic()
    have: dict[str, Any] = {}
    while True:
        missing = "the node does not answer"
        with suppress(LabError, ValueError):
            have = json.loads(node.run(["python3", ORACLE, "baseline"], timeout=90).stdout)
            missing = difference(without(wanted, {apart}), without(have, {apart})) or (
                "" if have["ready"] else "the node is not ready"
            )
        took = time.monotonic() - began
        if missing and took > limit:
            status = node.run(["trackbed", "status"], timeout=120)
            return took, have, f"{missing}; trackbed status: {(status.stderr or status.stdout).strip()[-1000:]}"
        if not missing:
            return took, have, ""
        time.sleep(0.5)


def difference(wanted: dict[str, Any], have: dict[str, Any]) -> str:
    """The first values that differ; empty if none does."""
    wrong = [line for kind in STATE for line in _unlike(wanted[kind], have[kind], "")]
    return "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")


def without(state: dict[str, Any], devices: set[str]) -> dict[str, Any]:
    """This state without these devices: functions by their PCI addresses, or netdevs as the keys name them."""
    return state | {
        kind: {
            key: value
            for key, value in state[kind].items()
            if not any(f"{key} ".startswith(f"{each} ") for each in devices)
        }
        for kind in STATE
    }


def _unlike(before: Any, now: Any, name: str) -> Iterator[str]:
    """Compare two JSON values: a line for each value within them that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _unlike(before.get(key, "not there"), now.get(key, "not there"), f"{name} {key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from _unlike(*pair, f"{name} {number}")
    elif before != now:
        yield f"{name.strip()}: {before!r}, now {now!r}"


def _lies(node: Node, seen: Sequence[Seen]) -> dict[str, Lie]:
    """By class: the longest time for which the report said ready, or the API showed it, while a value differed."""
    node.sh("systemctl stop chaos-oracle || true", timeout=120)
    text = node.run(["cat", f"{FOLDER}/lies.json"]).stdout
    if not text.strip():
        raise LabError(f"{node.name}: the oracle has printed nothing, so nothing can be judged")
    printed = json.loads(text)
    lies = {kind: Lie(lie["seconds"], "said ready", lie["what"]) for kind, lie in printed["lies"].items()}
    if seen:
        ahead = clock_ahead(node)
        shown = longest(seen, time.monotonic(), printed["differed"], ahead)
        lies |= {in_api(kind): lie for kind, lie in shown.items()}
    return lies
