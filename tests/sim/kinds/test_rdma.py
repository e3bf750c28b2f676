"""RDMA devices and the RDMA subsystem on the simulated kernel: what is set, and the conditions of the probes."""

import pytest

from agent.engine.converge import Pass
from agent.engine.originals import Originals
from agent.hardware.functions import vf_addresses
from agent.hardware.rdma import Reader
from agent.probes.rdma import NO_ROCE
from agent.report.records import HOST
from agent.report.verdict import is_ready
from cli import counters
from cli.as_inventory import derive_inventory
from cli.inspection import inspect, render
from tests.sim import passes
from tests.sim.kernel import Kernel
from tests.sim.passes import condition, nic, rail0, spec_of
from tests.sim.seams import seen
from tests.sim.two_nics import NAME0, NAME1, PF0, PF1


def settle(
    kernel: Kernel,
    rail0: dict[str, object],
    rail1: dict[str, object] | None = None,
    originals: Originals | None = None,
    **more: object,
) -> Pass:
    given = [(PF0, rail0), *([(PF1, rail1)] if rail1 is not None else [])]
    nics = [{"name": f"rail{n}", "select": {"pci": pf}, **nic} for n, (pf, nic) in enumerate(given)]
    spec = spec_of(*nics, **more)
    return passes.settle(kernel, spec, originals=originals)


IPV4: dict[str, object] = {"rdma": {"gid_type": "RoCE v2", "gid_ipv4": True}}
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"


def refused(result: Pass) -> dict[str, tuple[str, str]]:
    return {o.change.field: (o.result, o.error) for o in result.outcomes if o.result != "applied"}


# --- probes ------------------------------------------------------------------------------------------------


