"""Channels, rings, coalescing and offloads on the simulated kernel."""

from collections.abc import Mapping

import pytest
from attrs import evolve

from agent.driver_families import family_of
from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.kinds import links
from agent.kinds.ethtool import COALESCING
from agent.machine import Group, Link, QueueUser, Setting
from agent.report.records import Disruption, Outcome
from agent.report.verdict import is_ready
from agent.state.snapshot import read_basis
from agent.state.wanted import resolve
from tests.sim.ethtool import SimEthtool
from tests.sim.kernel import Kernel
from tests.sim.passes import applied, rail0, settle, undone

PF, MAC = "0000:21:00.0", "02:00:00:00:01:00"
NETDEV = "enp33s0"


def writes(kernel: Kernel, word: str) -> list[str]:
    return [value for _, value in kernel.writes if value.startswith(word)]


def of_kind(result: Pass, kind: str) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.change.kind == kind]


EVERYTHING: dict[str, Mapping[str, object]] = {
    "channels": {"combined": 1},
    "rings": {"rx": 1024, "tx": 512},
    "coalescing": {"rx_usecs": 50, "tx_usecs": 60},
    "offloads": {"rx-gro": False, "rx-all": True},
}


def test_a_spec_in_another_order_has_the_same_plan(kernel: Kernel) -> None:
    turned = {key: dict(reversed(list(value.items()))) for key, value in reversed(list(EVERYTHING.items()))}
    assert dry_run(kernel.machine(), rail0(**EVERYTHING)) == dry_run(kernel.machine(), rail0(**turned))


def test_only_netdevs_with_settings_are_read(kernel: Kernel) -> None:
    wanted = rail0(vfs={"count": 3, "groups": [{"index": "1", "rings": {"rx": 512}}]})
    settle(kernel, wanted)
    asked: list[int] = []

    class Listening(SimEthtool):
        def settings(self, group: Group, ifindex: int) -> Mapping[str, Setting]:
            asked.append(ifindex)
            return kernel.ethtool.settings("rings", ifindex)

    dry_run(evolve(kernel.machine(), ethtool=Listening(kernel)), wanted)
    assert asked == [kernel.netdev(vf_addresses(kernel.files, PF)[1]).ifindex]


def test_new_channels_have_their_interrupts_placed_in_the_same_pass(kernel: Kernel) -> None:
    result = settle(kernel, rail0(channels={"combined": 6}))
    assert is_ready(result.conditions)
    actions = {action: cpus for (_, action), cpus in kernel.interrupts.affinities(PF).items()}
    assert actions.pop(NETDEV) == "0-1"
    assert sorted(actions) == [f"{NETDEV}-TxRx-{queue}" for queue in range(6)]
    assert sorted(actions.values()) == ["0", "0", "0", "1", "1", "1"]
    assert len([path for path, _ in kernel.writes if path.endswith("smp_affinity_list")]) == 7


def test_a_netdev_that_udev_has_not_initialised_is_left_alone(kernel: Kernel) -> None:
    kernel.udev.lags(PF)
    settle(kernel, rail0(rings={"rx": 512}))
    assert not writes(kernel, "rings")


def test_vfs_have_settings_of_their_own(kernel: Kernel) -> None:
    vfs = {"count": 3, "defaults": {"rings": {"rx": 512}}, "groups": [{"index": "1", "rings": {"tx": 512}}]}
    assert is_ready(settle(kernel, rail0(vfs=vfs)).conditions)
    ethtool = kernel.machine().ethtool
    sizes = [
        {name: ring.value for name, ring in ethtool.settings("rings", kernel.netdev(vf).ifindex).items()}
        for _, vf in sorted(vf_addresses(kernel.files, PF).items())
    ]
    assert sizes == [{"rx": 512, "tx": 1024}, {"rx": 1024, "tx": 512}, {"rx": 512, "tx": 1024}]
    assert ethtool.settings("rings", kernel.netdev(PF).ifindex)["rx"].value == 256


