"""The parser and the schema say of each spec in `specs.txt` what stands there (:mod:`tests.unit.spec.specs`)."""

import json
from typing import Any

import pytest

from agent.spec.node import SpecError, from_mapping, parse
from tests.unit.spec.specs import ALSO, cases, faults


@pytest.mark.parametrize(("text", "answer"), cases())
def test_a_spec_that_is_wrong_is_refused_with_where_what_and_the_remedy(text: str, answer: list[str]) -> None:
    assert faults(text) == [line for line in answer if line != ALSO]


@pytest.mark.parametrize(("text", "answer"), cases())
def test_the_schema_refuses_what_it_can_express(text: str, answer: list[str], validator: Any) -> None:
    assert (not validator.is_valid(json.loads(text))) == (ALSO in answer)


NIC = {"name": "a", "select": {"pci": "0000:3b:00.0"}}
# Python's own words differ from version to version, or the text is too long for a line.
OTHERS = {
    "{": "spec: not valid JSON: Expecting property name",
    "[" * 100_000: "spec: not valid JSON: ",
    '{"node_name": "n1", "node_name": "n2"}': "the key 'node_name' is given twice",
    json.dumps(
        {"node_name": "n1", "nics": [{**NIC, "vfs": {"count": 4096, "groups": [{"index": ("0-4095," * 572)[:-1]}]}}]}
    ): "groups[0]: index: ",
}


@pytest.mark.parametrize(("text", "fault"), OTHERS.items(), ids=["no key", "nested", "twice", "VFs"])
def test_other_texts_are_refused_with_a_short_message(text: str, fault: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert fault in str(caught.value)
    assert len(str(caught.value)) < 4096, "it can be printed, and is no page"


def test_a_name_of_millions_of_characters_is_refused_with_a_short_message(validator: Any) -> None:
    with pytest.raises(SpecError) as caught:
        from_mapping({"node_name": "a.b" * 2_000_000})
    assert len(str(caught.value)) < 4096, "it can be printed, and is no page"
    assert not validator.is_valid({"node_name": "a.b" * 2_000_000})


def test_an_ipv4_address_written_as_ipv6_is_refused_and_the_document_is_named() -> None:
    nic = {"name": "a", "select": {"netdev": "x"}, "rail": 0, "addresses": ["::ffff:192.0.2.1/120"]}
    with pytest.raises(SpecError) as caught:
        from_mapping({"node_name": "n1", "nics": [nic]}, "gpu-01")
    assert str(caught.value).startswith("gpu-01.nics[0].addresses[0]: ")
    assert "give it as IPv4" in str(caught.value)
