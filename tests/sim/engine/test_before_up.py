"""A netdev's settings are made before its link is brought up: until then they disturb nobody, whatever the driver does."""

import errno
import random
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import define, evolve, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.machine import Group, Setting
from agent.report.records import WHOLE_KIND, Change, Disruption
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.ethtool import SimEthtool
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import spec_of
from tests.sim.refusing import refusing

PF, NETDEV = "0000:21:00.0", "enp33s0"

SETTINGS: dict[str, Any] = {
    "mtu": 9000,
    "channels": {"combined": 1},
    "rings": {"rx": 512, "tx": 1024},
    "coalescing": {"rx_usecs": 50},
    "offloads": {"rx-all": True, "rx-gro": False},
}
# Those that the simulated igbvf has.
VF_SETTINGS: dict[str, Any] = {
    "mtu": 9000,
    "rings": {"rx": 512},
    "coalescing": {"rx_usecs": 50},
    "offloads": {"rx-gro": False},
}


@define
class Node:
    """A node with one NIC, whose spec allows no disruption unless a test says otherwise. Passes are ten seconds apart."""

    kernel: Kernel = field(factory=Kernel)
    memory: Memory = field(init=False)
    time: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.kernel.add_nic(PF, NETDEV, "02:00:00:00:01:00")
        self.memory = Memory(lambda: self.time, Failures(), Originals())

    def follow(self, nic: Mapping[str, Any] | None, allow: str = "none", ethtool: SimEthtool | None = None) -> Pass:
        self.time += 10.0
        machine, goal = self.kernel.machine(), Goal(self.spec(nic, allow))
        return converge(evolve(machine, ethtool=ethtool) if ethtool else machine, goal, self.memory)

    def spec(self, nic: Mapping[str, Any] | None, allow: str) -> NodeSpec:
        nics = [] if nic is None else [{"name": "rail0", "select": {"pci": PF}, **nic}]
        return spec_of(*nics, disruption={"allow": allow})

    def set_up(self, function: str, up: bool) -> None:
        self.kernel.netlink.set_link(self.kernel.netdev(function).ifindex, up=up)

    def written(self, name: str) -> list[str]:
        return [value for where, value in self.kernel.writes if where == name]


@pytest.fixture
def node() -> Node:
    return Node()


def brought_up_last(written: list[str]) -> bool:
    """Whether settings were written to a netdev, and all of them before its link came up."""
    return len(written) > 1 and [value for value in written if value.endswith("up=True")] == [written[-1]]


@pytest.mark.parametrize("keys", [*([key] for key in SETTINGS), list(SETTINGS)], ids="+".join)
def test_a_pf_that_is_down_is_set_and_then_brought_up(node: Node, keys: list[str]) -> None:
    result = node.follow({key: SETTINGS[key] for key in keys})
    assert is_ready(result.conditions), result.conditions
    assert brought_up_last(node.written(NETDEV)), node.written(NETDEV)
    assert {outcome.change.disruption for outcome in result.outcomes} == {Disruption.NONE}
    node.kernel.writes.clear()
    assert node.follow({key: SETTINGS[key] for key in keys}).outcomes == ()
    assert node.kernel.writes == []


@pytest.mark.parametrize("keys", [*([key] for key in VF_SETTINGS), list(VF_SETTINGS)], ids="+".join)
def test_so_is_a_vf(node: Node, keys: list[str]) -> None:
    count = {"vfs": {"count": 2}}
    assert is_ready(node.follow(count, allow="vf-reset").conditions)
    vf = vf_addresses(node.kernel.files, PF)[1]
    node.set_up(vf, up=False)
    node.kernel.writes.clear()
    given = {key: VF_SETTINGS[key] for key in keys}
    result = node.follow({"vfs": {"count": 2, "groups": [{"index": "1", **given}]}})
    assert is_ready(result.conditions), result.conditions
    assert brought_up_last(node.written(node.kernel.netdev(vf).name)), node.kernel.writes


