"""Queries a Prometheus for values at the end of a period, and in equal steps over the period."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from netrc import NetrcParseError
from typing import Any

import httpx2
from attrs import field, frozen

from fleet.api import Failed
from fleet.connection import made
from fleet.kubeconfig import Misconfigured

POINTS = 96
"""The most points of a course. A day has one for each quarter of an hour."""

SHORTEST = 60
"""Seconds: the shortest time between two points."""

TIMEOUT = httpx2.Timeout(10.0, read=120.0)
"""Seconds for the connection, and for an answer: thousands of nodes over a week take a while."""

LOGIN = "write it into ~/.netrc, readable by you alone: machine {} login USER password PASSWORD"

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
    _remedy: str
    """What to do if the server asks for a login, or does not accept the one that it was given."""

    @property
    def times(self) -> tuple[int, ...]:
        """The points, in seconds since the epoch."""
        return tuple(self.end - self.step * left for left in reversed(range(self.points)))

    def at_end(self, query: str) -> list[tuple[Labels, float]]:
        """Each series of a query's result at the end. ``$range`` in the query is the whole period."""
        result = self._ask("query", query, time=self.end)
        return [(each["metric"], float(each["value"][1])) for each in result]

    def over_time(self, query: str) -> list[tuple[Labels, Course]]:
        """Each series of a query's result over time. ``$step`` in the query is the length of a step.

        A value counts for the next point: Thanos's query frontend moves the points back to multiples of the step
        (`--query-range.align-range-with-step`, its default; step_align.go).
        """
        times = self.times
        result = self._ask("query_range", query, start=times[0], end=times[-1], step=self.step)
        courses: list[tuple[Labels, Course]] = []
        for each in result:
            values = {math.ceil((when - times[0]) / self.step): float(value) for when, value in each["values"]}
            courses.append((each["metric"], [values.get(point) for point in range(self.points)]))
        return courses

    def _ask(self, what: str, query: str, **more: int) -> list[dict[str, Any]]:
        written = query.replace("$range", f"{self.step * self.points}s").replace("$step", f"{self.step}s")
        # By POST, since a query with the names of many nodes is longer than a URL may be.
        try:
            answer = self._client.post(
                what, data={"query": written, **{name: str(value) for name, value in more.items()}}
            )
            if answer.status_code == httpx2.codes.UNAUTHORIZED:
                raise Failed(f"{self.url} asks for a login, or does not accept the given one; {self._remedy}")
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
    """Connect to a Prometheus, with the login that ``~/.netrc`` has for its host, if any.

    :param end: seconds since the epoch.
    """
    step = max(SHORTEST, round(hours * 3600 / POINTS))
    points = max(2, round(hours * 3600 / step))
    api, shown = _urls(url)
    login, fault = _login()
    try:
        made_client = made(
            lambda: httpx2.Client(base_url=api, timeout=TIMEOUT, auth=login), "SSL_CERT_FILE", "name another file"
        )
    except Misconfigured as error:
        raise Failed(str(error)) from None
    with made_client as opened:
        yield Prometheus(shown, int(end), step, points, opened, fault or LOGIN.format(api.host))


def _login() -> tuple[httpx2.NetRCAuth | None, str]:
    """The logins of ``~/.netrc``, and why they cannot be used. Other programs accept more: curl, one that others may read."""
    try:
        return httpx2.NetRCAuth(), ""
    except (NetrcParseError, UnicodeDecodeError) as error:
        return None, f"~/.netrc cannot be used: {error}; correct it"
    except OSError:
        return None, ""


def _urls(given: str) -> tuple[httpx2.URL, str]:
    """The URL of the API, and the given one for messages.

    :raises Failed: it is not that of a server, or it has a login, which each program on this host could read.
    """
    try:
        url = httpx2.URL(given)
        if url.scheme in ("http", "https") and url.host:
            if url.userinfo:
                raise Failed(f"the URL of the Prometheus has a login, which other users see; {LOGIN.format(url.host)}")
            return httpx2.URL(f"{given.rstrip('/')}/api/v1/"), str(url).rstrip("/")
    except (httpx2.InvalidURL, UnicodeEncodeError):
        pass
    # What is no URL may have a password anywhere.
    shown = "the given text" if "@" in given else given
    raise Failed(f"{shown} is no URL of a Prometheus; give one as http://HOST:9090")
