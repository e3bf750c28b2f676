"""The documentation site: it builds, a broken link or anchor fails it, and its reference is what the code says."""

import fcntl
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.probes import probes
from agent.report.reasons import REASONS
from cli.schema import schema
from handbook import campaign, conditions, spec, trials
from handbook.hooks import PICTURES
from handbook.recordings import RECORDINGS
from tests.chromium import Scheme, illegible
from tests.programs import success
from tests.stand_ins import text_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# What mkdocs.yml and the hooks read.
SOURCES = ("mkdocs.yml", "docs", "handbook", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def built(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site. It is built once, also if pytest-xdist runs the tests of this file in several processes."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "site"
    with (base / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            success(built(ROOT, base / "new site"))
            (base / "new site").rename(folder)
    return folder


def text(site: Path, page: str) -> str:
    """The words of a page."""
    return re.sub(r"<[^>]+>", "", (site / page).read_text())


def test_each_page_exists_and_is_filled_in(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    pages = [*map(str, sources), "index.html", "contributing.html", "changelog.html", "examples.html"]
    assert [page for page in pages if not (site / page).is_file()] == []
    assert [page for page in pages if "<!-- from the code" in (site / page).read_text()] == []


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    assert {address for page in pages for address in loaded.findall(page.read_text())} == set()


@pytest.mark.parametrize(
    ("page", "count", "says", "shows"),
    [
        ("fabric.html", 1, "simulated fabric", "node00012"),
        ("fleet.html", 4, "Simulated", "gpu-04.example.net"),
        ("cli.html", 4, "simulated server", "CPU&#160;4"),
    ],
)
def test_a_page_shows_its_pictures_and_says_that_their_data_are_made_up(
    site: Path, page: str, count: int, says: str, shows: str
) -> None:
    text = (site / page).read_text()
    drawn = re.findall(r'<div class="picture".*?</div>', text, re.DOTALL)
    assert len(drawn) == count
    assert all("<svg" in each for each in drawn)
    assert says in drawn[0]
    assert any(shows in each for each in drawn)
    assert re.search(rf'href="(\.\./)?{PICTURES}"', text) and (site / PICTURES).is_file()


def test_the_recordings_show_what_the_commands_print() -> None:
    said = {
        name: html.unescape(re.sub(r"<[^>]+>", "", record())).replace("\xa0", " ")
        for name, record in RECORDINGS.items()
    }
    assert "~ vfs count                      0 -> 4" in said["plan"]
    assert "made 4 VFs and configured them" in said["repair"]
    assert "gpu-01 is not ready: Carrier" in said["watch"]
    assert "CPU 3: ens5f0np0 comp-4!, ens1f0np0 comp-3" in said["queues"]
    assert not any("@font-face" in record() for record in RECORDINGS.values())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["fabric.html", "fleet.html"])
def test_the_pictures_can_be_read(site: Path, page: str, scheme: Scheme, tmp_path: Path) -> None:
    assert illegible(site / page, scheme, tmp_path, ".picture text, .picture em, .picture span") == []


def test_each_decision_is_in_the_navigation(site: Path) -> None:
    shown = (site / "decisions/index.html").read_text()
    names = [path.stem for path in (ROOT / "docs/decisions").glob("*.md")]
    # Once in the navigation, once in the list.
    assert [name for name in names if shown.count(f'href="{name}.html"') < 2] == []


def test_a_broken_link_or_anchor_fails(tmp_path: Path) -> None:
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs/readiness.md"
    page.write_text(f"{page.read_text()}\n[the gate](gaet.md)\n[the gate](gate.md#no-such-heading)\n")
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    complaints = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert [word for word in ("gaet.md", "no-such-heading") if not any(word in line for line in complaints)] == []
    assert len(complaints) == 2


def test_the_reference_has_each_key_of_the_spec_with_its_meaning() -> None:
    made = schema()
    records = {"NodeSpec": made, **made["$defs"]}
    keys = [(name, key) for name, record in records.items() for key in record["properties"]]
    assert all(spec.meaning(name, key) for name, key in keys)
    assert "| `mtu` | 68 to 65535 | bytes | left" in spec.page()
    # Another table of the same section says how the agent sets it.
    assert '| `trust` | `"pcp"`, `"dscp"` |  | left' in spec.page()
    assert '| `owner` | `"user"`, `"trackbed"` |' in spec.page()


def test_the_table_of_a_section_has_its_rows_and_links_from_its_page(site: Path) -> None:
    assert "| `select.vendor`, `select.device` | PCI" in spec.section("nic")
    assert "| `max_tx_rate` | the highest" in spec.section("vfs")
    assert 'href="../gate.html"' in (site / "inventory/kubernetes.html").read_text()
    assert 'href="#attributes-of-vfs"' in (site / "inventory/nics.html").read_text()


def test_a_default_that_the_file_of_keys_states_is_that_of_the_spec() -> None:
    assert spec.default("Irqs", "pin", {"default": True}) == "`true`"
    with pytest.raises(ValueError, match=r"the default of Irqs\.pin is False; keys.yaml says `True`"):
        spec.default("Irqs", "pin", {"default": False})
    # One in words would not be compared.
    with pytest.raises(ValueError, match=r"the default of Nic\.mtu is 1500; keys.yaml says left alone"):
        spec.default("Nic", "mtu", {"default": 1500})


def test_a_key_that_is_not_described_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"docs/inventory/keys\.yaml: node has no colour"):
        spec.meaning("NodeSpec", "colour")


def test_the_table_of_checks_has_each_with_what_must_hold() -> None:
    made = conditions.checks()
    assert made.count("\n") == 2 + len(probes())
    assert "| `pcie_link` | `PcieLink` | device | warn" in made


def test_the_reference_has_each_reason_with_its_remedy() -> None:
    made = conditions.page()
    assert made.count("\n| `") == sum(map(len, REASONS.values()))
    assert "## PcieLink\n\n| Reason | Status | " in made
    assert f"| `PcieDegraded` | False | {REASONS['PcieLink'][1].remedy} |" in made
    assert "| `PortNotReady` | False | the message" in made


def test_the_pages_of_commands_and_metrics_have_what_there_is(site: Path) -> None:
    commands = text(site, "reference/commands.html")
    assert "0 no changes, 2 changes, 1 an error" in commands
    assert "trackbed fleet maintain [OPTIONS]" in commands
    assert "python -m lab unplug" in commands
    assert "trackbed_ready" in text(site, "metrics.html")


def test_the_pages_of_the_campaign_have_the_rows_of_their_records(site: Path) -> None:
    for name in ("lab", "kubernetes", "example", "systems", "reports", "benchmarks", "mutants"):
        rows = json.loads((ROOT / f"docs/campaign/{name}.json").read_text())["runs"]
        assert (site / f"campaign/{name}.html").read_text().count("<tr>") > len(rows)
    assert "dgx-h100" in text(site, "campaign/zoo.html")
    assert "a PF down" in text(site, "campaign/faults.html")


def test_a_run_of_the_campaign_is_recorded_and_replaces_the_one_before(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "campaign").mkdir(parents=True)
    columns = {"command": "Command", "shows": "Shows", "result": "Result", "duration": "Duration"}
    by_hand = [
        "`tests/lab/test_x.py -k some`",
        "`tests/lab/test_x.py`",
        "`pytest tests/lab/test_x.py`, beside another lab",
        '`pytest -m "not campaign" tests/lab/test_x.py`',
        "`pytest tests/lab/test_x.py`",
        "`pytest tests/lab/test_xy.py`",
    ]
    earlier = [{"command": command, "shows": "x holds", "result": "?", "duration": "?"} for command in by_hand]
    (docs / "campaign/lab.json").write_text(json.dumps({"columns": columns, "runs": earlier}))
    tests = tmp_path / "tests/lab"
    text_file(tests / "test_x.py", "def test_that_holds():\n    pass\n")
    text_file(tests / "room/test_y.py", "def test_this_fails():\n    assert False\n\ndef test_it_holds():\n    pass\n")
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={results}", "tests/lab"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)

    campaign.main([str(results)], docs)

    page = campaign.runs("lab", docs)
    assert re.search(r"\| `pytest -m campaign tests/lab/test_x\.py` \| x holds \| 1 passed \| \d+ s \|", page)
    commands = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| `")]
    replaced = "`pytest -m campaign tests/lab/test_x.py`"
    new = "`pytest -m campaign tests/lab/room/test_y.py`"
    assert sorted(commands) == sorted([by_hand[0], replaced, by_hand[2], by_hand[3], by_hand[5], new])
    assert commands.index(replaced) == 1
    failed = r"\| this fails; it holds \| 1 failed, 1 passed: `test_this_fails` \| \d+ s \|"
    assert re.search(rf"\| `pytest -m campaign tests/lab/room/test_y\.py` {failed}", page)


def trial(number: int, *wrong: str, **more: object) -> dict[str, object]:
    """A line of a lab's results, of a trial that ended well unless something was wrong."""
    made: dict[str, object] = {
        **{"agent": "0.1.0-a", "system": "Debian", "seed": 7, "only": [], "trial": number, "faults": ["a PF down"]},
        **{"group": "a value changed", "lies": {"told by events": 0.5}, "recovery": 4.0, "held": True, "memory": 9},
        "wrong": [*wrong],
    }
    return made | ({"again": f"python -m tests.chaos --seed 7 --trial {number}"} if wrong else {}) | more


def written(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The folder docs, without a recorded trial."""
    docs = tmp_path / "docs"
    text_file(docs / "campaign/faults.jsonl")
    return docs


def tables(docs: Path) -> str:
    """All tables of the recorded trials."""
    return "\n".join(made(trials.load(docs)) for made in trials.TABLES.values())


def test_without_any_recorded_trial_the_tables_say_so(docs: Path) -> None:
    assert tables(docs).count("No trial is recorded yet.") == len(trials.TABLES)


def test_trials_of_a_lab_are_recorded_and_counted(tmp_path: Path, docs: Path) -> None:
    pair: dict[str, object] = {"faults": ["a PF down", "reboot"], "group": "two at once", "lies": {}, "recovery": None}
    rows = [trial(1), trial(2, recovery=9.0), trial(3, "a | b", "c"), trial(4, "d", **pair)]
    campaign.main([written(tmp_path / "seed-7.jsonl", *rows)], docs)
    page = tables(docs)
    assert "| `0.1.0-a` | Debian | 7 |  | 4 | 2 |" in page
    assert "| a value changed | 3 | 2 | 0.5 s | 4 s | 9 s |" in page
    assert "| two at once | 1 | 0 | - | - | - |" in page
    assert "| all | 4 | 2 | 0.5 s | 4 s | 9 s |" in page
    assert "| a PF down | 3 | 2 | 1 | 0 |" in page
    assert "| reboot | 0 | 0 | 1 | 0 |" in page
    assert "| a PF down | a \\| b; c | `0.1.0-a` | Debian | `python -m tests.chaos --seed 7 --trial 3` |" in page
    assert "memory" not in (docs / "campaign/faults.jsonl").read_text()


def test_a_trial_is_recorded_once_for_each_version_and_keeps_its_explanation(tmp_path: Path, docs: Path) -> None:
    records, results = docs / "campaign/faults.jsonl", tmp_path / "seed-7.jsonl"
    campaign.main([written(results, trial(1, "bad"), trial(2, "bad"))], docs)
    written(records, trial(1, "bad", explained="the kernel's fault"), trial(2, "bad", explained="a typing error"))
    campaign.main([written(results, trial(1, "bad"), trial(2, "worse"), trial(2, agent="0.1.0-b"))], docs)
    kept = [json.loads(line) for line in records.read_text().splitlines()]
    assert [(row["agent"], row["trial"], row["wrong"], row.get("explained")) for row in kept] == [
        ("0.1.0-a", 1, ["bad"], "the kernel's fault"),
        ("0.1.0-a", 2, ["worse"], None),
        ("0.1.0-b", 2, [], None),
    ]
    unexplained, with_reasons = (trials.TABLES[name](trials.load(docs)) for name in ("failures", "explained"))
    assert "| worse |" in unexplained
    assert "| bad |" not in unexplained
    assert "| the kernel's fault |" in with_reasons


def test_a_result_without_its_version_is_refused(tmp_path: Path, docs: Path) -> None:
    old = {name: value for name, value in trial(1).items() if name != "agent"}
    with pytest.raises(SystemExit, match="line 1 has no agent"):
        campaign.main([written(tmp_path / "seed-7.jsonl", old)], docs)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("campaign.xml", None, "No such file"),
        ("campaign.xml", "<testsuites><testcase", "run the tests again"),
        ("seed-7.jsonl", None, "No such file"),
        ("seed-7.jsonl", '{"agent": "0.1', "remove what was not written to its end"),
    ],
    ids=str,
)
def test_results_that_cannot_be_read_are_named(
    tmp_path: Path, docs: Path, name: str, content: str | None, message: str
) -> None:
    results = tmp_path / name
    if content is not None:
        results.write_text(content)
    with pytest.raises(SystemExit, match=rf"{re.escape(str(results))} cannot be read: .*{message}"):
        campaign.main([str(results)], docs)
