"""`trackbed schema`, checked by an independent validator."""

import json
from typing import Any

import pytest

from agent.spec.node import parse, to_json
from cli.schema import DIALECT, schema
from tests.unit.spec.test_spec import FULL, NIC


def test_the_schema_is_valid_in_its_dialect(validator: Any) -> None:
    made = schema()
    assert made["$schema"] == DIALECT
    validator.check_schema(made)


@pytest.mark.parametrize("text", [FULL, to_json(parse(FULL)), '{"node_name": "n1"}', NIC % '"mtu": null'])
def test_a_spec_that_the_parser_accepts_is_valid_in_the_schema(validator: Any, text: str) -> None:
    parse(text)
    validator.validate(json.loads(text))


def test_every_record_and_every_key_with_a_pattern_says_what_it_is() -> None:
    made = schema()
    assert {"Nic", "Selector", "Vfs", "VfGroup", "Irqs", "Rps"} <= made["$defs"].keys()
    assert all(record["description"] and not record["additionalProperties"] for record in made["$defs"].values())
    mac = made["$defs"]["Selector"]["properties"]["mac"]["anyOf"]
    assert [part["type"] for part in mac] == ["string", "null"]
    assert "02:00:5e:10:00:01" in mac[0]["description"]
