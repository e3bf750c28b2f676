"""A small model: what other programs do to a device comes at every moment of the passes, and no event of it is lost.

The passes and the wake-ups are the real ones, in one thread. The steps of the other programs come, in their order, between any
two calls by which the agent reads something of the device or takes events. Once the worker sleeps, the report is compared with
a new reading of everything.
"""

import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import pytest
from attrs import define, evolve, field

from agent.engine.context import Memory
from agent.engine.dry_run import dry_run
from agent.engine.readiness import Probes
from agent.hardware.functions import vf_addresses
from agent.machine import Event, EventSource
from agent.report.records import Report
from agent.service.activity import Activity
from agent.service.apply_socket import Requests
from agent.service.inbox import Inbox
from agent.service.loop import Loop
from agent.service.messages import Output
from agent.service.pass_log import PassRecords
from agent.service.spec_in_force import SpecInForce
from agent.spec.node import NodeSpec, from_mapping
from agent.state.scope import Scope
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.seams import seen
from tests.sim.service.running import Announced
from tests.sim.two_nics import PF0, PF1, two_nics

NEVER = 1 << 30

CHANGED = ("/net", "/driver", "/ifindex")
"""The files that the steps change, but for a netdev's own folder, which is found by ``net``."""

STORAGE = "storage0"


@define
class Outside:
    """The kernel and what it announces: links by one socket, uevents by another, each in order."""

    kernel: Kernel = field(factory=two_nics)
    links: Announced = field(factory=Announced)
    uevents: Announced = field(factory=Announced)

    def sources(self) -> Sequence[EventSource]:
        return [*self.links.subscribe(), *self.uevents.subscribe()]

    def close(self) -> None:
        os.close(self.links.descriptor)
        os.close(self.uevents.descriptor)

    def set_mtu(self, function: str, mtu: int) -> None:
        """``ip link set NETDEV mtu MTU``."""
        self.kernel.netlink.set_link(self.kernel.netdev(function).ifindex, mtu=mtu)
        self.announce(function)

    def rename(self, function: str, name: str) -> None:
        """``ip link set NETDEV name NAME``, while it is up."""
        link = self.kernel.netdev(function)
        self.kernel.netlink.set_link(link.ifindex, up=False)
        self.kernel.netlink.rename(link.ifindex, name)
        self.kernel.netlink.set_link(link.ifindex, up=link.up)
        self.uevents.announce(Event(function=function))
        self.announce(function)

    def make_again(self, function: str) -> None:
        """The driver gives its netdev up and makes another one."""
        link = self.kernel.netdev(function)
        self.unbind(function)
        self.kernel.bind(function, link.name, link.permanent_mac)
        self.appeared(function)

    def unbind(self, function: str) -> None:
        self.announce(function)
        self.kernel.unbind(function)
        self.uevents.announce(self.uevent(function))

    def come_back(self, function: str) -> None:
        """A pod ends, whose netdev had the same index in the pod as another one had here."""
        self.kernel.come_back(function, "back")
        self.appeared(function)

    def appeared(self, function: str) -> None:
        self.uevents.announce(self.uevent(function))
        self.announce(function)

    def uevent(self, function: str) -> Event:
        return Event(function=function, physical_function=self.kernel.sriov.physical(function) or "")

    def announce(self, function: str) -> None:
        link = self.kernel.netdev(function)
        self.links.announce(Event(ifindex=link.ifindex, netdev=link.name))


Step = Callable[[Outside], None]


@define(eq=False)
class SeenInbox(Inbox):
    """The inbox, with a moment before each time that the agent takes events."""

    see: Callable[[], None] = field(kw_only=True)

    def wait(self, timeout: float, ends: bool = True) -> Scope:
        self.see()
        return super().wait(timeout, ends)


@define
class Model:
    """The worker's loop, and the moments at which the steps come: at 0 it sleeps."""

    folder: Path
    spec: NodeSpec
    steps: Sequence[Step]
    at: Sequence[int]
    probes: Probes
    outside: Outside = field(factory=Outside)
    moment: int = -1
    came: int = 0

    def see(self, method: str, arguments: str) -> None:
        """A moment, if the agent takes events, or reads something of a device that the steps change."""
        if self.moment < 0 or not (method in ("events", "netlink.link") or arguments.endswith(CHANGED)):
            return
        while self.came < len(self.steps) and self.at[self.came] == self.moment:
            self.came += 1
            self.steps[self.came - 1](self.outside)
        self.moment += 1

    def run(self, prepare: Step) -> Report:
        """What the report says when the worker sleeps."""
        kernel = self.outside.kernel
        inbox = SeenInbox(self.outside.sources(), Activity.at(None), lambda: None, see=lambda: self.see("events", ""))
        machine = seen(kernel.machine(), self.see)
        in_force = SpecInForce(self.folder / "state", self.folder / "run", self.spec)
        output = Output(io.StringIO())

        loop = Loop(
            machine,
            self.folder / "node.json",
            in_force,
            Memory(time.monotonic),
            PassRecords.kept(self.folder, self.folder),
            Activity.at(None),
            self.probes,
            inbox,
            output,
            Requests(self.folder / "apply.sock"),
            lambda announcement: "",
        )
        loop.run_pass(None, "start")
        prepare(self.outside)
        loop.start_over()
        report, _ = loop.run_pass(None, "spec")
        assert is_well(report)
        self.moment = 0
        while (scope := inbox.wait(0.0)) != frozenset():
            report, _ = loop.run_pass(scope, "event")
        inbox.close()
        return report


