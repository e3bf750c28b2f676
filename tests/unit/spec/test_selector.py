"""Which selectors and entries with `each` are accepted, by the parser and by the schema, and how others are refused."""

from typing import Any

import pytest

from agent.spec.node import from_mapping, parse, to_json

EACH = {"vendor": "15b3", "each": True}
NETWORK = {"network": "10.{rail}.0.0/16"}
STORAGE: dict[str, Any] = {"name": "storage", "select": {"pci": "0000:3b:00.0"}}


def entry(select: dict[str, Any], name: str = "rail{index}", **keys: Any) -> dict[str, Any]:
    return {"name": name, "select": select, **keys}


def node(*nics: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"node_name": "n1", "nics": list(nics), **more}


def exactly(number: int) -> dict[str, int]:
    return {"min": number, "max": number}


@pytest.mark.parametrize(
    "document",
    [
        node(entry({**EACH, "device": "1021", "min": 1, "max": 8})),
        node(entry({"driver": "mlx5_core", "each": True}, altnames=["rail{index}", "r{index}.fabric"])),
        node(
            entry({"serial": "MT1", "each": True}, name="port-{index}_a", vfs={"count": 2, "groups": [{"index": "1"}]})
        ),
        node(entry({**EACH, "without": ["storage"]}), STORAGE),
        node(entry({**EACH, "each": False}, name="rail")),
        node(entry({**EACH, "max": 4}, rdma={}), rdma={"at_least": 4}),
        node(entry(EACH), entry({"vendor": "8086", "each": True}, name="port{index}")),
        node(
            entry({**EACH, **exactly(8)}, rail=0, addresses=[NETWORK]),
            entry({"vendor": "8086", "each": True, **exactly(2)}, name="port{index}", rail=8, addresses=[NETWORK]),
            node_number=5,
        ),
        node(entry(EACH), entry({"pci": "0000:3b:00.0"}, name="rail64")),
    ],
)
def test_an_entry_with_each_is_read_back_as_it_was_written(document: dict[str, Any], validator: Any) -> None:
    spec = from_mapping(document)
    assert parse(to_json(spec)) == spec
    validator.validate(document)


@pytest.mark.parametrize("pci", ["0000:3b:00.0", "ffff:00:1f.7", "10002:01:00.0", "ffffffff:00:00.0"])
def test_a_domain_has_four_digits_or_more(pci: str, validator: Any) -> None:
    document = node(entry({"pci": pci}, name="rail0"))
    assert from_mapping(document).nics[0].select.pci == pci
    validator.validate(document)