def test_without_rdma_in_the_spec_there_is_no_condition(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    result = settle(kernel, {})
    assert not [c for c in result.conditions if c.type.startswith("Rdma")]
    assert result.have["rdma"] == {}


def test_an_event_of_one_vf_has_its_device_read_again_and_no_other(kernel: Kernel) -> None:
    kernel.rdma.rxe = True
    wanted: dict[str, object] = {"vfs": {"count": 3}, "rdma": {"pf": False, "vfs": True}, "roce": {"cm_tos": 106}}
    result = settle(kernel, wanted)
    first, second = (Reader(kernel.files).of(vf_addresses(kernel.files, PF0)[index])[0] for index in (1, 2))
    kernel.rdma.set_port(first, state="1: DOWN")
    kernel.rdma.set_port(second, state="1: DOWN")
    kernel.rdma.set_cm_defaults(first, 1, tos=0)
    kernel.rdma.set_cm_defaults(second, 1, tos=0)
    result = passes.settle(kernel, result.want.spec, result, frozenset({f"{PF0}#1"}))
    assert first in condition(result, "RdmaPorts").message
    assert second not in condition(result, "RdmaPorts").message
    assert [o.change.target for o in result.outcomes] == [f"{PF0}#1"]


@pytest.mark.parametrize(
    ("state", "wanted", "said"),
    [
        ({"state": "1: DOWN", "phys_state": "3: Disabled"}, {}, f"state DOWN/Disabled (bring {NAME0} up"),
        ({}, {"link_layer": "InfiniBand"}, "link layer Ethernet, not InfiniBand"),
        ({}, {"rate": 200}, "rate 100 Gb/sec (4X EDR), less than 200 Gbit/s"),
        ({"rate": ""}, {"rate": 100}, "rate unknown, less than"),
        ({}, {"gid_type": "RoCE v1"}, "no RoCE v1 GID (give the NIC `addresses`: the kernel makes a GID from each)"),
        ({}, {"gid_type": "RoCE v2", "gid_ipv4": True}, "no RoCE v2 GID of an IPv4 address"),
        ({}, {"gid_type": "RoCE v2", "gid_ipv6": True}, "no RoCE v2 GID of an IPv6 address"),
    ],
)
def test_a_port_that_is_not_as_wanted_is_named_with_the_remedy(
    kernel: Kernel, state: dict[str, str], wanted: dict[str, object], said: str
) -> None:
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    kernel.rdma.set_port("rocep33s0", **state)
    result = settle(kernel, {"rdma": wanted})
    ports = condition(result, "RdmaPorts")
    assert (ports.status, ports.reason, ports.stage) == ("False", "PortNotReady", "network")
    assert all(each in ports.message for each in ("rail0", "rocep33s0 port 1", PF0, said))
    assert condition(result, "RdmaDevices").status == "True"


def test_a_gid_behind_64_empty_entries_is_not_looked_for(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    for index in range(1, 200):
        kernel.tree.put(f"/sys/class/infiniband/rocep33s0/ports/1/gids/{index}", ":".join(["0000"] * 8))
    kernel.rdma.set_gid("rocep33s0", 65, MAPPED, "RoCE v2", NAME0)
    assert condition(settle(kernel, IPV4), "RdmaPorts").status == "False"
    kernel.rdma.set_gid("rocep33s0", 64, MAPPED, "RoCE v2", NAME0)
    assert condition(settle(kernel, IPV4), "RdmaPorts").status == "True"


def test_at_least_as_many_good_nics_as_rdma_at_least_make_a_node_ready(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "erdma_0", NAME0)
    kernel.rdma.add(PF1, "erdma_1", NAME1)
    kernel.rdma.set_port("erdma_1", state="1: DOWN")
    assert condition(settle(kernel, {"rdma": {}}, {"rdma": {}}), "RdmaPorts").status == "False"
    enough = condition(settle(kernel, {"rdma": {}}, {"rdma": {}}, rdma={"at_least": 1}), "RdmaPorts")
    assert (enough.status, enough.reason) == ("True", "EnoughOfThem")
    assert "NIC rail1: erdma_1 port 1" in enough.message
    few = condition(settle(kernel, {"rdma": {}}, {"rdma": {}}, rdma={"at_least": 2}), "RdmaPorts")
    assert (few.status, few.message.startswith("1 of 2 NICs are as expected, at least 2")) == ("False", True)


def test_a_vf_that_a_container_has_is_not_missed(kernel: Kernel) -> None:
    kernel.rdma.rxe = True
    wanted = {"vfs": {"count": 2}, "rdma": {"pf": False, "vfs": True}}
    settle(kernel, wanted)
    vf = vf_addresses(kernel.files, PF0)[0]
    name = Reader(kernel.files).of(vf)[0]
    kernel.move_away(vf)
    kernel.rdma.set_port(name, state="1: DOWN")
    assert condition(settle(kernel, wanted), "RdmaPorts").status == "True"
    kernel.rdma.delete(name)
    assert condition(settle(kernel, wanted), "RdmaDevices").status == "True"


def test_a_vf_that_is_kept_for_a_virtual_machine_is_not_missed(kernel: Kernel) -> None:
    kernel.rdma.rxe = True
    wanted: dict[str, object] = {"vfs": {"count": 2}, "rdma": {"pf": False, "vfs": True}}
    settle(kernel, wanted)
    vf = vf_addresses(kernel.files, PF0)[1]
    kernel.unbind(vf)
    kernel.set_driver(vf, "vfio-pci")
    kernel.tree.link(f"/sys/bus/pci/devices/{vf}/iommu_group", "../../../../kernel/iommu_groups/7")
    assert condition(settle(kernel, wanted), "RdmaDevices").status == "True"


def test_a_rate_that_a_driver_invents_is_not_judged(kernel: Kernel) -> None:
    kernel.add_erdma("0000:05:00.0")
    kernel.rdma.add("0000:05:00.0", "erdma_0", None, node_type="4: RNIC", rate="2.5 Gb/sec (1X SDR)")
    spec = spec_of({"name": "erdma", "select": {"driver": "erdma"}, "rdma": {"rate": 100}})
    result = passes.settle(kernel, spec)
    assert is_ready(result.conditions), result.conditions


@pytest.mark.parametrize(("driver", "node_type"), [("efa", "7: unspecified"), ("mana", "1: CA")])
def test_the_same_rate_of_all_nics_of_a_cloud_is_not_judged(kernel: Kernel, driver: str, node_type: str) -> None:
    """100 Gb/sec (4X EDR), by the source of the driver; the NIC may have 200 or 400 Gbit/s."""
    kernel.set_driver(PF0, driver)
    kernel.rdma.add(PF0, f"{driver}_0", NAME0, node_type=node_type)
    assert condition(settle(kernel, {"rdma": {"rate": 400}}), "RdmaPorts").status == "True"


@pytest.mark.parametrize("wanted", [None, {}])
def test_mana_s_device_for_raw_packets_is_no_infiniband_device(
    kernel: Kernel, wanted: dict[str, object] | None
) -> None:
    """Its first versions report no property of its port: no link layer, no GID, no rate (EINVAL), and the state NOP."""
    kernel.rdma.add(PF0, "mana_0", None, link_layer="InfiniBand", umad=False, state="NOP")
    port = "/sys/class/infiniband/mana_0/ports/1"
    kernel.tree.put(f"{port}/state", "0: NOP")
    for name in ("rate", "gids", "pkeys"):
        kernel.tree.remove(f"{port}/{name}")
    result = settle(kernel, {} if wanted is None else {"rdma": wanted})
    said = [c.message for c in result.conditions if c.status == "False"]
    assert said == ([] if wanted is None else [f"NIC rail0: mana_0 port 1 ({PF0}): no GIDs, so no RoCE ({NO_ROCE})"])
    (device,) = inspect(kernel.machine()).functions[0].rdma
    assert device.transport == "raw packets"


@pytest.mark.parametrize("rate", ["100 Gb/sec (4X EDR)", "40 Gb/sec (4X QDR)", "2.5 Gb/sec (1X SDR)"])
@pytest.mark.parametrize(
    ("speed", "reason"), [("400000", "AllActive"), ("200000", "PortNotReady"), ("-1", "PortNotReady")]
)
def test_a_rate_that_the_kernel_has_no_word_for_is_that_of_the_netdev(
    kernel: Kernel, rate: str, speed: str, reason: str
) -> None:
    """ib_get_eth_speed of Linux 6.1 has none above 100 Gbit/s, so ports of a Thor 2 with 400 Gbit/s look slow.

    Its driver may also keep the least rate, that of a link that is down, since it asks when it creates the RDMA device.
    """
    kernel.rdma.add(PF0, "bnxt_re0", NAME0, rate=rate)
    kernel.tree.put(f"/sys/class/net/{NAME0}/speed", speed)
    assert condition(settle(kernel, {"rdma": {"rate": 400}}), "RdmaPorts").reason == reason


def test_one_device_serves_both_ports_of_a_lag(kernel: Kernel) -> None:
    second = "0000:21:00.1"
    kernel.add_nic(second, "enp33s0f1", "02:00:00:00:01:02")
    kernel.rdma.add(PF0, "mlx5_bond_0", "bond0")
    for name in (NAME0, "enp33s0f1"):
        kernel.tree.link(f"/sys/class/net/{name}/master", "../bond0")
    kernel.tree.put("/sys/class/net/bond0/bonding/slaves", f"{NAME0} enp33s0f1")
    spec = spec_of(*(nic(f"port{pf[-1]}", pf, rdma={}) for pf in (PF0, second)))
    result = passes.settle(kernel, spec)
    assert [d.name for d in result.have["rdma"][second][second]] == ["mlx5_bond_0"]
    assert is_ready(result.conditions), result.conditions
    for device in ("enp33s0f1", second):
        counting = [source.name for source in counters.sources(kernel.files, device)]
        assert counting == ["mlx5_bond_0", "enp33s0f1"]
    kernel.rdma.delete("mlx5_bond_0")
    lacking = condition(passes.settle(kernel, spec), "RdmaDevices")
    assert f"{PF0}: no RDMA device" in lacking.message
    assert f"{second}: no RDMA device" in lacking.message


def test_iwarp_has_no_umad_and_none_is_missed(kernel: Kernel) -> None:
    """siw: no parent, no word of its netdev but the address in its GID."""
    kernel.rdma.add(None, "siw0", NAME0, node_type="4: RNIC")
    result = settle(kernel, {"rdma": {"link_layer": "Ethernet"}})
    assert [(d.name, d.transport) for d in result.have["rdma"][PF0][PF0]] == [("siw0", "iWARP")]
    assert is_ready(result.conditions), result.conditions


def test_efa_has_no_umad_and_none_is_missed(kernel: Kernel) -> None:
    """Its ports are of no protocol that has management datagrams (efa_get_port_immutable)."""
    kernel.lose_netdev(PF0)
    kernel.rdma.add(PF0, "rdmap33s0", None, node_type="7: unspecified", link_layer="Unknown", umad=False)
    assert is_ready(settle(kernel, {"rdma": {"rate": 100}}).conditions)


@pytest.mark.parametrize("up", [7, None])
def test_in_switchdev_mode_the_device_of_a_pf_passes_raw_packets(kernel: Kernel, up: int | None) -> None:
    """mlx5 gives it a port for each VF that there may be. The last one is the PF's."""
    kernel.rdma.add(PF0, "mlx5_0", NAME0, umad=False, other_ports=[(None, "Ethernet", "100 Gb/sec (4X EDR)")] * 6)
    ports = "/sys/class/infiniband/mlx5_0/ports"
    for number in range(1, 8):
        kernel.tree.remove(f"{ports}/{number}/gids")
        kernel.tree.put(f"{ports}/{number}/state", "4: ACTIVE" if number == up else "1: DOWN")
    result = settle(kernel, {"rdma": {}})
    assert [c.type for c in result.conditions if c.status == "False"] == ["RdmaPorts"]
    said = f"NIC rail0: mlx5_0 port {up or 1} ({PF0}): no GIDs, so no RoCE (in switchdev mode only VFs have GIDs: "
    assert condition(result, "RdmaPorts").message.startswith(said)
    assert is_ready(settle(kernel, {"rdma": {"pf": False, "vfs": True}}).conditions)
    assert refused(settle(kernel, {"roce": {"cm_tos": 106}}))["cm_tos"][0] == "unsupported"
    (device,) = inspect(kernel.machine()).functions[0].rdma
    assert (device.transport, [each.number for each in device.ports]) == ("raw packets", [up or 1])
    assert '"link_layer"' not in derive_inventory(kernel.machine(), "h1", "n1", []).text


def test_a_second_device_that_only_passes_raw_packets_is_not_judged(kernel: Kernel) -> None:
    """mana on Azure has two RDMA devices for a function: one does RoCE, the other one only passes raw packets, for DPDK."""
    kernel.rdma.add(PF0, "mana_0", NAME0)
    kernel.rdma.add(PF0, "manae_0", NAME0, umad=False)
    kernel.tree.remove("/sys/class/infiniband/manae_0/ports/1/gids")
    assert is_ready(settle(kernel, {"rdma": {"gid_type": "RoCE v2"}, "roce": {"cm_tos": 106}}).conditions)
    shown = inspect(kernel.machine()).functions[0]
    assert ([device.name for device in shown.rdma], shown.management_rdma) == (["mana_0"], ("manae_0",))


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        pytest.param(
            "/sys/bus/pci/devices/0000:21:00.0/infiniband_mad",
            "umad of rocep33s0 (load ib_umad)",
            id="k8s-rdma-shared-dev-plugin-23",
        ),
        ("/dev/infiniband/uverbs0", "uverbs0 of rocep33s0 (the kernel has it, "),
        pytest.param("/dev/infiniband/rdma_cm", "rdma_cm (load rdma_ucm)", id="k8s-rdma-shared-dev-plugin-192"),
    ],
)
def test_a_character_device_that_is_missing_is_named(kernel: Kernel, gone: str, said: str) -> None:
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    assert condition(settle(kernel, {"rdma": {}}), "RdmaCharDevices").status == "True"
    kernel.tree.remove(gone)
    kernel.tree.remove("/sys/class/infiniband_mad") if "mad" in gone else None
    last = settle(kernel, {"rdma": {}})
    assert not is_ready(last.conditions)
    result = condition(last, "RdmaCharDevices")
    assert result.status == "False" and result.message.startswith(f"not in /dev/infiniband: {said}")
    assert [fault.target for fault in result.faults] == [HOST if "rdma_cm" in gone else PF0]


