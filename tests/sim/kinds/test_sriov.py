"""SR-IOV on the simulated kernel: attributes of VFs, their names, and the PF's own link."""

from typing import Any

import pytest
from attrs import asdict

from agent.engine.dry_run import dry_run
from agent.hardware.functions import vf_addresses
from agent.report.records import Disruption
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel
from tests.sim.passes import settle, spec_of, undone

PF, OTHER = "0000:21:00.0", "0000:41:00.0"
MAC, OTHER_MAC = "02:00:00:00:01:00", "02:00:00:00:01:01"
NAME = "enp33s0"


@pytest.fixture
def kernel() -> Kernel:
    return made()


def made() -> Kernel:
    kernel = Kernel()
    kernel.add_nic(PF, NAME, MAC)
    kernel.load_vfio()
    return kernel


def spec(vfs: object = None, select: object = None, **more: object) -> NodeSpec:
    nic = {"name": "rail0", "select": select or {"pci": PF}, **({"vfs": vfs} if vfs else {}), **more}
    return spec_of(nic)


def group(**attributes: object) -> dict[str, object]:
    """Four VFs; the second has these attributes."""
    return {"count": 4, "groups": [{"index": "1", **attributes}]}


def test_the_kernel_binds_new_vfs_by_itself_again_after_all_vfs_were_removed(kernel: Kernel) -> None:
    autoprobe = f"/sys/bus/pci/devices/{PF}/sriov_drivers_autoprobe"
    for count in (2, 0):
        assert is_ready(settle(kernel, spec({"count": count})).conditions)
        assert (len(kernel.vfs(PF)), kernel.files.read(autoprobe)) == (count, "1")


def vf_attributes(kernel: Kernel, index: int) -> dict[str, Any]:
    link = kernel.netlink.link(NAME)
    assert link is not None
    return asdict(link.vfs[index])


def address(kernel: Kernel, index: int) -> str:
    return vf_addresses(kernel.files, PF)[index]


# --- attributes ----------------------------------------------------------------------------------------------------------


def test_a_priority_given_later_leaves_the_vlan_and_the_other_way_round(kernel: Kernel) -> None:
    settle(kernel, spec(group(vlan=100)))
    assert is_ready(settle(kernel, spec(group(vlan=100, qos=5))).conditions)
    assert (vf_attributes(kernel, 1)["vlan"], vf_attributes(kernel, 1)["qos"]) == (100, 5)
    assert is_ready(settle(kernel, spec(group(vlan=200))).conditions)
    assert (vf_attributes(kernel, 1)["vlan"], vf_attributes(kernel, 1)["qos"]) == (200, 5)
    assert is_ready(settle(kernel, spec(group(vlan=0))).conditions)
    assert (vf_attributes(kernel, 1)["vlan"], vf_attributes(kernel, 1)["qos"]) == (0, 0)


@pytest.mark.parametrize(("before", "after"), [((10, 100), (200, 300)), ((200, 300), (10, 100)), ((200, 300), (10, 0))])
def test_rates_can_rise_and_fall_past_each_other(
    kernel: Kernel, before: tuple[int, int], after: tuple[int, int]
) -> None:
    kernel.sriov.able.add(PF)
    for low, high in (before, after):
        result = settle(kernel, spec(group(min_tx_rate=low, max_tx_rate=high)))
        assert {outcome.result for outcome in result.outcomes} == {"applied"}
        assert (vf_attributes(kernel, 1)["min_tx_rate"], vf_attributes(kernel, 1)["max_tx_rate"]) == (low, high)


def test_a_largest_rate_below_the_smallest_one_that_was_left_alone_says_so(kernel: Kernel) -> None:
    kernel.sriov.able.add(PF)
    settle(kernel, spec(group(min_tx_rate=200, max_tx_rate=300)))
    (outcome,) = settle(kernel, spec(group(max_tx_rate=100))).outcomes
    assert outcome.result == "failed" and "EINVAL: its min_tx_rate is 200" in outcome.error


