"""IP addresses, routing tables and rules of rails: whole passes on the simulated kernel."""

import errno
from typing import Any

import pytest

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.hardware.functions import vf_addresses
from agent.machine import Route, Rule
from agent.report.verdict import is_ready
from agent.spec.addresses import PRIORITY
from agent.spec.node import NodeSpec
from agent.state.scope import own
from cli.as_spec import derive_spec
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import again, condition, spec_of, undone
from tests.sim.refusing import refusing
from tests.sim.two_nics import PF0, PF1

DERIVED = [{"network": "10.{rail}.0.0/16"}, {"network": "fd00:0:0:{rail}::/64"}]
CONF = "/proc/sys/net/ipv4/conf"


def spec(first: list[Any] | None = None, second: list[Any] | None = None, **more: Any) -> NodeSpec:
    nic = more.pop("nic", {})
    nics = [
        {"name": f"rail{rail}", "select": {"pci": pci}, "rail": rail, "addresses": addresses or [], **nic}
        for rail, (pci, addresses) in enumerate(((PF0, first), (PF1, second)))
    ]
    return spec_of(*nics, node_number=17, **more)


def run(kernel: Kernel, wanted: NodeSpec, originals: Originals | None = None, **more: Any) -> Pass:
    return converge(kernel.machine(), Goal(wanted), Memory(lambda: 0.0, originals=originals or Originals()), **more)


def settle(kernel: Kernel, wanted: NodeSpec, originals: Originals | None = None, **more: Any) -> Pass:
    result = run(kernel, wanted, originals, **more)
    assert is_ready(result.conditions), result.conditions
    return result


def index(kernel: Kernel, pf: str) -> int:
    return kernel.netdev(pf).ifindex


def own_addresses(kernel: Kernel, pf: str) -> tuple[str, ...]:
    return kernel.netlink.addresses().get(index(kernel, pf), ())


def test_each_rail_gets_its_addresses_its_table_and_its_rules(kernel: Kernel) -> None:
    gateway = {"network": "10.{rail}.0.0/16", "gateway": "10.{rail}.255.254"}
    wanted = spec([gateway, DERIVED[1]], DERIVED)
    settle(kernel, wanted)
    first, second = index(kernel, PF0), index(kernel, PF1)
    assert own_addresses(kernel, PF0) == ("10.0.0.17/16", "fd00::11/64")
    assert own_addresses(kernel, PF1) == ("10.1.0.17/16", "fd00:0:0:1::11/64")
    assert set(kernel.netlink.routes({479100})) == {
        Route("10.0.0.0/16", 479100, first, None, "10.0.0.17"),
        Route("0.0.0.0/0", 479100, first, "10.0.255.254", "10.0.0.17"),
        Route("fd00::/64", 479100, first, None, "fd00::11"),
    }
    assert set(kernel.netlink.routes({479101})) == {
        Route("10.1.0.0/16", 479101, second, None, "10.1.0.17"),
        Route("fd00:0:0:1::/64", 479101, second, None, "fd00:0:0:1::11"),
    }
    assert set(kernel.netlink.rules()) == {
        Rule("10.0.0.17", 479100, PRIORITY),
        Rule("fd00::11", 479100, PRIORITY),
        Rule("10.1.0.17", 479101, PRIORITY),
        Rule("fd00:0:0:1::11", 479101, PRIORITY),
    }
    for name in ("enp33s0", "enp65s0"):
        settings = [
            kernel.files.read(f"{CONF}/{name}/{setting}") for setting in ("arp_ignore", "arp_announce", "rp_filter")
        ]
        assert settings == ["1", "2", "2"]
    assert again(kernel, wanted) == ([], ())


def test_ipv6_alone_leaves_arp_alone(kernel: Kernel) -> None:
    settle(kernel, spec(["fd00::7/64"]))
    assert kernel.files.read(f"{CONF}/enp33s0/arp_ignore") == "0"