# --- rdma_netns --------------------------------------------------------------------------------------------


def test_the_netns_mode_is_set_once(kernel: Kernel) -> None:
    result = settle(kernel, {}, rdma={"netns_mode": "exclusive"})
    assert is_ready(result.conditions)
    assert kernel.rdma.mode == "exclusive"
    kernel.writes.clear()
    settle(kernel, {}, rdma={"netns_mode": "exclusive"})
    settle(kernel, {})
    assert kernel.writes == []


def test_a_node_without_rdma_says_that_it_has_none(kernel: Kernel) -> None:
    kernel.rdma.mode = None
    result = settle(kernel, {}, rdma={"netns_mode": "shared"})
    assert "load ib_core" in refused(result)["netns_mode"][1]


# --- what people see of a device ---------------------------------------------------------------------------


def test_inspect_shows_a_port_s_subnet_facts_and_a_device_s_hardware_facts(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "ibp33s0", NAME0, link_layer="InfiniBand")
    kernel.rdma.set_port("ibp33s0", lid="0x1f", lid_mask_count="2", sm_lid="0x1")
    for file, text in (("sys_image_guid", "b859:9f03:0000:0001"), ("hw_rev", "0"), ("board_id", "MT_0000000359")):
        kernel.tree.put(f"/sys/class/infiniband/ibp33s0/{file}", text)
    (device,) = next(f for f in inspect(kernel.machine()).functions if f.address == PF0).rdma
    assert (device.sys_image_guid, device.hw_rev, device.board_id) == ("b859:9f03:0000:0001", "0", "MT_0000000359")
    assert [(port.lid, port.lmc, port.sm_lid) for port in device.ports] == [(31, 2, 1)]


