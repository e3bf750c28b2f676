"""The node's spec, and the texts in it: ranges, addresses, selectors."""

import json
from collections.abc import Sequence
from contextlib import suppress

from agent.spec.node import NodeSpec, SpecError, from_mapping, parse, spec_hash, to_json
from agent.spec.ranges import format_ranges, parse_ranges
from tests.fuzz.targets import choose, chosen

DOCUMENT = {
    "node_name": "n1",
    "nics": [
        {
            "name": "rail0",
            "rail": 0,
            "select": {"pci": "0000:21:00.0"},
            "mtu": 9000,
            "addresses": ["10.1.0.1/24"],
            "channels": {"combined": 4},
            "vfs": {"count": 4, "defaults": {"trust": True}, "groups": [{"index": "0-1,3", "vlan": 5}]},
            "roce": {"trust": "dscp", "pfc": "3"},
        }
    ],
    "rps": {"enable": True},
    "sysctls": {"net.core.somaxconn": "4096"},
}


def example() -> NodeSpec:
    """A spec that has most of the keys."""
    return from_mapping(DOCUMENT)


def _spec(data: bytes) -> None:
    # As a file is read: what is no UTF-8 is refused before.
    with suppress(SpecError, UnicodeDecodeError):
        spec = parse(data.decode())
        text = to_json(spec)
        text.encode()
        assert parse(text) == spec
        assert spec_hash(parse(text)) == spec_hash(spec)


def _ranges(data: bytes) -> None:
    with suppress(ValueError):
        numbers = parse_ranges(data.decode())
        assert parse_ranges(format_ranges(numbers)) == numbers


def check(data: bytes) -> None:
    """Parse a spec or a list of ranges. If it is accepted, it is written and read again, and must be the same."""
    choose(data, (_spec, _ranges))


def seeds() -> Sequence[bytes]:
    """A spec, one for each of its keys, and ranges."""
    single = [{"node_name": "n1", key: value} for key, value in DOCUMENT.items() if key != "node_name"]
    return [*(chosen(0, json.dumps(one).encode()) for one in (DOCUMENT, *single)), chosen(1, b"0-3,8,10-12")]
