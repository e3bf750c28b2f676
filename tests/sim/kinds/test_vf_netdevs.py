"""The netdevs of VFs and PFs: their names, links and carriers, and representors."""

import itertools
from collections.abc import Callable

import pytest
from attrs import evolve

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.retry import Failures
from agent.hardware.functions import netdev, vf_addresses
from agent.machine import Link
from agent.report.records import Disruption
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from cli import counters
from cli.inspection import inspect, render
from tests.sim.kernel import Kernel, Netdev
from tests.sim.kinds.test_sriov import MAC, NAME, OTHER, OTHER_MAC, PF, address, group, made, spec, vf_attributes
from tests.sim.passes import condition, settle


@pytest.fixture
def kernel() -> Kernel:
    return made()


def comes_back(kernel: Kernel, name: str = "net1", vf: str = "") -> str:
    """A container gives a VF back with another name; the VF's address."""
    vf = vf or address(kernel, 1)
    kernel.move_away(vf)
    kernel.come_back(vf, name)
    return vf


def comes_back_up(kernel: Kernel) -> str:
    vf = comes_back(kernel)
    kernel.netlink.set_link(kernel.netdev(vf).ifindex, up=True)
    return vf


def passes_of(kernel: Kernel, wanted: NodeSpec) -> Callable[[int], Pass]:
    """Makes so many passes, 10 s apart and with one memory, and returns the last one."""
    time = itertools.count(step=10.0)
    memory = Memory(lambda: next(time), Failures())
    return lambda count: [converge(kernel.machine(), Goal(wanted), memory) for _ in range(count)][-1]


def test_a_vf_that_is_up_is_renamed_only_if_its_link_may_flap(kernel: Kernel) -> None:
    wanted = spec(group())
    settle(kernel, wanted)
    vf = comes_back_up(kernel)
    kernel.routed.add("net1")
    (outcome,) = [o for o in settle(kernel, wanted).outcomes if o.change.kind == "vf_names"]
    assert (outcome.result, outcome.change.disruption) == ("deferred", Disruption.LINK_FLAP)
    kernel.routed.clear()
    assert is_ready(settle(kernel, wanted).conditions)
    assert netdev(kernel.files, vf) == f"{NAME}v1"
    assert kernel.netdev(vf).up


@pytest.mark.parametrize("live", [True, False], ids=["since Linux 6.2", "before"])
def test_a_vf_that_is_up_is_taken_down_for_its_name_only_if_the_kernel_needs_that(kernel: Kernel, live: bool) -> None:
    kernel.renames_running = live
    wanted = spec(group())
    settle(kernel, wanted)
    vf = comes_back_up(kernel)
    kernel.writes.clear()
    assert is_ready(settle(kernel, wanted).conditions)
    assert netdev(kernel.files, vf) == f"{NAME}v1"
    assert kernel.netdev(vf).up
    assert any(where == "net1" and "up=False" in value for where, value in kernel.writes) is not live


def test_names_that_the_host_gives_by_its_own_rules_are_kept(kernel: Kernel) -> None:
    wanted = spec(group())
    settle(kernel, wanted)
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=False)
    kernel.netlink.rename(kernel.netdev(PF).ifindex, "rail0")
    for index in range(4):
        comes_back(kernel, f"rail0v{index}", address(kernel, index))
    result = settle(kernel, wanted)
    assert is_ready(result.conditions)
    assert [netdev(kernel.files, address(kernel, index)) for index in range(4)] == [
        f"rail0v{index}" for index in range(4)
    ]


def test_a_name_too_long_for_a_netdev_is_not_given(kernel: Kernel) -> None:
    kernel.add_nic(OTHER, "enp193s0f1d100", OTHER_MAC)
    wanted = spec(group(), select={"pci": OTHER})
    settle(kernel, wanted)
    vf = vf_addresses(kernel.files, OTHER)[0]
    assert len(kernel.netdev(vf).name) == 16
    comes_back(kernel, vf=vf)
    assert is_ready(settle(kernel, wanted).conditions)
    assert netdev(kernel.files, vf) == "net1"