@pytest.mark.parametrize(
    ("wanted", "blocker", "remedy"),
    [
        ({"channels": {"combined": 9}}, "combined is 8 at most, the spec wants 9", "`ethtool -l`"),
        pytest.param(
            {"rings": {"rx": 8192}}, "rx is 4096 at most, the spec wants 8192", "`ethtool -g`", id="PF_RING-900"
        ),
        ({"rings": {"rx": 1001}}, "igb has no rings of this size, but rx 1008", "give rx 1008"),
        ({"offloads": {"rx-gro-hv": True}}, "this kernel knows no feature 'rx-gro-hv'", "did you mean 'rx-gro-hw'?"),
        ({"offloads": {"generic-receive-offload": False}}, "knows no feature", "did you mean 'rx-gro'?"),
    ],
)
def test_impossible_values_are_refused_with_the_remedy_before_any_write(
    kernel: Kernel, wanted: dict[str, object], blocker: str, remedy: str
) -> None:
    (error,) = dry_run(kernel.machine(), rail0(**wanted)).errors
    assert blocker in error
    assert remedy in error
    result = settle(kernel, rail0(**wanted))
    assert [outcome.result for outcome in result.outcomes if outcome.change.blocker] == ["blocked"]
    assert not is_ready(result.conditions)
    assert not writes(kernel, next(iter(wanted)))


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"channels": {"rx": 2, "tx": 2}}, "channels"),
        ({"coalescing": {"rx_frames": 8}}, "rx_frames"),
        ({"coalescing": {"adaptive_rx": True}}, "adaptive_rx"),
        ({"offloads": {"rx-gro-hw": True}}, "rx-gro-hw"),
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_what_the_driver_does_not_have_is_unsupported(
    kernel: Kernel, wanted: dict[str, object], field: str, required: bool
) -> None:
    assert not dry_run(kernel.machine(), rail0(required=required, **wanted)).errors
    result = settle(kernel, rail0(required=required, **wanted))
    assert [(outcome.result, outcome.change.field) for outcome in undone(result)] == [("unsupported", field)]
    assert is_ready(result.conditions) is not required


def test_a_pf_has_fewer_channels_while_it_has_vfs(kernel: Kernel) -> None:
    wanted = rail0(vfs={"count": 2}, channels={"combined": 4})
    planned = dry_run(kernel.machine(), wanted)
    assert not planned.errors
    assert [change.after for change in planned.changes if change.kind == "channels"] == ["known after vfs"]
    (blocked,) = of_kind(settle(kernel, wanted), "channels")
    assert (blocked.result, "2 at most" in blocked.error) == ("blocked", True)


def test_channels_that_new_vfs_reset_are_set_again(kernel: Kernel) -> None:
    settle(kernel, rail0(channels={"combined": 1}))
    assert is_ready(settle(kernel, rail0(vfs={"count": 2}, channels={"combined": 1})).conditions)
    assert writes(kernel, "channels") == ["channels {'combined': 1}"] * 2


@pytest.mark.parametrize(
    ("wanted", "flaps"),
    [
        ({"channels": {"combined": 1}}, True),
        ({"rings": {"rx": 512}}, True),
        ({"offloads": {"rx-all": True}}, True),
        ({"offloads": {"rx-gro": False}}, False),
        ({"coalescing": {"rx_usecs": 50}}, False),
    ],
)
def test_a_netdev_in_use_keeps_its_link(kernel: Kernel, wanted: dict[str, object], flaps: bool) -> None:
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    kernel.routed.add(NETDEV)
    kernel.writes.clear()
    (outcome,) = of_kind(settle(kernel, rail0(**wanted)), next(iter(wanted)))
    assert (outcome.change.disruption is Disruption.LINK_FLAP) is flaps
    assert outcome.result == ("deferred" if flaps else "applied")
    assert (outcome.change.affected == (f"a route through {NETDEV} ({PF})",)) is flaps
    assert any(writes(kernel, word) for word in ("channels", "rings", "coalescing", "feature")) is not flaps