def test_a_name_that_another_netdev_has_is_an_error(kernel: Kernel) -> None:
    wanted = spec(group())
    settle(kernel, wanted)
    vf = address(kernel, 1)
    kernel.move_away(vf)
    kernel.add_nic(OTHER, f"{NAME}v1", OTHER_MAC)
    kernel.come_back(vf, "net1")
    kernel.netlink.set_link(kernel.netdev(vf).ifindex, up=True)
    kernel.writes.clear()
    (failed,) = [o for o in settle(kernel, wanted).outcomes if o.result == "failed"]
    assert failed.error == f"another netdev is called {NAME}v1; rename that first"
    assert ("net1", "mtu=None up=False") not in kernel.writes


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("link_state", "enable", "cannot set link_state"),
        ("rss_query", True, "cannot set rss_query"),
        ("node_guid", "00:11:22:33:44:55:66:77", "cannot set node_guid"),
        ("vlan_protocol", "802.1ad", "does not support this vlan_protocol"),
        ("min_tx_rate", 10, "does not support min_tx_rate"),
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_what_igb_refuses_is_unsupported_and_ready_follows_required(
    kernel: Kernel, name: str, value: object, reason: str, required: bool
) -> None:
    needed = {"vlan_protocol": {"vlan": 100}, "min_tx_rate": {"max_tx_rate": 0}}
    more: dict[str, object] = {**needed.get(name, {})}
    result = settle(kernel, spec(group(**{name: value}, **more), required=required))
    (outcome,) = undone(result)
    assert (outcome.result, outcome.change.target, outcome.change.field) == ("unsupported", f"{PF}#1", name)
    assert reason in outcome.error
    assert is_ready(result.conditions) is not required
    assert vf_attributes(kernel, 1)["vlan"] == more.get("vlan", 0)


def test_an_attribute_that_its_driver_takes_and_does_not_report_says_so(kernel: Kernel) -> None:
    """As older ixgbe do with link_state."""
    kernel.sriov.able.add(PF)
    kernel.sriov.late.add("link_state")
    (outcome,) = undone(settle(kernel, spec(group(link_state="disable"))))
    assert (outcome.result, outcome.error) == ("failed", "written 2 times, and it still reads auto")
    assert outcome.remedy.endswith("take link_state out of the spec")


def test_a_vf_of_another_guid_is_bound_again(kernel: Kernel) -> None:
    kernel.sriov.able.add(PF)
    wanted = spec(group(node_guid="00:11:22:33:44:55:66:77"))
    assert is_ready(settle(kernel, wanted).conditions)
    kernel.rdma.add(address(kernel, 1), "rocep1", None)
    kernel.tree.put("/sys/class/infiniband/rocep1/node_guid", "0000:0000:0000:0001")
    (change,) = [change for change in dry_run(kernel.machine(), wanted).changes if change.kind == "bindings"]
    assert (change.field, change.before, change.disruption) == (
        "node_guid",
        "00:00:00:00:00:00:00:01",
        Disruption.REBIND,
    )
    kernel.sriov.able.clear()
    other = spec(group(node_guid="00:11:22:33:44:55:66:99"))
    assert not [change for change in settle(kernel, other).outcomes if change.change.kind == "bindings"]


def test_trusted_vfs_that_somebody_made_get_their_addresses_at_once(kernel: Kernel) -> None:
    """Whoever made them left their drivers with addresses of their own, and their links up."""
    kernel.files.write(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "3")
    pf = kernel.netdev(PF)
    for index, vf in vf_addresses(kernel.files, PF).items():
        kernel.netlink.set_vf(pf.ifindex, index, trust=True)
        kernel.netlink.set_link(kernel.netdev(vf).ifindex, up=True)
    wanted = spec({"count": 3, "defaults": {"trust": True}})
    assert undone(settle(kernel, wanted)) == []
    assert not dry_run(kernel.machine(), wanted).changes
    macs = [kernel.netdev(vf).mac for vf in vf_addresses(kernel.files, PF).values()]
    assert [vf_attributes(kernel, index)["mac"] for index in range(3)] == macs