def test_facts_that_a_driver_lacks_are_left_out(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    kernel.tree.remove("/sys/class/infiniband/rocep33s0/sys_image_guid")
    kernel.rdma.set_port("rocep33s0", lid="unknown")
    result = inspect(kernel.machine())
    (device,) = next(f for f in result.functions if f.address == PF0).rdma
    assert (device.sys_image_guid, device.hw_rev, device.board_id) == (None, None, None)
    assert [(port.lid, port.lmc, port.sm_lid) for port in device.ports] == [(None, 0, 0)]
    shown = render(result)
    assert all(word not in shown for word in ("LID", "system image", "revision", "board"))


def test_one_device_without_a_readable_firmware_version_hides_no_other(kernel: Kernel) -> None:
    """Discovery ends at it (https://github.com/Mellanox/nic-configuration-operator/issues/496)."""
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    kernel.rdma.add(PF1, "rocep65s0", "enp65s0")
    for device, version in (("rocep33s0", "22.41.1000"), ("rocep65s0", "22.41.1000")):
        kernel.tree.put(f"/sys/class/infiniband/{device}/fw_ver", version)
    kernel.unreadable.add("/sys/class/infiniband/rocep33s0/fw_ver")
    shown = {function.address: function.rdma for function in inspect(kernel.machine()).functions}
    assert [device.firmware for device in (*shown[PF0], *shown[PF1])] == [None, "22.41.1000"]
    wanted: dict[str, object] = {"rdma": {"gid_type": "RoCE v2"}}
    assert condition(settle(kernel, wanted), "RdmaDevices").status == "True"


def test_a_pass_does_not_read_what_only_inspect_shows(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    read: list[str] = []
    machine = seen(kernel.machine(), lambda _, where: read.append(where))
    assert is_ready(passes.settle(machine, rail0(rdma={})).conditions)
    assert any(path.endswith("/state") for path in read)
    assert not any(path.endswith(("lid", "lid_mask_count", "sys_image_guid", "hw_rev")) for path in read)


@pytest.mark.parametrize("name", ["smi1", "a_smi"])
def test_a_device_for_management_alone_is_not_judged(kernel: Kernel, name: str) -> None:
    """An XDR port has one, for the subnet manager of its planes."""
    kernel.rdma.add(PF0, "mlx5_0", None, link_layer="InfiniBand", rate="800 Gb/sec (4X XDR)")
    kernel.rdma.add(PF0, name, None, link_layer="InfiniBand", rate="200 Gb/sec (1X XDR)", uverbs=False)
    result = settle(kernel, {"rdma": {"link_layer": "InfiniBand", "rate": 800}})
    assert is_ready(result.conditions), result.conditions
    inspection = inspect(kernel.machine())
    shown = next(function for function in inspection.functions if function.address == PF0)
    assert ([device.name for device in shown.rdma], shown.management_rdma) == (["mlx5_0"], (name,))
    assert inspection.other_rdma == ()
    assert '"rate": 800' in derive_inventory(kernel.machine(), "h1", "n1", []).text


@pytest.mark.parametrize("present", [True, False])
def test_whether_rdma_cm_is_there_does_not_depend_on_a_nic_that_is_missing(kernel: Kernel, present: bool) -> None:
    kernel.rdma.add(PF0, "mlx5_0", "enp33s0")
    if not present:
        kernel.tree.remove("/dev/infiniband/rdma_cm")
    wanted = spec_of(nic("rail0", "0000:99:00.0", rdma={}))
    result = passes.settle(kernel, wanted)
    for last, scope in ((None, None), (result.have, frozenset({PF0}))):
        result = passes.settle(kernel, wanted, last, scope)
        assert condition(result, "RdmaCharDevices").status == str(present)
    assert condition(result, "NicsPresent").reason == "NicMissing"
