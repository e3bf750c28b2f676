"""The version stands in one place; what a release needs, and what cannot be installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common import archive
from tests import release
from tests.release import CHECKS, RESULTS, SUITES, Checkout, Missing, checklist
from tests.stand_ins import text_file

VERSION = "1.2.3"
ENTRY = f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-01-31\n\n- One thing.\n"
PASSED = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1" timestamp="2999-01-01T00:00:00"/></testsuites>'


def put(checkout: Checkout, name: str, text: str) -> None:
    path = checkout.root / name
    text_file(path, text)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A commit that lacks nothing but what is built and signed."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "n")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "n@example.net")
    made = Checkout(tmp_path, VERSION)
    put(made, ".gitignore", f"/{RESULTS}/\n")
    put(made, "CHANGELOG.md", ENTRY)
    for suite in SUITES:
        put(made, f"{RESULTS}/{suite}.xml", PASSED)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        assert made.git(*words).returncode == 0
    return made


def commit(checkout: Checkout) -> None:
    assert checkout.git("commit", "-qam", "more").returncode == 0


def first_missing(checkout: Checkout) -> str:
    try:
        for check in (release.tree, release.number, release.changelog, release.results, release.signature):
            check(checkout)
    except Missing as error:
        return str(error)
    return ""


def test_each_point_that_is_missing_says_what_to_do(checkout: Checkout) -> None:
    assert first_missing(checkout) == f"there is no tag v{VERSION}: git tag --sign v{VERSION}"
    put(checkout, "new", "")
    assert first_missing(checkout).startswith("1 files are not committed, as new")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"[{VERSION}]", "[1.2.2]", f"CHANGELOG.md has no entry ## [{VERSION}] - DATE"),
        (" - 2026-01-31", "", "has no date"),
        ("[Unreleased]\n", "[Unreleased]\n\n- More.\n", "has lines under Unreleased"),
        ("- One thing.\n", "- One thing.\n" * 61, "has 61 lines"),
        ("- One thing.\n", "", "has 0 lines"),
    ],
)
def test_a_changelog_that_is_not_of_this_release_is_missing(
    checkout: Checkout, old: str, new: str, message: str
) -> None:
    put(checkout, "CHANGELOG.md", ENTRY.replace(old, new))
    commit(checkout)
    assert message in first_missing(checkout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "lab.xml is missing or damaged: run `make test cluster-suite`"),
        ("<", "lab.xml is missing or damaged"),
        (PASSED.replace('failures="0"', 'failures="1"'), "mend what failed"),
        (PASSED.replace('errors="0"', 'errors="1"'), "mend what failed"),
        (PASSED.replace('tests="3"', 'tests="1"'), "mend what failed"),
        (PASSED.replace("2999", "1999"), "lab.xml is older than the commit"),
    ],
)
def test_a_suite_that_has_not_passed_on_this_commit_is_missing(
    checkout: Checkout, text: str | None, message: str
) -> None:
    file = checkout.root / RESULTS / "lab.xml"
    file.unlink() if text is None else file.write_text(text)
    assert message in first_missing(checkout)


def test_a_tag_counts_with_a_good_signature_on_this_commit(checkout: Checkout) -> None:
    assert checkout.git("tag", "-a", "-m", "x", checkout.tag).returncode == 0
    assert f"the signature of {checkout.tag} is not good" in first_missing(checkout)
    put(checkout, "CHANGELOG.md", f"{ENTRY}- Another.\n")
    commit(checkout)
    assert "is of another commit" in first_missing(checkout)


def test_the_list_ends_with_the_first_point_that_is_missing(checkout: Checkout) -> None:
    put(checkout, "CHANGELOG.md", "")
    commit(checkout)
    lines = list(checklist(checkout))
    assert [good for good, _ in lines] == [True, True, False]
    assert len(lines) < len(CHECKS)
    assert lines[-1][1].startswith("The changelog has an entry") and ": no, " in lines[-1][1]


def test_the_command_the_archive_and_the_agent_s_file_have_one_version() -> None:
    (project,) = re.findall(r'^version = "(.*)"$', (archive.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "cli", "--version"]
    said = subprocess.run(command, cwd=archive.ROOT, capture_output=True, text=True, check=True).stdout
    assert said == f"trackbed, version {project}\n"
    assert {archive.version(machine).rpartition("-")[0] for machine in archive.MACHINES} == {project}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["wheel", "--wheel-dir=."], ["install", "--target=there"]])
def test_a_wheel_is_refused_in_one_line(tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "pip", *words, "--no-deps", "--no-build-isolation", str(archive.ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Run `make control` in the checkout." in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
