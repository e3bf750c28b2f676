"""Huge pages in the kernel's pools, on one NUMA node or over all of them.

The persistent pool is compared: ``nr_hugepages`` minus ``surplus_hugepages``. When a pool is made smaller than what is in use,
the kernel counts the excess pages as surplus, and frees each when its user releases it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Mapping
from contextlib import suppress

from attrs import evolve, frozen

from agent.documents import load
from agent.hardware.sysfs import names_in, numbered, parsed, read_or
from agent.hardware.topology import NODE
from agent.kinds import ANY_VALUE, Reading
from agent.machine import Files, Machine
from agent.report.names import RUN_FOLDER
from agent.report.records import HOST, Change
from agent.spec.node import HugepagePool
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "hugepages"

ALL_NODES = "/sys/kernel/mm/hugepages"

# What the running kubelet has counted, by size, and when it was started: JSON. Written before a change.
COUNTED = f"{RUN_FOLDER}/kubelet-hugepages.json"
LARGEST = 4096
"""Bytes of it."""


@frozen
class Pages:
    """What a pool has; ``missing`` says why there is none."""

    total: int = 0
    free: int = 0
    surplus: int = 0
    missing: str = ""

    @property
    def persistent(self) -> int:
        """The pages that were requested and allocated."""
        return self.total - self.surplus


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Pages]]:
    """The wanted pools, by their :attr:`HugepagePool.name`."""
    if not host_in_scope(scope):
        return {}
    return {HOST: {pool.name: _read_or_why(machine.files, pool) for pool in want.spec.hugepages}}


def _read_or_why(files: Files, pool: HugepagePool) -> Pages:
    """A pool as it is now. One whose files fail to read is missing: the others are set all the same."""
    try:
        return read(files, pool)
    except OSError as error:
        return Pages(missing=f"it cannot be read: {error}")


def _folder(pool: HugepagePool) -> str:
    return ALL_NODES if pool.numa_node is None else f"{NODE}/node{pool.numa_node}/hugepages"


def path(pool: HugepagePool) -> str:
    """The folder of a pool."""
    return f"{_folder(pool)}/hugepages-{pool.kilobytes}kB"


def read(files: Files, pool: HugepagePool) -> Pages:
    """A pool as it is now."""
    try:
        paths = [f"{path(pool)}/{name}" for name in ("nr_hugepages", "free_hugepages", "surplus_hugepages")]
        total, free, surplus = (parsed(int, files.read(each), each) for each in paths)
    except FileNotFoundError:
        sizes = ", ".join(name.removeprefix("hugepages-") for name in names_in(files, _folder(pool)))
        if not sizes and pool.numa_node is not None:
            return Pages(missing=f"there is no NUMA node {pool.numa_node} with memory")
        return Pages(missing=f"there are no huge pages of {pool.size} (this machine has {sizes or 'none'})")
    return Pages(total, free, surplus)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The pools whose size differs."""
    changes = []
    pools: Mapping[str, Pages] = have[NAME].get(HOST, {})
    for pool in sorted(want.spec.hugepages, key=lambda pool: pool.name):
        now = pools.get(pool.name, Pages(missing="it has not been read"))
        if now.missing:
            remedy = "compare with /sys/devices/system/node/node*/hugepages"
            changes.append(Change(NAME, HOST, pool.name, None, pool.count, blocker=now.missing, remedy=remedy))
        elif now.persistent != pool.count:
            remedy = f"reserve them at boot: hugepagesz={pool.size} hugepages=N on the kernel's command line"
            changes.append(Change(NAME, HOST, pool.name, now.persistent, pool.count, remedy=remedy))
    return changes


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """A pool's persistent pages as they are now.

    None if the spec gives the pool, or one that shares its pages: the pool of all nodes has those of each node.
    """
    own = HugepagePool.named(kept.field, 0)
    if any(_share_pages(own, given) for given in want.spec.hugepages):
        return None
    now = read(machine.files, own)
    return None if now.missing else Reading(now.persistent)


def _share_pages(one: HugepagePool, other: HugepagePool) -> bool:
    nodes = {one.numa_node, other.numa_node}
    return one.size == other.size and (len(nodes) == 1 or None in nodes)


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The pools of the NUMA nodes: the kernel divides the pages of the pool of all nodes between them."""
    asked = HugepagePool.named(change.field, 0)
    nodes = numbered(names_in(machine.files, NODE), "node")
    pools = [evolve(asked, numa_node=node) for node in nodes if asked.numa_node in (None, node)]
    now = {pool: read(machine.files, pool) for pool in pools}
    present = {pool: each.persistent for pool, each in now.items() if not each.missing}
    # A kernel without NUMA has no folders of nodes.
    present = present or {asked: read(machine.files, asked).persistent}
    return [Change(NAME, HOST, pool.name, pages, ANY_VALUE) for pool, pages in present.items()]


def in_steps(change: Change) -> bool:
    """The kernel may find memory for some of the pages only."""
    return True


def stale(machine: Machine) -> Mapping[str, tuple[int, int]]:
    """The sizes of which the running kubelet has counted another number of pages than there are now: that number, and now's.

    A kubelet counts the pages of all nodes once, when it starts (GetHugePagesInfo, cadvisor's machine package).
    """
    counted = _counted(machine)
    now = {size: read(machine.files, HugepagePool(size, 0)).total for size in counted}
    return {size: (count, now[size]) for size, count in counted.items() if count != now[size]}


def _counted(machine: Machine) -> dict[str, int]:
    """What is noted of the kubelet that runs; empty if nothing is, or it is damaged."""
    try:
        noted = load(read_or(machine.files, COUNTED, ""), LARGEST)
        return dict(noted["pages"]) if noted["started"] == machine.kubelet.started() else {}
    except (ValueError, KeyError, TypeError):
        return {}


def _note(machine: Machine, size: str) -> None:
    """Note what the running kubelet has counted of a size, before the first change of that size since its start."""
    started, counted = machine.kubelet.started(), _counted(machine)
    if started and size not in counted:
        pages = {**counted, size: read(machine.files, HugepagePool(size, 0)).total}
        with suppress(OSError):  # /run is full: the pages matter more than the note
            machine.files.replace(COUNTED, json.dumps({"started": started, "pages": pages}))


def apply(machine: Machine, change: Change) -> None:
    """Request the pool's size. The kernel may find less contiguous memory than that; it then keeps the pages it found."""
    pool = HugepagePool.named(change.field, change.number)
    _note(machine, pool.size)
    machine.files.write(f"{path(pool)}/nr_hugepages", str(pool.count))
    now = read(machine.files, pool)
    if now.persistent < pool.count:
        raise OSError(
            errno.ENOMEM, f"the kernel found memory for {now.persistent} of {pool.count} pages of {pool.size}"
        )
