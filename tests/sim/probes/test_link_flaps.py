"""Losses of carrier: which count, what they make of a link's state, and what outlives a restart of the agent."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from agent.probes.link_flaps import MOST, TRAINING, Loss, health
from agent.report.records import NicVerdict
from agent.report.verdict import is_ready
from agent.spec.node import Flaps
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.readiness import Node
from tests.sim.two_nics import MAC0, NAME0, PF0, PF1

FLAPS = {"losses": 3, "within": 300, "daily": 5, "quiet": 600, "probation": 3600}
HOUR, DAY = 3600, 86400


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node whose links have been up for so long that losses count."""
    node = Node.with_two_nics()
    node.folder = tmp_path
    node.restart()
    look(node)
    node.now += TRAINING
    look(node)
    return node


def look(node: Node, **judged: object) -> NicVerdict:
    """The verdict on the first NIC after a pass."""
    node.look(flaps=FLAPS, **judged)
    assert node.last is not None
    return node.last.nics[0]


def lose(node: Node, seconds: float = 1.0, address: str = PF0, seen: bool = True) -> None:
    """The link is away for so long. ``seen``: a pass reads it meanwhile."""
    node.kernel.carriers.lose(address)
    if seen:
        look(node)
    node.now += seconds
    node.kernel.carriers.regain(address)
    look(node)
    node.now += 10


def states(node: Node, *waits: float) -> list[str]:
    """The state of the first NIC's link after each wait."""
    found: list[str] = []
    for seconds in waits:
        node.now += seconds
        found.append(look(node).link)
    return found


def test_too_many_losses_within_the_window_quarantine_one_nic_and_leave_the_node_ready(node: Node) -> None:
    for expected in ("suspect", "suspect", "quarantined"):
        lose(node)
        assert look(node).link == expected
    conditions = node.look(flaps=FLAPS)
    assert (conditions["LinkFlaps"].status, conditions["LinkFlaps"].severity) == ("False", "warn")
    assert is_ready(conditions.values())
    assert node.last is not None
    first, second = node.last.nics
    assert (first.ready, first.reason, first.certainty) == (False, "Quarantined", "likely")
    assert first.message.startswith("quarantined after 3 losses of carrier; ") and first.message.endswith(" 10m")
    assert (second.ready, second.link) == (True, "good")


def test_a_quarantined_link_that_stays_up_is_on_probation_and_then_good(node: Node) -> None:
    for _ in range(3):
        lose(node)
    assert states(node, 580, 20, 3580, 20) == ["quarantined", "probation", "probation", "good"]
    lose(node)
    assert look(node).link == "suspect"


def test_a_report_does_not_change_while_nothing_happens(node: Node) -> None:
    lose(node)
    for _ in range(2):
        verdict = look(node)
        node.now += 60
        assert look(node) == verdict
        lose(node)
        lose(node)


def test_a_loss_on_probation_quarantines_for_twice_as_long(node: Node) -> None:
    for _ in range(3):
        lose(node)
    assert states(node, 600) == ["probation"]
    assert (look(node).ready, look(node).certainty) == (True, "likely")
    lose(node)
    assert states(node, 0, 1180, 20) == ["quarantined", "quarantined", "probation"]


def test_seldom_losses_quarantine_by_their_number_in_a_day_and_are_forgotten_after_it(node: Node) -> None:
    for _ in range(4):
        lose(node)
        node.now += HOUR
    assert look(node).link == "suspect"
    lose(node)
    assert look(node).link == "quarantined"
    other = Node(node.kernel)
    look(other)
    other.now += TRAINING
    for _ in range(4):
        lose(other)
        other.now += 5 * HOUR
    assert states(other, DAY) == ["good"]


def test_losses_that_no_pass_has_seen_are_counted_by_the_kernel(node: Node) -> None:
    for _ in range(3):
        node.kernel.carriers.lose(PF0)
        node.kernel.carriers.regain(PF0)
    assert look(node).link == "quarantined"


def test_a_loss_that_lasts_is_one_and_its_quarantine_does_not_end_while_it_lasts(node: Node) -> None:
    lose(node, 2 * HOUR)
    assert look(node).link == "suspect"
    lose(node)
    lose(node, seen=False)
    assert look(node).link == "suspect", "the first one is too long ago"
    node.kernel.carriers.lose(PF0)
    assert states(node, 0, DAY) == ["quarantined", "quarantined"]
    node.kernel.carriers.regain(PF0)
    assert states(node, 1, 590, 20) == ["quarantined", "quarantined", "probation"]


def test_a_loss_in_quarantine_makes_it_begin_again(node: Node) -> None:
    for _ in range(3):
        lose(node)
    assert states(node, 500) == ["quarantined"]
    lose(node)
    assert states(node, 500, 100) == ["quarantined", "probation"]


def test_a_link_that_came_up_and_was_lost_again_between_two_passes_has_two_losses(node: Node) -> None:
    node.kernel.carriers.lose(PF0)
    assert look(node).link == "suspect"
    for _ in range(2):
        node.kernel.carriers.regain(PF0)
        node.kernel.carriers.lose(PF0)
    assert look(node).link == "quarantined"


