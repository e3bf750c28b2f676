"""Whatever the README and docs/ quote exists: conditions and their reasons, commands and their options, paths, links."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from agent.report.reasons import declared
from cli.__main__ import cli
from handbook import samples
from lab.__main__ import main as lab
from tasks.common.data import leftovers

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
FOLDERS = (
    "agent|bench|control|deploys|docs|examples|fleet|group_data|inventories|lab|molecule|"
    "requirements|tasks|templates|tests"
)

IN_A_TABLE = re.compile(r"\b([A-Z]\w+) +(?:True|False|Unknown) +([A-Z]\w+)(?:  (.+))?")
IN_A_SENTENCE = re.compile(
    r"\b([A-Z]\w+)`? is (?:True|False|Unknown)(?: \(|,? (?:with the )?reason )`?([A-Z][a-z]+[A-Z]\w+)(?:\): (.+))?"
)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fenced(text: str) -> list[str]:
    """The lines of the fenced blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def inline(text: str) -> list[str]:
    """What stands between backticks in a sentence or a table."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@cache
def constants() -> dict[Path, frozenset[str]]:
    """The string constants of each file of the agent, the tasks and the fleet's tools."""
    files = [path for folder in ("agent", "cli", "fleet", "tasks") for path in (ROOT / folder).rglob("*.py")]
    return {path: frozenset(_strings(path)) for path in files}


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unknown_reasons(text: str) -> list[str]:
    """The conditions in ``text`` whose reason nobody declares, or whose message no file begins that gives the reason."""
    return [
        f"{type} {reason} {message}".rstrip()
        for type, reason, message in (*IN_A_TABLE.findall(text), *IN_A_SENTENCE.findall(text))
        if declared(type, reason) is None or (message and not _begins(message, reason))
    ]


def _begins(message: str, reason: str) -> bool:
    # A message consists of constants and of values.
    giving = (strings for path, strings in constants().items() if reason in strings and path.name != "reasons.py")
    return any(message.startswith(part.rstrip()) for strings in giving for part in strings if len(part) > 5)


def unknown_commands(text: str) -> list[str]:
    """Calls of our command lines in ``text`` with a command or an option that there is not, and what is unknown of them."""
    calls = ((re.compile(r"(?:^|[/\s])trackbed ([a-z].*)"), cli), (re.compile(r"python -m lab ((?!ssh)[a-z].*)"), lab))
    wrong = []
    for line in (*fenced(text), *inline(text)):
        for pattern, group in calls:
            for called in pattern.findall(line):
                words = re.split(r" # |[;|>]|  ", called)[0].replace("[", "").replace("]", "").split()
                wrong += [f"{line.strip()}: {word}" for word in _unknown(group, words)]
    return wrong


def _unknown(command: click.Command, words: list[str]) -> list[str]:
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z-]+", words[0]):
        context = click.Context(command)
        subcommand = command.get_command(context, words[0])
        if subcommand is None:
            return [words[0]]
        command, words = subcommand, words[1:]
    options = {name for option in command.params for name in option.opts} | {"-h", "--help", "--version"}
    return [word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word) and word not in options]


@pages
def test_each_condition_has_a_reason_that_the_code_gives(page: Path) -> None:
    assert unknown_reasons(page.read_text()) == []


@pages
def test_each_command_and_option_is_there(page: Path) -> None:
    assert unknown_commands(page.read_text()) == []


def test_each_operation_of_the_transcript_of_a_deploy_is_there() -> None:
    transcript = (ROOT / "docs/how-to/getting-started.md").read_text()
    results = transcript.partition("--> Results:\n")[2].partition("    Grand total")[0]
    names = [re.split("  +", line.strip())[0] for line in results.splitlines()[1:]]
    assert len(names) > 10
    assert [name for name in names if not is_operation(name)] == []


def test_each_operation_of_the_made_up_deploy_is_there() -> None:
    assert [each.name for each in samples.deploy().operations if not is_operation(each.name)] == []


def is_operation(name: str) -> bool:
    """Whether the code names a deploy and an operation so."""
    known = frozenset[str]().union(*constants().values())
    return all(part in known for part in name.split(" | "))


@cache
def options_of_pyinfra() -> frozenset[str]:
    """In a process of its own, since importing pyinfra replaces threads by greenlets."""
    program = [str(Path(sys.executable).with_name("pyinfra")), "--help"]
    help_text = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_text))


