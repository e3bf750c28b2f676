"""bench.boot computes the agent's share of a boot from what a node prints."""

import json

import pytest

from bench.boot import boot


def test_the_agent_s_share_is_from_its_start_until_ready() -> None:
    one = boot("90000000\n", json.dumps({"ready": True, "since": 100.0}))
    assert (one.started, one.ready) == (90.0, 100.0)
    assert one.share == pytest.approx(0.1)


def test_a_node_that_is_not_ready_is_no_result() -> None:
    with pytest.raises(ValueError, match="not ready"):
        boot("1", json.dumps({"ready": False, "since": 3.0}))
