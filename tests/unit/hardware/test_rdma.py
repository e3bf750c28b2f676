"""RDMA devices: what follows from the files of sysfs."""

import pytest

from agent.hardware.rdma import RdmaPort, transport


@pytest.mark.parametrize(
    ("node_type", "link_layer", "expected"),
    [
        ("CA", "InfiniBand", "InfiniBand"),
        ("CA", "Ethernet", "RoCE"),
        ("RNIC", "Ethernet", "iWARP"),
        ("unspecified", "Unspecified", "unspecified"),
        ("CA", None, "CA"),
        ("", None, None),
    ],
)
def test_the_transport_follows_from_node_type_and_link_layer(
    node_type: str, link_layer: str | None, expected: str | None
) -> None:
    assert transport(node_type, link_layer) == expected


@pytest.mark.parametrize(
    ("rate", "gigabits"),
    [("100 Gb/sec (4X EDR)", 100.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", None), (None, None), ("Gb/sec", None)],
)
def test_a_rate_is_a_number_of_gigabits(rate: str | None, gigabits: float | None) -> None:
    assert RdmaPort(1, None, None, None, None, rate).gigabits == gigabits