@pages
def test_each_deploy_has_options_and_files_that_there_are(page: Path) -> None:
    lines = (*fenced(page.read_text()), *inline(page.read_text()))
    # A file that the page shows, or that an earlier command has written.
    written = {name for line in lines for name in re.findall(r"(?:^#|>) (\S+\.py)\b", line)}
    deploys = [
        line.partition("#")[0].split("pyinfra ", 1)[1].split()
        for line in lines
        if re.search(r"(?:^|[$/ ])pyinfra (?:-y )?(?:inventories/|@)", line)
    ]
    options = {word for words in deploys for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)}
    assert options <= (options_of_pyinfra() if options else frozenset())
    files = {word for words in deploys for word in words if word.endswith(".py")} - written
    assert [name for name in files if not (ROOT / name).is_file()] == []


@pages
def test_each_target_of_make_is_there(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = page.read_text()
    lines = (*fenced(text), *inline(text))
    called = {name for line in lines for name in re.findall(r"^(?:\$ )?make ([a-z-]+)$", line)}
    assert called <= set(targets)


@pages
def test_each_path_and_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    paths = [
        name for line in inline(text) for name in re.findall(rf"(?:^|\s)((?:{FOLDERS})/[\w./-]*)(?=$|[\s:,])", line)
    ]
    links = [(page.parent / link.partition("#")[0]) for link in re.findall(r"\]\(((?!http|#)[^)]+)\)", text)]
    assert [str(path) for path in (*(ROOT / name for name in paths), *links) if not path.exists()] == []


def test_each_page_is_found_from_the_readme() -> None:
    found, unread = set[Path](), [ROOT / "README.md"]
    while unread:
        page = unread.pop()
        found.add(page)
        links = re.findall(r"\]\(((?!http|#)[^)#]+)", page.read_text())
        linked = {(page.parent / link).resolve() for link in links}
        linked |= {each for folder in linked if folder.is_dir() for each in folder.glob("*.md")}
        unread += [each for each in linked if each.suffix == ".md" and each not in found]
    assert [str(page) for page in PAGES if page not in found] == []


@cache
def known_tests() -> frozenset[str]:
    """The tests that there are."""
    in_files = (
        re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE) for path in (ROOT / "tests").rglob("*.py")
    )
    return frozenset(name for names in in_files for name in names)


@pages
def test_each_test_that_is_named_is_there(page: Path) -> None:
    named = {name for line in inline(page.read_text()) for name in re.findall(r"^(test_\w+)$", line)}
    assert named <= known_tests()


@pytest.mark.parametrize("name", ["attacks", "by_hand"])
def test_each_test_that_the_evidence_names_is_there(name: str) -> None:
    rows = json.loads((ROOT / f"docs/campaign/{name}.json").read_text())["runs"]
    named = {test for row in rows for test in re.findall(r"`(test_\w+)`", row["test"])}
    assert len(named) > 10
    assert named - known_tests() == set()


def test_the_hooks_before_a_commit_run_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    hooks = [
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    [lint] = re.findall(r"^lint:.*\n((?:\t.+\n)+)", makefile, re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in lint.splitlines()]
    assert "check: lint quick\n" in makefile
    assert sorted(hook["entry"] for hook in hooks) == sorted([*commands, "make quick"])


def test_a_condition_with_another_s_reason_a_mistyped_command_and_option_are_found() -> None:
    assert unknown_reasons("  Carrier  True  AllConnected\n  Carrier  True  NoErrors") == ["Carrier NoErrors"]
    assert unknown_reasons("`Carrier` is False, reason `NotTold`") == ["Carrier NotTold"]
    assert unknown_reasons("Carrier is False (NoCarrier): dark: ens2f0") == ["Carrier NoCarrier dark: ens2f0"]
    text = "```console\n# trackbed plan --spec x\n$ .venv/bin/trackbed plan --spce x\n```\n`trackbed plna`"
    assert unknown_commands(text) == ["$ .venv/bin/trackbed plan --spce x: --spce", "trackbed plna: plna"]


def test_each_file_that_the_deploy_writes_is_listed() -> None:
    listed = re.findall(r"`(/[^`]+)`", (ROOT / "docs/footprint.md").read_text())
    tasks = (strings for path, strings in constants().items() if path.is_relative_to(ROOT / "tasks"))
    paths = {text for strings in tasks for text in strings if re.fullmatch(r"/(?:etc|opt|usr|var)/[\w./-]*", text)}
    own = {path for path in paths if "trackbed" in path or path.startswith("/etc/nccl")} | {*leftovers()}
    assert len(own) > 20
    assert [path for path in sorted(own) if not any(fnmatch(path, pattern) for pattern in listed)] == []
