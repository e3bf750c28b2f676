"""The states of the spec in the file: the table of docs/spec-in-force.md, and what a hanging device does to the others."""

import errno
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from agent.spec.node import NodeSpec, from_mapping, to_json
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.refusing import refusing
from tests.sim.service.specs import PF, Agent, refuse_five, spec
from tests.sim.two_nics import PF1

PAGE = Path(__file__).parents[3] / "docs" / "spec-in-force.md"
WRITE = {PF: "vfs: write sriov_numvfs 5 did not return"}


@pytest.fixture
def agent(tmp_path: Path, kernel: Kernel) -> Agent:
    return Agent(tmp_path, kernel)


# --- the states ------------------------------------------------------------------------------------


def on_trial(agent: Agent) -> None:
    agent.give(spec(5))


def kept(agent: Agent) -> None:
    agent.kernel.routed.add("enp33s0")
    agent.give(spec(5))
    agent.try_out()


def verified(agent: Agent) -> None:
    agent.give(spec(5))
    agent.look()


def refused(agent: Agent) -> None:
    agent.give(spec(8))


def given_up(agent: Agent) -> None:
    agent.give(spec(5))
    agent.kernel.fault = refuse_five
    agent.try_out()


def state(agent: Agent) -> str:
    """The state of the file's spec."""
    wanted = agent.file.read_text()
    in_force = agent.in_force
    if in_force.spec is not None and wanted == to_json(in_force.spec):
        assert not in_force.refusal
        assert (in_force.trial_left(agent.now) < math.inf) == (in_force.state() == "on trial")
        return in_force.state()
    assert in_force.spec == spec(3) == in_force.verified
    return "given up" if "the last verified one is kept" in in_force.refusal else "refused"


# --- what happens ----------------------------------------------------------------------------------


def is_ready(agent: Agent) -> None:
    agent.kernel.routed.clear()
    agent.look()


def ends_and_waits(agent: Agent) -> None:
    agent.kernel.routed.add("enp33s0")
    agent.try_out()


def ends_and_fails(agent: Agent) -> None:
    agent.kernel.routed.clear()
    agent.kernel.fault = refuse_five
    agent.kernel.sriov.set_count(PF, 0)
    agent.try_out()


def hangs_in_a_write(agent: Agent) -> None:
    agent.hung = frozenset({PF})
    agent.start(hung_writes=WRITE)


def hangs_in_a_read(agent: Agent) -> None:
    agent.hung = frozenset({PF})
    agent.start()


def restarts(agent: Agent) -> None:
    agent.start()


def crashes(agent: Agent) -> None:
    agent.start(crashed="the worker ended with status 3, 3 times in a row")


def is_reloaded(agent: Agent) -> None:
    agent.read(asked=True)


def boots(agent: Agent) -> None:
    agent.reboot()


STATES: Mapping[str, Callable[[Agent], None]] = {
    "on trial": on_trial,
    "kept": kept,
    "verified": verified,
    "refused": refused,
    "given up": given_up,
}
EVENTS: Mapping[str, Callable[[Agent], None]] = {
    "the node is ready": is_ready,
    "30 s are over, and changes wait": ends_and_waits,
    "30 s are over, and a required change fails": ends_and_fails,
    "a write hangs": hangs_in_a_write,
    "a read hangs": hangs_in_a_read,
    "another worker starts": restarts,
    "three crashes": crashes,
    "the unit is reloaded": is_reloaded,
    "the node boots": boots,
}


