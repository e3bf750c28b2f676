"""The samples that Prometheus would scrape from a fleet in a day, as OpenMetrics. Most nodes are well, some are not."""

from collections.abc import Iterator

EVERY = 300
"""Seconds between two scrapes: a third of a step of the report's."""

POINTS = 288
"""A day of them."""

BROKEN, SILENT, DRIFTING, FLAPPING = 3, 5, 6, 7
"""Numbers of the nodes that are not ready since noon, do not answer since the morning, drift in each hour, and are not ready at
times. In a larger fleet one node in 64 is like the first three."""

OFTEN = 64


def name(number: int) -> str:
    return f"gpu-{number + 1:04}.example.net:9809"


def samples(nodes: int, end: int) -> Iterator[str]:
    """The samples, each series by itself."""
    times = [end - EVERY * left for left in reversed(range(POINTS))]

    def series(metric: str, labels: str, number: int, values: list[float | None]) -> Iterator[str]:
        of = f'{metric}{{job="trackbed",instance="{name(number)}"{labels}}}'
        return (f"{of} {value} {when}" for when, value in zip(times, values, strict=True) if value is not None)

    answers = [
        [0.0 if _like(number, SILENT) and point > POINTS // 3 else 1.0 for point in range(POINTS)]
        for number in range(nodes)
    ]
    ready = [
        [_ready(number, point) if up else None for point, up in enumerate(answers[number])] for number in range(nodes)
    ]
    yield "# TYPE up gauge"
    for number in range(nodes):
        yield from series("up", "", number, [*answers[number]])
    yield "# TYPE trackbed_ready gauge"
    for number in range(nodes):
        yield from series("trackbed_ready", "", number, ready[number])
    yield "# TYPE trackbed_condition gauge"
    for type, bad in (("NicsPresent", BROKEN), ("Uncontended", DRIFTING)):
        labels = f',type="{type}",status="False",severity="required"'
        for number in range(nodes):
            if _like(number, bad):
                yield from series("trackbed_condition", labels, number, [1.0] * POINTS)
    yield "# TYPE trackbed_drift_repairs counter"
    for kind, step in (("vfs", 48), ("links", 12)):
        for number in range(nodes):
            counts: list[float | None] = [point // step if _like(number, DRIFTING) else 0.0 for point in range(POINTS)]
            if number < OFTEN or _like(number, DRIFTING):
                yield from series("trackbed_drift_repairs_total", f',kind="{kind}"', number, counts)
    yield "# TYPE trackbed_drift_suspects counter"
    for number in range(nodes):
        if _like(number, DRIFTING):
            beside: list[float | None] = [point // 12 for point in range(POINTS)]
            yield from series("trackbed_drift_suspects_total", ',kind="links",program="NetworkManager"', number, beside)
    now: list[float | None] = [*[None] * (POINTS - 1), 1.0]
    yield "# TYPE trackbed_build_info gauge"
    for number in range(nodes):
        version = "0.2.0" if number % 4 else "0.1.0"
        yield from series("trackbed_build_info", f',version="{version}"', number, now)
    yield "# TYPE trackbed_spec_info gauge"
    for number in range(nodes):
        yield from series("trackbed_spec_info", f',hash="7003db781de62589",node="gpu-{number + 1:04}"', number, now)


def _like(number: int, one: int) -> bool:
    return number % OFTEN == one


def _ready(number: int, point: int) -> float:
    if _like(number, BROKEN) and point >= POINTS // 2:
        return 0.0
    return 0.0 if number % OFTEN == FLAPPING and point % 24 == 0 else 1.0
