"""InfiniBand on the simulated kernel: GUIDs of VFs, the subnet manager, partition keys."""

import textwrap

import pytest

from agent.engine.contention import LIMIT
from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.dry_run import dry_run
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from agent.spec.node import to_json
from agent.state.guids import derived_guid
from cli.as_spec import derive_spec
from tests.sim.kernel import Kernel
from tests.sim.passes import condition, nic, rail0, settle, spec_of

PF, OTHER = "0000:21:00.0", "0000:41:00.0"
GUID = "b8:3f:d2:03:00:12:34:56"
ADDRESS = f"00:00:10:86:fe:80:00:00:00:00:00:00:{GUID}"
PORT = "/sys/class/infiniband/ibp33s0/ports/1"


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_nic(PF, "ibp33s0", ADDRESS, node=0)
    kernel.sriov.able.add(PF)
    return kernel


# --- GUIDs -----------------------------------------------------------------------------------------------------


def test_each_vf_gets_guids_of_its_own_before_it_is_bound_and_they_stay(kernel: Kernel) -> None:
    wanted = rail0(vfs={"count": 3})
    result = settle(kernel, wanted)
    assert is_ready(result.conditions), result.conditions
    guids = [(vf.node_guid, vf.port_guid) for vf in kernel.vfs(PF)]
    assert guids == [(derived_guid(GUID, index),) * 2 for index in range(3)]
    kinds = [o.change.kind for o in result.outcomes if o.change.target == f"{PF}#1"]
    assert kinds.index("vf_attributes") < kinds.index("bindings")
    assert not dry_run(kernel.machine(), wanted).changes
    kernel.reload_driver(PF)
    settle(kernel, wanted)
    assert [(vf.node_guid, vf.port_guid) for vf in kernel.vfs(PF)] == guids


@pytest.mark.parametrize(("address", "derive"), [("00:00:10:86:fe:80" + ":00" * 14, True), (ADDRESS, False)])
def test_no_guid_is_derived_from_a_port_without_one_or_if_the_spec_says_so(address: str, derive: bool) -> None:
    """The VFs of each node without a GUID would have the same ones."""
    kernel = Kernel()
    kernel.add_nic(PF, "ibp33s0", address)
    kernel.sriov.able.add(PF)
    result = settle(kernel, rail0(vfs={"count": 2, "derive_guids": derive}))
    assert is_ready(result.conditions), result.conditions
    assert {(vf.node_guid, vf.port_guid) for vf in kernel.vfs(PF)} == {(None, None)}


def test_a_vf_whose_node_guid_another_program_sets_again_and_again_is_bound_again_seldom(kernel: Kernel) -> None:
    kernel.rdma.rxe = True
    failures, rebound = Failures(), 0
    for number in range(60):
        memory = Memory(lambda at=number * 60.0: at, failures)  # type: ignore[misc]
        result = converge(kernel.machine(), Goal(rail0(vfs={"count": 2})), memory)
        rebound += sum(o.change.field == "node_guid" and o.result == "applied" for o in result.outcomes)
        vf = vf_addresses(kernel.files, PF)[0]
        kernel.unbind(vf)
        kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 0, node_guid="00:11:22:33:44:55:66:77")
        kernel.files.write("/sys/bus/pci/drivers_probe", vf)
    assert not is_ready(result.conditions)
    assert condition(result, "Uncontended").status == "False"
    assert rebound <= 4 * LIMIT


def test_given_guids_stand_above_derived_ones(kernel: Kernel) -> None:
    group = {"index": "1", "port_guid": "00:11:22:33:44:55:66:77"}
    settle(kernel, rail0(vfs={"count": 2, "groups": [group]}))
    assert kernel.vfs(PF)[1].port_guid == "00:11:22:33:44:55:66:77"
    assert kernel.vfs(PF)[1].node_guid == derived_guid(GUID, 1)


def test_an_ethernet_pf_s_vfs_get_none(kernel: Kernel) -> None:
    kernel.add_nic(OTHER, "enp65s0", "02:00:00:00:01:00")
    kernel.sriov.able.add(OTHER)
    wanted = spec_of(nic("r", OTHER, vfs={"count": 1}))
    settle(kernel, wanted)
    assert kernel.vfs(OTHER)[0].node_guid is None


