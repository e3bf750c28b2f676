from __future__ import annotations

from tasks import irqbalance
from tests.deploy.conftest import Node

RUNS = {
    "--property SubState": ["Id=irqbalance.service", "SubState=running"],
    "--property UnitFileState": ["Id=irqbalance.service", "UnitFileState=enabled"],
}
ABSENT = {
    "--property SubState": ["Id=irqbalance.service", "SubState=dead"],
    "--property UnitFileState": ["Id=irqbalance.service", "UnitFileState="],
}


def test_it_is_stopped_and_disabled(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("disabled"), RUNS)
    assert result.flat == ["systemctl stop irqbalance.service", "systemctl disable irqbalance.service"]


def test_there_is_no_such_unit(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("disabled"), ABSENT)
    assert result.planned == {"irqbalance off": False}
    assert result.flat == []


def test_untouched(node: Node) -> None:
    assert node.deploy(lambda: irqbalance.policy("untouched"), RUNS).commands == {}


def test_a_node_that_is_only_observed_keeps_it(node: Node) -> None:
    result = node.deploy(lambda: irqbalance.policy("disabled", "observe"), RUNS)
    assert result.flat == []