def test_vfs_take_the_nic_s_txqueuelen_unless_they_have_their_own(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, spec(group(txqueuelen=300), txqueuelen=5000)).conditions)
    assert [kernel.netdev(address(kernel, index)).txqueuelen for index in range(3)] == [5000, 300, 5000]


def test_a_vf_whose_link_its_pf_holds_down_needs_no_carrier(kernel: Kernel) -> None:
    kernel.sriov.able.add(PF)
    wanted = spec(group(link_state="disable"))
    follow = passes_of(kernel, wanted)
    result = follow(3)
    assert result.outcomes == ()
    assert is_ready(result.conditions)
    link = kernel.netlink.link(kernel.netdev(address(kernel, 1)).name)
    assert link is not None
    assert (link.up, link.carrier) == (True, False)
    # Another program has disabled the link of a VF without link_state: to set it down and up would not help.
    kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 2, link_state="disable")
    kernel.writes.clear()
    result = follow(3)
    assert not is_ready(result.conditions)
    assert kernel.writes == []


def test_a_link_that_lost_its_carrier_long_ago_gets_the_same_time_to_settle_as_at_first(kernel: Kernel) -> None:
    failures, now = Failures(), 0.0
    settle(kernel, spec({"count": 2}), failures=failures)
    vf, memory = address(kernel, 1), Memory(lambda: now, failures)

    def flaps(start: float) -> list[int]:
        """The seconds at which its link is taken down and up, while that does not help."""
        nonlocal now
        kernel.carriers.lose(vf, slow=True)
        seconds = []
        for second in range(20):
            kernel.writes.clear()
            now = start + second
            converge(kernel.machine(), Goal(spec({"count": 2})), memory)
            seconds += [second] if any("up=False" in value for _, value in kernel.writes) else []
        kernel.carriers.regain(vf)
        now = start + 100.0
        converge(kernel.machine(), Goal(spec({"count": 2})), memory)
        return seconds

    assert flaps(0.0) == flaps(4000.0) == [5, 10, 12, 14, 16, 18]
    assert flaps(4200.0)[0] == 2, "not so soon after the last time"


def test_only_a_vf_whose_driver_may_miss_its_carrier_is_set_down_and_up_for_it(kernel: Kernel) -> None:
    """In switchdev mode a VF has no carrier while its representor is down (mlx5e_rep_open in en_rep.c)."""
    kernel.set_driver(PF, "mlx5_core")
    follow = passes_of(kernel, spec({"count": 2}))
    follow(1)
    kernel.carriers.lose(address(kernel, 1), slow=True)
    kernel.writes.clear()
    result = follow(3)
    assert kernel.writes == []
    assert condition(result, "Carrier").message.endswith(f"enp33s0v1 ({PF}#1)")


@pytest.mark.parametrize("link_file", ["/usr/lib/systemd/network/99-default.link", "/etc/systemd/network/10-vfs.link"])
def test_a_vf_with_a_link_file_of_its_own_keeps_the_name_that_it_has(kernel: Kernel, link_file: str) -> None:
    settle(kernel, spec({"count": 2}))
    usual = kernel.netdev(address(kernel, 1)).name
    vf = comes_back(kernel, "fast0")
    entry = f"/run/udev/data/n{kernel.netdev(vf).ifindex}"
    kernel.tree.put(entry, kernel.tree.read(entry).replace("/usr/lib/systemd/network/99-default.link", link_file))
    settle(kernel, spec({"count": 2}))
    assert kernel.netdev(vf).name == (usual if "99-default" in link_file else "fast0")


