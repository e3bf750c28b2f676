"""The check of the shell in tasks/: what it finds, and that it finds all of it."""

import ast
from pathlib import Path

import pytest

from tests.shellcheck import findings, texts

FILE = Path("tasks/some.py")


def values(argument: str, **module: object) -> list[str]:
    return list(texts(ast.parse(argument, mode="eval").body, module, FILE))


def test_a_fault_is_named_with_its_place_and_line() -> None:
    [fault] = findings("tasks/some.py:7", "#!/bin/sh -e\necho one\nrm $1\n")
    assert fault.startswith("tasks/some.py:7: SC2086: ") and fault.endswith(": rm $1")
    # `sh -e` ends the script.
    assert findings("tasks/some.py:7", '#!/bin/sh -e\ncd "$1"\n') == []


def test_each_text_that_may_be_sent_is_checked() -> None:
    tables = {"debian": "apt", "rhel": "dnf"}
    assert set(values("BEGIN + TABLE[family]", BEGIN="a ", TABLE=tables)) == {"a apt", "a dnf"}
    assert set(values("ONE if unknown else OTHER", ONE="one", OTHER="other")) == {"one", "other"}


def test_a_script_with_data_in_it_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"tasks/some\.py:1: name 'data' is not defined: make the script of constants"):
        values("f'rm {data}'")
