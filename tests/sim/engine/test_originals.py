"""Values that leave the spec are restored: whole passes on the simulated kernel."""

import errno
from pathlib import Path
from typing import Any, get_args

import pytest

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.originals import ORIGINALS, Originals
from agent.hardware.config_space import device_control, max_read_request
from agent.hardware.functions import vf_addresses
from agent.machine import DcbState, Group
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim import passes
from tests.sim.kernel import Kernel
from tests.sim.passes import nic, rail0, spec_of
from tests.sim.refusing import refusing
from tests.sim.two_nics import PF0, PF1


def spec(defaults: dict[str, Any] | None = None, second: bool = True, **more: object) -> NodeSpec:
    mtu = {"mtu": more.pop("mtu")} if "mtu" in more else {}
    vfs = {"count": 2, "defaults": defaults or {}}
    nics = [nic("rail0", PF0, vfs=vfs, **mtu), nic("rail1", PF1, **mtu)]
    return spec_of(*nics[: 1 + second], **more)


def settle(kernel: Kernel, wanted: NodeSpec, originals: Originals) -> Pass:
    result = passes.settle(kernel, wanted, originals=originals)
    assert is_ready(result.conditions), result.conditions
    return result


def affinities(kernel: Kernel) -> set[str]:
    return {kernel.files.read(f"/proc/irq/{number}/smp_affinity_list") for number in kernel.files.names("/proc/irq")}


def test_values_that_leave_the_spec_are_restored(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec({"vlan": 100, "trust": True}, mtu=9000), originals)
    assert affinities(kernel) == {"0", "1", "2", "3", "0-1", "2-3"}
    left = spec(irqs={"pin": False}, rps={"enable": False})
    result = settle(kernel, left, originals)
    assert {(outcome.change.original, outcome.change.required) for outcome in result.outcomes} == {(True, False)}
    restored = [outcome.change for outcome in result.outcomes]
    assert (PF0, "mtu", 9000, 1500) in [(each.target, each.field, each.before, each.after) for each in restored]
    pf = kernel.netlink.link("enp33s0")
    assert pf is not None
    assert pf.mtu == 1500
    assert [(vf.vlan, vf.trust) for vf in pf.vfs] == [(0, False)] * 2
    assert affinities(kernel) == {"0-3"}
    kernel.writes.clear()
    assert settle(kernel, left, originals).outcomes == ()
    assert kernel.writes == []


def test_vfs_and_their_macs_are_not_removed(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec(), originals)
    before = kernel.netlink.link("enp33s0")
    settle(kernel, rail0(), originals)
    after = kernel.netlink.link("enp33s0")
    assert before is not None and after is not None
    assert [vf.mac for vf in after.vfs] == [vf.mac for vf in before.vfs]


def test_a_vf_that_is_bound_again_for_its_mac_has_its_values_again(kernel: Kernel, originals: Originals) -> None:
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, up=True)
    kernel.files.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "2")
    vf = vf_addresses(kernel.files, PF0)[0]
    kernel.netlink.set_link(kernel.netdev(vf).ifindex, up=True, mtu=1300)
    settle(kernel, spec(), originals)
    assert any(path.endswith(f"{vf}/driver/unbind") for path, _ in kernel.writes)
    assert (kernel.netdev(vf).up, kernel.netdev(vf).mtu) == (True, 1300)
    settle(kernel, spec_of(), originals)
    assert (kernel.netdev(vf).up, kernel.netdev(vf).mtu) == (True, 1300)


@pytest.mark.parametrize(("own", "another"), [([9000], 4000), ([9000, 4000], 9000)], ids=["new", "earlier"])
def test_a_value_that_another_program_has_set_since_is_not_restored(
    kernel: Kernel, originals: Originals, own: list[int], another: int
) -> None:
    """Also one that the agent itself had set earlier."""
    for mtu in own:
        settle(kernel, spec(mtu=mtu), originals)
    for mtu in (another, 9000):
        kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=mtu)
        settle(kernel, spec(), originals)
        assert (kernel.netdev(PF0).mtu, kernel.netdev(PF1).mtu) == (mtu, 1500)


def test_a_value_that_the_spec_itself_brought_back_has_no_original(kernel: Kernel, originals: Originals) -> None:
    for mtu in (9000, 1500):
        settle(kernel, spec(mtu=mtu), originals)
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=2000)
    settle(kernel, spec(mtu=1500), originals)
    settle(kernel, spec(), originals)
    assert kernel.netdev(PF0).mtu == 2000


