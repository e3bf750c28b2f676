"""Mode observe writes nothing, and the spec that is derived from a node has an empty plan."""

import pytest

from agent.engine.dry_run import dry_run
from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec, SpecError, parse, to_json
from agent.state.wanted import derived_mac
from cli.as_spec import NotFound, derive_spec
from tests.sim.kernel import Kernel
from tests.sim.passes import nic, settle, spec_of
from tests.sim.two_nics import MAC0, PF0, PF1, two_nics

MANAGEMENT = "0000:01:00.0"


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics()
    kernel.add_nic(MANAGEMENT, "eno1", "02:00:00:00:09:00")
    kernel.routed.add("eno1")
    return kernel


def wanted(**more: object) -> NodeSpec:
    groups = [{"index": "4", "vlan": 100, "spoofchk": False, "mtu": 4000}, {"index": "3", "mac": "02:00:00:00:07:07"}]
    vfs = {"count": 5, "defaults": {"trust": True}, "groups": groups}
    nics = [nic("rail0", PF0, mtu=9000, vfs=vfs), nic("rail1", PF1, vfs={"count": 2})]
    return spec_of(*nics, **more)


def derived(kernel: Kernel, *chosen: str) -> NodeSpec:
    kernel.writes.clear()
    derived = derive_spec(kernel.machine(), "n1", chosen)
    assert kernel.writes == []
    assert derived.remaining == ()
    written = parse(to_json(derived.spec))
    assert written == derived.spec
    assert dry_run(kernel.machine(), written).changes == ()
    assert dry_run(kernel.machine(), written).errors == ()
    return written


# --- mode: observe -----------------------------------------------------------------------------------------


def test_observe_and_then_enforce(kernel: Kernel) -> None:
    settle(kernel, wanted(mode="observe"))
    assert is_ready(settle(kernel, wanted()).conditions)
    assert kernel.netdev(PF0).mtu == 9000
    assert settle(kernel, wanted(mode="observe")).conditions[0].status == "True"


# --- inspect --as-spec -------------------------------------------------------------------------------------


def test_the_spec_derived_from_a_configured_node_is_its_own(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, wanted()).conditions)
    written = derived(kernel)
    assert [nic.select.pci for nic in written.nics] == [PF0, PF1]
    rail0, rail1 = written.nics
    assert (rail0.mtu, rail0.state) == (9000, "up")
    assert rail0.vfs is not None
    assert rail1.vfs is not None
    assert (rail0.vfs.count, rail1.vfs.count) == (5, 2)
    assert rail0.vfs.derive_macs
    assert (rail0.vfs.defaults.trust, rail0.vfs.defaults.vlan) == (True, 0)
    by_index = {group.index: group for group in rail0.vfs.groups}
    assert by_index.keys() == {"3", "4"}
    assert (by_index["4"].vlan, by_index["4"].spoofchk, by_index["4"].mtu) == (100, False, 4000)
    assert by_index["3"].mac == "02:00:00:00:07:07"
    assert written.irqs.pin
    assert written.rps.enable


def test_values_that_nobody_set_are_kept_in_a_derived_spec(kernel: Kernel) -> None:
    """VFs that nobody gave an address, interrupts wherever they were, one NIC down."""
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, up=True)
    kernel.files.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "3")
    written = derived(kernel)
    rail0, rail1 = written.nics
    assert rail0.vfs is not None
    assert rail0.vfs.derive_macs is False
    assert rail0.vfs.defaults.mac is None
    assert rail1.state == "down"
    assert not written.irqs.pin


def test_a_vf_whose_driver_has_another_address_is_not_bound_again(kernel: Kernel) -> None:
    settle(kernel, wanted())
    name = kernel.netdev(PF0).name
    kernel.netlink.set_vf(kernel.netdev(PF0).ifindex, 1, mac="02:00:00:00:08:08")
    assert name
    written = derived(kernel)
    vfs = written.nics[0].vfs
    assert vfs is not None
    assert vfs.derive_macs is False
    macs = {group.index: group.mac for group in vfs.groups}
    assert macs["1"] is None if "1" in macs else True
    assert macs["0"] == derived_mac(MAC0, 0)


def test_a_vf_in_a_pod_is_written_down_by_what_its_pf_grants(kernel: Kernel) -> None:
    settle(kernel, wanted())
    kernel.move_away(vf_addresses(kernel.files, PF0)[1])
    assert derived(kernel).nics[0].vfs is not None


