"""Names of kernel parameters, and the other parameters that the kernel changes when one is written."""

import pytest

from agent.spec.sysctl_names import folders_along, values_along

# net/ipv4/devinet.c, net/ipv6/addrconf.c, net/core/neighbour.c
ALONG = [
    ("net.ipv6.conf.all.disable_ipv6", "1", "eth0", {"net.ipv6.conf.eth0.disable_ipv6": "1"}),
    ("net.ipv6.conf.all.disable_ipv6", "0x1", "default", {"net.ipv6.conf.default.disable_ipv6": "1"}),
    ("net.ipv6.conf.all.disable_ipv6", "1", "all", {}),
    ("net.ipv6.conf.all.forwarding", "1", "eth0", {"net.ipv6.conf.eth0.forwarding": "1"}),
    ("net.ipv4.ip_forward", "1", "eth0", {"net.ipv4.conf.eth0.forwarding": "1"}),
    ("net.ipv4.ip_forward", "0", "all", {"net.ipv4.conf.all.accept_redirects": "1"}),
    ("net.ipv4.conf.default.rp_filter", "2", "eth0", {"net.ipv4.conf.eth0.rp_filter": "2"}),
    ("net.ipv4.conf.default.rp_filter", "2", "all", {}),
    ("net.ipv6.neigh.default.gc_stale_time", "90", "eth0", {"net.ipv6.neigh.eth0.gc_stale_time": "90"}),
]


@pytest.mark.parametrize(("name", "value", "place", "along"), ALONG)
def test_what_is_set_along(name: str, value: str, place: str, along: dict[str, str]) -> None:
    assert values_along(name, value, place) == along


ALONE = [
    "net.ipv6.conf.eth0.disable_ipv6",
    "net.ipv6.conf.default.disable_ipv6",
    "net.ipv4.conf.default.forwarding",
    "net.ipv4.conf.all.rp_filter",
    "net.ipv4.neigh.default.base_reachable_time_ms",
    "vm.swappiness",
]


@pytest.mark.parametrize("name", ALONE)
def test_other_parameters_set_nothing_along(name: str) -> None:
    assert folders_along(name) == []
    assert values_along(name, "1", "eth0") == {}
