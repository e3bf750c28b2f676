"""A node whose agent keeps originals, and whose spec has at most one NIC."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from attrs import define, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec, from_mapping
from tests.sim.kernel import Kernel
from tests.sim.killed import Killed
from tests.sim.two_nics import PF0


@define
class Node:
    """A node with one NIC in its spec, and its agent's file of originals. Each pass is an hour after the one before."""

    kernel: Kernel
    path: Path
    originals: Originals = field(init=False)
    time: count[int] = field(factory=lambda: count(0, 4000))

    def __attrs_post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.originals = Originals.load(self.path)

    def follow(self, nic: dict[str, Any] | None, passes: int = 3, **more: Any) -> Pass:
        spec, failures = wanting(nic, **more), Failures()
        for _ in range(passes):
            memory = Memory(partial(float, next(self.time)), failures, self.originals)
            result = converge(self.kernel.machine(), Goal(spec), memory)
        return result


def wanting(nic: dict[str, Any] | None, **more: Any) -> NodeSpec:
    nics = [] if nic is None else [{"name": "rail0", "select": {"pci": PF0}, **nic}]
    return from_mapping({"node_name": "n1", "nics": nics, "irqs": {"pin": False}, "rps": {"enable": False}, **more})


def left(result: Pass) -> list[tuple[str, str, str]]:
    """What a pass has left undone."""
    return [(o.change.field, o.result, o.error) for o in result.outcomes if o.result != "applied"]


def is_settled(result: Pass) -> bool:
    """Whether the node is ready, and nothing is left undone."""
    return is_ready(result.conditions) and not left(result)


def vf(node: Node, index: int) -> str:
    """The PCI address of a VF of the first NIC."""
    return vf_addresses(node.kernel.files, PF0)[index]


def follow_or_die(node: Node, nic: dict[str, Any]) -> None:
    try:
        node.follow(nic)
    except Killed:
        node.restart()
