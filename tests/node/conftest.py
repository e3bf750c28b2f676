"""Checks of deployed nodes with the distribution's tools: `pytest tests/node --hosts=ssh://root@gpu-01,ssh://root@gpu-02`.

A check that has nothing to look at is skipped, by name; TRACKBED_NO_SKIP=1 makes that a failure, but for those whose
reasons end with one of the words in TRACKBED_MAY_SKIP ("link_state,min_tx_rate").
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.evidence import Host, Nic, Node, read_node


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Where everything must be checked, a skip is a failure."""
    report: Any = yield
    if report.skipped and os.environ.get("TRACKBED_NO_SKIP") == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if not reason.endswith(
            tuple(f" {word}" for word in os.environ.get("TRACKBED_MAY_SKIP", "").split(",") if word)
        ):
            report.outcome = "failed"
            report.longrepr = f"not checked, and TRACKBED_NO_SKIP=1: {reason}"
    return report  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def node(host: Host) -> Node:
    """The node and its spec. What its tools say is read once for each group of checks, at the first that asks."""
    return read_node(host)


@pytest.fixture(scope="module")
def nics(node: Node) -> tuple[Nic, ...]:
    """The spec's NICs and the functions that they mean."""
    if not node.spec.nics:
        pytest.skip(f"{node.name}: its spec names no NIC")
    return node.nics()
