"""bench.quarantine: a simulated fleet, and what it prints and records."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import bench.quarantine
from agent.probes.link_flaps import DAY, Loss
from agent.spec.node import Flaps
from bench.quarantine import COLUMNS, Link, Rates, fleet, main, quarantines, row

FLAPS = Flaps(losses=2, within=100, quiet=600)


def test_a_quarantine_is_counted_once_with_its_times() -> None:
    losses = tuple(Loss(at, at + 1.0) for at in (10.0, 20.0, 30.0, 5000.0, 5010.0))
    assert quarantines(Link(losses, (0.0, DAY)), DAY, FLAPS) == ([(20.0, 631.0), (5000.0, 6211.0)], 3)
    assert quarantines(Link(losses[:1], None), DAY, FLAPS) == ([], 0)


def test_a_quarantine_ends_with_the_simulation() -> None:
    losses = (Loss(0.0, 1.0), Loss(2.0, 3.0))
    assert quarantines(Link(losses, None), 100.0, FLAPS)[0] == [(2.0, 100.0)]


def test_without_bad_links_and_flaps_nobody_is_quarantined() -> None:
    links = list(fleet(4, 2, 30, Rates(0.0, 0.0, 0.0), 1))
    assert {link.losses for link in links} == {()}
    found = row(links, 30 * DAY, Flaps())
    assert (found["false"], found["missed"]) == ("0 of 8", "0 of 0")


def test_losses_of_one_link_never_overlap() -> None:
    for link in fleet(40, 2, 30, Rates(1.0, 0.5, 5.0), 1):
        ends = [loss.ended for loss in link.losses]
        assert all(
            ended is not None and ended <= after.began for ended, after in zip(ends, link.losses[1:], strict=False)
        )


def test_the_table_is_recorded_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "campaign").mkdir()
    monkeypatch.setattr(bench.quarantine, "DOCS", tmp_path)
    said = CliRunner().invoke(main, ["--nodes", "40", "--rails", "2", "--bad", "0.5", "--record"])
    assert said.exit_code == 0, said.output
    recorded = json.loads((tmp_path / "campaign" / "quarantine.json").read_text())
    assert recorded["columns"] == COLUMNS
    assert all(cell in said.output for each in recorded["runs"] for cell in each.values())
