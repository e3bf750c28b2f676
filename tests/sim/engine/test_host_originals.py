"""Originals of the host: one state of the kernel has one original, by whichever notation or parts the spec gives it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.spec.node import from_mapping
from tests.sim.hugepages import NODE
from tests.sim.kernel import Kernel
from tests.sim.two_nics import PF0, two_nics

SOMAXCONN = "/proc/sys/net/core/somaxconn"
IO_TIMEOUT = "/sys/module/nvme_core/parameters/io_timeout"
POOLS = [f"{NODE}/node{node}/hugepages/hugepages-2048kB/nr_hugepages" for node in (0, 1)]

NODE0 = {"size": "2M", "count": 2, "numa_node": 0}
NODE1 = {"size": "2M", "count": 3, "numa_node": 1}
ALL = {"size": "2M", "count": 4}


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.tree.put(SOMAXCONN, "4096")
    kernel.tree.put(IO_TIMEOUT, "30")
    return kernel


def follow(kernel: Kernel, originals: Originals, now: float, **given: object) -> None:
    """Converge until nothing is left to do."""
    spec, failures = from_mapping({"node_name": "n1", **given}), Failures()
    for number in range(4):
        converge(kernel.machine(), Goal(spec), Memory(lambda at=now + 100 * number: at, failures, originals))  # type: ignore[misc]


def pools(kernel: Kernel) -> list[str]:
    return [kernel.files.read(path) for path in POOLS]


@pytest.mark.parametrize("before", ["0", "6"])
@pytest.mark.parametrize(
    "specs",
    [
        [[NODE0], [ALL]],
        [[ALL], [NODE0]],
        [[NODE0, NODE1], [ALL], [NODE1]],
        [[NODE0], [NODE0, NODE1], [NODE1]],
        [[ALL], [], [NODE1], [ALL]],
        [[{"size": "2M", "count": 200}]],  # more than there is memory for
        [[{"size": "2M", "count": 90, "numa_node": 0}]],
    ],
)
def test_huge_pages_are_restored_on_each_node(
    kernel: Kernel, originals: Originals, before: str, specs: list[list[object]]
) -> None:
    kernel.files.write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", before)
    was = pools(kernel)
    for number, hugepages in enumerate([*specs, []]):
        follow(kernel, originals, 1000.0 * number, hugepages=hugepages)
    assert pools(kernel) == was


def test_if_one_numa_nodes_pool_leaves_the_spec_only_that_pool_is_restored(
    kernel: Kernel, originals: Originals
) -> None:
    follow(kernel, originals, 0.0, hugepages=[ALL])
    follow(kernel, originals, 1000.0, hugepages=[NODE0])
    assert pools(kernel) == ["2", "0"]


def test_huge_pages_that_another_program_has_reserved_since_stay(kernel: Kernel, originals: Originals) -> None:
    follow(kernel, originals, 0.0, hugepages=[NODE0])
    kernel.files.write(POOLS[0], "5")
    follow(kernel, originals, 1000.0)
    assert pools(kernel) == ["5", "0"]


TWO_NOTATIONS = [
    (SOMAXCONN, {"sysctls": {"net.core.somaxconn": "512"}}, {"sysctls": {"net/core/somaxconn": "600"}}),
    (
        IO_TIMEOUT,
        {"module_parameters": {"nvme-core": {"io-timeout": "40"}}},
        {"module_parameters": {"nvme_core": {"io_timeout": "50"}}},
    ),
    (POOLS[0], {"hugepages": [{**NODE0, "size": "2048K"}]}, {"hugepages": [ALL]}),
]


@pytest.mark.parametrize(("path", "one", "other"), TWO_NOTATIONS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_state_with_two_notations_has_one_original(
    kernel: Kernel, originals: Originals, path: str, one: dict[str, object], other: dict[str, object], swapped: bool
) -> None:
    was = kernel.files.read(path)
    first, second = (other, one) if swapped else (one, other)
    follow(kernel, originals, 0.0, **first)
    assert kernel.files.read(path) != was
    follow(kernel, originals, 1000.0, **second)
    assert kernel.files.read(path) != was
    follow(kernel, originals, 2000.0)
    assert kernel.files.read(path) == was


@pytest.mark.parametrize(
    ("path", "line", "given"),
    [
        (SOMAXCONN, ["sysctls", "host", "net/core/somaxconn", "128", ["4096"]], TWO_NOTATIONS[0][1]),
        (SOMAXCONN, ["sysctls", "host", "somaxconn", "128", ["4096"]], TWO_NOTATIONS[0][1]),
        (IO_TIMEOUT, ["module_parameters", "host", "nvme-core.io_timeout", "20", ["30"]], TWO_NOTATIONS[1][2]),
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
def test_an_original_of_an_unknown_field_does_not_end_the_pass(tmp_path: Path, name: str) -> None:
    kernel = two_nics()
    text = json.dumps(["addresses", PF0, name, "absent", ["present"]]).encode()
    (tmp_path / ORIGINALS).write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    originals = Originals.load(tmp_path / ORIGINALS)
    follow(kernel, originals, 0.0, nics=[{"name": "rail0", "select": {"pci": PF0}}])
    follow(kernel, originals, 1000.0)
    assert kernel.netlink.addresses() == {}
