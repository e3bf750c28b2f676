"""`trackbed stat`."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator

import click

from agent.report.options import number
from agent.report.printable import printable
from cli import terminal
from cli.commands import Failed, as_json
from cli.counters import Meter, NoDevice, Source, counters, read, sources

DECIMAL = ("", "k", "M", "G", "T", "P")
BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
HEADER = f"{'':<12} {'now':>12} {'max':>12} {'average':>12} {'min':>12} {'total':>12}"


@click.command()
@click.option(
    "-d", "--device", default=None, help="RDMA device, netdev or PCI address. [default: the only RDMA device]"
)
@click.option("-l", "--live", is_flag=True, help="Show rates once each interval, until Ctrl-C.")
@click.option(
    "--interval",
    type=number("seconds", 0.1, 3600.0),
    default=None,
    show_default="1",
    help="With -l: seconds between two readings.",
)
@click.option("--count", type=click.IntRange(1), default=None, help="With -l: end after this number of intervals.")
@as_json
def stat(device: str | None, live: bool, interval: float | None, count: int | None, as_json: bool) -> None:
    """Show the traffic of an RDMA device and its netdev.

    Without -l: the present value of every counter. With -l: bytes and packets per second, received and sent, with maximum,
    average and minimum, as a live view on a terminal or else as a line for each interval; at the end, totals and elapsed time.
    --json prints an object for each interval; the last object has the totals.

    Exit code: 0 (also after Ctrl-C), 1 no such device.

    Example: trackbed stat -d mlx5_0 -l
    """
    if not live and (interval is not None or count is not None):
        raise click.UsageError("--interval and --count belong to -l; give that, too")
    from agent.linux.files import LinuxFiles

    files = LinuxFiles()
    try:
        chosen = sources(files, device)
    except NoDevice as error:
        raise Failed(str(error)) from None
    if not live:
        _totals({source: counters(files, source) for source in chosen}, as_json)
        return
    meters = [Meter(source) for source in chosen]
    screen = terminal.Screen() if terminal.live() and not as_json else None
    try:
        for number in itertools.count():
            due = time.monotonic() + (1.0 if interval is None else interval)
            for meter in meters:
                meter.take(read(files, meter.source), time.monotonic())
            if number:
                _show(meters, screen, as_json)
            if number == count:
                break
            time.sleep(max(0.0, due - time.monotonic()))
    except KeyboardInterrupt:
        pass
    if not as_json:
        _sum_up(meters, screen)


def _totals(totals: dict[Source, dict[str, int]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([{"name": s.name, "port": s.port, "counters": values} for s, values in totals.items()]))
        return
    for source, values in totals.items():
        click.echo(click.style(printable(str(source)), bold=True))
        for name, value in sorted(values.items()):
            click.echo(f"  {name:<32} {value:>22}")


def _show(meters: list[Meter], screen: terminal.Screen | None, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"time": time.time(), "devices": [_plain(meter) for meter in meters]}))
    elif screen is not None:
        screen.show([*_table(meters), "", "Ctrl-C ends this view"])
    else:
        when = time.strftime("%H:%M:%S")
        for meter in meters:
            rates = "  ".join(f"{name} {rate_text(rate.now, name)}" for name, rate in meter.rates())
            click.echo(f"{when}  {printable(str(meter.source))}  {rates or 'counts nothing'}")


def _plain(meter: Meter) -> dict[str, object]:
    rates = {
        name: {"now": r.now, "max": r.maximum, "average": r.average, "min": r.minimum, "total": r.total}
        for name, r in meter.rates()
    }
    return {"name": meter.source.name, "port": meter.source.port, "elapsed": meter.elapsed, **rates}


def _table(meters: list[Meter]) -> Iterator[str]:
    for meter in meters:
        yield click.style(printable(str(meter.source)), bold=True)
        yield HEADER
        for name, rate in meter.rates():
            speeds = (rate_text(value, name) for value in (rate.now, rate.maximum, rate.average, rate.minimum))
            total = rate_text(rate.total, name).removesuffix("/s")
            yield f"{name:<12} " + " ".join(f"{value:>12}" for value in (*speeds, total))


def _sum_up(meters: list[Meter], screen: terminal.Screen | None) -> None:
    table = [*_table(meters), f"elapsed {meters[0].elapsed:.1f} s"]
    if screen is not None:
        screen.show(table)
    else:
        click.echo("\n".join(table))


def rate_text(value: float, name: str) -> str:
    """A rate with three digits and a prefix: binary for bytes, as eRDMA's tools have it, and decimal for packets."""
    unit, prefixes, step = ("B/s", BINARY, 1024) if name.endswith("bytes") else ("/s", DECIMAL, 1000)
    power = 0
    # Numbers with four digits get the next prefix, which affects 1,000 to 1,023 of a binary one.
    while value >= min(step, 999.5) and power < len(prefixes) - 1:
        value /= step
        power += 1
    digits = 0 if power == 0 else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {prefixes[power]}{unit}"
