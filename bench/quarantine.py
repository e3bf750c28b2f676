"""Simulates links that flap, and prints whom settings of `readiness.flaps` quarantine: `python -m bench.quarantine`.

A fleet has healthy links, some of them behind a switch that restarts, and bad ones. The losses of carrier of each link go
through the agent's own rule (agent/probes/link_flaps.py). The rates are assumptions: published ones are of whole fabrics.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import quantiles

import click
from attrs import frozen

from agent.probes.link_flaps import DAY, Health, Loss
from agent.spec.node import Flaps
from handbook.campaign import DOCS, write
from handbook.markdown import table

HOUR = 3600.0
NODES_OF_A_SWITCH = 32
REPAIR = 3 * DAY
"""Seconds from the first loss of a bad link until somebody repairs it."""

SETTINGS = (
    Flaps(),
    Flaps(losses=1),
    Flaps(losses=2, within=300),
    Flaps(losses=3, within=300),
    Flaps(daily=50),
    Flaps(daily=4),
    Flaps(daily=10),
    Flaps(quiet=600),
    Flaps(quiet=600, probation=3600),
    Flaps(quiet=4 * 3600),
)
"""The first are the defaults. Two within 300 s: as others evict a node after two alerts."""

COLUMNS = {
    "losses": "Losses within",
    "daily": "or in a day",
    "quiet": "Quiet, probation",
    "false": "Healthy links quarantined",
    "lost": "Hours of healthy links lost",
    "missed": "Bad links missed",
    "delay": "Until quarantine, p50 and p90",
    "suffered": "Losses of a bad link while in use",
}


@frozen
class Link:
    """A link's losses in their order; ``bad``: from when to when it is bad, None if it is healthy."""

    losses: tuple[Loss, ...]
    bad: tuple[float, float] | None


@frozen
class Rates:
    """``flaps``: of a healthy link in a day. ``bad``: share of links that become bad. ``restarts``: of a switch in a month."""

    flaps: float
    bad: float
    restarts: float


def fleet(nodes: int, rails: int, days: int, rates: Rates, seed: int) -> Iterator[Link]:
    """The links of a fleet. In each group of nodes, one switch connects the NICs of one rail."""
    dice = random.Random(seed)  # noqa: S311  no secret
    end = days * DAY
    for first in range(0, nodes, NODES_OF_A_SWITCH):
        for _ in range(rails):
            restarts = [*_poisson(dice, rates.restarts / (30 * DAY), 0.0, end)]
            for _ in range(min(NODES_OF_A_SWITCH, nodes - first)):
                yield _link(dice, restarts, end, rates)


def _link(dice: random.Random, restarts: Sequence[float], end: float, rates: Rates) -> Link:
    losses = [loss for at in restarts for loss in _bounced(dice, at, dice.uniform(120, 600))]
    for at in _poisson(dice, rates.flaps / DAY, 0.0, end):
        losses += _bounced(dice, at, dice.choice((1.0, 1.0, 5.0, 30.0)))
    bad = None
    if dice.random() < rates.bad:
        began = dice.uniform(0.0, end - REPAIR)
        own = list(_bad(dice, began))
        bad = own[0].began, began + REPAIR
        losses += own
    return Link(tuple(_apart(sorted(losses, key=lambda loss: loss.began))), bad)


def _poisson(dice: random.Random, rate: float, began: float, end: float) -> Iterator[float]:
    while rate and (began := began + dice.expovariate(rate)) < end:
        yield began


def _bounced(dice: random.Random, at: float, seconds: float) -> Iterator[Loss]:
    """A loss, and with a chance of one in five another one shortly after it came up, and so on."""
    yield Loss(at, at + seconds)
    while dice.random() < 0.2:
        at += seconds + dice.uniform(1, 30)
        seconds = 2.0
        yield Loss(at, at + seconds)