def test_losses_while_a_link_comes_up_do_not_count() -> None:
    node = Node.with_two_nics()
    look(node)
    for _ in range(5):
        lose(node)
    assert look(node).link == "good"


def test_a_netdev_that_its_driver_made_anew_has_a_count_of_its_own(node: Node) -> None:
    netdev = node.kernel.netdevs[NAME0]
    netdev.link = evolve(netdev.link, ifindex=77, carrier_downs=50)
    node.kernel.tree.put(f"/sys/class/net/{NAME0}/ifindex", "77")
    assert look(node).link == "good"


def test_losses_of_two_links_are_not_added_up(node: Node) -> None:
    for address in (PF0, PF1, PF0, PF1):
        lose(node, address=address)
    assert node.last is not None
    assert [nic.link for nic in node.last.nics] == ["suspect", "suspect"]


def test_the_agent_s_own_changes_and_a_netdev_that_is_set_down_are_no_losses(node: Node) -> None:
    for state in ("down", "up") * 3:
        node.wanted_state = state
        look(node)
        node.now += 1
    assert look(node).link == "good"
    node.now += TRAINING
    look(node)
    for count in (1, 2, 3, 4):
        node.more = {"nics": [nic("rail0", PF0, vfs={"count": count})]}
        node.kernel.carriers.count_loss(PF0)
        look(node)
        node.now += TRAINING
    assert look(node).link == "good"


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("channels", [{"combined": number} for number in (1, 2, 3, 4)]),
        ("rings", [{"rx": size, "tx": size} for size in (512, 1024, 2048, 4096)]),
        ("mtu", [9000, 1500, 9000, 1500]),
    ],
)
def test_channels_that_mlx5_opens_anew_for_the_agent_are_no_losses(setting: str, values: list[object]) -> None:
    """It has no carrier for an instant, which the kernel counts."""
    node = Node(Kernel(cpus=8))
    node.kernel.add_nic(PF0, NAME0, MAC0, driver="mlx5_core")
    for value in values:
        node.more = {"nics": [{"name": "rail0", "select": {"pci": PF0}, setting: value}]}
        look(node)
        node.now += TRAINING
        assert look(node).link == "good"
    assert node.kernel.netdev(PF0).carrier_downs


def test_a_restart_of_the_agent_forgets_no_loss_and_counts_those_meanwhile(node: Node) -> None:
    lose(node)
    lose(node)
    node.kernel.carriers.lose(PF0)
    node.kernel.carriers.regain(PF0)
    node.restart()
    quarantined = look(node)
    assert quarantined.link == "quarantined"
    node.restart()
    assert look(node) == quarantined


def test_the_losses_are_written_only_when_they_have_changed(node: Node, tmp_path: Path) -> None:
    def written() -> int:
        look(node)
        node.now += 60
        return (tmp_path / "link_flaps.json").stat().st_ino

    for state in ("up", "down"):
        node.wanted_state = state
        written()
        assert written() == written()
    (tmp_path / "link_flaps.json").unlink()
    node.wanted_state = "up"
    assert written()


def test_a_full_disk_costs_no_loss_while_the_agent_runs(node: Node, tmp_path: Path) -> None:
    (tmp_path / "link_flaps.json").unlink()
    (tmp_path / "link_flaps.json").mkdir()
    for _ in range(5):
        lose(node)
    assert look(node).link == "quarantined"


def test_a_file_that_cannot_be_read_starts_over(node: Node, tmp_path: Path) -> None:
    for _ in range(3):
        lose(node)
    assert look(node).link == "quarantined"
    (tmp_path / "link_flaps.json").write_text('{"kept": 3}')
    node.restart()
    assert look(node).link == "good"


def test_a_check_that_is_off_or_only_warns_quarantines_nobody(node: Node) -> None:
    for _ in range(3):
        lose(node)
    warned = look(node, probes={"link_flaps": {"severity": "warn"}})
    assert (warned.ready, warned.link) == (True, "quarantined")
    off = look(node, probes={"link_flaps": {"severity": "off"}})
    assert (off.ready, off.link) == (True, "good")


def test_a_flood_of_losses_is_kept_within_bounds_and_ends(node: Node) -> None:
    for _ in range(2):
        for _ in range(1000):
            node.kernel.carriers.count_loss(PF0)
        assert look(node).link == "quarantined"
    assert node.folder is not None
    kept = json.loads((node.folder / "link_flaps.json").read_text())["kept"]
    assert len(kept[PF0]["losses"]) == MOST
    node.restart()
    assert states(node, 0, 600, 3600) == ["quarantined", "probation", "good"]


def test_no_sequence_of_losses_is_sticky_for_ever() -> None:
    """Also the longest quarantine ends after a day of quiet."""
    flaps = Flaps()
    losses = [Loss(float(number * DAY), number * DAY + 1.0) for number in range(MOST)]
    burst = [Loss(float(number), float(number)) for number in range(5)]
    for kept in (losses, burst, burst + losses):
        last = kept[-1].ended
        assert last is not None
        assert health(kept, last + DAY + flaps.probation, flaps).state == "good"
    # On probation once a day: each quarantine is longer, up to a day.
    assert health(burst + losses[1:3], 2 * DAY + 1.0, flaps).hold == 4 * flaps.quiet
