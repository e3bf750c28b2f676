"""The table of public reports names tests that exist, so that anybody can run a trial again."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "docs/campaign/reports.json").read_text())["runs"]
REPORT = re.compile(
    r"\[[\w.-]+/[\w.-]+ (\d+|(?P<commit>[0-9a-f]{12}))\]"
    r"\(https://github\.com/[\w.-]+/[\w.-]+/(?(commit)commit/[0-9a-f]{12}|(issues|pull)/\d+)\)"
)


def test_each_report_is_there_once_and_has_its_address() -> None:
    assert [row["report"] for row in ROWS if not REPORT.fullmatch(row["report"])] == []
    assert [report for report, count in Counter(row["report"] for row in ROWS).items() if count > 1] == []


def test_each_report_names_a_test_that_exists() -> None:
    named = {row["test"].strip("`") for row in ROWS}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(named - set(listed.splitlines())) == []
