"""Soaks a node of the lab: `python -m tests.soak --hours 8`. The agent repairs each drift, and uses no more memory at the end.

Each minute (`--pace`) one value of the first node is broken, while one of its VFs sends to the second node by iperf3 and
ib_write_bw. The lab must be up and deployed. Every :data:`SAVED` seconds a snapshot of both nodes is taken, with their memory,
and the results are written. A soak that was stopped continues from there, also after a restart of this host: the
agent's processes are in the snapshot. `make lab-down` deletes the snapshots.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from attrs import asdict, frozen

from agent.report.names import REPORT, RUN_FOLDER
from agent.runtime import write_atomically
from lab import MACHINES, LabError, Node, fleet, logs
from lab.node import wait
from tests.agent_size import DESCRIPTORS, MEMORY
from tests.chaos.trial import NEVER, Versions, of_journal, versions

NICS = MACHINES[0].nics
COUNTS = (7, 4)
REPAIRED = 300.0
"""Seconds after which the soak gives up. Only a node that hangs takes so long, even on a busy host."""

SAVED = 300.0
"""Seconds of the soak between two snapshots. It does not count the time of a snapshot."""

SNAPSHOT = "soak"
GROWTH = {"memory": 8_000, "descriptors": 2}
"""How much supervisor and worker may grow after the first round. Memory in kB."""

REPLACED = "is replaced"
"""Words of each message that says that the supervisor replaces its worker. No drift of the soak is a reason for that."""

LOADED = f"{NICS[0].netdev}v1"
ADDRESSES = ("10.79.0.1", "10.79.0.2")
DONE = "/run/soak-load"
UNIT = "soak-load"
# The soak also deletes the VFs. A new VF needs its address again, and has another RDMA device.
_LOAD = """
while sleep 1; do
  ip address replace {address}/24 dev {netdev} || continue
  device=$(rdma link | sed -n 's,^link \\([^/]*\\)/.* netdev {netdev} .*,\\1,p')
  {work}
