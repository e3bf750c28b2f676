"""Queries a Prometheus for values at the end of a period, and in equal steps over the period."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
from attrs import field, frozen

from fleet.api import Failed

POINTS = 96
"""The most points of a course. A day has one for each quarter of an hour."""

SHORTEST = 60
"""Seconds: the shortest time between two points."""

TIMEOUT = httpx2.Timeout(10.0, read=120.0)
"""Seconds for the connection, and for an answer: thousands of nodes over a week take a while."""

Labels = Mapping[str, str]
Course = Sequence[float | None]
"""A value at each point in time; None where there is none."""


@frozen
class Prometheus:
    """A server, and the queried period: ``points`` steps of ``step`` seconds each. The last one ends at ``end``."""

    url: str
    end: int
    step: int
    points: int
    _client: httpx2.Client = field(repr=False)

    @property
    def times(self) -> tuple[int, ...]:
        """The points, in seconds since the epoch."""
        return tuple(self.end - self.step * left for left in reversed(range(self.points)))

    def at_end(self, query: str) -> list[tuple[Labels, float]]:
        """Each series of a query's result at the end. ``$range`` in the query is the whole period."""
        result = self._ask("query", query, time=self.end)
        return [(each["metric"], float(each["value"][1])) for each in result]

    def over_time(self, query: str) -> list[tuple[Labels, Course]]:
        """Each series of a query's result over time. ``$step`` in the query is the length of a step."""
        times = self.times
        result = self._ask("query_range", query, start=times[0], end=times[-1], step=self.step)
        courses: list[tuple[Labels, Course]] = []
        for each in result:
            values = {int(when): float(value) for when, value in each["values"]}
            courses.append((each["metric"], [values.get(when) for when in times]))
        return courses

    def _ask(self, what: str, query: str, **more: int) -> list[dict[str, Any]]:
        written = query.replace("$range", f"{self.step * self.points}s").replace("$step", f"{self.step}s")
        # By POST, since a query with the names of many nodes is longer than a URL may be.
        try:
            answer = self._client.post(
                what, data={"query": written, **{name: str(value) for name, value in more.items()}}
            )
            document = answer.json()
            if document["status"] != "success":
                raise Failed(f"{self.url} refuses a query: {document['error']}; ask for fewer hours, or see its log")
            return list(document["data"]["result"])
        except httpx2.HTTPError as error:
            raise Failed(
                f"{self.url} does not answer: {str(error) or type(error).__name__}; is it a Prometheus?"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Failed(
                f"{self.url} answers {answer.status_code} and no JSON of Prometheus's; is it a Prometheus?"
            ) from None


@contextmanager
def connected(url: str, hours: float, end: float) -> Iterator[Prometheus]:
    """Connect to a Prometheus.

    :param end: seconds since the epoch.
    """
    step = max(SHORTEST, round(hours * 3600 / POINTS))
    points = max(2, round(hours * 3600 / step))
    try:
        with httpx2.Client(base_url=f"{url.rstrip('/')}/api/v1/", timeout=TIMEOUT) as client:
            # Messages show this URL, so it is without the password that the given one may have.
            shown = str(httpx2.URL(url).copy_with(username=None, password=None)).rstrip("/")
            yield Prometheus(shown, int(end), step, points, client)
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, UnicodeEncodeError) as error:
        raise Failed(f"{url} is no URL of a Prometheus: {error}; give one as http://HOST:9090") from None