@pytest.mark.parametrize("owner", ["user", "trackbed"])
def test_a_vf_that_a_pod_has_keeps_the_pod_s_name_also_in_the_host_s_namespace(kernel: Kernel, owner: str) -> None:
    """A pod of the host's network, as of a virtual machine."""
    wanted = spec({"count": 2, "defaults": {"owner": owner}})
    settle(kernel, wanted)
    usual = kernel.netdev(address(kernel, 1)).name
    vf = comes_back(kernel)
    kernel.host.allocated[vf] = ("default/vm",)
    settle(kernel, wanted)
    assert kernel.netdev(vf).name == {"user": "net1", "trackbed": usual}[owner]


def test_a_vf_that_its_pf_is_resetting_is_looked_at_again_soon(kernel: Kernel) -> None:
    failures = Failures()
    assert is_ready(settle(kernel, spec(group(trust=True)), failures=failures).conditions)
    kernel.sriov.resetting.add((PF, 1))
    kernel.writes.clear()
    result = settle(kernel, spec(group(trust=True)), failures=failures)
    assert not is_ready(result.conditions)
    assert "its PF reports nothing of it now" in condition(result, "Converged").message
    assert kernel.writes == []
    assert failures.next_try() == 0.25
    kernel.sriov.resetting.clear()
    assert is_ready(settle(kernel, spec(group(trust=True)), failures=failures).conditions)
    assert kernel.writes == []


def test_if_a_driver_reports_no_vf_the_remedy_names_what_to_leave_out(kernel: Kernel) -> None:
    """As idpf and sfc's EF100, which have no ndo_get_vf_config (rtnl_fill_vf, net/core/rtnetlink.c)."""
    kernel.sriov.resetting |= {(PF, 0), (PF, 1)}
    result = settle(kernel, spec({"count": 2, "defaults": {"trust": True}}))
    remedies = {outcome.change.field: outcome.remedy for outcome in result.outcomes if outcome.result == "blocked"}
    lasts = "see the kernel log (dmesg) if that lasts; if its driver never reports VFs, "
    assert remedies == {"mac": f"{lasts}give vfs.derive_macs: false", "trust": f"{lasts}take trust out of the spec"}


def test_a_vf_that_its_pf_reports_again_is_set_at_once(kernel: Kernel) -> None:
    failures = Failures()
    kernel.sriov.resetting.add((PF, 1))
    assert not is_ready(settle(kernel, spec(group(trust=True)), failures=failures).conditions)
    kernel.sriov.resetting.clear()
    assert is_ready(settle(kernel, spec(group(trust=True)), failures=failures).conditions)
    assert vf_attributes(kernel, 1)["trust"]


def test_a_vf_in_a_bond_keeps_its_own_address_behind_the_bond_s(kernel: Kernel) -> None:
    settle(kernel, spec(group()))
    vf = kernel.netdev(address(kernel, 1))
    kernel.tree.put(f"/sys/class/net/{vf.name}/address", kernel.netdev(address(kernel, 0)).mac)
    kernel.tree.put(f"/sys/class/net/{vf.name}/bonding_slave/perm_hwaddr", vf.mac)
    kernel.tree.put(f"/sys/class/net/{vf.name}/upper_bond0/ifindex", "99")
    assert settle(kernel, spec(group())).outcomes == ()


def test_a_vf_of_a_pf_that_is_down_is_not_bound_again_and_again(kernel: Kernel) -> None:
    down, failures = spec({"count": 2}, state="down"), Failures()
    settle(kernel, down, failures=failures)
    kernel.writes.clear()
    result = settle(kernel, down, failures=failures)
    assert kernel.writes == []
    assert is_ready(result.conditions), result.conditions
    assert result.outcomes == ()
    assert is_ready(settle(kernel, spec({"count": 2}, state="up"), failures=failures).conditions)
    link = kernel.netdev(address(kernel, 0))
    assert link.mac == vf_attributes(kernel, 0)["mac"]