def test_no_other_link_is_taken_down_for_its_settings_before_the_one_that_is_down_is_up(node: Node) -> None:
    """Two links at once would be down. The other's settings have their own turn."""
    wanted = node.spec({"vfs": {"count": 2, "defaults": {"rings": {"rx": 512}}}}, "none")
    assert is_ready(node.follow({"vfs": {"count": 2, "defaults": {"rings": {"rx": 512}}}}, allow="vf-reset").conditions)
    first, second = vf_addresses(node.kernel.files, PF).values()
    node.kernel.ethtool.set("rings", node.kernel.netdev(first).ifindex, {"rx": 256})
    before = converge(node.kernel.machine(), Goal(wanted), node.memory)
    assert [(o.change.target, o.result) for o in before.outcomes] == [(f"{PF}#0", "deferred")]
    node.set_up(second, up=False)
    node.kernel.writes.clear()
    goal = Goal(wanted, asked=lambda: (Disruption.LINK_FLAP, ""))
    assert is_ready(converge(node.kernel.machine(), goal, node.memory, before.have, frozenset({f"{PF}#1"})).conditions)
    links = [node.kernel.netdev(vf).name for vf in (second, first)]
    assert [where for where, _ in node.kernel.writes if where in links][:2] == links, node.kernel.writes


def test_new_vfs_are_set_before_they_are_brought_up(node: Node) -> None:
    """Without the order of changes a VF's rings would take its link down once more, also where that is allowed."""
    vfs = {"count": 2, "defaults": VF_SETTINGS}
    result = node.follow({"vfs": vfs}, allow="vf-reset")
    assert is_ready(result.conditions), result.conditions
    for vf in vf_addresses(node.kernel.files, PF).values():
        written = node.written(node.kernel.netdev(vf).name)
        assert brought_up_last([value for value in written if not value.startswith("txqueuelen")]), written


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("later", [{}, None], ids=["left the spec", "its NIC left the spec"])
def test_an_original_is_restored_before_the_link_comes_up(node: Node, key: str, later: dict[str, Any] | None) -> None:
    node.set_up(PF, up=True)
    before = state(node, key)
    assert is_ready(node.follow({key: SETTINGS[key], "state": "down"}, allow="link-flap").conditions)
    assert state(node, key) != before
    node.kernel.writes.clear()
    assert is_ready(node.follow(later).conditions)
    assert state(node, key) == before
    assert brought_up_last(node.written(NETDEV)), node.written(NETDEV)


def state(node: Node, key: str) -> object:
    index, ethtool = node.kernel.netdev(PF).ifindex, node.kernel.ethtool
    method = "features" if key == "offloads" else key
    return node.kernel.netdev(PF).mtu if key == "mtu" else ethtool.settings(method, index)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{**SETTINGS, "max_read_request": 4096}, {"vfs": {"count": 2, "groups": [{"index": "1", **VF_SETTINGS}]}}]
)
def test_a_plan_lists_the_changes_in_the_order_in_which_they_are_made(node: Node, given: dict[str, Any]) -> None:
    node.follow({"vfs": {"count": 2}, "altnames": ["old"]}, allow="vf-reset")
    for function in (PF, *vf_addresses(node.kernel.files, PF).values()):
        node.set_up(function, up=False)
    planned = dry_run(
        node.kernel.machine(), node.spec({"vfs": {"count": 2}, **given}, "none"), node.memory.originals
    ).changes
    made = [outcome.change for outcome in node.follow({"vfs": {"count": 2}, **given}).outcomes]
    # What is known only after others is one line of the plan.
    told = [change for change in made if key(change) in map(key, planned)]
    assert [key(change) for change in planned if change.field != WHOLE_KIND] == [key(change) for change in told]
    assert {change.kind for change in told} >= {"links", "rings", "offloads"}


def key(change: Change) -> tuple[str, str, str]:
    return change.kind, change.target, change.field


# --- drivers that need their link up --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "word"),
    [("channels", "channels"), ("rings", "rings"), ("coalescing", "coalescing"), ("offloads", "feature")],
)
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_what_is_refused_while_the_link_is_down_is_judged_later(node: Node, key: str, word: str, error: int) -> None:
    """As qlcnic_set_intr_coalesce does."""
    node.kernel.fault = refusing(error, "ethtool", f" {word} ", when=lambda: not node.kernel.netdev(PF).up)
    node.follow({key: SETTINGS[key]})
    assert node.kernel.netdev(PF).up
    result = node.follow({key: SETTINGS[key]})
    flaps = [(o.result, o.change.disruption) for o in result.outcomes if o.change.disruption > Disruption.NONE]
    if key == "coalescing":
        assert is_ready(result.conditions)
    else:
        assert flaps == [("deferred", Disruption.LINK_FLAP)]
    assert is_ready(node.follow({key: SETTINGS[key]}, allow="link-flap").conditions)