@pytest.mark.parametrize("what", ["address", "address6", "route", "rule", "setting"])
def test_an_event_restores_what_another_program_removed(kernel: Kernel, what: str) -> None:
    wanted = spec(DERIVED, DERIVED)
    last = settle(kernel, wanted).have
    before = (kernel.netlink.addresses(), set(kernel.netlink.routes({479100, 479101})), set(kernel.netlink.rules()))
    if what == "address":
        kernel.netlink.remove_address(index(kernel, PF1), "10.1.0.17/16")
    elif what == "address6":
        kernel.netlink.remove_address(index(kernel, PF1), "fd00:0:0:1::11/64")
    elif what == "route":
        kernel.netlink.remove_route(kernel.netlink.routes({479101})[0])
    elif what == "rule":
        kernel.netlink.remove_rule(Rule("10.1.0.17", 479101, PRIORITY))
    else:
        kernel.tree.put(f"{CONF}/enp65s0/arp_ignore", "0")
    result = settle(kernel, wanted, last=last, scope=frozenset({own(PF1)}))
    assert {outcome.change.kind for outcome in result.outcomes} == {"addresses"}
    assert {outcome.change.target for outcome in result.outcomes} == {PF1}
    after = (kernel.netlink.addresses(), set(kernel.netlink.routes({479100, 479101})), set(kernel.netlink.rules()))
    assert {ifindex: set(assigned) for ifindex, assigned in after[0].items()} == {
        ifindex: set(assigned) for ifindex, assigned in before[0].items()
    }
    assert after[1:] == before[1:]
    assert kernel.files.read(f"{CONF}/enp65s0/arp_ignore") == "1"


def test_after_a_link_was_down_or_a_driver_reloaded_addresses_routes_and_rules_return(kernel: Kernel) -> None:
    wanted = spec(DERIVED)
    settle(kernel, wanted)
    kernel.netlink.set_link(index(kernel, PF0), up=False)
    settle(kernel, wanted)
    assert set(own_addresses(kernel, PF0)) == {"10.0.0.17/16", "fd00::11/64"}
    assert len(kernel.netlink.routes({479100})) == 2
    kernel.reload_driver(PF0)
    settle(kernel, wanted)
    assert set(own_addresses(kernel, PF0)) == {"10.0.0.17/16", "fd00::11/64"}
    assert {route.ifindex for route in kernel.netlink.routes({479100})} == {index(kernel, PF0)}


@pytest.mark.parametrize("refused", [errno.ENETUNREACH, errno.ENETDOWN, errno.EINVAL])
def test_a_route_that_the_kernel_refuses_while_its_link_flaps_is_there_later(kernel: Kernel, refused: int) -> None:
    """The link has been up only for a moment (https://github.com/bisdn/bisdn-linux/issues/130)."""
    wanted = spec([{"network": "10.{rail}.0.0/16", "gateway": "10.{rail}.255.254"}])
    kernel.fault = refusing(refused, " route ")
    first = run(kernel, wanted)
    assert not is_ready(first.conditions)
    assert kernel.netlink.routes({479100}) == ()
    kernel.fault = no_fault
    settle(kernel, wanted, last=first.have)
    assert {(route.destination, route.gateway) for route in kernel.netlink.routes({479100})} == {
        ("10.0.0.0/16", None),
        ("0.0.0.0/0", "10.0.255.254"),
    }


def test_all_that_a_cable_s_loss_has_taken_is_back_without_a_carrier(kernel: Kernel) -> None:
    """Another program removes the addresses of a link that lost its carrier, and all routes with them (flannel 1434)."""
    wanted = spec(DERIVED)
    last = settle(kernel, wanted).have
    before = set(kernel.netlink.routes({479100}))
    kernel.netlink.set_link(index(kernel, PF0), up=False)
    for address in own_addresses(kernel, PF0):
        kernel.netlink.remove_address(index(kernel, PF0), address)
    kernel.netlink.set_link(index(kernel, PF0), up=True)
    kernel.tree.put("/sys/class/net/enp33s0/carrier", "0")
    run(kernel, wanted, last=last, scope=frozenset({own(PF0)}))
    assert set(own_addresses(kernel, PF0)) == {"10.0.0.17/16", "fd00::11/64"}
    assert set(kernel.netlink.routes({479100})) == before


