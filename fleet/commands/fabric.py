"""`trackbed fleet fabric`: the results of deploys/fabric.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from attrs import asdict
from rich.text import Text

from agent.report.printable import printable
from fleet import columns
from fleet.api import Failed
from fleet.fabric.ends import Ends
from fleet.fabric.journal import Damaged, Journal, default_path
from fleet.fabric.tests import ALL_REDUCE, TESTS, rounded
from fleet.fabric.verdict import Verdict, verdict

NOT_PROVEN = 2


@click.group()
def fabric() -> None:
    """Show the results of the fabric test (`pyinfra INVENTORY deploys/fabric.py`).

    Example: trackbed fleet fabric report
    """


@fabric.command()
@click.option(
    "--results",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file of results. [default: the last run's]",
)
@click.option("--html", "page_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write an HTML page.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON lines for programs: each NIC, each bad path, each collective, then the verdict.",
)
def report(path: Path | None, page_file: Path | None, as_json: bool) -> None:
    """Show each NIC, path and collective that is not good, and the usual rates.

    A stopped run is judged by its finished tests. The command reads a file, and does not connect to the cluster.

    Exit code: 0 every NIC is good and the test is finished, 2 otherwise, 1 the results cannot be read.

    Example: trackbed fleet fabric report --html fabric.html
    """
    journal = _read(path or default_path())
    ends = journal.run.by_name()
    judged = verdict(ends, journal.results, journal.ended is not None, journal.collectives)
    if page_file is not None:
        # Imported here, since importing matplotlib takes a second.
        from fleet.fabric.page import page
        from fleet.page import write

        write(page_file, page(ends, judged, journal.run.began, journal.run.absent))
    proven = judged.proven and not journal.run.absent
    if as_json:
        for end in judged.ends:
            click.echo(json.dumps(asdict(end)))
        for each in judged.paths:
            click.echo(json.dumps({"path": asdict(each)}))
        for collective in judged.collectives:
            click.echo(json.dumps({"collective": asdict(collective)}))
        whole = {
            "proven": proven,
            "finished": judged.finished,
            "usual": dict(judged.usual),
            "absent": journal.run.absent,
        }
        click.echo(json.dumps(whole))
    else:
        _print(journal, ends, judged)
    sys.exit(0 if proven else NOT_PROVEN)


def _read(path: Path) -> Journal:
    try:
        return Journal.read(path)
    except FileNotFoundError:
        raise Failed(f"{path} does not exist; test first: pyinfra INVENTORY deploys/fabric.py") from None
    except (Damaged, OSError) as error:
        raise Failed(str(error)) from None


def _print(journal: Journal, ends: Ends, judged: Verdict) -> None:
    rows = [*judged.left]
    rows += [(f"{each.client} -> {each.server}", "bad path", f"{each.test}: {each.message}") for each in judged.paths]
    rows += [
        (", ".join(collective.group.ends), "bad collective", f"{ALL_REDUCE}: {collective.message}")
        for collective in judged.collectives
        if collective.message
    ]
    rows += [(node, "not tested", why) for node, why in sorted(journal.run.absent.items())]
    if rows:
        texts = [(Text(printable(nic)), Text(kind, "red"), Text(printable(why))) for nic, kind, why in rows]
        columns.show(("NIC", "VERDICT", "WHY"), texts)
    for test, value in judged.usual.items():
        click.echo(f"{test}: usually {rounded(value)} {TESTS[test].unit}")
    for collective in judged.collectives:
        if collective.value is not None:
            made = collective.group
            measured = f"{rounded(collective.value)} Gbit/s by {made.program}"
            click.echo(printable(f"{ALL_REDUCE} of {', '.join(made.ends)}: {measured}"))
    stopped = "" if judged.finished else "; the test is not finished: run deploys/fabric.py again to go on"
    click.echo(
        f"{len(judged.ends) - len(judged.left)} of {len(judged.ends)} NICs are good, {len(judged.paths)} bad paths{stopped}"
    )