def _bad(dice: random.Random, at: float) -> Iterator[Loss]:
    """The losses of a bad link: for some hours 0.3 to 60 in an hour, then none for some hours, until it is repaired."""
    end = at + REPAIR
    rate = 0.3 * 200 ** dice.random() / HOUR
    yield Loss(at, at + 1.0)
    while at < end:
        active = min(end, at + dice.uniform(1, 6) * HOUR)
        for each in _poisson(dice, rate, at, active):
            yield Loss(each, each + dice.choice((1.0, 2.0, 10.0)))
        at = active + dice.uniform(2, 24) * HOUR


def _apart(losses: Sequence[Loss]) -> Iterator[Loss]:
    """Without the losses that begin while another one lasts."""
    until = 0.0
    for loss in losses:
        if loss.began >= until:
            until = loss.ended or 0.0
            yield loss


def quarantines(link: Link, end: float, flaps: Flaps) -> tuple[list[tuple[float, float]], int]:
    """When the link was quarantined, and how many losses of a bad link came while it was in use."""
    found: list[tuple[float, float]] = []
    suffered = 0
    health = Health()
    for loss in link.losses:
        now = health.at(loss.began, flaps)
        if health.state == "quarantined" != now.state:
            found.append((health.since, health.free))
        if link.bad and link.bad[0] <= loss.began < link.bad[1]:
            suffered += now.state != "quarantined"
        health = now.after(loss, flaps)
    if health.state == "quarantined":
        found.append((health.since, min(health.free, end)))
    return found, suffered


def row(links: Sequence[Link], end: float, flaps: Flaps) -> dict[str, str]:
    """What these settings do to these links."""
    false, lost, healthy = 0, 0.0, 0
    delays: list[float] = []
    missed, suffered, bad = 0, 0, 0
    for link in links:
        found, own = quarantines(link, end, flaps)
        if link.bad is None:
            healthy += 1
            false += bool(found)
            lost += sum(until - since for since, until in found)
            continue
        bad += 1
        suffered += own
        during = [since for since, until in found if until > link.bad[0] and since < link.bad[1]]
        if during:
            delays.append(max(0.0, during[0] - link.bad[0]))
        else:
            missed += 1
    deciles = quantiles(delays, n=10) if len(delays) > 1 else [0.0] * 9
    return {
        "losses": f"{flaps.losses} in {flaps.within} s",
        "daily": str(flaps.daily),
        "quiet": f"{flaps.quiet / 60:.0f} min, {flaps.probation / HOUR:.0f} h",
        "false": f"{false} of {healthy}",
        "lost": f"{lost / HOUR:.0f}",
        "missed": f"{missed} of {bad}",
        "delay": f"{deciles[4] / 60:.0f} min, {deciles[8] / 60:.0f} min",
        "suffered": f"{suffered / max(1, bad):.1f}",
    }


@click.command()
@click.option("--nodes", default=1000, show_default=True, help="Nodes of the fleet.")
@click.option("--rails", default=8, show_default=True, help="NICs of each node.")
@click.option("--days", default=30, show_default=True, help="How long it runs.")
@click.option("--flaps", default=0.05, show_default=True, help="Losses of carrier of a healthy link in a day.")
@click.option("--bad", default=0.01, show_default=True, help="Share of the links that become bad, for three days.")
@click.option("--restarts", default=0.5, show_default=True, help="Restarts of a switch in 30 days.")
@click.option("--seed", default=1, show_default=True, help="Another number gives other losses.")
@click.option(
    "--record", is_flag=True, help="Write docs/campaign/quarantine.json, from which `make docs` makes the table."
)
def main(nodes: int, rails: int, days: int, flaps: float, bad: float, restarts: float, seed: int, record: bool) -> None:
    """Print false and missed quarantines of several settings; the first row has the defaults.

    Exit code: 0 done.
    """
    links = list(fleet(nodes, rails, days, Rates(flaps, bad, restarts), seed))
    rows = [row(links, days * DAY, settings) for settings in SETTINGS]
    click.echo(table([*COLUMNS.values()], [[*each.values()] for each in rows]))
    if record:
        write("quarantine", COLUMNS, rows, DOCS)


if __name__ == "__main__":
    main()
