"""What a node answers may be anything: it fails that node alone, in one line."""

from __future__ import annotations

import base64

import pytest
from pyinfra.api.exceptions import FactProcessError, PyinfraError
from pyinfra.context import host

from tasks.common.facts import FactBase
from tasks.hardware import NodeHardware
from tasks.kubernetes import NodeCredentials
from tests.deploy.conftest import Node
from tests.fuzz.targets.facts import FACTS

GARBAGE = ["inspection", "{", "\x1b[2J not JSON"]


def test_every_fact_survives_any_output() -> None:
    assert len(FACTS) > 40
    # pyinfra's own class ends the deploy of all nodes for one that answers nonsense.
    assert [fact.name for fact in FACTS if not issubclass(fact, FactBase)] == []


def test_a_node_that_answers_nonsense_fails_alone(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    # There is one node here; a deploy to several continues on the others.
    with pytest.raises(PyinfraError, match="No hosts remaining"):
        node.deploy(lambda: host.get_fact(NodeHardware), {"inspect": GARBAGE})
    assert "the node's answer to NodeHardware cannot be read: JSONDecodeError" in caplog.text


def test_a_number_that_no_float_can_be_is_nonsense_too() -> None:
    claims = base64.urlsafe_b64encode(b'{"exp": 1' + b"0" * 400 + b"}").decode().rstrip("=")
    with pytest.raises(FactProcessError, match="the node's answer to NodeCredentials cannot be read: OverflowError"):
        NodeCredentials().process([f"secret {claims}"])


def test_a_node_s_output_is_escaped_on_the_terminal() -> None:
    class Shown(FactBase[str]):
        def process(self, output: list[str]) -> str:
            raise ValueError(output[0])

    with pytest.raises(FactProcessError) as refused:
        Shown().process(["\x1b[2J"])
    assert "\x1b" not in str(refused.value)
