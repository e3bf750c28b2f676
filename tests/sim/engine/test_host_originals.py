"""Originals of the host: a variable of the kernel has one original, by whichever keys, notations or parts the spec sets it."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.spec.node import from_mapping
from tests.sim.hugepages import NODE
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.two_nics import PF0, two_nics

SOMAXCONN = "/proc/sys/net/core/somaxconn"
IO_TIMEOUT = "/sys/module/nvme_core/parameters/io_timeout"
POOLS = [f"{NODE}/node{node}/hugepages/hugepages-2048kB/nr_hugepages" for node in (0, 1)]

NODE0 = {"size": "2M", "count": 2, "numa_node": 0}
NODE1 = {"size": "2M", "count": 3, "numa_node": 1}
ALL = {"size": "2M", "count": 4}

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
        {"hugepages": [ALL]},
        {"hugepages": [NODE0]},
        {"hugepages": [NODE0, NODE1]},
    ],
    "ARP": [
        {},
        {"nics": [nic("rail0", PF0)]},
        {"nics": [nic("rail0", PF0, rail=0, addresses=["192.0.2.11/24"])]},
        {"nics": [nic("rail0", PF0, rail=0, addresses=["fd00::7/64"])]},
        {"sysctls": {f"{CONF}.arp_ignore": "2", f"{CONF}.rp_filter": "1"}},
        {"nics": [nic("rail0", PF0)], "sysctls": {f"{CONF.replace('.', '/')}/arp_announce": "1"}},
    ],
    "steering": [
        {},
        {"nics": [nic("rail0", PF0)], "rps": {"enable": True}},
        {"rps": {"enable": False, "netdevs": [{"match": "enp33*", "cpus": "3"}]}},
        {"nics": [nic("rail0", PF0)], "rps": {"enable": False, "netdevs": [{"match": "enp33*", "cpus": "3"}]}},
    ],
    "RDMA namespaces": [
        {},
        {"rdma": {"netns_mode": "exclusive"}},
        {"module_parameters": {"ib_core": {"netns_mode": "N"}}},
    ],
}

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


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics()
    kernel.tree.put(IO_TIMEOUT, "30")
    return kernel


def asking(chosen: dict[str, int]) -> dict[str, Any]:
    """One spec that says of each variable what was chosen."""
    spec: dict[str, Any] = {"node_name": "n1", "irqs": {"pin": False}, "rps": {"enable": False}}
    for name, number in chosen.items():
        for key, value in WAYS[name][number].items():
            spec[key] = {**spec[key], **value} if isinstance(value, dict) and key in spec else value
    return spec


def follow(kernel: Kernel, originals: Originals, now: float, **given: object) -> list[str]:
    """Make passes until nothing is left to do. :returns: what is not as the spec wants."""
    spec, failures = from_mapping({"node_name": "n1", **given}), Failures()
    for number in range(3):
        memory = Memory(lambda at=now + 100 * number: at, failures, originals)  # type: ignore[misc]
        result = converge(kernel.machine(), Goal(spec), memory)
    return [str(outcome) for outcome in result.outcomes if outcome.change.field != "ib_core.netns_mode"]


def values(kernel: Kernel) -> dict[str, str]:
    """All that the specs set."""
    shown = {
        path: text.lstrip("0") if path.endswith("_cpus") else text
        for path, text in kernel.tree.files.items()
        if path.startswith(("/proc/sys/", "/sys/module/")) or "hugepages" in path or "/queues/" in path
    }
    return {**shown, "rdma": str(kernel.rdma.netns_mode()), "addresses": str(kernel.netlink.addresses())}


def check(kernel: Kernel, path: Path, sequence: list[dict[str, int]], restarts: bool) -> None:
    """Follow specs, and then one that sets nothing: all is as it was before."""
    follow(kernel, Originals(), 0.0, **asking({"ARP": 1}))  # sets the link up
    was = values(kernel)
    path.unlink(missing_ok=True)
    originals = Originals.load(path)
    for number, chosen in enumerate([*sequence, {"ARP": 1}]):
        assert follow(kernel, originals, 1000.0 * number, **asking(chosen)) == []
        if restarts:
            originals = Originals.load(path)
    now = values(kernel)
    assert {each: text for each, text in now.items() if was.get(each) != text} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_after_any_two_keys_for_one_variable_its_value_is_restored(tmp_path: Path, name: str) -> None:
    ways = range(len(WAYS[name]))
    for first in ways:
        for second in ways:
            check(two_nics(), tmp_path / ORIGINALS, [{name: first}, {name: second}], restarts=False)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("before", [BEFORE[::2], BEFORE[1::2]], ids=["amounts", "ratios"])
def test_what_an_administrator_has_set_before_is_restored_also_after_restarts(
    kernel: Kernel, tmp_path: Path, name: str, before: list[tuple[str, str]]
) -> None:
    for path, text in before:
        kernel.files.write(path, text)
    for number in range(1, len(WAYS[name])):
        check(kernel, tmp_path / ORIGINALS, [{name: number}, {}, {name: number}], restarts=True)


def pools(kernel: Kernel) -> list[str]:
    return [kernel.files.read(path) for path in POOLS]


def test_only_the_pool_that_leaves_the_spec_is_restored(kernel: Kernel, originals: Originals) -> None:
    follow(kernel, originals, 0.0, hugepages=[ALL])
    follow(kernel, originals, 1000.0, hugepages=[NODE0])
    assert pools(kernel) == ["2", "0"]


def test_huge_pages_that_another_program_has_reserved_since_stay(kernel: Kernel, originals: Originals) -> None:
    follow(kernel, originals, 0.0, hugepages=[NODE0])
    kernel.files.write(POOLS[0], "5")
    follow(kernel, originals, 1000.0)
    assert pools(kernel) == ["5", "0"]


@pytest.mark.parametrize(
    ("path", "line", "given"),
    [
        (
            SOMAXCONN,
            ["sysctls", "host", "net/core/somaxconn", "128", ["4096"]],
            {"sysctls": {"net.core.somaxconn": "512"}},
        ),
        (SOMAXCONN, ["sysctls", "host", "somaxconn", "128", ["4096"]], {"sysctls": {"net.core.somaxconn": "512"}}),
        (
            IO_TIMEOUT,
            ["module_parameters", "host", "nvme-core.io_timeout", "20", ["30"]],
            {"module_parameters": {"nvme_core": {"io_timeout": "50"}}},
        ),
        (POOLS[0], ["sysctls", "host", "vm.nr_hugepages", "4", ["0"]], {"hugepages": [NODE0]}),
        (POOLS[0], ["hugepages", "host", "2048K", 2, [4]], {"hugepages": [NODE0]}),
    ],
)
def test_an_original_under_another_name_does_not_keep_what_is_wanted_away(
    kernel: Kernel, tmp_path: Path, path: str, line: list[object], given: dict[str, object]
) -> None:
    text = json.dumps(line).encode()
    (tmp_path / ORIGINALS).write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    was, originals = kernel.files.read(path), Originals.load(tmp_path / ORIGINALS)
    follow(kernel, originals, 0.0, **given)
    wanted = kernel.files.read(path)
    assert wanted != was
    follow(kernel, originals, 1000.0, **given)
    assert kernel.files.read(path) == wanted


@pytest.mark.parametrize("name", ["", "x", "route", "route 10.0.0.0/8 table", "from 10.0.0.1 lookup main", "address"])
def test_an_original_of_an_unknown_field_does_not_end_the_pass(kernel: Kernel, tmp_path: Path, name: str) -> None:
    text = json.dumps(["addresses", PF0, name, "absent", ["present"]]).encode()
    (tmp_path / ORIGINALS).write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    originals = Originals.load(tmp_path / ORIGINALS)
    follow(kernel, originals, 0.0, nics=[nic("rail0", PF0)])
    follow(kernel, originals, 1000.0)
    assert kernel.netlink.addresses() == {}
