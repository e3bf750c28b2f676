"""What a node answers may be anything: it fails that node alone, in one line."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from paramiko.file import BufferedFile
from pyinfra.api.exceptions import FactProcessError
from pyinfra.connectors import util
from pyinfra.context import host

from tasks.common.facts import FactBase
from tasks.hardware import NodeHardware
from tests.deploy.conftest import Node
from tests.fuzz.targets.facts import FACTS

GARBAGE = ["inspection", "{", "\x1b[2J not JSON"]


def test_every_fact_survives_any_output() -> None:
    assert len(FACTS) > 40
    # pyinfra's own class ends the deploy of all nodes for one that answers nonsense.
    assert [fact.name for fact in FACTS if not issubclass(fact, FactBase)] == []


def test_a_node_that_answers_nonsense_fails(node: Node) -> None:
    result = node.deploy(lambda: host.get_fact(NodeHardware), {"inspect": GARBAGE})
    assert result.failed
    assert "NodeHardware cannot be read: JSONDecode" in result.errors[0]


def test_a_number_that_no_float_can_be_is_nonsense_too() -> None:
    class Number(FactBase[float]):
        def process(self, output: list[str]) -> float:
            return float(int(output[0]))

    with pytest.raises(FactProcessError, match="the node's answer to Number cannot be read: OverflowError"):
        Number().process(["1" + "0" * 400])


def test_a_node_s_output_is_escaped_on_the_terminal() -> None:
    class Shown(FactBase[str]):
        def process(self, output: list[str]) -> str:
            raise ValueError(output[0])

    with pytest.raises(FactProcessError) as refused:
        Shown().process(["\x1b[2J"])
    assert "\x1b" not in str(refused.value)


BYTES = b"# \xcd\xf8\xc2\xe7\nNCCL_IB_TC=136\n\xff"
READ = [r"# \xcd\xf8\xc2\xe7", "NCCL_IB_TC=136", r"\xff"]

READER = "pyinfra.connectors.util:read_buffer"


def test_an_answer_of_ssh_with_bytes_that_are_not_utf_8_is_read_to_its_end(replace: Callable[..., None]) -> None:
    replace(READER)
    sent = BytesIO(BYTES)

    class Channel(BufferedFile):  # type: ignore[type-arg]
        _read = sent.read

    channel: Any = Channel()
    channel._set_mode("r", 4)
    output = util.read_output_buffers(channel, [], timeout=None, print_output=False, print_prefix="")
    assert output.stdout_lines == READ


def test_an_answer_of_this_node_with_bytes_that_are_not_utf_8_is_read_to_its_end(replace: Callable[..., None]) -> None:
    replace(READER)
    octal = "".join(f"\\{byte:03o}" for byte in BYTES)
    status, output = util.run_local_process(f"printf '{octal}'")
    assert (status, output.stdout_lines) == (0, READ)