done
"""
_SERVE = "timeout 120 iperf3 --server --one-off; timeout 120 ib_write_bw --ib-dev=$device -R"
# As with a scheduler, nothing starts on a node that is not ready: its programs would follow each other so closely that a change
# of their VF, which waits for their end, would be late again and again.
_READY = f"import json, sys; sys.exit(not json.load(open('{RUN_FOLDER}/{REPORT}'))['ready'])"
_SEND = (
    f'python3 -c "{_READY}" || continue;'
    f" timeout 120 iperf3 --client {ADDRESSES[1]} --time 10 && echo iperf3 >> {DONE};"
    f" timeout 120 ib_write_bw --ib-dev=$device -R --duration 10 {ADDRESSES[1]} && echo ib_write_bw >> {DONE}"
)


@frozen
class Drift:
    """A command on the node that breaks a value, and the check that the value is repaired."""

    command: str
    repaired: str


@frozen
class Row:
    """A drift that was repaired. ``took``: seconds until its check held; ``seconds``: until the next drift.

    ``memory`` (kB) and ``descriptors``: those of supervisor and worker; only at the end of a round.
    """

    command: str
    took: float
    seconds: float
    memory: int | None = None
    descriptors: int | None = None


def drifts() -> list[Drift]:
    """A drift of each value that the soak breaks. In a round each comes once, since a value broken too often is contended."""
    found = []
    for nic, count in zip(NICS, COUNTS, strict=True):
        for index in range(count):
            vf = f"{nic.netdev}v{index}"
            found += [
                Drift(f"ip link set {vf} mtu 1500", f"test $(cat /sys/class/net/{vf}/mtu) = 9000"),
                Drift(f"ip link set {vf} down", f"ip link show {vf} | grep -q '[<,]UP[,>]'"),
            ]
        # The kernel sends no event for this: the next full reading finds it.
        rps = f"/sys/class/net/{nic.netdev}v0/queues/rx-0/rps_cpus"
        found.append(Drift(f"echo 0 > {rps}", f"test $((0x$(cat {rps}))) != 0"))
        numvfs = f"/sys/bus/pci/devices/{nic.pci}/sriov_numvfs"
        found += [
            Drift(f"ip link set {nic.netdev} vf 0 trust off", f"ip link show {nic.netdev} | grep -q 'vf 0 .*trust on'"),
            Drift(f"ip link set {nic.netdev} down", f"ip link show {nic.netdev} | grep -q '[<,]UP[,>]'"),
            Drift(f"echo 0 > {numvfs}", f"test $(cat {numvfs}) = {count}"),
        ]
    both = " && ".join(
        f"test $(cat /sys/bus/pci/devices/{nic.pci}/sriov_numvfs) = {count}"
        for nic, count in zip(NICS, COUNTS, strict=True)
    )
    return [*found, Drift("modprobe -r igb; modprobe igb", both)]


def drift(number: int) -> Drift:
    """The drift of this number, counted from 0. Each round has an order of its own, the same each time."""
    every = drifts()
    rounds, position = divmod(number, len(every))
    return random.Random(rounds).sample(every, len(every))[position]  # noqa: S311  not for security


def summary(rows: Sequence[Row], carried: Sequence[str]) -> str:
    """What a soak has shown, in one line. ``carried``: the runs of iperf3 and ib_write_bw that ended well."""
    took = sorted(row.took for row in rows)
    ends = [row for row in rows if row.memory is not None]
    return (
        f"{_lasted(rows) / 3600:.2f} h, {len(rows)} drifts; "
        f"seconds until one was seen repaired: median {took[len(took) // 2]:.1f}, most {took[-1]:.1f}; "
        f"after each round: memory (PSS) {[row.memory for row in ends]} kB, descriptors {[row.descriptors for row in ends]}; "
        f"runs: {carried.count('iperf3')} of iperf3, {carried.count('ib_write_bw')} of ib_write_bw"
    )


def wrong(rows: Sequence[Row], carried: Sequence[str]) -> list[str]:
    """Why a soak of these drifts has failed; empty if it has not."""
    found = [f"no run of {name} ended well" for name in ("iperf3", "ib_write_bw") if name not in carried]
    ends = [asdict(row) for row in rows if row.memory is not None]
    for what, more in GROWTH.items():
        sizes = [row[what] for row in ends]
        # The agent may grow in the first round, in which it reads everything for the first time.
        if sizes and max(sizes) > sizes[0] + more:
            found.append(f"{what}: {sizes[0]} after the first round, then {max(sizes)}")
    return found


def replaced(journal: str) -> list[str]:
    """What is wrong if the supervisor replaced the worker. systemd does not count that: the service's main process stays."""
    return [line for line in journal.splitlines() if REPLACED in line]


@click.command()
@click.option(
    "--hours", default=8.0, show_default=True, type=click.FloatRange(min=0.0, min_open=True), help="How long."
)
@click.option(
    "--pace",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.0),
    help="Seconds from one drift to the next.",
)
def main(hours: float, pace: float) -> None:
    """Break a value of the first node each minute, and judge how the agent repairs it. A stopped soak continues.

    Exit code: 0 every drift was repaired and nothing grew, 1 not, or the lab failed, 2 bad input.
    """
    try:
        nodes = fleet.nodes()
        for node in nodes:
            # A node that is off cannot say which version it runs.
            if node.pid() is None:
                node.restore(SNAPSHOT)
        found = Soak(nodes, versions(nodes[0]), pace).run(hours * 3600)
    except LabError as error:
        raise click.ClickException(str(error)) from None
    for line in found:
        click.secho(line, fg="red")
    sys.exit(1 if found else 0)