def test_a_pass_that_reads_only_some_devices_does_not_begin_to_restore(kernel: Kernel, originals: Originals) -> None:
    last = settle(kernel, spec(sysctls={"net.core.somaxconn": "512"}), originals).have
    passes.settle(kernel, spec(), last, frozenset({PF0}), originals=originals)
    assert kernel.files.read("/proc/sys/net/core/somaxconn") == "512"


def test_the_original_is_the_value_before_the_first_change(
    kernel: Kernel, originals: Originals, tmp_path: Path
) -> None:
    settle(kernel, spec(mtu=9000), originals)
    settle(kernel, spec(mtu=4000), originals)
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=2000)
    settle(kernel, spec(mtu=4000), originals)
    kept = (tmp_path / ORIGINALS).read_text()
    planned = dry_run(kernel.machine(), spec(), Originals.load(tmp_path / ORIGINALS, keep=False))
    assert (tmp_path / ORIGINALS).read_text() == kept
    restarted = Originals.load(tmp_path / ORIGINALS)
    given_back = [change for change in planned.changes if change.kind == "links"]
    assert [(c.target, c.before, c.after) for c in given_back] == [(pf, 4000, 1500) for pf in (PF0, PF1)]
    settle(kernel, spec(), restarted)
    assert kernel.netdev(PF0).mtu == 1500
    assert not dry_run(kernel.machine(), spec(), Originals.load(tmp_path / ORIGINALS)).changes


def test_a_link_in_use_is_not_disturbed_to_restore_a_value(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec(mtu=9000), originals)
    kernel.routed.add("enp33s0")
    result = settle(kernel, spec(), originals)
    assert [(o.result, o.change.target) for o in result.outcomes if o.result != "applied"] == [("deferred", PF0)]
    assert kernel.netdev(PF0).mtu == 9000


def test_the_values_of_a_vf_with_an_owner_are_not_restored(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec({"vlan": 100}), originals)
    kernel.move_away(vf_addresses(kernel.files, PF0)[1])
    settle(kernel, spec(), originals)
    pf = kernel.netlink.link("enp33s0")
    assert pf is not None
    assert [vf.vlan for vf in pf.vfs] == [0, 100]


SETTINGS: dict[str, object] = {
    "txqueuelen": 4000,
    "channels": {"combined": 1},
    "rings": {"rx": 1024, "tx": 512},
    "coalescing": {"rx_usecs": 50, "tx_usecs": 60},
    "offloads": {"rx-gro": False, "rx-all": True},
    "max_read_request": 4096,
    "roce": {"trust": "dscp", "pfc": "3", "cm_tos": 106},
}
OF_THE_HOST: dict[str, object] = {
    "sysctls": {"net.ipv4.tcp_rmem": "4096 131072 33554432"},
    "module_parameters": {"nvme-core": {"io-timeout": "255"}},
    "hugepages": [{"size": "2M", "count": 16, "numa_node": 1}],
}
TCP_RMEM, IO_TIMEOUT = "/proc/sys/net/ipv4/tcp_rmem", "/sys/module/nvme_core/parameters/io_timeout"
HUGEPAGES = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"


@pytest.fixture
def full_node(kernel: Kernel) -> Kernel:
    """A node that supports every setting."""
    kernel.tree.put(TCP_RMEM, "4096\t131072\t6291456")
    kernel.tree.put(IO_TIMEOUT, "30")
    kernel.rdma.add(PF0, "rocep33s0", "enp33s0")
    kernel.rdma.dcb["enp33s0"] = DcbState(frozenset({0}))
    return kernel


def everything(kernel: Kernel) -> list[object]:
    """The present value of everything in SETTINGS and OF_THE_HOST."""
    netdev, ethtool = kernel.netdev(PF0), kernel.machine().ethtool
    return [
        netdev.txqueuelen,
        *(ethtool.settings(group, netdev.ifindex) for group in get_args(Group)),
        max_read_request((device_control(kernel.files, PF0) or (0, 0))[1]),
        kernel.rdma.dcb["enp33s0"],
        kernel.rdma.cm_defaults("rocep33s0", 1),
        *(kernel.files.read(path) for path in (TCP_RMEM, IO_TIMEOUT, HUGEPAGES)),
    ]


def one(nic: dict[str, object], **more: object) -> NodeSpec:
    return spec_of({"name": "rail0", "select": {"pci": PF0}, **nic}, **more)


