"""Breaks a node of the lab in random ways, and judges the result by the kernel's state: `python -m tests.chaos`.

Each trial is a line of a file in the lab's folder. A run that was stopped goes on after the last line of the same versions; the
same seed makes the same trials. `--record` adds them to docs/campaign/faults.jsonl, and
writes the tables of the page beside it. TRACKBED_LAB selects the lab. After a trial that ends badly, the trials since the node
was last restored are repeated with fewer of them; `--trial` runs the smallest set.
"""

import json
import random
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
from attrs import asdict, frozen

from agent.runtime import write_atomically
from handbook import campaign
from handbook.trials import lines
from lab import LabError, Node, fleet, instance, logs
from lab.instance import Instance
from tests.chaos.cluster import CLUSTER
from tests.chaos.faults import FAULTS, Fault, Trial, trials
from tests.chaos.smallest import smallest
from tests.chaos.trial import Before, Outcome, before_all, run, versions

ALL = (*FAULTS, *CLUSTER)

BEFORE = "before-chaos"
"""The snapshot of the node before the first fault."""


TRIES = 12
"""How often a failure is tried with fewer faults. Each attempt restores a snapshot, and each trial takes a minute or two."""


@click.command()
@click.option("--seed", default=1, show_default=True, help="The same seed makes the same trials.")
@click.option("--faults", "count", default=100, show_default=True, help="How many trials.")
@click.option(
    "--node", "name", default="node1", show_default=True, help="The node of the lab; its lab must be up and deployed."
)
@click.option("--only", multiple=True, help="Only faults of this name or group; may be given more than once.")
@click.option(
    "--trial",
    "numbers",
    multiple=True,
    type=click.IntRange(1),
    help="Only this trial of the seed, from a restored node.",
)
@click.option("--without", multiple=True, help="With --trial: leave out a fault of this name.")
@click.option("--record", is_flag=True, help="Run nothing; add all results of this lab to those in docs/campaign.")
def main(
    seed: int,
    count: int,
    name: str,
    only: tuple[str, ...],
    numbers: tuple[int, ...],
    without: tuple[str, ...],
    record: bool,
) -> None:
    """Inject faults on a node of the lab, and judge the result of each from the kernel's state.

    Exit code: 0 every trial ended well, 1 one did not or the lab failed, 2 bad input.
    """
    try:
        if record:
            campaign.main([str(file) for file in sorted(_folder(instance.named()).glob("*.jsonl"))])
            return
        failed = _inject(seed, count, name, only, numbers, without)
    except LabError as error:
        # Each trial is written when it has ended, so the next call goes on.
        raise click.ClickException(str(error)) from None
    sys.exit(1 if failed else 0)


def _inject(
    seed: int, count: int, name: str, only: tuple[str, ...], numbers: tuple[int, ...], without: tuple[str, ...]
) -> bool:
    """Run the trials that the options select; whether one ended badly."""
    nodes = {node.name: node for node in fleet.nodes()}
    if name not in nodes:
        raise click.BadParameter(f"the lab has no {name}; it has {', '.join(nodes)}", param_hint="--node")
    folder = _folder(nodes[name].instance)
    folder.mkdir(exist_ok=True)
    chaos = Campaign(nodes[name], folder, seed, only)
    chosen = named(only)
    unable = chaos.unable(chosen)
    if not numbers:
        return chaos.run(able(trials(seed, chosen), count, unable)) > 0
    picked = pick(trials(seed, chosen), numbers, without, unable)
    chaos.snapshot()
    return chaos.fails(picked)


def _folder(lab: Instance) -> Path:
    """Where a lab's results are. They stay when the lab goes down."""
    return lab.folder / "chaos"


def named(only: Sequence[str]) -> list[Fault]:
    """The faults that ``--only`` selects."""
    chosen = [fault for fault in ALL if not only or {fault.name, fault.group} & set(only)]
    if not chosen:
        known = ", ".join(sorted({fault.group for fault in ALL}))
        raise click.BadParameter(f"no fault has that name or group; the groups are: {known}", param_hint="--only")
    return chosen


def able(drawn: Iterable[Trial], count: int, unable: Sequence[Fault]) -> list[Trial]:
    """The first ``count`` trials without a fault that the node cannot try."""
    return list(islice((trial for trial in drawn if not set(unable) & set(trial[1])), count))


def pick(
    drawn: Iterable[Trial], numbers: Sequence[int], without: Sequence[str], unable: Sequence[Fault]
) -> list[Trial]:
    """The trials of these numbers, in their order, without the faults of these names."""
    kept = [
        (number, tuple(fault for fault in faults if fault.name not in without))
        for number, faults in islice(drawn, max(numbers))
        if number in numbers
    ]
    for number, faults in kept:
        for fault in faults:
            if fault in unable:
                why = f"this node cannot try {fault.name!r} (needs: {fault.needs})"
                raise click.BadParameter(f"trial {number}: {why}", param_hint="--trial")
    return [(number, faults) for number, faults in kept if faults]


