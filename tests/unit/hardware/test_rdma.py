"""RDMA devices: what follows from the files of sysfs, and which GID is chosen."""

import pytest

from agent.hardware.rdma import Family, Gid, RdmaPort, gid_fits, transport


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


GIDS = (
    Gid(0, "RoCE v1", "fe80::1", "ens1"),
    Gid(1, "RoCE v2", "fe80::1", "ens1"),
    Gid(4, "RoCE v2", "10.0.0.1", "ens1.100"),
    Gid(5, "RoCE v1", "10.0.0.2", "ens1"),
)


@pytest.mark.parametrize(
    ("type", "family", "indexes"),
    [
        (None, None, [0, 1, 4, 5]),
        ("RoCE v2", None, [1, 4]),
        ("RoCE v2", "IPv4", [4]),
        (None, "IPv6", []),
        ("IB", None, []),
    ],
)
def test_a_gid_fits_by_its_type_and_a_link_local_one_by_no_family(
    type: str | None, family: Family | None, indexes: list[int]
) -> None:
    assert [gid.index for gid in GIDS if gid_fits(gid, type, family)] == indexes


@pytest.mark.parametrize(
    ("rate", "gigabits"),
    [("100 Gb/sec (4X EDR)", 100.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", None), (None, None), ("Gb/sec", None)],
)
def test_a_rate_is_a_number_of_gigabits(rate: str | None, gigabits: float | None) -> None:
    assert RdmaPort(1, None, None, None, None, rate).gigabits == gigabits
