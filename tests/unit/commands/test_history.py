"""`trackbed history` as a process, on a history of the test's own."""

import json
from pathlib import Path

import pytest

from agent.report.history import History
from agent.report.records import Change, Disruption, Outcome
from tests.unit.commands.node_folder import OUTCOME, trackbed

pytestmark = pytest.mark.slow


def test_history_says_what_when_and_why(tmp_path: Path) -> None:
    assert trackbed(tmp_path, "history").stdout == "nothing was changed yet\n"
    kept = History(tmp_path, "boot-1")
    kept.record([OUTCOME], "h1", "spec")
    kept.record([OUTCOME], "h1", "event 0000:21:00.0")
    said = trackbed(tmp_path, "history").stdout
    assert "boot boot-1" in said
    assert f"  event 0000:21:00.0  (spec h1)\n  applied     {OUTCOME.change}\n" in said
    every = trackbed(tmp_path, "history", "--all", "--last", "1").stdout
    assert f"{OUTCOME.change}  (event 0000:21:00.0; spec h1)" in every
    (line,) = trackbed(tmp_path, "history", "--json", "--last", "1").stdout.splitlines()
    assert json.loads(line)["trigger"] == "event 0000:21:00.0"
    assert trackbed(tmp_path, "history", "--device", "host").stdout.startswith("no change of this device")


def test_history_says_which_of_its_lines_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text("{}\n\x00\n")
    damaged = trackbed(tmp_path, "history")
    assert (damaged.returncode, damaged.stdout) == (0, "")
    assert damaged.stderr.startswith(f"{tmp_path}/history.jsonl: 2 lines")


def test_history_has_one_line_for_the_changes_of_a_pass_to_a_device(tmp_path: Path) -> None:
    pf = "0000:21:00.0"
    vfs = [Change("vf_links", f"{pf}#{index}", "mtu", 1500, 9000) for index in range(7)]
    made = [Change("links", pf, "mtu", 1500, 9000), Change("vfs", pf, "count", 0, 7, Disruption.LINK_FLAP), *vfs]
    host = Change("sysctls", "host", "vm.swappiness", "60", "10")
    kept = History(tmp_path, "boot-1")
    kept.record([Outcome(change, "applied") for change in (*made, host)], "h1", "start")
    kept.record(
        [Outcome(change, "failed", "EBUSY", "see dmesg") for change in vfs], "h1", f"event {pf}#0 {pf}#1 {pf}#2 {pf}#3"
    )
    kept.record([Outcome(change, "applied") for change in vfs], "h1", "retry")
    kept.record([Outcome(Change("vfs", pf, "count", 7, 0), "applied")], "h1", "spec")
    moved = [
        Change("irqs", pf, f"rx-{queue}", "1", "2", note="CPU 1 went offline" if queue else "") for queue in range(4)
    ]
    kept.record([Outcome(change, "applied") for change in moved], "h1", "resync")
    lines = trackbed(tmp_path, "history").stdout.splitlines()
    assert [line.lstrip() for line in lines if line.startswith("  ")] == [
        f"applied     {pf}: made 7 VFs and configured them; set links of the PF: 9 writes [link-flap]",
        "applied     sysctls host vm.swappiness: 60 -> 10",
        f"failed      vf_links {pf}#0 mtu: 1500 -> 9000: EBUSY; see dmesg (and 6 more like this)",
        f"applied     {pf}: configured VF 0-6: 7 writes",
        f"applied     vfs {pf} count: 7 -> 0",
        f"applied     {pf}: set irqs of the PF: 4 writes; 3 of them: CPU 1 went offline",
    ]
    assert sum(f"event {pf}#0 and 3 more" in line for line in lines) == 1
    assert len(trackbed(tmp_path, "history", "--all").stdout.splitlines()) == 1 + 10 + 7 + 7 + 1 + 4


def test_history_names_the_programs_that_ran_at_a_repair_and_accuses_none(tmp_path: Path) -> None:
    repaired = Outcome(Change("links", "0000:21:00.0", "mtu", 1500, 9000), "applied")
    History(tmp_path, "boot-1").record([repaired], "h1", "event 0000:21:00.0", {"links": ("NetworkManager",)})
    assert "\n  running     NetworkManager: " in trackbed(tmp_path, "history").stdout
    assert "; running: NetworkManager)" in trackbed(tmp_path, "history", "--all").stdout