@frozen
class Campaign:
    """The trials of one seed on one node."""

    node: Node
    folder: Path
    seed: int
    only: tuple[str, ...]

    def unable(self, chosen: Sequence[Fault]) -> list[Fault]:
        """Those of these faults that cannot be tried on this node."""
        unable = [fault for fault in chosen if fault.needs and self.node.run(["sh", "-c", fault.needs]).returncode != 0]
        for fault in unable:
            click.echo(f"not tried on {self.node.name}: {fault.name} (needs: {fault.needs})")
        if unable == chosen:
            raise click.BadParameter(f"{self.node.name} can try none of these faults", param_hint="--only")
        return unable

    def run(self, planned: list[Trial]) -> int:
        """Continue after the last trial in the file of results; return the number of trials that ended badly."""
        same: dict[str, Any] = {"seed": self.seed, "only": list(self.only), **asdict(versions(self.node))}
        results = self.folder / f"seed-{self.seed}.jsonl"
        rows = [*lines(results)] if results.exists() else []
        done = {row["trial"]: row for row in rows if all(row[name] == value for name, value in same.items())}
        self.snapshot(anew=not done)
        before = self._afresh()
        since: list[Trial] = []
        failed = sum(1 for row in done.values() if row["wrong"])
        for number, faults in (trial for trial in planned if trial[0] not in done):
            since.append((number, faults))
            outcome = self._try(number, faults, before)
            row: dict[str, Any] = {**same, "trial": number, **asdict(outcome)}
            rows.append(row)
            _say(number, outcome)
            if outcome.wrong:
                failed += 1
                row["again"] = again(self.seed, self.only, since, dict(since))
                _write(results, rows)
                folder = self.folder / f"{results.stem}{'-some' if self.only else ''}-{number}"
                logs.keep(self.node, folder)
                click.echo(f"  logs: {folder}")
                row["again"] = self._minimised(since)
                click.echo(f"  {row['again']}")
            _write(results, rows)
            if outcome.wrong:
                before, since = self._afresh(), []
        self.node.restore(BEFORE)
        return failed

    def fails(self, some: Sequence[Trial]) -> bool:
        """Whether the last of these trials ends badly, on a restored node."""
        before = self._afresh()
        outcome = None
        for number, faults in some:
            outcome = self._try(number, faults, before)
            _say(number, outcome)
        return outcome is not None and bool(outcome.wrong)

    def snapshot(self, anew: bool = False) -> None:
        """Take the snapshot of the node as it is. If there is one of the same versions, that one stays, unless ``anew``."""
        taken, now = self.folder / f"{self.node.name}.versions", json.dumps(asdict(versions(self.node)))
        if anew or not self.node.has(BEFORE) or not taken.exists() or taken.read_text() != now:
            self.node.run(["trackbed", "wait", "--timeout", "180"], timeout=200, check=True)
            self.node.snapshot(BEFORE)
            taken.write_text(now)

    def _afresh(self) -> Before:
        self.node.restore(BEFORE)
        self.node.run(["trackbed", "wait", "--timeout", "180"], timeout=200, check=True)
        return before_all(self.node)

    def _try(self, number: int, faults: tuple[Fault, ...], before: Before) -> Outcome:
        try:
            # The same numbers at random for a trial, whichever ran before it.
            return run(self.node, faults, before, random.Random(self.seed * 100_000 + number))  # noqa: S311
        except LabError as error:
            group = faults[0].group if len(faults) == 1 else "two at once"
            return Outcome(tuple(fault.name for fault in faults), group, wrong=(f"the trial itself: {error}",))

    def _minimised(self, since: list[Trial]) -> str:
        """The command that runs again the faults since the node was restored that are needed for the failure."""
        click.echo("  again, with fewer faults:")
        needed = smallest(since, self.fails, TRIES)
        number, last = needed[-1]
        for fault in last if len(last) > 1 else ():
            fewer = tuple(other for other in last if other is not fault)
            if self.fails([*needed[:-1], (number, fewer)]):
                needed[-1] = number, fewer
                break
        return again(self.seed, self.only, needed, dict(since))


def again(seed: int, only: Sequence[str], needed: Sequence[Trial], all_faults: Mapping[int, tuple[Fault, ...]]) -> str:
    """The command that runs these trials again."""
    words = ["python", "-m", "tests.chaos", "--seed", str(seed)]
    words += [word for name in only for word in ("--only", name)]
    for number, faults in needed:
        words += ["--trial", str(number)]
        words += [word for fault in all_faults[number] if fault not in faults for word in ("--without", fault.name)]
    return shlex.join(words)


def _say(number: int, outcome: Outcome) -> None:
    lies = ", ".join(f"{seconds} s" for seconds in outcome.lies.values()) or "-"
    end = f"as before after {outcome.recovery} s" if outcome.recovery is not None else "not as before"
    click.echo(f"trial {number}, {' + '.join(outcome.faults)}: {end}; said ready for {lies}; {outcome.memory} kB")
    for why in outcome.wrong:
        click.echo(click.style(f"  {why}", fg="red"))


def _write(results: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(results, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


if __name__ == "__main__":
    main()