@pytest.mark.parametrize("nics", [[nic("rail0", PF0)], []])
def test_settings_that_are_read_only_while_in_the_spec_are_restored(
    full_node: Kernel, originals: Originals, nics: list[object]
) -> None:
    settle(full_node, one({}), originals)
    before = everything(full_node)
    settle(full_node, one(SETTINGS, **OF_THE_HOST), originals)
    changed = everything(full_node)
    assert all(now != was for now, was in zip(changed, before, strict=True))
    settle(full_node, one(SETTINGS, **OF_THE_HOST), originals)
    assert everything(full_node) == changed
    left = spec_of(*nics)
    planned = {each.field: (each.before, each.after) for each in dry_run(full_node.machine(), left, originals).changes}
    assert nics == [] or [str(each) for each in planned["rings"]] == ["rx=1024 tx=512", "rx=256 tx=256"]
    settle(full_node, left, originals)
    assert everything(full_node) == before
    full_node.writes.clear()
    assert settle(full_node, left, originals).outcomes == ()
    assert full_node.writes == []


def test_settings_of_the_host_stay_when_a_device_leaves_the_spec(full_node: Kernel, originals: Originals) -> None:
    settle(full_node, one({"mtu": 9000}, **OF_THE_HOST), originals)
    changed = [full_node.files.read(path) for path in (TCP_RMEM, IO_TIMEOUT, HUGEPAGES)]
    settle(full_node, spec_of(**OF_THE_HOST), originals)
    assert full_node.netdev(PF0).mtu == 1500
    assert [full_node.files.read(path) for path in (TCP_RMEM, IO_TIMEOUT, HUGEPAGES)] == changed


def test_while_a_function_cannot_be_read_no_device_has_left_the_spec(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, spec(mtu=9000), originals)
    second = {"name": "rail1", "select": {"netdev": "enp65s0"}, "mtu": 9000}
    kernel.unreadable.add(f"/sys/bus/pci/devices/{PF1}/vendor")
    wanted = spec_of(second)
    passes.settle(kernel, wanted, originals=originals)
    assert kernel.netdev(PF0).mtu == 9000


def test_only_altnames_that_the_agent_added_are_removed(kernel: Kernel, originals: Originals) -> None:
    kernel.netlink.add_altname(kernel.netdev(PF0).ifindex, "somebody-s")
    settle(kernel, one({"altnames": ["somebody-s", "rail0", "storage"]}), originals)
    assert kernel.netdev(PF0).altnames == ("somebody-s", "rail0", "storage")
    settle(kernel, one({"altnames": ["storage"]}), originals)
    assert kernel.netdev(PF0).altnames == ("somebody-s", "storage")
    kernel.writes.clear()
    assert settle(kernel, one({"altnames": ["storage"]}), originals).outcomes == ()
    assert kernel.writes == []
    settle(kernel, spec_of(), originals)
    assert kernel.netdev(PF0).altnames == ("somebody-s",)


def test_an_altname_that_another_program_has_added_again_stays(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, one({"altnames": ["rail0"]}), originals)
    kernel.reload_driver(PF0)
    settle(kernel, one({}), originals)
    kernel.netlink.add_altname(kernel.netdev(PF0).ifindex, "rail0")
    settle(kernel, one({}), originals)
    assert kernel.netdev(PF0).altnames == ("rail0",)


def test_a_value_that_is_not_supported_now_is_restored_later(kernel: Kernel, originals: Originals) -> None:
    """igb supports more channels without VFs."""
    settle(kernel, one({"channels": {"combined": 2}}), originals)
    for _ in range(2):
        (outcome,) = (
            o for o in settle(kernel, one({"vfs": {"count": 2}}), originals).outcomes if o.result != "applied"
        )
        assert (outcome.result, outcome.error) == ("blocked", "combined is 2 at most now")
    planned = dry_run(kernel.machine(), one({"vfs": {"count": 2}}), originals)
    assert (planned.changes, planned.errors) == ((), ())
    new = one({"vfs": {"count": 2}, "txqueuelen": 500})
    memory = Memory(lambda: 0.0, originals=originals)
    assert converge(kernel.machine(), Goal(new, verified=one({"vfs": {"count": 2}})), memory).as_wanted
    assert ("enp33s0", "channels {'combined': 4}") not in kernel.writes
    settle(kernel, one({"vfs": {"count": 0}}), originals)
    settle(kernel, one({}), originals)
    assert kernel.ethtool.settings("channels", kernel.netdev(PF0).ifindex)["combined"].value == 4


def test_after_a_refused_write_the_value_before_it_is_restored(kernel: Kernel, originals: Originals) -> None:
    settle(kernel, one({"mtu": 9000}), originals)
    kernel.fault = refusing(errno.EBUSY, "mtu=4000")
    passes.settle(kernel, one({"mtu": 4000}), originals=originals)
    assert kernel.netdev(PF0).mtu == 9000
    settle(kernel, one({}), originals)
    assert kernel.netdev(PF0).mtu == 1500
