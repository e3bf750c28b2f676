"""What is approved must be what the cluster signs: Python judges a request, and Go's parsers read it for the signer."""

from itertools import islice

import pytest

from tests.unit.fleet.made_up_requests import compare, made_up

pytestmark = pytest.mark.slow


def test_go_reads_an_approved_request_as_the_same_request() -> None:
    compared = compare(list(islice(made_up(seed=7), 4000)))
    assert compared.wrong == ()
    # Neither of them refuses everything.
    assert compared.approved > 100
    assert compared.mine > compared.approved


def test_a_weaker_approver_would_be_caught() -> None:
    mine = compare(list(islice(made_up(seed=7), 2000)), judge=lambda _: True)
    assert len(mine.wrong) > 100
