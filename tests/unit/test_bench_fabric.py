"""bench.fabric: what it prints of a simulated fleet, and when it fails."""

import pytest
from attrs import evolve
from click.testing import CliRunner

from bench.fabric import Outcome, assumed_seconds, main, wrong
from fleet.fabric.schedule import Round
from fleet.fabric.tests import FabricSettings

FAULTLESS = Outcome(
    nodes=8, bad_paths=0.01, runs=20, good=2000, blamed=0, bad=200, missed=0, paths=70, paths_missed=0, paths_blamed=0,
    rounds=170, wall=4930.0, cpu=0.5,
)  # fmt: skip


def test_each_fleet_has_a_row_with_few_bad_paths_and_one_with_many() -> None:
    said = CliRunner().invoke(main, ["--nodes", "8", "--rails", "2", "--ends", "16"])
    assert said.exit_code == 0, said.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.output.splitlines() if "│" in line]
    assert [row[:3] for row in rows] == [["8", "0.1%", "1"], ["8", "1.0%", "1"]]
    assert [row[6:8] for row in rows] == [["0 of 15 (0.00%)", "0 of 1 (0.00%)"]] * 2
    assert "ib_write_bw, ib_read_bw, ib_send_bw, ib_write_lat" in said.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"blamed": 2, "missed": 2}, []),
        ({"blamed": 3}, ["8 nodes, 1.0% bad paths: 3 of 2000 (0.15%) good ends are blamed, more than 0.1%"]),
        ({"missed": 3}, ["8 nodes, 1.0% bad paths: 3 of 200 (1.50%) bad ends are missed, more than 1.0%"]),
    ],
)
def test_more_wrong_verdicts_than_are_accepted_are_named(more: dict[str, int], said: list[str]) -> None:
    assert list(wrong([FAULTLESS, evolve(FAULTLESS, **more)])) == said


def test_the_command_fails_if_verdicts_are_wrong_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.fabric.MOST_BLAMED", -0.001)
    said = CliRunner().invoke(main, ["--nodes", "8", "--rails", "1", "--ends", "8"])
    assert said.exit_code == 1
    assert "0.1% bad paths: 0 of 7 (0.00%) good ends" in said.output


def test_a_latency_takes_no_measured_time() -> None:
    rounds = [Round("survey", number, test, False, ()) for number, test in enumerate(("ib_read_bw", "ib_write_lat"))]
    assert assumed_seconds(rounds, FabricSettings(seconds=5)) == 2 * (4 + 20) + 5
