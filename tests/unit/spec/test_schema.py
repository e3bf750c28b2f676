"""`trackbed schema`, checked by an independent validator."""

import json
from typing import Any

import pytest

from agent.spec.node import SpecError, parse, to_json
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


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"node_name": "GPU_1"}',
        '{"node_name": 7}',
        '{"node_name": "n1", "nic": []}',
        '{"node_name": "n1", "nics": {}}',
        '{"node_name": "n1", "mode": "watch"}',
        NIC % '"mtu": "9000"',
        NIC % '"mtu": true',
        NIC % '"mtu": 90000',
        NIC % '"state": "on"',
        NIC % '"max_read_request": 1000',
        '{"node_name": "n1", "rfs": {"entries": 30000}}',
        '{"node_name": "n1", "readiness": {"silenced": {"clock": {"until": "20261201", "reason": "r"}}}}',
        NIC % '"vfs": {"cuont": 4}',
        NIC % '"vfs": {"count": 4, "groups": [{"index": "0", "vlan": 4095}]}',
        '{"node_name": "n1", "nics": [{"name": "a", "select": {"pci": "3b:00.0"}}]}',
        '{"node_name": "n1", "disruption": {"allow": "all"}}',
    ],
)
def test_a_spec_that_the_parser_refuses_is_not_valid_in_the_schema(validator: Any, text: str) -> None:
    with pytest.raises(SpecError):
        parse(text)
    assert not validator.is_valid(json.loads(text))


def test_every_record_and_every_key_with_a_pattern_says_what_it_is() -> None:
    made = schema()
    assert {"Nic", "Selector", "Vfs", "VfGroup", "Irqs", "Rps"} <= made["$defs"].keys()
    assert all(record["description"] and not record["additionalProperties"] for record in made["$defs"].values())
    mac = made["$defs"]["Selector"]["properties"]["mac"]["anyOf"]
    assert [part["type"] for part in mac] == ["string", "null"]
    assert "02:00:5e:10:00:01" in mac[0]["description"]