@pytest.mark.parametrize(
    ("driver", "wanted", "flaps"),
    [
        # The firmware or the device is told, and the netdev stays up.
        ("ena", {"mtu": 1400}, False),
        ("gve", {"mtu": 1400}, False),
        ("cxgb4", {"mtu": 1400}, False),
        ("hinic", {"mtu": 1400}, False),
        # The netdev is closed and opened.
        *(
            (driver, {"mtu": 1400}, True)
            for driver in ("ice", "i40e", "ixgbe", "bnxt_en", "hns3", "mana", "qede", "idpf")
        ),
        *(
            (driver, {"offloads": {"rx-gro": False}}, False)
            for driver in ("ena", "ice", "i40e", "hns3", "ionic", "sfc")
        ),
        # The driver turns its own aggregation off with it.
        *((driver, {"offloads": {"rx-gro": False}}, True) for driver in ("bnxt_en", "qede", "idpf", "gve")),
        *((driver, {"offloads": {"rx-all": True}}, driver == "ixgbe") for driver in ("ixgbe", "bnxt_en", "mlx4_core")),
        *((driver, {"coalescing": {"rx_usecs": 50}}, driver == "ixgbe") for driver in ("ixgbe", "ixgbevf", "bnxt_en")),
        *((driver, {"vfs": {"count": 1}}, False) for driver in ("ice", "hns3", "ionic", "qede")),
        *((driver, {"vfs": {"count": 1}}, True) for driver in ("i40e", "ixgbe", "bnxt_en")),
    ],
)
def test_a_change_waits_for_a_netdev_in_use_only_if_its_driver_takes_the_link_down(
    driver: str, wanted: dict[str, object], flaps: bool
) -> None:
    kernel = Kernel(cpus=8)
    kernel.add_nic(PF, NETDEV, MAC, driver=driver, total_vfs=8 if "vfs" in wanted else 0)
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    kernel.routed.add(NETDEV)
    first = of_kind(settle(kernel, rail0(**wanted)), "links" if "mtu" in wanted else next(iter(wanted)))[0]
    assert (first.change.disruption is Disruption.LINK_FLAP, first.result == "deferred") == (flaps, flaps)


@pytest.mark.parametrize(("owner", "size"), [("user", 1024), ("trackbed", 512)])
def test_a_vf_s_settings_are_its_owner_s_unless_the_spec_says_otherwise(kernel: Kernel, owner: str, size: int) -> None:
    settle(kernel, rail0(vfs={"count": 1, "defaults": {"state": "down"}}))
    (vf,) = vf_addresses(kernel.files, PF).values()
    kernel.host.allocated[vf] = ("team/trainer-0",)
    given = {"owner": owner, "state": "down", "rings": {"rx": 512}}
    assert is_ready(settle(kernel, rail0(vfs={"count": 1, "defaults": given})).conditions)
    assert kernel.ethtool.settings("rings", kernel.netdev(vf).ifindex)["rx"].value == size


def test_a_feature_that_the_driver_keeps_off_is_reported(kernel: Kernel) -> None:
    (blocked,) = undone(settle(kernel, rail0(offloads={"tx-vlan-hw-insert": False})))
    assert (blocked.result, blocked.change.field) == ("blocked", "tx-vlan-hw-insert")
    assert "a feature that it depends on keeps it on" in blocked.error
    assert writes(kernel, "feature") == ["feature {'tx-vlan-hw-insert': False}"]
    both = rail0(offloads={"tx-vlan-hw-insert": False, "rx-vlan-hw-parse": False})
    assert not dry_run(kernel.machine(), both).errors
    assert is_ready(settle(kernel, both).conditions)


def test_a_value_that_the_driver_rounds_is_not_written_for_ever(kernel: Kernel) -> None:
    failures = Failures()
    for _ in range(3):
        result = settle(kernel, rail0(rings={"rx": 16}), failures=failures)
    (failed,) = of_kind(result, "rings")
    assert failed.result == "failed" and failed.error.endswith(" rx=64")
    assert not is_ready(result.conditions)
    assert len(writes(kernel, "rings")) == 2


def test_adaptive_goes_off_before_the_numbers_and_on_after_them(kernel: Kernel) -> None:
    status = links.LinkStatus(PF, "mlx5_core", Link(2, NETDEV, MAC, MAC, 1500, True, True), True)
    present: dict[str, int | bool] = {"adaptive_rx": True, "adaptive_tx": False, "rx_usecs": 8, "tx_usecs": 8}
    read = {name: Setting(value) for name, value in present.items()}
    wanted = {"adaptive_rx": False, "adaptive_tx": True, "rx_usecs": 16, "tx_usecs": 16}
    snapshot = read_basis(kernel.machine())
    have = snapshot.merged(links.NAME, None, {PF: {PF: status}}).merged(COALESCING.name, None, {PF: {PF: read}})
    planned = COALESCING.plan(resolve(rail0(coalescing=wanted), snapshot.functions), have)
    assert [change.field for change in planned] == ["adaptive_rx", "rx_usecs", "tx_usecs", "adaptive_tx"]