def test_what_a_driver_refuses_also_with_its_link_up_is_tried_again_after_minutes(node: Node) -> None:
    node.kernel.fault = refusing(errno.EOPNOTSUPP, "coalescing")
    for _ in range(20):
        node.follow({"coalescing": SETTINGS["coalescing"]})
    # Once before the link came up, and once after that.
    assert len([value for value in node.written(NETDEV) if value.startswith("coalescing")]) == 2


@pytest.mark.parametrize("key", ["channels", "rings", "coalescing"])
def test_what_is_refused_is_named_once_though_the_link_does_not_come_up_either(node: Node, key: str) -> None:
    def fault(operation: str, where: str, value: str) -> OSError | None:
        refused = value.startswith(key) or "up=True" in value
        return OSError(errno.EIO, "Input/output error") if refused else None

    node.kernel.fault = fault
    result = node.follow({key: SETTINGS[key]})
    failed = [o.change.field for o in result.outcomes if o.result == "failed"]
    assert len(failed) == len(set(failed)) == 2, failed


@pytest.mark.parametrize("allow", ["none", "link-flap"])
@pytest.mark.parametrize("method", ["channels", "rings", "coalescing", "features"])
def test_a_driver_that_cannot_be_read_while_its_link_is_down_is_brought_up(node: Node, method: str, allow: str) -> None:
    class Silent(SimEthtool):
        def settings(self, group: Group, ifindex: int) -> Mapping[str, Setting]:
            if group == method and not node.kernel.netdev(PF).up:
                raise OSError(errno.EINVAL, "the link is down")
            return node.kernel.ethtool.settings(group, ifindex)

        def set(self, group: Group, ifindex: int, given: Mapping[str, int | bool]) -> None:
            node.kernel.ethtool.set(group, ifindex, given)

    result = node.follow(SETTINGS, allow, ethtool=Silent(node.kernel))
    assert node.kernel.netdev(PF).up
    # What is first read then is judged as a change of a link that is up.
    assert is_ready(result.conditions) is (allow == "link-flap" or method == "coalescing"), result.conditions


# --- whatever others have done before ---------------------------------------------------------------------------

CHOICES: dict[str, tuple[Any, ...]] = {
    "mtu": (1500, 4000, 9000),
    "channels": ({"combined": 1}, {"combined": 2}),
    "rings": ({"rx": 512}, {"tx": 256}, {"rx": 1024, "tx": 512}),
    "coalescing": ({"rx_usecs": 10}, {"rx_usecs": 50}),
    "offloads": ({"rx-all": True}, {"rx-gro": False}, {"rx-all": False, "rx-gro": True}),
    "state": ("up", "down"),
}
FLAPS = ("channels", "rings", "feature {'rx-all'", "mtu=1", "mtu=4", "mtu=9")
"""How the writes begin for which igb takes a link down."""


@pytest.mark.parametrize("seed", range(20))
def test_without_permission_no_link_that_is_up_is_taken_down_for_a_setting(node: Node, seed: int) -> None:
    chance, kernel = random.Random(seed), node.kernel  # noqa: S311  the same machines each time
    taken_down: list[tuple[str, str]] = []
    allow = "vf-reset"

    def given(*keys: str) -> dict[str, Any]:
        return {key: chance.choice(CHOICES[key]) for key in keys if chance.random() < 0.5}

    def fault(operation: str, where: str, value: str) -> OSError | None:
        up = where in kernel.netdevs and kernel.netdevs[where].link.up
        if up and allow == "none" and value.startswith(FLAPS):
            taken_down.append((where, value))
        # Half of the drivers accept nothing while their link is down.
        return OSError(errno.EINVAL, "down") if seed % 2 and operation == "ethtool" and not up else None

    for _ in range(5):
        vfs = {"count": 2, "defaults": given("rings", "coalescing", "state")}
        nic = {**given(*CHOICES), "vfs": vfs} if chance.random() < 0.9 else None
        for _ in range(3):
            node.follow(nic, allow)
        kernel.fault = no_fault
        for netdev in list(kernel.netdevs.values()):
            kernel.netlink.set_link(netdev.link.ifindex, up=chance.random() < 0.5)
            kernel.ethtool.set("rings", netdev.link.ifindex, {"rx": chance.choice((256, 2048))})
        kernel.fault, allow = fault, chance.choice(("none", "link-flap"))
    assert not taken_down
