"""`trackbed fleet fabric report` as an operator runs it."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from matplotlib import colormaps
from matplotlib.colors import to_hex

from cli.__main__ import cli
from fleet.fabric.collective import Collective, Group
from fleet.fabric.ends import End, by_name
from fleet.fabric.journal import Journal, Run
from fleet.fabric.page import COLOURS, CROSS
from fleet.fabric.tests import FabricSettings
from tests.chromium import Scheme, illegible, shown
from tests.sim.fabric import Fabric, Kind, ends

SETTINGS = FabricSettings(across_rails=False)


GROUP = Group(0, 1, "mpi4py", ("node00000/rail1", "node00001/rail1"))


def written(
    folder: Path,
    bad: dict[str, Kind],
    finished: bool = True,
    absent: dict[str, str] | None = None,
    collectives: tuple[Collective, ...] = (),
    nodes: int = 8,
) -> Path:
    fabric = Fabric(ends(nodes, 2), bad)
    journal = Journal.open(folder / "r.jsonl", Run(tuple(fabric.ends.values()), SETTINGS, absent or {}, 1.0e9))
    journal.add(fabric.run(SETTINGS)[1])
    journal.add((), collectives)
    if finished:
        journal.finish()
    return journal.path


def report(path: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["fleet", "fabric", "report", "--results", str(path), *more])


def test_a_proven_fabric_exits_0(tmp_path: Path) -> None:
    said = report(written(tmp_path, {}))
    assert said.exit_code == 0, said.output
    assert "16 of 16 NICs are good, 0 bad paths\n" in said.output
    assert re.search(r"ib_write_bw: usually (38|39)\d\.\d\d Gbit/s", said.output)


def test_a_bad_nic_is_named_with_its_reason_and_exits_2(tmp_path: Path) -> None:
    said = report(written(tmp_path, {"node00003/rail1": "blocked"}))
    assert said.exit_code == 2
    assert re.search(r"node00003/rail1 +blocked +it sends and receives nothing", said.output)
    assert "15 of 16 NICs are good" in said.output


@pytest.mark.parametrize("finished", [False, True])
def test_an_unfinished_test_or_a_node_that_was_not_tested_proves_nothing(tmp_path: Path, finished: bool) -> None:
    absent = {"node9": "it cannot be reached"} if finished else {}
    said = report(written(tmp_path, {}, finished, absent))
    assert said.exit_code == 2
    assert ("node9" if finished else "the test is not finished") in said.output


def test_json_has_a_line_for_each_end_and_one_for_the_whole(tmp_path: Path) -> None:
    said = report(written(tmp_path, {"node00003/rail1": "slow"}), "--json")
    *rows, whole = [json.loads(line) for line in said.output.splitlines()]
    assert len(rows) == 16
    assert [row["end"] for row in rows if row["status"] != "good"] == ["node00003/rail1"]
    assert whole["proven"] is False and whole["finished"] is True


def test_the_page_has_each_nic_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "fabric.html"
    assert (
        report(written(tmp_path, {"node00003/rail1": "slow"}, absent={"<b>": "x"}), "--html", str(path)).exit_code == 2
    )
    text = path.read_text()
    assert "node00003/rail1" in text and "node00007" in text and "not proven" in text
    assert "<b>" not in text
    # Names of XML's vocabularies are no addresses that anything is fetched from.
    assert not re.search(r"(src|href)=\"(?!#)|url\((?!#)|@import|<script", re.sub(r'xmlns(:\w+)?="[^"]*"', "", text))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("nodes", [8, 512])
def test_a_browser_shows_the_heat_map_legibly_and_makes_no_request(nodes: int, scheme: Scheme, tmp_path: Path) -> None:
    page = tmp_path / "fabric.html"
    # Of one cross alone there are too few pixels of its plain colour.
    bad: dict[str, Kind] = {f"node0000{number}/rail1": "blocked" for number in (1, 3, 5)}
    assert report(written(tmp_path, bad, nodes=nodes), "--html", str(page)).exit_code == 2
    assert illegible(page, scheme, tmp_path) == []
    seen = shown(page, scheme, tmp_path)
    assert seen.asked == frozenset()
    blocked, usual = (to_hex(colormaps[COLOURS](share)) for share in (0.0, 1.0))
    paper = {"light": "#ffffff", "dark": "#16181c"}
    assert {blocked, usual, CROSS, paper[scheme]} <= seen.colours()


@pytest.mark.slow
def test_long_names_can_be_read(tmp_path: Path) -> None:
    page = tmp_path / "fabric.html"
    members = [
        End(f"gpu-{n:04}.rack-17.example.net", f"rail-{r}-of-socket-0", r, "x") for n in range(40) for r in (0, 1)
    ]
    journal = Journal.open(tmp_path / "r.jsonl", Run(tuple(members), SETTINGS, {}, 1.0e9))
    journal.add(Fabric(by_name(tuple(members))).run(SETTINGS)[1])
    report(journal.path, "--html", str(page))
    assert illegible(page, "light", tmp_path) == []


def test_a_collective_that_failed_is_named_with_its_nics_and_exits_2(tmp_path: Path) -> None:
    page = tmp_path / "fabric.html"
    path = written(tmp_path, {}, collectives=(Collective(GROUP, None, "timeout", "no answer"),))
    said = report(path, "--html", str(page))
    assert said.exit_code == 2
    assert re.search(r"node00000/rail1, node00001/rail1 +bad collective +all_reduce: timeout: no answer", said.output)
    assert "timeout: no answer" in page.read_text()


def test_a_collective_that_passed_is_shown_with_its_rate(tmp_path: Path) -> None:
    path = written(tmp_path, {}, collectives=(Collective(GROUP, 375.5),))
    said = report(path)
    assert said.exit_code == 0, said.output
    assert "all_reduce of node00000/rail1, node00001/rail1: 375.50 Gbit/s by mpi4py\n" in said.output
    (line,) = [line for line in map(json.loads, report(path, "--json").output.splitlines()) if "collective" in line]
    assert line["collective"]["value"] == 375.5
    # A rate of a lab's link is not rounded to nothing.
    (tmp_path / "r.jsonl").unlink()
    slow = report(written(tmp_path, {}, collectives=(Collective(GROUP, 0.004321),)))
    assert "0.00432 Gbit/s by mpi4py" in slow.output


def test_a_page_of_a_test_in_which_no_node_could_be_tested_says_so(tmp_path: Path) -> None:
    page = tmp_path / "fabric.html"
    journal = Journal.open(tmp_path / "r.jsonl", Run((), SETTINGS, {"node9": "it cannot be reached"}, 1.0e9))
    assert report(journal.path, "--html", str(page)).exit_code == 2
    assert "it cannot be reached" in page.read_text()


def test_results_that_are_not_there_or_damaged_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    for name, why in (
        ("none", "does not exist; test first"),
        ("bad", "bad.jsonl, line 1, cannot be read; move the file"),
    ):
        said = report(tmp_path / f"{name}.jsonl")
        assert (said.exit_code, why in said.output) == (1, True), said.output