def test_vfs_that_are_passed_through_are_so_in_a_derived_spec(kernel: Kernel) -> None:
    """Without their driver in the spec, the VFs would get netdevs after the next boot."""
    kernel.load_vfio()
    vfs = {"count": 3, "defaults": {"driver": "vfio-pci"}, "groups": [{"index": "1", "driver": "netdevice"}]}
    nics = [
        {"name": "rail0", "select": {"pci": PF0}, "vfs": vfs},
        {"name": "rail1", "select": {"pci": PF1}, "vfs": {"count": 2, "defaults": {"driver": "vfio-pci"}}},
    ]
    assert is_ready(settle(kernel, spec_of(*nics)).conditions)
    rail0, rail1 = (nic.vfs for nic in derived(kernel).nics)
    assert rail0 is not None
    assert rail1 is not None
    assert [rail0.attributes(index).driver for index in range(3)] == ["vfio-pci", None, "vfio-pci"]
    assert (rail1.defaults.driver, rail1.groups) == ("vfio-pci", ())


def test_running_irqbalance_is_left_running(kernel: Kernel) -> None:
    settle(kernel, wanted())
    kernel.host.processes.add("irqbalance")
    assert derived(kernel).irqs.irqbalance == "untouched"


def test_the_nic_of_the_default_route_is_taken_only_when_it_is_named(kernel: Kernel) -> None:
    assert MANAGEMENT not in {nic.select.pci for nic in derived(kernel).nics}
    assert [nic.select.pci for nic in derived(kernel, "eno1").nics] == [MANAGEMENT]
    assert [nic.select.pci for nic in derived(kernel, PF1).nics] == [PF1]


def test_a_missing_nic_is_named_with_those_that_exist(kernel: Kernel) -> None:
    with pytest.raises(NotFound, match=r"ens9: no such NIC; this node has .*0000:01:00.0 \(eno1\)"):
        derive_spec(kernel.machine(), "n1", ["ens9"])


def test_vfs_whose_queue_is_of_another_length_than_their_pf_s_keep_theirs(kernel: Kernel) -> None:
    settle(kernel, wanted())
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, txqueuelen=2000)
    vfs = derived(kernel).nics[0].vfs
    assert vfs is not None
    assert vfs.defaults.txqueuelen == 1000


@pytest.mark.parametrize("count", [1, 3])
def test_each_vf_has_its_own_guid_and_unset_ones_are_left_out(kernel: Kernel, count: int) -> None:
    settle(kernel, spec_of(nic_with(count)))
    kernel.sriov.able.add(PF0)
    for index in range(count):
        given = f"00:11:22:33:44:55:66:0{index}"
        kernel.netlink.set_vf(kernel.netdev(PF0).ifindex, index, node_guid=given, port_guid="00:00:00:00:00:00:00:00")
    vfs = derived(kernel, PF0).nics[0].vfs
    assert vfs is not None
    assert [vfs.attributes(index).node_guid for index in range(count)] == [
        f"00:11:22:33:44:55:66:0{index}" for index in range(count)
    ]
    assert {vfs.attributes(index).port_guid for index in range(count)} == {None}


def nic_with(count: int) -> dict[str, object]:
    return nic("rail0", PF0, vfs={"count": count})


def test_a_netdev_of_an_odd_name_without_a_queue_is_written_down_too(kernel: Kernel) -> None:
    kernel.add_nic("0000:61:00.0", "fab@0", "02:00:00:00:01:02")
    kernel.netlink.set_link(kernel.netdev("0000:61:00.0").ifindex, txqueuelen=0)
    nic = derived(kernel, "fab@0").nics[0]
    assert (nic.name, nic.txqueuelen) == ("0000-61-00.0", None)


def test_a_node_that_no_spec_can_describe_is_an_error(kernel: Kernel) -> None:
    settle(kernel, wanted())
    vf = vf_addresses(kernel.files, PF0)[0]
    kernel.netlink.set_link(kernel.netdev(vf).ifindex, mtu=9100)
    with pytest.raises(SpecError, match=r"vfs\..*mtu 9100 is above nics\[0\]\.mtu 9000"):
        derive_spec(kernel.machine(), "n1", ())


def test_a_value_of_a_vf_that_no_spec_can_have_is_an_error_that_names_the_nic(kernel: Kernel) -> None:
    settle(kernel, wanted())
    kernel.sriov.able.add(PF1)
    kernel.netlink.set_vf(kernel.netdev(PF1).ifindex, 1, vlan=4095)
    with pytest.raises(SpecError, match=rf"^NIC {PF1}: vlan: 4095 is out of range"):
        derive_spec(kernel.machine(), "n1", ())