@pytest.mark.parametrize("driver", ["ice", "i40e"])
@pytest.mark.parametrize("adaptive", [{}, {"adaptive_rx": True}])
def test_usecs_that_a_driver_refuses_while_it_chooses_them_itself_are_explained(
    driver: str, adaptive: dict[str, bool]
) -> None:
    """Intel's drivers choose them by default."""
    kernel = Kernel(cpus=8)
    kernel.add_nic(PF, NETDEV, MAC, driver=driver)
    (failed,) = undone(settle(kernel, rail0(coalescing={"rx_usecs": 50} | adaptive)))
    assert failed.result == "failed" and "adaptive_rx: false" in failed.remedy
    assert is_ready(settle(kernel, rail0(coalescing={"rx_usecs": 50, "adaptive_rx": False})).conditions)
    # Off, then on: the number was set meanwhile.
    assert is_ready(settle(kernel, rail0(coalescing={"rx_usecs": 50, "adaptive_rx": True})).conditions)


def test_channels_of_which_mlx5_shows_twice_as_many_for_af_xdp_are_as_wanted() -> None:
    kernel = Kernel(cpus=8)
    kernel.add_nic(PF, NETDEV, MAC, driver="mlx5_core")
    wanted = rail0(channels={"combined": 4})
    assert is_ready(settle(kernel, wanted).conditions)
    kernel.queue_users[PF] = (QueueUser(5, "AF_XDP"),)
    assert not dry_run(kernel.machine(), wanted).changes
    assert is_ready(settle(kernel, wanted).conditions)
    (change,) = of_kind(settle(kernel, rail0(channels={"combined": 16})), "channels")
    assert change.change.blocker == "combined is 8 at most, the spec wants 16"


@pytest.mark.parametrize(("asked", "made"), [(1024, 1024), (1000, 1024), (1025, 2048), (1, 1)])
def test_mlx5_s_rings_are_powers_of_two(asked: int, made: int) -> None:
    assert family_of("mlx5_core").ring_size(asked) == made


@pytest.mark.parametrize(
    ("driver", "asked", "made"),
    [
        ("ice", 1000, 1024),
        ("i40e", 1000, 1024),
        ("iavf", 1000, 1024),
        ("ixgbe", 1001, 1008),
        ("hns3", 1001, 1008),
        ("ena", 1000, 512),
        ("ena", 100, 256),
        ("gve", 1000, 1024),
        ("mana", 1000, 1024),
        ("ionic", 1000, 1024),
        ("mlx4_core", 1000, 1024),
        ("nfp", 1000, 1024),
        ("hinic", 1000, 512),
        ("enic", 1000, 992),
        ("enic", 16, 64),
        ("atlantic", 1001, 1008),
        ("idpf", 1000, 1024),
    ],
)
def test_a_ring_that_a_driver_rounds_or_refuses_is_never_asked_for(driver: str, asked: int, made: int) -> None:
    kernel = Kernel()
    kernel.add_nic(PF, NETDEV, MAC, driver=driver)
    (change,) = of_kind(settle(kernel, rail0(rings={"rx": asked})), "rings")
    assert change.change.blocker == f"{driver} has no rings of this size, but rx {made}"
    assert change.change.remedy == f"give rx {made}"
    assert not writes(kernel, "rings")


# A driver with two modes, as bnxt: combined channels exclude rx and tx ones.
COMBINED, SEPARATE = {"combined": 3}, {"rx": 2, "tx": 1}


@pytest.mark.parametrize(
    "sequence", [(SEPARATE,), (COMBINED, SEPARATE), (SEPARATE, COMBINED), (SEPARATE, COMBINED, SEPARATE)]
)
@pytest.mark.parametrize("before", [{}, {"rx": 4, "tx": 4, "combined": 0}], ids=["combined", "separate"])
def test_a_netdev_goes_from_combined_to_separate_channels_and_back(
    kernel: Kernel, before: dict[str, int], sequence: tuple[dict[str, int], ...]
) -> None:
    kernel.ethtool.two_modes.add(PF)
    index = kernel.netdev(PF).ifindex
    if before:
        kernel.ethtool.set("channels", index, before)
    found = kernel.ethtool.settings("channels", index)
    memory = Memory(lambda: 0.0)
    for channels in sequence:
        for _ in range(2):
            result = converge(kernel.machine(), Goal(rail0(channels=channels)), memory)
        assert is_ready(result.conditions), result.conditions
        assert not applied(result)
        present = {name: quantity.value for name, quantity in kernel.ethtool.settings("channels", index).items()}
        assert present == {"rx": 0, "tx": 0, "combined": 0} | channels
    memory.failures.forget()
    converge(kernel.machine(), Goal(rail0()), memory)
    assert kernel.ethtool.settings("channels", index) == found
