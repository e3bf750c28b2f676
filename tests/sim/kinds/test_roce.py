"""RoCE on the simulated kernel: trust, PFC, the rdma_cm's defaults, and what a driver without DCB refuses."""

import pytest

from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.hardware.functions import vf_addresses
from agent.hardware.rdma import Reader
from agent.machine import CmDefaults, DcbState
from agent.report.reasons import LOG_IF_LOADED
from agent.report.records import Disruption
from agent.report.verdict import is_ready
from tests.sim.kernel import Kernel
from tests.sim.kinds.test_rdma import refused, settle
from tests.sim.passes import rail0
from tests.sim.two_nics import NAME0, PF0

NET = f"/sys/class/net/{NAME0}"

ROCE = {"trust": "dscp", "pfc": "3", "cm_tos": 106, "cm_mode": "RoCE v2"}


def test_roce_is_set_on_the_port_and_on_every_device_and_stays(kernel: Kernel) -> None:
    kernel.rdma.rxe = True
    kernel.rdma.dcb[NAME0] = DcbState(frozenset({0, 5}))
    wanted = {"vfs": {"count": 2}, "roce": ROCE}
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    result = settle(kernel, wanted)
    assert is_ready(result.conditions), result.conditions
    state = kernel.rdma.dcb[NAME0]
    assert state.pfc == {3}
    assert len(state.dscp) == 64
    assert state.dscp > {(26, 3), (46, 5)}
    devices = [
        name for pci in [PF0, *vf_addresses(kernel.files, PF0).values()] for name in Reader(kernel.files).of(pci)
    ]
    assert len(devices) == 3
    assert {kernel.rdma.cm_defaults(name, 1) for name in devices} == {CmDefaults(106, "RoCE v2")}
    kernel.writes.clear()
    settle(kernel, wanted)
    assert kernel.writes == []


def test_trust_goes_back_to_pcp_when_the_last_dscp_is_gone(kernel: Kernel) -> None:
    kernel.rdma.dcb[NAME0] = DcbState(frozenset({3}), frozenset({(26, 3), (48, 6)}))
    settle(kernel, {"roce": {"trust": "pcp", "pfc": ""}})
    assert kernel.rdma.dcb[NAME0] == DcbState(frozenset())


@pytest.mark.parametrize("replaces", [True, False], ids=["ConnectX", "others"])
def test_a_dscp_that_another_program_gave_another_priority_is_set_again(kernel: Kernel, replaces: bool) -> None:
    kernel.rdma.replaces_dscp = replaces
    kernel.rdma.dcb[NAME0] = DcbState(frozenset())
    settle(kernel, {"roce": {"trust": "dscp"}})
    whole = kernel.rdma.dcb[NAME0]
    kernel.rdma.add_dscp(NAME0, frozenset({(26, 0)}))
    assert [o.result for o in settle(kernel, {"roce": {"trust": "dscp"}}).outcomes] == ["applied"]
    assert kernel.rdma.dcb[NAME0] == whole
    kernel.rdma.remove_dscp(NAME0, whole.dscp - {(26, 3)})
    settle(kernel, {"roce": {"trust": "dscp"}})
    assert kernel.rdma.dcb[NAME0] == whole


@pytest.mark.parametrize("trust", ["pcp", "dscp"])
def test_an_administrator_s_priorities_come_back(kernel: Kernel, trust: str) -> None:
    before = kernel.rdma.dcb[NAME0] = DcbState(frozenset(), frozenset({(26, 5), (26, 6), (46, 6)}))
    originals = Originals()
    settle(kernel, {"roce": {"trust": trust}}, originals=originals)
    assert kernel.rdma.dcb[NAME0] != before
    settle(kernel, {}, originals=originals)
    assert kernel.rdma.dcb[NAME0] == before


def test_a_driver_without_dcb_is_unsupported_and_an_optional_nic_does_not_make_unready(kernel: Kernel) -> None:
    last_pass = settle(kernel, {"roce": {"trust": "dscp", "pfc": "3", "ecn": "3"}})
    assert {field: result for field, (result, _) in refused(last_pass).items()} == dict.fromkeys(
        ["trust", "pfc", "ecn_np", "ecn_rp"], "unsupported"
    )
    assert refused(last_pass)["pfc"][1] == f"the driver of {NAME0} does not support pfc 3 (DCBNL)"
    assert "comes with MLNX_OFED" in refused(last_pass)["ecn_np"][1]
    assert not is_ready(last_pass.conditions)
    assert is_ready(settle(kernel, {"required": False, "roce": {"trust": "dscp"}}).conditions)


def test_a_driver_without_dcb_has_no_priorities(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, {"roce": {"pfc": "", "ecn": ""}}).conditions)