def test_a_driver_that_cannot_set_them_says_how_to_do_without(kernel: Kernel) -> None:
    kernel.sriov.able.clear()
    result = settle(kernel, rail0(vfs={"count": 1}))
    (first, _) = [o for o in result.outcomes if o.change.field.endswith("_guid")]
    assert first.result == "unsupported" and "cannot set node_guid" in first.error
    assert "vfs.derive_guids: false" in first.remedy


def test_two_functions_with_the_same_guid_are_left_alone(kernel: Kernel) -> None:
    kernel.add_nic(OTHER, "ibp65s0", ADDRESS[:-23] + derived_guid(GUID, 1))
    result = settle(kernel, rail0(vfs={"count": 2}))
    missing = condition(result, "NicsPresent")
    assert (missing.status, missing.reason) == ("False", "AddressGivenTwice")
    assert all(each in missing.message for each in (OTHER, f"{PF}#1", derived_guid(GUID, 1)))


def test_derived_guids_are_local_unicast_and_differ_for_all_vfs_of_a_vendor_s_ports() -> None:
    ports = [f"b8:3f:d2:03:00:12:34:{last:02x}" for last in (0x56, 0x57, 0x5E)]
    made = [derived_guid(port, index) for port in ports for index in range(4096)]
    assert len(set(made)) == len(made)
    assert {int(guid[:2], 16) & 0b11 for guid in made} == {0b10}
    # The same after an upgrade, too: changing this would give every VF of a fleet another GUID.
    assert derived_guid(GUID, 0) == "46:14:a0:00:00:12:34:56"
    assert derived_guid(GUID, 4095) == "46:14:af:ff:00:12:34:56"


def test_derived_guids_are_not_in_a_derived_spec_and_others_are(kernel: Kernel) -> None:
    settle(kernel, rail0(vfs={"count": 2}))
    derived = derive_spec(kernel.machine(), "n1", ())
    assert derived.remaining == ()
    assert "guid" not in to_json(derived.spec)
    kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 1, node_guid="00:11:22:33:44:55:66:77")
    derived = derive_spec(kernel.machine(), "n1", ())
    assert derived.remaining == ()
    vfs = derived.spec.nics[0].vfs
    assert vfs is not None
    assert not vfs.derive_guids
    assert vfs.attributes(1).node_guid == "00:11:22:33:44:55:66:77"
    assert vfs.attributes(0).node_guid == derived_guid(GUID, 0)


# --- the link policy -----------------------------------------------------------------------------------------------


def test_a_vf_that_its_pf_holds_down_is_named_with_the_setting_that_lifts_it(kernel: Kernel) -> None:
    """A ConnectX VF may have the link policy Down until its PF gives it another."""
    wanted = rail0(vfs={"count": 2}, rdma={"pf": False, "vfs": True})
    settle(kernel, wanted)
    for index, vf in vf_addresses(kernel.files, PF).items():
        kernel.rdma.add(vf, f"ibp33s0v{index}", None, link_layer="InfiniBand")
        octets = derived_guid(GUID, index).replace(":", "")
        kernel.tree.put(f"/sys/class/infiniband/ibp33s0v{index}/node_guid", ":".join(textwrap.wrap(octets, 4)))
    held = vf_addresses(kernel.files, PF)[1]
    kernel.sriov.set(PF, kernel.netdev(PF), 1, link_state="disable")
    kernel.carriers.lose(held, slow=True)
    kernel.rdma.set_port("ibp33s0v1", state="1: DOWN", phys_state="5: LinkUp")
    result = settle(kernel, wanted)
    carrier, ports = condition(result, "Carrier"), condition(result, "RdmaPorts")
    assert carrier.message == f"no carrier on {kernel.netdev(held).name} ({PF}#1, which its PF holds down)"
    assert carrier.remedy.endswith(' link_state "auto"')
    assert 'give the VF link_state "auto"' in ports.message


# --- the subnet manager --------------------------------------------------------------------------------------------


def keys(kernel: Kernel, *table: str) -> None:
    for index, key in enumerate(table):
        kernel.tree.put(f"{PORT}/pkeys/{index}", key)


