"""A variable of the kernel that several keys of the spec set: after any sequence of specs it is as before the agent."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.spec.node import from_mapping
from tests.sim.kernel import Kernel
from tests.sim.two_nics import PF0, two_nics

pytestmark = pytest.mark.slow

CONF = "net.ipv4.conf.enp33s0"
VM = "/proc/sys/vm"

# What a spec may say of one variable, by any key. {} says nothing.
WAYS: dict[str, list[dict[str, Any]]] = {
    "flow entries": [{}, {"rfs": {"enable": True, "entries": 4096}}, {"rfs": {"enable": True, "entries": 8192}}],
    "ports": [
        {},
        {"sysctls": {"net.ipv4.ip_local_reserved_ports": "30000-30000"}},
        {"sysctls": {"net/ipv4/ip_local_reserved_ports": "30001,30000"}},
    ],
    "connections": [{}, {"sysctls": {"net.core.somaxconn": "0x403"}}, {"sysctls": {"net/core/somaxconn": "1027"}}],
    "idmapping": [
        {},
        {"module_parameters": {"nfs": {"nfs4-disable-idmapping": "1"}}},
        {"module_parameters": {"nfs": {"nfs4_disable_idmapping": "N"}}},
    ],
    "dirty": [
        {},
        {"sysctls": {"vm.dirty_bytes": "1073741824"}},
        {"sysctls": {"vm/dirty_bytes": "8192", "vm.dirty_ratio": "0"}},
        {"sysctls": {"vm.dirty_ratio": "40"}},
    ],
    "dirty in the background": [
        {},
        {"sysctls": {"vm.dirty_background_bytes": "1073741824"}},
        {"sysctls": {"vm.dirty_background_ratio": "5", "vm.dirty_background_bytes": "0"}},
        {"sysctls": {"vm.dirty_background_ratio": "30"}},
    ],
    "overcommit": [{}, {"sysctls": {"vm.overcommit_kbytes": "4000000"}}, {"sysctls": {"vm.overcommit_ratio": "80"}}],
    "huge pages": [
        {},
        {"hugepages": [{"size": "2048K", "count": 5}]},
        {"hugepages": [{"size": "2M", "count": 4}]},
        {"hugepages": [{"size": "2M", "count": 3, "numa_node": 1}]},
    ],
    "ARP": [
        {},
        {"nics": [{"name": "rail0", "select": {"pci": PF0}}]},
        {"nics": [{"name": "rail0", "select": {"pci": PF0}, "rail": 0, "addresses": ["192.0.2.11/24"]}]},
        {"nics": [{"name": "rail0", "select": {"pci": PF0}, "rail": 0, "addresses": ["fd00::7/64"]}]},
        {"sysctls": {f"{CONF}.arp_ignore": "2", f"{CONF}.rp_filter": "1"}},
        {
            "nics": [{"name": "rail0", "select": {"pci": PF0}}],
            "sysctls": {f"{CONF.replace('.', '/')}/arp_announce": "1"},
        },
    ],
    "steering": [
        {},
        {"nics": [{"name": "rail0", "select": {"pci": PF0}}], "rps": {"enable": True}},
        {"rps": {"enable": False, "netdevs": [{"match": "enp33*", "cpus": "3"}]}},
        {
            "nics": [{"name": "rail0", "select": {"pci": PF0}}],
            "rps": {"enable": False, "netdevs": [{"match": "enp33*", "cpus": "3"}]},
        },
    ],
    "RDMA namespaces": [
        {},
        {"rdma": {"netns_mode": "exclusive"}},
        {"module_parameters": {"ib_core": {"netns_mode": "N"}}},
    ],
}

specs = st.fixed_dictionaries({name: st.integers(0, len(ways) - 1) for name, ways in WAYS.items()})
# What an administrator may have written before the agent came.
BEFORE = [
    (f"{VM}/dirty_bytes", "2147483648"),
    (f"{VM}/dirty_ratio", "0"),
    (f"{VM}/dirty_background_bytes", "65536"),
    (f"{VM}/dirty_background_ratio", "0"),
    (f"{VM}/overcommit_kbytes", "1000000"),
    (f"{VM}/overcommit_ratio", "0"),
    ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "7"),
    ("/proc/sys/net/core/rps_sock_flow_entries", "4096"),
    ("/sys/module/nfs/parameters/nfs4_disable_idmapping", "0"),
    ("/proc/sys/net/ipv4/conf/enp33s0/arp_ignore", "1"),
]


def asking(chosen: dict[str, int]) -> dict[str, Any]:
    """One spec that says of each variable what was chosen."""
    spec: dict[str, Any] = {"node_name": "n1", "irqs": {"pin": False}, "rps": {"enable": False}}
    for name, number in chosen.items():
        for key, value in WAYS[name][number].items():
            spec[key] = {**spec[key], **value} if isinstance(value, dict) and key in spec else value
    return spec


def follow(kernel: Kernel, originals: Originals, now: float, spec: dict[str, Any]) -> list[str]:
    """Make passes until nothing is left to do. :returns: what is not as the spec wants."""
    failures = Failures()
    for number in range(3):
        memory = Memory(lambda at=now + 100 * number: at, failures, originals)  # type: ignore[misc]
        result = converge(kernel.machine(), Goal(from_mapping(spec)), memory)
    return [str(outcome) for outcome in result.outcomes if outcome.change.field != "ib_core.netns_mode"]


def values(kernel: Kernel) -> dict[str, str]:
    """All that the specs set."""
    shown = {
        path: text.lstrip("0") if path.endswith("_cpus") else text
        for path, text in kernel.tree.files.items()
        if path.startswith(("/proc/sys/", "/sys/module/")) or "hugepages" in path or "/queues/" in path
    }
    return {**shown, "rdma": str(kernel.rdma.netns_mode()), "addresses": str(kernel.netlink.addresses())}


def check(sequence: list[dict[str, int]], before: list[tuple[str, str]], restarts: bool) -> None:
    kernel = two_nics()
    for path, text in before:
        kernel.files.write(path, text)
    follow(kernel, Originals(), 0.0, asking({"ARP": 1}))  # sets the link up
    was = values(kernel)
    with TemporaryDirectory() as folder:
        originals = Originals.load(Path(folder) / ORIGINALS)
        for number, chosen in enumerate([*sequence, {"ARP": 1}]):
            assert follow(kernel, originals, 1000.0 * number, asking(chosen)) == []
            if restarts:
                originals = Originals.load(Path(folder) / ORIGINALS)
    now = values(kernel)
    assert {path: text for path, text in now.items() if was.get(path) != text} == {}


@settings(max_examples=50, deadline=None)
@given(st.lists(specs, min_size=1, max_size=4), st.lists(st.sampled_from(BEFORE), max_size=4), st.booleans())
def test_after_any_specs_the_empty_spec_restores_all_values(
    sequence: list[dict[str, int]], before: list[tuple[str, str]], restarts: bool
) -> None:
    check(sequence, before, restarts)


@pytest.mark.parametrize("name", WAYS)
def test_after_any_two_keys_for_one_variable_its_value_is_restored(name: str) -> None:
    ways = range(len(WAYS[name]))
    for first in ways:
        for second in ways:
            check([{name: first}, {name: second}], [], restarts=False)


@pytest.mark.parametrize("name", ["dirty", "dirty in the background", "overcommit"])
@pytest.mark.parametrize("before", [BEFORE[:0], BEFORE[::2][:3], BEFORE[1:6:2]])
def test_a_ratio_and_an_amount_are_restored_whichever_was_set(name: str, before: list[tuple[str, str]]) -> None:
    for number in range(1, len(WAYS[name])):
        check([{name: number}, {}, {name: number}], before, restarts=True)
