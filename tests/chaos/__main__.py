"""Breaks a node of the lab in random ways, and judges by the kernel what came of it: `python -m tests.chaos`.

Each trial is a line of a file in the lab's folder. A run that was stopped goes on after the last line; the same seed makes the
same trials. `--table` prints what the lines say, as docs/campaign-faults.md has it. TRACKBED_LAB selects the lab.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from statistics import median

import click

from lab import LabError, Node, fleet, logs
from tests.chaos.faults import FAULTS, Fault, trials
from tests.chaos.oracle import EVENTS, SILENT
from tests.chaos.trial import Outcome, prepare, run

BEFORE = "before-chaos"
"""The snapshot of the node before the first fault."""


@click.command()
@click.option("--seed", default=1, show_default=True, help="The same seed makes the same trials.")
@click.option("--faults", "count", default=100, show_default=True, help="How many trials.")
@click.option(
    "--node", "name", default="node1", show_default=True, help="The node of the lab; its lab must be up and deployed."
)
@click.option("--only", multiple=True, help="Only faults of this name or group; may be given more than once.")
@click.option("--table", is_flag=True, help="Run nothing; print the table of all results of this lab.")
def main(seed: int, count: int, name: str, only: tuple[str, ...], table: bool) -> None:
    """Inject faults on a node of the lab, and judge each by the kernel.

    Exit code: 0 every trial ended well, 1 one did not, 2 bad input.
    """
    try:
        nodes = {node.name: node for node in fleet.nodes()}
    except LabError as error:
        raise click.ClickException(str(error)) from None
    if name not in nodes:
        raise click.BadParameter(f"the lab has no {name}; it has {', '.join(nodes)}", param_hint="--node")
    folder = nodes[name].folder.parent / "chaos"
    folder.mkdir(exist_ok=True)
    if table:
        _table([json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()])
        return
    chosen = [fault for fault in FAULTS if not only or {fault.name, fault.group} & set(only)]
    if not chosen:
        names = ", ".join(sorted({fault.group for fault in FAULTS}))
        raise click.BadParameter(f"no fault has that name or group; the groups are: {names}", param_hint="--only")
    failed = _campaign(
        nodes[name], folder / f"seed-{seed}{'-some' if only else ''}.jsonl", list(trials(seed, count, chosen)), seed
    )
    sys.exit(1 if failed else 0)


def _campaign(node: Node, results: Path, planned: list[tuple[Fault, ...]], seed: int) -> int:
    """The number of trials that ended badly."""
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    failed = sum(1 for row in done if row["wrong"])
    if not done or not node.has(BEFORE):
        node.run(["trackbed", "wait", "--timeout", "180"], timeout=200, check=True)
        node.snapshot(BEFORE)
    wanted = _afresh(node)
    for number, faults in enumerate(planned):
        if number < len(done):
            continue
        outcome = _try(node, faults, wanted, seed * 100_000 + number)
        with results.open("a") as file:
            file.write(outcome.line() + "\n")
        _say(number, len(planned), outcome)
        if outcome.wrong:
            failed += 1
            folder = results.parent / f"{results.stem}-{number}"
            logs.keep(node, folder)
            click.echo(f"  logs: {folder}")
            wanted = _afresh(node)
            if len(faults) > 1:
                _minimise(node, faults, wanted, seed * 100_000 + number)
                wanted = _afresh(node)
            click.echo(
                f"  again: python -m tests.chaos --seed {seed} {' '.join(f'--only {f.name!r}' for f in faults)} --faults 1"
            )
    node.restore(BEFORE)
    return failed


def _afresh(node: Node) -> dict[str, object]:
    node.restore(BEFORE)
    node.run(["trackbed", "wait", "--timeout", "180"], timeout=200, check=True)
    return prepare(node)


def _try(node: Node, faults: tuple[Fault, ...], wanted: dict[str, object], seed: int) -> Outcome:
    try:
        return run(node, faults, wanted, random.Random(seed))  # noqa: S311
    except LabError as error:
        group = faults[0].group if len(faults) == 1 else "two at once"
        return Outcome(tuple(fault.name for fault in faults), group, wrong=(f"the trial itself: {error}",))


def _minimise(node: Node, faults: tuple[Fault, ...], wanted: dict[str, object], seed: int) -> None:
    """Say whether one of the faults does it alone."""
    for fault in faults:
        alone = _try(node, (fault,), wanted, seed)
        click.echo(f"  {fault.name} alone: {'; '.join(alone.wrong) or 'ends well'}")
        if alone.wrong:
            return
        wanted = _afresh(node)
    click.echo("  only both together")


def _say(number: int, count: int, outcome: Outcome) -> None:
    lies = ", ".join(f"{seconds} s" for seconds in outcome.lies.values()) or "-"
    end = f"as before after {outcome.recovery} s" if outcome.recovery is not None else "not as before"
    click.echo(f"{number + 1}/{count} {' + '.join(outcome.faults)}: {end}; said ready for {lies}; {outcome.memory} kB")
    for why in outcome.wrong:
        click.echo(click.style(f"  {why}", fg="red"))


def _table(rows: list[dict[str, object]]) -> None:
    """Markdown: a row for each group of faults, and one for all."""
    click.echo(
        "| Faults | Tried | Ended well | Longest lie: what events tell | Longest lie: the rest | Recovery: median | Longest |"
    )
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    groups = sorted({str(row["group"]) for row in rows})
    for group in [*groups, ""]:
        mine = [row for row in rows if group in ("", row["group"])]
        if not mine:
            continue
        well = sum(1 for row in mine if not row["wrong"])
        took = [float(row["recovery"]) for row in mine if row["recovery"] is not None]  # type: ignore[arg-type]
        lies = [max((row["lies"].get(kind, 0.0) for row in mine), default=0.0) for kind in (EVENTS, SILENT)]  # type: ignore[attr-defined]
        times = (f"{median(took):.0f} s", f"{max(took):.0f} s") if took else ("-", "-")
        click.echo(
            f"| {group or 'all'} | {len(mine)} | {well} | {lies[0]:.1f} s | {lies[1]:.1f} s | {times[0]} | {times[1]} |"
        )


if __name__ == "__main__":
    main()