def with_port(kernel: Kernel, **texts: str) -> None:
    kernel.rdma.add(PF, "ibp33s0", None, link_layer="InfiniBand")
    kernel.rdma.set_gid("ibp33s0", 0, "fe80:0000:0000:0000:b83f:d203:0012:3456", "IB/RoCE v1", "")
    kernel.rdma.set_port("ibp33s0", **texts)


def test_a_port_that_a_subnet_manager_has_configured(kernel: Kernel) -> None:
    with_port(kernel)
    result = settle(kernel, rail0(rdma={"link_layer": "InfiniBand", "gid_type": "IB"}))
    found = condition(result, "SubnetManager")
    assert (found.status, found.reason, found.stage) == ("True", "AllConfigured", "network")
    assert is_ready(result.conditions)


@pytest.mark.parametrize(
    ("texts", "table", "type", "reason", "said"),
    [
        (
            {"sm_lid": "0x0", "state": "2: INIT"},
            ("0x8001",),
            "SubnetManager",
            "NotConfigured",
            "SM LID 0 (start opensm on",
        ),
        ({"sm_lid": "0x0"}, ("0x8001",), "SubnetManager", "NotConfigured", "SM LID 0 (start opensm"),
        ({"state": "3: ARMED"}, ("0x8001",), "SubnetManager", "NotConfigured", "state ARMED, SM LID 1 (start opensm"),
        (
            {},
            ("0xffff",),
            "PartitionKeys",
            "KeyMissing",
            "no P_Key 0x8001, it has 0xffff (the subnet manager assigns it",
        ),
        ({}, ("0x0000",), "PartitionKeys", "KeyMissing", "no P_Key 0x8001, it has none ("),
        ({}, ("0x7fff", "0x0001"), "PartitionKeys", "KeyMissing", "only a limited member of partition 0x8001 ("),
    ],
    ids=["initial", "no-manager", "armed", "other-key", "no-key", "limited"],
)
def test_a_port_that_waits_for_a_subnet_manager_or_lacks_a_key_of_it_is_named_with_the_remedy(
    kernel: Kernel, texts: dict[str, str], table: tuple[str, ...], type: str, reason: str, said: str
) -> None:
    with_port(kernel, **texts)
    keys(kernel, *table)
    result = settle(kernel, rail0(rdma={"pkeys": ["0x8001"]}))
    found = condition(result, type)
    assert (found.status, found.reason, found.stage) == ("False", reason, "network")
    assert found.message.startswith(f"NIC rail0: ibp33s0 port 1 ({PF}): {said}")
    assert not is_ready(result.conditions)


def test_a_port_without_a_link_does_not_count_for_the_subnet_manager(kernel: Kernel) -> None:
    with_port(kernel, state="1: DOWN", phys_state="2: Polling", sm_lid="0x0")
    result = settle(kernel, rail0(rdma={}))
    assert condition(result, "SubnetManager").status == "True"
    assert condition(result, "RdmaPorts").status == "False"


def test_ethernet_and_nodes_without_expected_rdma_have_no_condition(kernel: Kernel) -> None:
    with_port(kernel)
    assert not [c for c in settle(kernel, rail0()).conditions if c.type == "SubnetManager"]
    kernel.rdma.delete("ibp33s0")
    kernel.rdma.add(PF, "rocep33s0", "ibp33s0")
    assert not [c for c in settle(kernel, rail0(rdma={})).conditions if c.type == "SubnetManager"]


# --- partition keys ------------------------------------------------------------------------------------------------


def test_required_keys_are_found_wherever_in_the_table_they_are(kernel: Kernel) -> None:
    with_port(kernel)
    keys(kernel, "0xffff", "0x0000", "0x0000", "0x8001")
    result = settle(kernel, rail0(rdma={"pkeys": ["0x8001", "0xffff"]}))
    assert condition(result, "PartitionKeys").status == "True"
    assert is_ready(result.conditions)
    assert not [path for path, _ in kernel.writes if "pkeys" in path]


def test_keys_that_nobody_requires_are_not_read(kernel: Kernel) -> None:
    with_port(kernel)
    result = settle(kernel, rail0(rdma={}))
    assert result.have["rdma"][PF][PF][0].ports[0].pkeys == ()
    assert not [c for c in result.conditions if c.type == "PartitionKeys"]