def test_a_rule_that_another_program_adds_at_the_same_moment_is_no_error(kernel: Kernel) -> None:
    """Networkd says "Could not add rule: File exists", and its link fails (https://github.com/systemd/systemd/issues/18107)."""
    wanted = spec(DERIVED)
    rule = Rule("10.0.0.17", 479100, PRIORITY)

    def meanwhile(operation: str, where: str, what: str) -> None:
        if operation == "rule" and what == "from 10.0.0.17 table 479100" and rule not in kernel.netlink.rules():
            kernel.fault = no_fault
            kernel.netlink.add_rule(rule)

    kernel.fault = meanwhile
    settle(kernel, wanted)
    assert kernel.fault is no_fault
    assert kernel.netlink.rules().count(rule) == 1


def test_a_route_of_another_netdev_in_the_rail_s_table_is_replaced(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.netlink.add_route(Route("10.0.0.0/16", 479100, index(kernel, PF1)))
    settle(kernel, spec(DERIVED))
    assert Route("10.0.0.0/16", 479100, index(kernel, PF0), None, "10.0.0.17") in kernel.netlink.routes({479100})
    assert index(kernel, PF1) not in {route.ifindex for route in kernel.netlink.routes({479100})}


def test_addresses_of_others_stay(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec(), originals)
    kernel.netlink.add_address(index(kernel, PF0), "198.51.100.1/24")
    kernel.netlink.add_address(index(kernel, PF0), "10.0.0.17/16")
    settle(kernel, spec(DERIVED), originals)
    settle(kernel, spec(), originals)
    assert own_addresses(kernel, PF0) == ("198.51.100.1/24", "10.0.0.17/16")
    assert (kernel.netlink.routes({479100}), kernel.netlink.rules()) == ((), ())


@pytest.mark.parametrize("left", [spec(), spec_of()], ids=["the NICs stay", "the NICs leave"])
def test_an_address_that_leaves_the_spec_is_removed_with_its_table_and_rule(
    kernel: Kernel, originals: Originals, left: NodeSpec
) -> None:
    settle(kernel, spec(DERIVED, DERIVED), originals)
    settle(kernel, spec(["192.0.2.11/24"], DERIVED), originals)
    assert own_addresses(kernel, PF0) == ("192.0.2.11/24",)
    assert {route.destination for route in kernel.netlink.routes({479100})} == {"192.0.2.0/24"}
    settle(kernel, left, originals)
    assert kernel.netlink.addresses() == {}
    assert (kernel.netlink.routes({479100, 479101}), kernel.netlink.rules()) == ((), ())
    assert {kernel.files.read(f"{CONF}/{name}/arp_ignore") for name in ("enp33s0", "enp65s0")} == {"0"}


def test_an_address_changes_within_its_network_although_the_kernel_removes_it_with_the_old_one(
    kernel: Kernel, originals: Originals
) -> None:
    settle(kernel, spec(["192.0.2.11/24"]), originals)
    settle(kernel, spec(["192.0.2.12/24"]), originals)
    assert own_addresses(kernel, PF0) == ("192.0.2.12/24",)
    assert {rule.source for rule in kernel.netlink.rules()} == {"192.0.2.12"}
    assert [route.source for route in kernel.netlink.routes({479100})] == ["192.0.2.12"]


def test_addresses_of_one_network_leave_together(kernel: Kernel, originals: Originals) -> None:
    # The kernel removes the second with the first.
    settle(kernel, spec(["192.0.2.11/24", "192.0.2.12/24"]), originals)
    assert undone(settle(kernel, spec(), originals)) == []
    assert (kernel.netlink.addresses(), kernel.netlink.routes({479100}), kernel.netlink.rules()) == ({}, (), ())


def test_an_address_in_use_is_removed_once_its_user_is_gone(kernel: Kernel, originals: Originals) -> None:
    kernel.rdma.add(PF0, "mlx5_0", "enp33s0")
    settle(kernel, spec(DERIVED), originals)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    result = run(kernel, spec(), originals)
    assert "ib_write_bw (pid 4711)" in undone(result)[0].error
    assert set(own_addresses(kernel, PF0)) == {"10.0.0.17/16", "fd00::11/64"}
    kernel.host.open.clear()
    settle(kernel, spec(), originals)
    assert own_addresses(kernel, PF0) == ()


def test_an_address_is_added_while_the_nic_is_in_use(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "mlx5_0", "enp33s0")
    settle(kernel, spec())
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    settle(kernel, spec(DERIVED))


def test_the_agent_s_own_gateway_is_no_user_of_the_nic(kernel: Kernel) -> None:
    gateway = [{"network": "10.{rail}.0.0/16", "gateway": "10.{rail}.255.254"}]
    settle(kernel, spec(gateway))
    settle(kernel, spec(gateway, nic={"vfs": {"count": 2}, "disruption": {"allow": "reboot"}}))
    settle(kernel, spec(gateway, nic={"vfs": {"count": 4}, "disruption": {"allow": "reboot"}}))
    assert len(vf_addresses(kernel.files, PF0)) == 4


def test_an_address_that_another_netdev_has_is_blocked(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.ip["enp65s0"] = ("10.0.0.17/8",)
    outcomes = undone(run(kernel, spec(DERIVED[:1])))
    assert {(outcome.result, outcome.error) for outcome in outcomes} == {
        ("blocked", "enp65s0 has the address 10.0.0.17")
    }
    assert {outcome.remedy for outcome in outcomes} == {"take it from enp65s0 or from the spec"}
    assert (kernel.netlink.routes({479100}), kernel.netlink.rules()) == ((), ())


def test_a_sysctl_and_addresses_that_set_the_same_are_both_named(kernel: Kernel) -> None:
    given = {"net.ipv4.conf.enp33s0.rp_filter": "2"}
    planned = dry_run(kernel.machine(), spec(DERIVED, sysctls=given))
    (error,) = planned.errors
    assert all(each in error for each in (*given, "the addresses of NIC rail0 set the same"))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_setting_that_sysctls_and_then_addresses_set_has_one_original(
    kernel: Kernel, originals: Originals, swapped: bool
) -> None:
    settle(kernel, spec(), originals)
    by_sysctls, by_addresses = spec(sysctls={"net.ipv4.conf.enp33s0.rp_filter": "1"}), spec(["192.0.2.11/24"])
    for wanted in (by_addresses, by_sysctls) if swapped else (by_sysctls, by_addresses):
        settle(kernel, wanted, originals)
    left = dry_run(kernel.machine(), spec(), originals).changes
    assert [change.after for change in left if change.field.endswith("rp_filter")] == ["0"]


def test_an_ipv6_address_with_another_prefix_length_is_named(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.netlink.add_address(index(kernel, PF0), "fd00::7/48")
    outcome = undone(run(kernel, spec(["fd00::7/64"])))[0]
    assert outcome.error.startswith("enp33s0 has fd00::7 with another prefix")


def test_an_ipv6_address_gets_another_prefix_length_in_one_pass(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec(["fd00::7/64"]), originals)
    assert undone(settle(kernel, spec(["fd00::7/80"]), originals)) == []
    assert own_addresses(kernel, PF0) == ("fd00::7/80",)


def test_a_prefix_length_that_waits_for_a_user_does_not_make_unready(kernel: Kernel, originals: Originals) -> None:
    first = spec(["fd00::7/64"])
    settle(kernel, first, originals)
    kernel.routed.add("enp33s0")
    goal = Goal(spec(["fd00::7/80"]), verified=first)
    result = converge(kernel.machine(), goal, Memory(lambda: 0.0, originals=originals))
    assert is_ready(result.conditions), result.conditions
    assert {outcome.result for outcome in undone(result)} == {"blocked", "deferred"}
    kernel.routed.clear()
    settle(kernel, spec(["fd00::7/80"]), originals)
    assert own_addresses(kernel, PF0) == ("fd00::7/80",)


def test_an_address_of_others_stays_when_the_spec_s_leaves(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec(["192.0.2.1/24"]), originals)
    kernel.netlink.add_address(index(kernel, PF0), "192.0.2.50/24")
    settle(kernel, spec(), originals)
    assert own_addresses(kernel, PF0) == ("192.0.2.50/24",)
    assert kernel.files.read(f"{CONF}/enp33s0/promote_secondaries") == "0"


def test_ipv6_that_is_disabled_is_named(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.fault = refusing(errno.EACCES, "address ")
    assert "IPv6 is disabled" in undone(run(kernel, spec(["fd00::7/64"])))[0].error
    kernel.fault = no_fault
    settle(kernel, spec(["fd00::7/64"]))


def test_a_netdev_that_udev_has_not_named_yet_gets_no_address(kernel: Kernel) -> None:
    kernel.udev.lags(PF0)
    result = run(kernel, spec(DERIVED))
    assert f"links {PF0} udev entry: none -> present" in [str(outcome.change) for outcome in undone(result)]
    assert own_addresses(kernel, PF0) == ()
    kernel.udev.catches_up(PF0)
    settle(kernel, spec(DERIVED))


def test_a_gid_of_an_ipv4_address_comes_with_the_address_and_its_index_is_found(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "mlx5_0", "enp33s0")
    kernel.rdma.add(PF1, "mlx5_1", "enp65s0")
    # On one of them another GID has the index that the IPv4 one would have.
    kernel.rdma.set_gid("mlx5_1", 1, "2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", "enp65s0")
    expected = {"rdma": {"gid_type": "RoCE v2", "gid_ipv4": True}}

    def said(wanted: NodeSpec) -> str:
        return condition(run(kernel, wanted), "RdmaPorts").message

    assert "IPv4" in said(spec(nic=expected))
    only6 = said(spec(["fd00::7/64"], ["fd00::8/64"], nic=expected))
    assert "give the NIC an IPv4 address" in only6
    assert said(spec(DERIVED, DERIVED, nic=expected)) == ""


def test_a_nic_with_rail_addresses_is_not_taken_for_the_default_route_in_a_derived_spec(kernel: Kernel) -> None:
    gateway = [{"network": "10.{rail}.0.0/16", "gateway": "10.{rail}.255.254"}]
    settle(kernel, spec(gateway))
    kernel.routed.add("enp65s0")
    assert [nic.select.pci for nic in derive_spec(kernel.machine(), "n1", ()).spec.nics] == [PF0]


def test_an_address_that_another_node_has_is_not_taken_for_one_that_works(kernel: Kernel) -> None:
    address = "fd00::11/64"
    kernel.netlink.set_link(index(kernel, PF0), up=True)
    kernel.netlink.add_address(index(kernel, PF0), address)
    kernel.routing.duplicates.add(address)
    first, *others = undone(run(kernel, spec([address])))
    assert (first.change.field, first.result) == (f"address {address}", "blocked")
    assert first.error.startswith("another node has fd00::11")
    assert "ip address del fd00::11/64 dev enp33s0" in first.remedy
    assert {outcome.error for outcome in others} == {first.error}
    kernel.writes.clear()
    run(kernel, spec([address]))
    assert not kernel.writes
    kernel.netlink.remove_address(index(kernel, PF0), address)
    kernel.routing.duplicates.clear()
    settle(kernel, spec([address]))