REPRESENTORS = ["pf0vf1", "c1pf0sf88", "pf0", "pf0sf1", "pf0vfr1", "p0pf0vf1", "pf0s1", "1"]


def represent(kernel: Kernel, name: str, ifindex: int, port: str) -> None:
    kernel.appear(Netdev(PF, Link(ifindex, name, f"02:aa:00:00:00:{ifindex}", "", 1500, False, False)))
    if port:
        kernel.tree.put(f"/sys/class/net/{name}/phys_port_name", port)


def shown(kernel: Kernel) -> tuple[list[str], list[str]]:
    """The PF's netdevs and representors in `trackbed inspect`. Device plugins select VFs by the first netdev (pfNames)."""
    function = inspect(kernel.machine()).functions[0]
    return [each.name for each in function.netdevs], [each.name for each in function.representors]


@pytest.mark.parametrize("own", ["", "p0", "p0s1", "n0"])
@pytest.mark.parametrize("port", REPRESENTORS)
def test_the_netdev_of_a_representor_is_not_the_pf_s(port: str, own: str) -> None:
    kernel = Kernel()
    kernel.add_nic(PF, "rail0", MAC)
    represent(kernel, "eth0", 99, port)
    if own:
        kernel.tree.put("/sys/class/net/rail0/phys_port_name", own)
    assert is_ready(settle(kernel, spec(mtu=9000)).conditions)
    assert {name: found.link.mtu for name, found in kernel.netdevs.items()} == {"rail0": 9000, "eth0": 1500}
    assert shown(kernel) == (["rail0"], ["eth0"])
    kernel.rdma.add(PF, "mlx5_0", "rail0")
    for device in (PF, "mlx5_0"):
        assert [source.name for source in counters.sources(kernel.files, device)] == ["mlx5_0", "rail0"]
    assert "representor eth0" in render(inspect(kernel.machine()))


def test_of_netdevs_without_a_port_name_the_oldest_is_the_pf_s() -> None:
    kernel = Kernel()
    kernel.add_nic(PF, "rail0", MAC)
    represent(kernel, "eth0", 99, "")
    assert netdev(kernel.files, PF) == "rail0"


@pytest.mark.parametrize("port", REPRESENTORS)
@pytest.mark.parametrize("count", [pytest.param(0, id="mlnx-tools-157"), 1, 3])
def test_a_representor_is_not_the_netdev_of_a_pf_whose_own_is_away(kernel: Kernel, count: int, port: str) -> None:
    """On a BlueField the PF of a host has a representor, also where the card's other function has the only port."""
    settle(kernel, spec({"count": count}))
    kernel.move_away(PF)
    names = [f"eth{number}" for number in range(count or 1)]
    for number, name in enumerate(names):
        represent(kernel, name, 90 + number, port)
    kernel.writes.clear()
    result = settle(kernel, spec({"count": count}, mtu=9000))
    assert not [written for written in kernel.writes if "eth" in written[0]]
    assert {each.link.mtu for each in kernel.netdevs.values() if each.function == PF} == {1500}
    assert result.have["links"][PF][PF].link is None
    assert shown(kernel) == ([], names)


def test_a_vf_below_a_team_or_a_macvlan_is_not_bound_again_for_the_address_that_those_set(kernel: Kernel) -> None:
    settle(kernel, spec({"count": 2}))
    link = kernel.netdev(vf_addresses(kernel.files, PF)[1])
    kernel.netdevs[link.name].link = evolve(link, mac="02:de:ad:00:00:01", permanent_mac=link.mac)
    kernel.tree.put(f"/sys/class/net/{link.name}/address", "02:de:ad:00:00:01")
    assert "bindings" in [change.kind for change in dry_run(kernel.machine(), spec({"count": 2})).changes]
    kernel.tree.put(f"/sys/class/net/{link.name}/upper_team0/ifindex", "9")
    assert not dry_run(kernel.machine(), spec({"count": 2})).changes
