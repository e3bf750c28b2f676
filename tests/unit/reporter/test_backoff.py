"""The requests that an API server gets after an outage: each reporter retries independently of the others."""

import random
from collections import Counter

import pytest

from agent.reporter.kubernetes.backoff import FIRST_WAIT, LAST_URGENT_WAIT, LAST_WAIT, Backoff

FLEET = 8000


def comes_back(outage: float, last: float) -> float:
    """Seconds from the end of an outage that all have noticed at once until one of them tries again."""
    backoff, at = Backoff(last), 0.0
    while at < outage:
        at += backoff.failed()
    return at - outage


@pytest.mark.parametrize("last", [LAST_WAIT, LAST_URGENT_WAIT])
@pytest.mark.parametrize("outage", [60.0, 180.0, 600.0])
def test_a_fleet_comes_back_spread_over_the_longest_wait(outage: float, last: float) -> None:
    random.seed(1)
    times = [comes_back(outage, last) for _ in range(FLEET)]
    assert max(times) <= last
    busiest = max(Counter(map(int, times)).values())
    print(f"{FLEET} nodes, {outage:.0f} s, at most {last:.0f} s: {busiest} in the busiest second")  # noqa: T201
    assert busiest <= 2 * FLEET / last


def test_retry_after_is_honoured_and_success_resets_the_wait() -> None:
    backoff = Backoff()
    assert backoff.failed(30.0) >= 30.0
    for _ in range(20):
        assert backoff.failed() <= LAST_WAIT
    backoff.succeeded()
    assert backoff.failed() <= FIRST_WAIT