@frozen
class Soak:
    """A soak of the first of these nodes. Another version of the agent or of the system begins a new one."""

    nodes: tuple[Node, ...]
    versions: Versions
    pace: float

    @property
    def folder(self) -> Path:
        """Where its results and a failure's logs are. They stay when the lab goes down."""
        return self.nodes[0].instance.folder / "soak"

    def run(self, seconds: float) -> list[str]:
        """Continue until the soak has lasted so long. :returns: what is wrong."""
        node = self.nodes[0]
        rows = self._begin()
        saved = lasted = _lasted(rows)
        while lasted < seconds:
            try:
                rows.append(self._step(len(rows)))
            except LabError:
                logs.keep(node, self.folder / "failure")
                click.echo(f"logs: {self.folder / 'failure'}")
                raise
            _say(rows, seconds)
            lasted = _lasted(rows)
            if lasted >= min(saved + SAVED, seconds):
                self._save(rows)
                saved = lasted
        carried = node.run(["cat", DONE]).stdout.split()
        click.echo(summary(rows, carried))
        # Of hours, only these lines: the same message may well come often.
        never = "|".join((*NEVER, REPLACED))
        journal = node.run(["journalctl", "--no-pager", "-b", "-o", "cat", "-u", "trackbed", "--grep", never]).stdout
        found = wrong(rows, carried) + of_journal(journal) + replaced(journal)
        restarts = node.sh("systemctl show --property=NRestarts --value trackbed").strip()
        return found + ([f"the agent was started again {restarts} times"] if restarts != "0" else [])

    def _begin(self) -> list[Row]:
        """The rows so far, with the nodes as they were then."""
        rows = self._load()
        for node in self.nodes if rows else ():
            node.restore(SNAPSHOT)
        for node in self.nodes:
            node.run(["trackbed", "wait", "--timeout", "300"], timeout=320, check=True)
        if not rows:
            _send(self.nodes)
        return rows

    def _step(self, number: int) -> Row:
        """Break a value, and wait for the repair and until the next drift is due."""
        node, chosen = self.nodes[0], drift(number)
        began = time.monotonic()
        node.sh(chosen.command, timeout=300)
        wait(lambda: _succeeds(node, chosen.repaired), REPAIRED, f"{node.name}: the repair of: {chosen.command}")
        took = time.monotonic() - began
        # New VFs have netdevs only at the end of the pass.
        node.run(["trackbed", "wait", "--timeout", str(round(REPAIRED))], timeout=REPAIRED + 20, check=True)
        size: tuple[int | None, int | None] = (None, None)
        if (number + 1) % len(drifts()) == 0:
            size = int(node.sh(MEMORY)), int(node.sh(DESCRIPTORS))
        time.sleep(max(0.0, began + self.pace - time.monotonic()))  # the soak's pace; nothing is waited for
        return Row(chosen.command, round(took, 1), round(time.monotonic() - began, 1), *size)

    def _save(self, rows: Sequence[Row]) -> None:
        for node in self.nodes:
            node.snapshot(SNAPSHOT)
        same = asdict(self.versions)
        self.folder.mkdir(exist_ok=True)
        write_atomically(self._results, "".join(json.dumps({**same, **asdict(row)}) + "\n" for row in rows))

    def _load(self) -> list[Row]:
        if not self._results.exists() or not all(node.has(SNAPSHOT) for node in self.nodes):
            return []
        same = asdict(self.versions)
        rows: list[dict[str, Any]] = [json.loads(line) for line in self._results.read_text().splitlines()]
        ours = [{key: row[key] for key in row if key not in same} for row in rows if same.items() <= row.items()]
        return [Row(**row) for row in ours]

    @property
    def _results(self) -> Path:
        return self.folder / "results.jsonl"


def _send(nodes: tuple[Node, ...]) -> None:
    """Have a VF of the first node send to the second one's, from now on."""
    for node, address, work in zip(reversed(nodes[:2]), reversed(ADDRESSES), (_SERVE, _SEND), strict=True):
        node.sh(f"modprobe -a ib_uverbs rdma_ucm; systemctl stop {UNIT} 2>/dev/null || true; rm -f {DONE}")
        text = _LOAD.format(address=address, netdev=LOADED, work=work)
        unit = ["systemd-run", "--quiet", "--collect", f"--unit={UNIT}"]
        node.run([*unit, "sh", "-c", text.replace("$", "$$")], check=True)


def _succeeds(node: Node, script: str) -> bool:
    return node.run(["sh", "-c", script]).returncode == 0


def _lasted(rows: Sequence[Row]) -> float:
    return sum(row.seconds for row in rows)


def _say(rows: Sequence[Row], seconds: float) -> None:
    so_far = _lasted(rows)
    last = rows[-1]
    size = f"; {last.memory} kB, {last.descriptors} descriptors" if last.memory is not None else ""
    click.echo(f"{so_far / 60:.0f} of {seconds / 60:.0f} min: {last.command}: repaired after {last.took} s{size}")


if __name__ == "__main__":
    main()
