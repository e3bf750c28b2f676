"""Files that are replaced together, before a program reads them: what the operation runs, as a shell runs it."""

import shlex
import subprocess
from pathlib import Path

import pytest
from pyinfra.api.operation import operation

from tasks.common import texts
from tasks.common.commands import Commands
from tests.deploy.conftest import Node
from tests.deploy.scripts import sh
from tests.programs import success

PROGRAM = 'ls "$1"; cat "$1/changed"\n'
HAVE = {"changed": "old\n", "removed": "old\n", "same": "old\n"}
WANT = {"changed": "new\n", "added": "new\n", "same": "old\n"}


@operation()
def replace(have: dict[str, str], want: dict[str, str], after: str, folder: str) -> Commands:
    yield from texts.replace(have, want, after, folder)


def replaced(node: Node, folder: Path, after: str, want: dict[str, str] = WANT) -> subprocess.CompletedProcess[str]:
    """Replace a folder's files."""
    have, paths = read(folder), {str(folder / name): text for name, text in want.items()}
    result = node.deploy(lambda: replace(have=have, want=paths, after=after, folder=str(folder)), {})
    for path, text in result.uploads.items():
        if path.endswith(".new"):
            Path(path).write_bytes(text)
    return subprocess.run(shlex.split(result.flat[-1]), capture_output=True, text=True, check=False, timeout=60)


def read(folder: Path) -> dict[str, str]:
    """The files as the next deploy reads them."""
    return texts.Texts().process(sh(texts.READ, *(folder / name for name in sorted({*HAVE, *WANT}))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, text in HAVE.items():
        (folder / name).write_text(text)
    return folder


def test_several_files_are_read_byte_for_byte_but_for_a_final_line_end(tmp_path: Path) -> None:
    there = {"one": "a\nb", "two": ":x\n\n# file b\n", "three": ""}
    for name, text in there.items():
        (tmp_path / name).write_text(text)
    found = texts.Texts().process(sh(texts.READ, *(tmp_path / name for name in ("one", "absent", "two", "three"))))
    assert {Path(path).name: text for path, text in found.items()} == {**there, "one": "a\nb\n"}


def test_files_are_replaced_as_a_whole_and_read_by_the_same_command(node: Node, folder: Path) -> None:
    assert success(replaced(node, folder, PROGRAM)).split() == ["added", "changed", "same", "new"]
    assert {file.name: file.read_text() for file in folder.iterdir()} == WANT
    assert (folder / "changed").stat().st_mode & 0o777 == 0o644
    assert read(folder) == {str(folder / name): text for name, text in WANT.items()}


@pytest.mark.parametrize(
    "after",
    ["(exit 3)\n", "kill -HUP $$; exec sleep 60\n", "kill -KILL $$; exec sleep 60\n"],
    ids=["fails", "is hung up", "is killed"],
)
def test_files_that_a_program_did_not_read_are_replaced_again(node: Node, folder: Path, after: str) -> None:
    """A kill stands for a loss of power, too: nothing of the command runs after it."""
    before = read(folder)
    assert replaced(node, folder, after).returncode != 0
    assert success(replaced(node, folder, PROGRAM)).split() == ["added", "changed", "same", "new"]
    assert {file.name: file.read_text() for file in folder.iterdir()} == WANT
    assert read(folder) != before


def test_what_did_not_read_that_its_only_file_is_gone_is_run_again(node: Node, tmp_path: Path) -> None:
    (tmp_path / "removed").write_text("old\n")
    assert replaced(node, tmp_path, "kill -KILL $$\n", {}).returncode != 0
    assert not (tmp_path / "removed").exists()
    assert replaced(node, tmp_path, "echo again\n", {}).stdout == "again\n"
    assert list(tmp_path.iterdir()) == []
