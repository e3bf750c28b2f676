"""What is approved must be what the cluster signs: Python judges a request, and Go's parsers read it for the signer."""

from itertools import islice

from tests.unit.fleet.made_up_requests import compare, made_up


def test_go_reads_an_approved_request_as_the_same_request() -> None:
    found = compare(list(islice(made_up(seed=7), 4000)))
    assert found.wrong == ()
    # Neither of them refuses everything.
    assert found.approved > 100
    assert found.mine > found.approved


def test_a_weaker_approver_would_be_caught() -> None:
    mine = compare(list(islice(made_up(seed=7), 2000)), judge=lambda _: True)
    assert len(mine.wrong) > 100