def is_well(report: Report) -> bool:
    judged = ("Converged", "NicsPresent")
    return all(each.status == "True" for each in report.conditions if each.type in judged)


def moments(steps: int, run: Callable[[Sequence[int]], int], before: tuple[int, ...]) -> Iterator[Sequence[int]]:
    """Every choice of moments for the steps after those in ``before``.

    :param run: makes a run, and returns how many steps came before the worker slept.
    """
    if len(before) == steps:
        yield before
        return
    for moment in count(before[-1]):
        chosen = (*before, moment)
        if run((*chosen, *[NEVER] * (steps - len(chosen)))) < len(chosen):
            return
        yield from moments(steps, run, chosen)


def bare(*nics: object) -> NodeSpec:
    """NICs with nothing but an MTU: the fewer reads a pass has, the fewer moments there are."""
    off = {"irqs": {"irqbalance": "untouched", "pin": False}, "rps": {"enable": False}, "xps": {"enable": False}}
    return from_mapping({"node_name": "n1", "nics": nics, **off})


def two(**more: object) -> NodeSpec:
    a = nic("a", PF0, mtu=9000)
    return bare(a, nic("b", PF1, mtu=1500, **more))


def nothing(outside: Outside) -> None:
    pass


def share_an_index(outside: Outside) -> None:
    """VF 1 is in a pod, where its netdev has the index that VF 0's has here."""
    first, second = (vf_addresses(outside.kernel.files, PF1)[index] for index in range(2))
    outside.kernel.move_away(second)
    away = outside.kernel._away[second]
    away.link = evolve(away.link, ifindex=outside.kernel.netdev(first).ifindex)


def vfs(outside: Outside) -> Mapping[int, str]:
    return vf_addresses(outside.kernel.files, PF1)


def drift(outside: Outside) -> None:
    """The pass that runs repairs this. So it takes events after that round, and in the next one reads little else."""
    outside.set_mtu(PF0, 1500)


def swap_vfs(outside: Outside) -> None:
    """VF 0 loses its netdev, and VF 1 comes back from the pod with the index of that one."""
    outside.unbind(vfs(outside)[0])
    outside.come_back(vfs(outside)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "prepare", "steps", "first"),
    [
        (
            two(),
            nothing,
            (lambda outside: outside.make_again(PF1), drift, lambda outside: outside.set_mtu(PF1, 4000)),
            (0,),
        ),
        (
            bare({"name": "a", "select": {"netdev": STORAGE}, "mtu": 9000}),
            lambda outside: outside.rename(PF0, STORAGE),
            (
                lambda outside: outside.rename(PF0, "other"),
                lambda outside: outside.rename(PF1, STORAGE),
                lambda outside: outside.set_mtu(PF1, 4000),
            ),
            (0,),
        ),
        (
            two(vfs={"count": 2}),
            share_an_index,
            (swap_vfs, drift, lambda outside: outside.set_mtu(vfs(outside)[1], 1400)),
            (0, 1),
        ),
    ],
    ids=["made-again", "wanted-since-then", "index-of-another"],
)
def test_at_whatever_moment_events_come_the_report_is_true_once_the_worker_sleeps(
    spec: NodeSpec, prepare: Step, steps: Sequence[Step], first: tuple[int, ...], tmp_path: Path
) -> None:
    """:param first: the moments of the first steps. Those of the others are all that there are."""
    tried = 0
    lost = []
    # Its probes are judged and never read: no thread of it runs.
    probes = Probes(two_nics().machine())

    def run(at: Sequence[int]) -> int:
        nonlocal tried
        model = Model(tmp_path, spec, steps, at, probes)
        report = model.run(prepare)
        model.outside.close()
        tried += 1
        left = dry_run(model.outside.kernel.machine(), spec)
        if is_well(report) == bool(left.changes or left.errors):
            lost.append((at, left))
        return model.came

    for _ in moments(len(steps), run, first):
        pass
    assert not lost
    assert tried > 50
