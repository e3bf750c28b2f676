"""Pools of huge pages as in mm/hugetlb.c: the kernel reserves as many pages as it can, and removes none that is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

SIZES = (2048, 1048576)
DEFAULT = 2048
NODE = "/sys/devices/system/node"
ALL = "/sys/kernel/mm/hugepages"


@frozen
class Memory:
    """How many pages of a size a node's memory can be made into, by the size in KiB."""

    pages: dict[int, int] = field(factory=lambda: {2048: 64, 1048576: 1})


def boot(kernel: Kernel) -> None:
    for size in SIZES:
        for folder in (ALL, *(f"{NODE}/node{node}/hugepages" for node in range(kernel.nodes))):
            _say(kernel, f"{folder}/hugepages-{size}kB", 0, 0, 0)
    kernel.tree.put("/proc/meminfo", f"MemTotal:        8388608 kB\nHugepagesize:       {DEFAULT} kB")


def _say(kernel: Kernel, folder: str, total: int, free: int, surplus: int) -> None:
    for name, pages in (("nr_hugepages", total), ("free_hugepages", free), ("surplus_hugepages", surplus)):
        kernel.tree.put(f"{folder}/{name}", str(pages))


def _pages(kernel: Kernel, folder: str) -> tuple[int, int, int]:
    total, free, surplus = (int(kernel.files.read(f"{folder}/{n}_hugepages")) for n in ("nr", "free", "surplus"))
    return total, free, surplus


def use(kernel: Kernel, node: int, size: int, pages: int) -> None:
    """Use pages of a node's pool."""
    folder = f"{NODE}/node{node}/hugepages/hugepages-{size}kB"
    total, free, surplus = _pages(kernel, folder)
    _say(kernel, folder, total, free - pages, surplus)
    _sum(kernel, size)


def resize(kernel: Kernel, path: str, count: int) -> None:
    """A write to nr_hugepages."""
    folder = path.rpartition("/")[0]
    size = int(folder.rpartition("-")[2].removesuffix("kB"))
    if folder.startswith(NODE):
        _resize_node(kernel, folder, size, count)
    else:
        for node in range(kernel.nodes):
            share = count // kernel.nodes + (node < count % kernel.nodes)
            _resize_node(kernel, f"{NODE}/node{node}/hugepages/hugepages-{size}kB", size, share)
    _sum(kernel, size)


def _resize_node(kernel: Kernel, folder: str, size: int, count: int) -> None:
    total, free, _ = _pages(kernel, folder)
    used = total - free
    made = min(count, max(total, kernel.memory.pages[size]))
    _say(kernel, folder, max(made, used), max(made, used) - used, max(0, used - made))


def _sum(kernel: Kernel, size: int) -> None:
    nodes = [_pages(kernel, f"{NODE}/node{node}/hugepages/hugepages-{size}kB") for node in range(kernel.nodes)]
    total, free, surplus = (sum(counts) for counts in zip(*nodes, strict=True))
    _say(kernel, f"{ALL}/hugepages-{size}kB", total, free, surplus)
