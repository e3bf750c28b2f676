"""RoCE congestion control on the simulated kernel, with MLNX_OFED's files, the in-tree driver's debugfs, or neither."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.engine.originals import ORIGINALS, Originals
from agent.kinds import dcqcn
from agent.report.verdict import is_ready
from agent.spec.dcqcn import DCQCN_PARAMETERS
from agent.spec.node import NodeSpec, SpecError
from tests.sim.kernel import Kernel
from tests.sim.passes import settle, spec_of

PF = "0000:21:00.0"
OFED = "/sys/class/net/enp33s0/ecn"
DEBUGFS = f"/sys/kernel/debug/mlx5/{PF}/cc_params"

# drivers/infiniband/hw/mlx5/cong.c, mlx5_ib_dbg_cc_name.
IN_TREE = (
    "rp_clamp_tgt_rate",
    "rp_clamp_tgt_rate_ati",
    "rp_time_reset",
    "rp_byte_reset",
    "rp_threshold",
    "rp_ai_rate",
    "rp_max_rate",
    "rp_hai_rate",
    "rp_min_dec_fac",
    "rp_min_rate",
    "rp_rate_to_set_on_first_cnp",
    "rp_dce_tcp_g",
    "rp_dce_tcp_rtt",
    "rp_rate_reduce_monitor_period",
    "rp_initial_alpha_value",
    "rp_gd",
    "np_min_time_between_cnps",
    "np_cnp_dscp",
    "np_cnp_prio_mode",
    "np_cnp_prio",
)
EVERY = {name: True if name.startswith("clamp") else 1 for name in DCQCN_PARAMETERS}


def with_ofed(kernel: Kernel) -> None:
    for name in (*DCQCN_PARAMETERS, "cnp_dscp"):
        role = "roce_np" if name in dcqcn.NOTIFICATION else "roce_rp"
        kernel.tree.put(f"{OFED}/{role}/{name}", "0")


def with_debugfs(kernel: Kernel) -> None:
    for name in IN_TREE:
        kernel.tree.put(f"{DEBUGFS}/{name}", "0")


def spec(roce: dict[str, object], **more: object) -> NodeSpec:
    return spec_of({"name": "rail0", "select": {"pci": PF}, "roce": roce, **more})


def refused(result: Pass) -> tuple[str, str, str]:
    (outcome,) = [o for o in result.outcomes if o.change.kind == "dcqcn"]
    return outcome.result, outcome.error, outcome.remedy


def test_mlnx_ofed_s_files_are_written_and_stay(kernel: Kernel) -> None:
    with_ofed(kernel)
    with_debugfs(kernel)
    wanted = spec({"cnp_dscp": 48, "dcqcn": {"rpg_ai_rate": 5, "min_time_between_cnps": 4, "clamp_tgt_rate": True}})
    assert is_ready(settle(kernel, wanted).conditions)
    assert kernel.files.read(f"{OFED}/roce_np/cnp_dscp") == "48"
    assert kernel.files.read(f"{OFED}/roce_np/min_time_between_cnps") == "4"
    assert kernel.files.read(f"{OFED}/roce_rp/rpg_ai_rate") == "5"
    assert kernel.files.read(f"{OFED}/roce_rp/clamp_tgt_rate") == "1"
    assert not [path for path, _ in kernel.writes if path.startswith(DEBUGFS)]
    assert not dry_run(kernel.machine(), wanted).changes


def test_the_in_tree_driver_s_debugfs_is_used_where_there_is_no_ofed(kernel: Kernel) -> None:
    with_debugfs(kernel)
    wanted = spec(
        {"cnp_dscp": 48, "dcqcn": {"rpg_ai_rate": 5, "cnp_802p_prio": 6, "clamp_tgt_rate_after_time_inc": True}}
    )
    assert is_ready(settle(kernel, wanted).conditions)
    assert [kernel.files.read(f"{DEBUGFS}/{name}") for name in ("np_cnp_dscp", "rp_ai_rate", "np_cnp_prio")] == [
        "48",
        "5",
        "6",
    ]
    assert kernel.files.read(f"{DEBUGFS}/rp_clamp_tgt_rate_ati") == "1"
    assert not dry_run(kernel.machine(), wanted).changes


@pytest.mark.parametrize("driver", [with_ofed, with_debugfs])
def test_each_parameter_has_its_file_in_both_drivers(kernel: Kernel, driver: Callable[[Kernel], None]) -> None:
    driver(kernel)
    result = settle(kernel, spec({"cnp_dscp": 48, "dcqcn": EVERY}))
    assert is_ready(result.conditions), result.conditions
    written = [path for path, _ in kernel.writes if path.startswith((OFED, DEBUGFS))]
    assert len(written) == len(set(written)) == len(DCQCN_PARAMETERS) + 1


def test_a_value_that_another_changed_is_set_again(kernel: Kernel) -> None:
    with_ofed(kernel)
    settle(kernel, spec({"cnp_dscp": 48}))
    kernel.files.write(f"{OFED}/roce_np/cnp_dscp", "0")
    result = settle(kernel, spec({"cnp_dscp": 48}))
    assert [str(o.change) for o in result.outcomes] == [f"dcqcn {PF} cnp_dscp: 0 -> 48"]


def test_a_driver_without_either_is_unsupported_with_the_remedy(kernel: Kernel) -> None:
    last_pass = settle(kernel, spec({"cnp_dscp": 48}))
    result, error, remedy = refused(last_pass)
    assert result == "unsupported"
    assert error == (
        f"{PF} has neither MLNX_OFED's ecn/roce_* below its netdev nor {DEBUGFS}: "
        "load mlx5_ib, mount debugfs, or install OFED (the key `ofed`)"
    )
    assert remedy == "take cnp_dscp out of the spec, or mark the NIC required: false"
    converged = next(c for c in last_pass.conditions if c.type == "Converged")
    assert (converged.status, converged.reason) == ("False", "Unsupported")
    assert "has neither MLNX_OFED's" in converged.message
    assert is_ready(settle(kernel, spec({"cnp_dscp": 48}, required=False)).conditions)


def test_parameters_that_the_firmware_lacks_are_unsupported(kernel: Kernel) -> None:
    kernel.tree.put(f"{DEBUGFS}/np_cnp_dscp", "0")
    result = settle(kernel, spec({"cnp_dscp": 48, "dcqcn": {"rpg_max_rate": 100}}))
    assert [(o.change.field, o.result) for o in result.outcomes if o.change.kind == "dcqcn"] == [
        ("cnp_dscp", "applied"),
        ("rpg_max_rate", "unsupported"),
    ]


def test_a_locked_down_kernel_is_named_and_the_nic_stays_in_the_pass(kernel: Kernel) -> None:
    with_debugfs(kernel)
    kernel.locked_down.add(f"{DEBUGFS}/np_cnp_dscp")
    last_pass = settle(kernel, spec({"cnp_dscp": 48}))
    result, error, _ = refused(last_pass)
    assert result == "unsupported"
    assert error.startswith(f"the kernel refuses {DEBUGFS}/np_cnp_dscp (lockdown")
    assert next(c for c in last_pass.conditions if c.type == "NicsPresent").status == "True"


def test_values_that_leave_the_spec_are_restored(kernel: Kernel, tmp_path: Path) -> None:
    with_ofed(kernel)
    kernel.files.write(f"{OFED}/roce_np/cnp_dscp", "46")
    originals = Originals.load(tmp_path / ORIGINALS)
    settle(kernel, spec({"cnp_dscp": 48}), originals=originals)
    settle(kernel, spec({"trust": None}), originals=originals)
    assert kernel.files.read(f"{OFED}/roce_np/cnp_dscp") == "46"


def test_nothing_is_read_that_the_spec_does_not_ask_for(kernel: Kernel) -> None:
    with_debugfs(kernel)
    kernel.unreadable |= {f"{DEBUGFS}/{name}" for name in IN_TREE}
    assert is_ready(settle(kernel, spec({})).conditions)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cnp_dscp": 64}, "cnp_dscp: 64 is out of range; give 0 to 63 (DSCP)"),
        ({"dcqcn": {"dce_tcp_g": 1024}}, "dce_tcp_g: 1024 is out of range; give 0 to 1023 (1024ths)"),
        ({"dcqcn": {"rpg_min_dec_fac": 101}}, "give 0 to 100 percent"),
        ({"dcqcn": {"rp_ai_rate": 5}}, "did you mean 'rpg_ai_rate'"),
    ],
)
def test_bad_data_is_refused_with_the_remedy(given: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(given)
    assert message in str(caught.value)