def test_what_the_driver_refuses_is_unsupported(kernel: Kernel) -> None:
    kernel.rdma.dcb[NAME0] = DcbState(frozenset())
    kernel.rdma.refused_priorities = frozenset({7})
    assert refused(settle(kernel, {"roce": {"pfc": "3,7"}}))["pfc"][0] == "unsupported"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ice", f"`ethtool --set-priv-flags {NAME0} fw-lldp-agent off`"),
        ("i40e", f"`ethtool --set-priv-flags {NAME0} disable-fw-lldp on`"),
        ("bnxt_en", "DCBX off in its firmware"),
        ("igb", ""),
    ],
)
def test_firmware_that_manages_dcb_is_named_if_a_driver_refuses(kernel: Kernel, name: str, advice: str) -> None:
    kernel.rdma.dcb[NAME0] = DcbState(frozenset())
    kernel.rdma.managed = {NAME0}
    kernel.set_driver(PF0, name)
    last_pass = settle(kernel, {"roce": {"trust": "dscp", "pfc": "3"}})
    for result, message in refused(last_pass).values():
        assert result == "failed"
        assert ("firmware manages DCB" in message) is bool(advice)
        assert advice in message
    kernel.rdma.managed = set()
    assert is_ready(settle(kernel, {"roce": {"trust": "dscp", "pfc": "3"}}).conditions)


def test_pfc_waits_for_whoever_uses_a_vf_since_it_takes_the_link_down(kernel: Kernel) -> None:
    kernel.rdma.dcb[NAME0] = DcbState(frozenset())
    settle(kernel, {"vfs": {"count": 1}})
    kernel.move_away(vf_addresses(kernel.files, PF0)[0])
    last_pass = settle(kernel, {"vfs": {"count": 1}, "roce": {"pfc": "3"}})
    result, error = refused(last_pass)["pfc"]
    assert result == "deferred" and f"another network namespace ({PF0}#0)" in error
    assert kernel.rdma.dcb[NAME0].pfc == set()


@pytest.mark.parametrize(
    ("driver", "flaps"),
    [
        ("mlx5_core", {"pfc"}),
        ("mlx4_core", {"trust"}),
        ("bnxt_en", {"pfc"}),
        ("ice", {"trust", "pfc"}),
        ("of nobody", {"trust", "pfc"}),
    ],
)
def test_a_change_is_judged_by_what_the_driver_does_for_it(kernel: Kernel, driver: str, flaps: set[str]) -> None:
    """Also where it puts back what was there before."""
    kernel.rdma.dcb[NAME0] = DcbState(frozenset())
    kernel.set_driver(PF0, driver)
    originals = Originals()
    given: dict[str, object] = {"roce": {"trust": "dscp", "pfc": "3"}}
    for wanted in (given, {}):
        made = settle(kernel, wanted, originals=originals).outcomes
        changes = [each.change for each in made if each.change.kind == "roce"]
        assert {each.field: each.disruption == Disruption.LINK_FLAP for each in changes} == {
            "trust": "trust" in flaps,
            "pfc": "pfc" in flaps,
        }


def test_a_nic_without_a_roce_device_has_nothing_to_set_the_defaults_on(kernel: Kernel) -> None:
    kernel.rdma.add(None, "siw0", NAME0, node_type="4: RNIC")
    result = settle(kernel, {"roce": {"cm_tos": 106}})
    said = f"{PF0} and its VFs have no RoCE device; load its RDMA driver; {LOG_IF_LOADED}"
    assert refused(result)["cm_tos"] == ("failed", said)
    assert not dry_run(kernel.machine(), rail0(roce={"cm_tos": 106})).errors


@pytest.mark.parametrize(("key", "value", "why"), [("cm_mode", "RoCE v1", "port 1"), ("traffic_class", 106, "")])
def test_what_a_port_does_not_have_is_unsupported(kernel: Kernel, key: str, value: object, why: str) -> None:
    kernel.rdma.add(PF0, "rocep33s0", NAME0)
    result, error = refused(settle(kernel, {"roce": {key: value}}))[key]
    assert (result, why in error) == ("unsupported", True)


def test_the_files_of_mlnx_ofed_are_used_where_they_are(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "mlx5_0", NAME0)
    kernel.tree.put(f"{NET}/qos/trust", "[pcp] dscp")
    kernel.tree.put("/sys/class/infiniband/mlx5_0/tc/1/traffic_class", "")
    for role in ("roce_np", "roce_rp"):
        for priority in range(8):
            kernel.tree.put(f"{NET}/ecn/{role}/enable/{priority}", "1" if priority == 5 else "0")
    result = settle(kernel, {"roce": {"trust": "dscp", "ecn": "3", "traffic_class": 106}})
    assert kernel.files.read(f"{NET}/qos/trust") == "dscp"
    for role in ("roce_np", "roce_rp"):
        assert [p for p in range(8) if kernel.files.read(f"{NET}/ecn/{role}/enable/{p}") == "1"] == [3]
    assert kernel.files.read("/sys/class/infiniband/mlx5_0/tc/1/traffic_class") == "Global tclass=106"
    assert is_ready(result.conditions)
