"""The archive, and the inventory of a node that deploys itself from it."""

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from pyinfra.api.exceptions import DeployError, InventoryError

from tasks import pull
from tasks.common import archive
from tasks.common.archive import ROOT
from tests.stand_ins import text_file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; this inventory is for nodes in pull mode"),
        ("{", "cannot be read: JSONDecodeError"),
        ("[]", "deploy this node from its control host again"),
        ('{"host": "node-a"}', "cannot be read: KeyError('inventory')"),
    ],
)
def test_the_node_s_own_inventory_needs_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str
) -> None:
    settings = tmp_path / "pull.json"
    if content is not None:
        settings.write_text(content)
    monkeypatch.setenv("TRACKBED_PULL_SETTINGS", str(settings))
    with pytest.raises(InventoryError) as caught:
        runpy.run_path(str(ROOT / "inventories" / "local.py"))
    assert str(caught.value).startswith(str(settings))
    assert message in str(caught.value)


PUSHED = """
_hosts = [("a.example.net", {"node_name": "a", "x": 1}), ("b.example.net", {})]
first = (_hosts, {"y": "first", "z": "shared"})
second = (["a.example.net", "b.example.net"], {"x": 2})
"""
# In a process of its own: pyinfra's command replaces parts of Python's library when it is imported.
SHOW = """
import json, sys
from pyinfra.api.state import State
from pyinfra.context import ctx_state
from pyinfra_cli.inventory import make_inventory
ctx_state.set(State())
host = make_inventory(sys.argv[1], cwd=".").get_host(sys.argv[2])
print(json.dumps({"node_name": host.name, **host.data.dict()}, sort_keys=True))
"""


@pytest.mark.parametrize("name", ["a.example.net", "b.example.net"])
def test_a_node_has_the_same_data_in_pull_mode_as_from_its_control_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "inventories"
    text_file(folder / "fleet.py", PUSHED)
    shutil.copy(ROOT / "inventories/local.py", folder)
    text_file(tmp_path / "group_data/first.py", "z = 'of the file'\n")
    (tmp_path / "group_data/fleet.py").write_text("w = 'of all hosts'\n")
    settings = tmp_path / "pull.json"
    settings.write_text(json.dumps({"host": name, "inventory": "inventories/fleet.py"}))
    monkeypatch.setenv("TRACKBED_PULL_SETTINGS", str(settings))
    data = [
        json.loads(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", SHOW, f"inventories/{file}.py", host],
                cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
            ).stdout
        )
        for file, host in (("fleet", name), ("local", "@local"))
    ]  # fmt: skip
    assert data[0] == data[1]
    assert {key: data[0][key] for key in "wyz"} == {"w": "of all hosts", "y": "first", "z": "of the file"}


def test_an_inventory_that_the_archive_lacks_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "pull.json"
    settings.write_text(json.dumps({"host": "a", "inventory": "inventories/absent.py"}))
    monkeypatch.setenv("TRACKBED_PULL_SETTINGS", str(settings))
    with pytest.raises(InventoryError, match=r"inventories/absent\.py is not in this archive"):
        runpy.run_path(str(ROOT / "inventories" / "local.py"))


@pytest.mark.parametrize("minor", range(10, 15))
def test_the_archive_s_pins_are_those_of_the_node_s_python(minor: int) -> None:
    lines = archive.pins(pull.PINS, "x86_64", f"3.{minor}").splitlines()
    pinned = dict(line.split(" ")[0].split("==") for line in lines)
    assert {"pyinfra", "paramiko", "gevent"} <= pinned.keys()
    assert ("exceptiongroup" in pinned) == (minor == 10)


def test_a_time_of_issue_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(DeployError, match="SOURCE_DATE_EPOCH='yesterday' is not a number"):
        pull.build(tmp_path / "one", (), ROOT)


def test_an_archive_of_the_same_commit_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    target = f"3.{sys.version_info.minor}-x86_64"
    for name in ("one", "other"):
        pull.build(tmp_path / name, (target,), ROOT)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    with tarfile.open(tmp_path / "one") as tar:
        names = tar.getnames()
    assert {"ISSUED", "deploy.py", f"lib-{target}/pyinfra/__init__.py"} <= set(names)
    assert not [name for name in names if name.startswith(f"lib-{target}/bin")]


def test_the_archive_has_all_that_a_deploy_imports(tmp_path: Path) -> None:
    for name in pull.CONTENT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    statements = ast.parse((tmp_path / "deploy.py").read_text()).body
    # All imports, and the first statement after them, which checks the keys of all tasks.
    spec = next(number for number, each in enumerate(statements) if isinstance(each, ast.Assign))
    (tmp_path / "begin.py").write_text("\n".join(map(ast.unparse, statements[: spec + 1])))
    shutil.copy(ROOT / "tests/deploy/fake.py", tmp_path)
    (tmp_path / "one.py").write_text(
        'import fake as _fake\nhosts = [("@fake/node1", {"node_name": "node1", "fabric": {"seconds": 3}})]\n'
    )
    # Tests have the project installed. A node has its archive only.
    code = "import runpy, sys; sys.path.remove(sys.argv.pop(1)); runpy.run_module('pyinfra', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), "-y", "one.py", "begin.py"],
        cwd=tmp_path,
        env={**os.environ, "PYINFRA_FAKE_DELAY": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
