"""Rails that move to other PFs: a rule and a table belong to a rail, not to the PF that has it."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.machine import Rule
from agent.report.records import HOST
from agent.report.verdict import is_ready
from agent.spec.addresses import PRIORITY
from agent.spec.node import NodeSpec
from tests.sim import passes
from tests.sim.kernel import Kernel, no_fault
from tests.sim.killed import Killed
from tests.sim.passes import spec_of
from tests.sim.two_nics import MAC0, NAME0, NAME1, PF0, PF1, two_nics

FIVE = ["10.5.0.7/16", "10.5.0.8/16", "fd00::5:7/112"]
SIX = [{"address": "10.6.0.7/16", "gateway": "10.6.255.254"}]
TABLES = range(479100, 479164)


def rail(number: int, addresses: list[Any], **select: str) -> dict[str, Any]:
    return {"name": f"rail{number}", "select": select, "rail": number, "addresses": addresses}


def run(kernel: Kernel, wanted: NodeSpec, originals: Originals) -> Pass:
    return passes.settle(kernel, wanted, originals=originals)


def settle(kernel: Kernel, wanted: NodeSpec, originals: Originals) -> None:
    """One pass makes everything as wanted, and the next ones write nothing."""
    result = run(kernel, wanted, originals)
    assert is_ready(result.conditions), result.conditions
    assert result.as_wanted
    run(kernel, wanted, originals)
    assert passes.again(kernel, wanted, originals=originals) == ([], ())


@pytest.mark.parametrize("of", ["hung", "unreadable"])
def test_a_sysctl_that_a_rail_has_taken_over_stays_while_its_nic_is_left_alone(of: str) -> None:
    kernel, originals = two_nics(), Originals()
    nic = {"name": "rail0", "select": {"pci": PF0}, "rail": 0}
    settle(kernel, spec_of(nic, sysctls={f"net.ipv4.conf.{NAME0}.arp_ignore": "1"}), originals)
    wanted = spec_of({**nic, "addresses": FIVE})
    settle(kernel, wanted, originals)
    machine = evolve(kernel.machine(), hung=frozenset({PF0} if of == "hung" else ()))
    kernel.unreadable |= {f"/sys/bus/pci/devices/{PF0}/numa_node"} if of == "unreadable" else set()
    passes.settle(machine, wanted, originals=originals)
    assert kernel.writes == []


def rules(kernel: Kernel) -> set[tuple[str, int]]:
    return {(rule.source, rule.table) for rule in kernel.netlink.rules()}


def has(kernel: Kernel, pf: str) -> set[str]:
    return set(kernel.netlink.addresses().get(kernel.netdev(pf).ifindex, ()))


def tables(kernel: Kernel) -> Mapping[int, set[str]]:
    """The PFs through which the routes of each table lead."""
    pfs = {kernel.netdev(pf).ifindex: pf for pf in (PF0, PF1) if kernel.has_netdev(pf)}
    routes = sorted(kernel.netlink.routes(TABLES), key=lambda route: route.table)
    return {
        table: {pfs[route.ifindex] for route in of_table}
        for table, of_table in itertools.groupby(routes, key=lambda route: route.table)
    }


FIVES_RULES = {("10.5.0.7", 479105), ("10.5.0.8", 479105), ("fd00::5:7", 479105)}


def is_on(kernel: Kernel, pf: str) -> None:
    assert rules(kernel) == FIVES_RULES
    assert tables(kernel) == {479105: {pf}}
    assert has(kernel, pf) == set(FIVE)


@pytest.mark.parametrize("returns", ["before", "after"])
def test_the_rules_of_a_rail_stay_when_the_card_returns_that_had_the_rail_before(
    kernel: Kernel, originals: Originals, returns: str
) -> None:
    settle(kernel, spec_of(rail(5, FIVE, pci=PF0)), originals)
    kernel.remove_nic(PF0)
    if returns == "before":
        kernel.add_nic(PF0, "ens9", MAC0)
    moved = spec_of(rail(5, FIVE, pci=PF1))
    settle(kernel, moved, originals)
    if returns == "after":
        kernel.add_nic(PF0, "ens9", MAC0)
    settle(kernel, moved, originals)
    is_on(kernel, PF1)
    assert has(kernel, PF0) == set()


@pytest.mark.parametrize("loss", ["reload_driver", "lose_netdev"])
def test_a_rail_moves_from_a_pf_that_has_lost_its_addresses(kernel: Kernel, originals: Originals, loss: str) -> None:
    settle(kernel, spec_of(rail(5, FIVE, pci=PF0)), originals)
    getattr(kernel, loss)(PF0)
    settle(kernel, spec_of(rail(5, FIVE, pci=PF1)), originals)
    is_on(kernel, PF1)


def test_two_rails_that_change_places_while_a_link_is_down_do_not_block_each_other_in_the_plan(
    kernel: Kernel, originals: Originals
) -> None:
    """The kernel has removed the routes by which the agent knows its addresses."""
    settle(kernel, spec_of(rail(5, FIVE, pci=PF0), rail(6, SIX, pci=PF1)), originals)
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, up=False)
    swapped = spec_of(rail(5, FIVE, pci=PF1), rail(6, SIX, pci=PF0))
    assert dry_run(kernel.machine(), swapped).errors == ()
    settle(kernel, swapped, originals)
    assert has(kernel, PF1) == set(FIVE)


ON_PF0, ON_PF1 = rail(5, FIVE, pci=PF0), rail(5, FIVE, pci=PF1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([ON_PF0], [ON_PF1], id="to another PF"),
        pytest.param([ON_PF0], [ON_PF1, {"name": "spare", "select": {"pci": PF0}}], id="and the old one stays"),
        pytest.param([ON_PF0], [ON_PF1, rail(6, SIX, pci=PF0)], id="and the old one gets another rail"),
        pytest.param([ON_PF0], [rail(7, FIVE, pci=PF0)], id="another number"),
        pytest.param([ON_PF0], [rail(7, FIVE, pci=PF1)], id="to another PF with another number"),
        pytest.param([ON_PF0, rail(6, SIX, pci=PF1)], [ON_PF1, rail(6, SIX, pci=PF0)], id="two change places"),
        pytest.param([ON_PF0, rail(6, SIX, pci=PF1)], [rail(6, FIVE, pci=PF0), rail(5, SIX, pci=PF1)], id="numbers"),
    ],
)
def test_rails_move_in_one_spec(
    kernel: Kernel, originals: Originals, before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    settle(kernel, spec_of(*before), originals)
    assert dry_run(kernel.machine(), spec_of(*after)).errors == ()
    settle(kernel, spec_of(*after), originals)
    given = {PF0: set[str](), PF1: set[str]()}
    sources: set[tuple[str, int]] = set()
    for nic in after:
        for address in nic.get("addresses", ()):
            text = address if isinstance(address, str) else address["address"]
            given[nic["select"]["pci"]].add(text)
            sources.add((text.partition("/")[0], 479100 + nic["rail"]))
    assert {pf: has(kernel, pf) for pf in given} == given
    assert rules(kernel) == sources
    assert tables(kernel) == {479100 + nic["rail"]: {nic["select"]["pci"]} for nic in after if "rail" in nic}


def test_the_rules_of_a_rail_without_its_nic_stay(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec_of(rail(5, FIVE, pci=PF0)), originals)
    kernel.remove_nic(PF0)
    run(kernel, spec_of(rail(5, FIVE, pci=PF0)), originals)
    assert rules(kernel) == FIVES_RULES
    result = run(kernel, spec_of(), originals)
    assert rules(kernel) == set()
    assert {outcome.change.target for outcome in result.outcomes} == {HOST}


def test_a_rule_of_others_stays(kernel: Kernel, originals: Originals) -> None:
    kernel.netlink.add_rule(Rule("10.5.0.7", 479105, PRIORITY))
    settle(kernel, spec_of(rail(5, FIVE, pci=PF0)), originals)
    settle(kernel, spec_of(rail(5, FIVE, pci=PF1)), originals)
    settle(kernel, spec_of(), originals)
    assert rules(kernel) == {("10.5.0.7", 479105)}


def test_an_address_that_others_have_moved_is_not_the_agent_s(kernel: Kernel, originals: Originals) -> None:
    wanted = spec_of(rail(5, FIVE, pci=PF0))
    settle(kernel, wanted, originals)
    kernel.netlink.remove_address(kernel.netdev(PF0).ifindex, "10.5.0.7/16")
    kernel.netlink.add_address(kernel.netdev(PF1).ifindex, "10.5.0.7/16")
    errors = {outcome.error for outcome in run(kernel, wanted, originals).outcomes if outcome.result == "blocked"}
    assert errors == {f"{NAME1} has the address 10.5.0.7"}


def test_a_kill_before_any_write_of_a_move_leaves_nothing_behind(tmp_path: Path) -> None:
    number = 0
    while _killed_at(number, tmp_path / f"{number}.jsonl"):
        number += 1
    assert number > 10


def _killed_at(number: int, path: Path) -> bool:
    """Kill the agent before this write of a move, and let another one go on. :returns: whether there was such a write."""
    kernel = two_nics()
    settle(kernel, spec_of(rail(5, FIVE, pci=PF0)), Originals.load(path))
    moved = spec_of(rail(5, FIVE, pci=PF1))
    writes = itertools.count()

    def kill(operation: str, where: str, what: str) -> None:
        if next(writes) == number:
            raise Killed

    kernel.fault = kill
    try:
        run(kernel, moved, Originals.load(path))
        killed = False
    except Killed:
        killed = True
    kernel.fault = no_fault
    originals = Originals.load(path)
    run(kernel, moved, originals)
    settle(kernel, moved, originals)
    is_on(kernel, PF1)
    assert has(kernel, PF0) == set()
    return killed