def table() -> dict[tuple[str, str], str]:
    """The table in the docs: the state after an event, by the event and the state before it."""
    rows = [
        [re.sub(r"\*", "", cell).strip() for cell in line.strip().strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    header = next(row for row in rows if row[1:] == list(STATES))
    start = rows.index(header) + 2
    body = rows[start : start + len(EVENTS)]
    assert [row[0] for row in body] == list(EVENTS)
    return {(row[0], before): after for row in body for before, after in zip(header[1:], row[1:], strict=True)}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("before", STATES)
def test_each_state_becomes_what_the_table_says(agent: Agent, before: str, event: str) -> None:
    agent.give(spec(3))
    agent.look()
    STATES[before](agent)
    assert state(agent) == before
    EVENTS[event](agent)
    assert state(agent) == table()[event, before]
    # Another worker changes nothing.
    agent.start()
    assert state(agent) == table()[event, before]


def two(count: int, mtu: int, **more: object) -> NodeSpec:
    first = nic("a", PF, vfs={"count": count}, **more)
    return from_mapping({"node_name": "n1", "nics": [first, nic("b", PF1, mtu=mtu)]})


def hangs(agent: Agent) -> None:
    agent.hung = frozenset({PF})


def cannot_be_read(agent: Agent) -> None:
    agent.kernel.unreadable.add(f"/sys/bus/pci/devices/{PF}/numa_node")


def is_missing(agent: Agent) -> None:
    agent.kernel.remove_nic(PF)


@pytest.mark.parametrize("first_nic", [hangs, cannot_be_read, is_missing])
def test_a_new_spec_for_the_other_nics_comes_into_force_whatever_one_nic_lacks(
    agent: Agent, first_nic: Callable[[Agent], None]
) -> None:
    agent.give(two(3, 1500))
    agent.look()
    first_nic(agent)
    without = from_mapping({"node_name": "n1", "nics": [nic("b", PF1, mtu=3000)]})
    for mtu, given in ((9000, two(3, 9000)), (4000, two(3, 4000, required=False)), (3000, without)):
        agent.give(given)
        assert (agent.in_force.spec, agent.in_force.refusal) == (given, "")
        agent.try_out()
        assert agent.kernel.netdev(PF1).mtu == mtu
        agent.start()
        assert agent.in_force.spec == given


@pytest.mark.parametrize("first_nic", [hangs, cannot_be_read, is_missing])
def test_a_new_spec_for_a_nic_that_cannot_be_checked_is_refused_until_it_can(
    agent: Agent, first_nic: Callable[[Agent], None]
) -> None:
    agent.give(two(3, 1500))
    agent.look()
    first_nic(agent)
    agent.give(two(4, 9000))
    agent.start()
    assert agent.in_force.spec == two(3, 1500)
    assert agent.in_force.refusal


@pytest.mark.parametrize("hung_before", ["", "left alone", "tried again"])
def test_other_devices_keep_one_spec_while_a_write_hangs_at_each_try(agent: Agent, hung_before: str) -> None:
    """A spec is not to blame for a device that hung when it came, also if a worker is just trying that device again."""
    agent.give(two(3, 1500))
    agent.look()
    if hung_before:
        agent.hung = frozenset({PF})
        agent.start(hung_writes=WRITE)
        if hung_before == "tried again":
            agent.hung = frozenset()
            agent.start(hung_writes=WRITE)
        agent.give(two(3, 9000))
        if hung_before == "left alone":
            agent.look()
    else:
        agent.give(two(4, 9000))
    for _ in range(3):
        # A worker leaves the device alone, and after a while another one tries it again, which hangs.
        agent.hung = frozenset({PF})
        agent.start(hung_writes=WRITE)
        agent.try_out()
        assert agent.kernel.netdev(PF1).mtu == (9000 if hung_before else 1500)
        agent.hung = frozenset()
        agent.start()
        assert agent.in_force.spec == two(3, 9000 if hung_before else 1500)
    assert ("did not return" in agent.in_force.refusal) is not bool(hung_before)


def test_what_failed_before_a_new_spec_came_is_no_fault_of_that(agent: Agent) -> None:
    """Otherwise nothing of a node with one bad value could be changed, and the others would go to and fro."""
    agent.give(two(3, 1500))
    agent.look()
    agent.kernel.sriov.set_count(PF, 0)
    agent.kernel.fault = lambda operation, where, value: (
        OSError(errno.ENOSPC, "no space") if where.endswith("sriov_numvfs") or "mtu=4000" in value else None
    )
    agent.try_out()
    agent.give(two(3, 9000))
    agent.try_out()
    assert (agent.in_force.spec, agent.kernel.netdev(PF1).mtu) == (two(3, 9000), 9000)
    # What a new spec has brought is its fault, also if another one follows before its trial ends.
    for given in (two(3, 4000), two(2, 4000)):
        agent.give(given)
        agent.look()
    agent.try_out()
    assert f"links {PF1} mtu" in agent.in_force.refusal
    assert f"{PF} count" not in agent.in_force.refusal


def test_what_fails_on_a_nic_that_is_not_required_is_no_fault_of_a_new_spec(agent: Agent) -> None:
    """Also if another NIC keeps the node from being ready."""
    agent.give(two(3, 1500))
    agent.look()
    given = two(5, 1500, required=False)
    agent.give(given)
    agent.kernel.fault = refuse_five
    agent.kernel.unreadable.add(f"/sys/bus/pci/devices/{PF1}/numa_node")
    assert "failed" in {o.result for o in agent.try_out().outcomes if o.change.device == PF}
    assert (agent.in_force.spec, agent.in_force.refusal) == (given, "")


def test_a_spec_of_which_a_part_waits_is_no_more_tried_and_not_verified(agent: Agent) -> None:
    """A failure that comes later is not the spec's fault. Nor can the node return to this spec: a part of it was never made."""
    agent.give(two(3, 1500))
    agent.look()
    agent.kernel.routed.add("enp33s0")
    given = two(5, 9000, required=False)
    agent.give(given)
    agent.look()
    assert (agent.in_force.state(), agent.in_force.verified) == ("kept", two(3, 1500))
    agent.kernel.fault = refusing(errno.EIO, "mtu=9000")
    agent.kernel.netlink.set_link(agent.kernel.netdev(PF1).ifindex, mtu=1500)
    assert "failed" in {outcome.result for outcome in agent.try_out().outcomes}
    assert (agent.in_force.spec, agent.in_force.refusal) == (given, "")


def test_a_spec_that_changes_what_an_entry_leaves_out_is_refused_for_what_the_entry_lacks(agent: Agent) -> None:
    def wanting(mtu: int) -> NodeSpec:
        others = {"driver": "igb", "each": True, "min": 1, "without": ["a"]}
        nics = [nic("a", PF, mtu=mtu), {"name": "rail{index}", "select": others}]
        return from_mapping({"node_name": "n1", "nics": nics})

    agent.give(wanting(1500))
    agent.look()
    agent.kernel.remove_nic(PF1)
    agent.give(wanting(9000))
    assert agent.in_force.spec == wanting(1500)
    assert "at least 1 must match" in agent.in_force.refusal
