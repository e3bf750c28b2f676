"""`python -m lab` without a running node: its messages, which say what to do next, and its exit codes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.image import Image

ROOT = Path(__file__).parents[3]


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder with a short path: that of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="lab-") as made:
        yield Path(made)


def lab(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "TRACKBED_LAB": "t"}
    command = [sys.executable, "-m", "lab", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def stopped(state: Path, text: str = "") -> None:
    """A lab that was up, and whose nodes are off."""
    folder = state / "trackbed" / "lab" / "t"
    folder.mkdir(parents=True)
    plan = {"image": str(state / "image"), "ports": {"node1": 1, "node2": 2}}
    (folder / "lab.json").write_text(text or json.dumps(plan))


def test_a_lab_that_is_down_says_how_to_start_it(state: Path) -> None:
    asked = lab(state, "status", "--ready")
    assert asked.returncode == 1
    assert "`python -m lab up` starts it" in asked.stderr
    failed = lab(state, "power-cut", "node1")
    assert failed.returncode == 1
    assert "lab: lab t is down\n`python -m lab up` starts it." in failed.stderr


def test_status_says_of_each_node_what_to_do(state: Path) -> None:
    stopped(state)
    asked = lab(state, "status", "--ready")
    assert asked.returncode == 1
    for name in ("node1", "node2"):
        assert f"{name} is off: `python -m lab power-on {name}` boots it" in asked.stderr


def test_a_node_that_is_off_says_how_to_boot_it(state: Path) -> None:
    stopped(state)
    failed = lab(state, "snapshot", "node1", "before")
    assert failed.returncode == 1
    assert "lab: node1 is off\n`python -m lab power-on node1` boots it." in failed.stderr


def test_a_node_that_the_lab_does_not_have_is_bad_input(state: Path) -> None:
    stopped(state)
    refused = lab(state, "power-on", "node3")
    assert refused.returncode == 2
    assert "lab: the lab has no node3\n`python -m lab status` shows its nodes." in refused.stderr


def test_a_lab_keeps_its_number_of_nodes(state: Path) -> None:
    stopped(state)
    refused = lab(state, "up", "--nodes", "3")
    assert refused.returncode == 2
    assert "lab: lab t has 2 nodes\nRun `python -m lab down`, then `up`." in refused.stderr


def test_a_damaged_plan_says_what_to_do(state: Path) -> None:
    stopped(state, "{")
    failed = lab(state, "status")
    assert failed.returncode == 1
    assert "Run `python -m lab down`" in failed.stderr


def test_a_bad_name_of_a_snapshot_is_bad_input(state: Path) -> None:
    stopped(state)
    refused = lab(state, "restore", "node1", "1st")
    assert refused.returncode == 2
    assert "Start with a letter" in refused.stderr


def test_an_error_without_a_remedy_of_its_own_says_where_to_look() -> None:
    program = (
        "from lab import __main__ as lab\n"
        "from lab.errors import LabError\n"
        "@lab.main.command()\n"
        "def break_it() -> None:\n"
        "    raise LabError('it broke')\n"
        "lab.cli()\n"
    )
    command = [sys.executable, "-c", program, "break-it"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[0] == "lab: it broke"
    assert "`python -m lab logs NODE` collects" in failed.stderr


@pytest.mark.slow
def test_the_suites_on_virtual_servers_use_pythons_own_subprocesses_and_threads() -> None:
    """`pyinfra_cli` replaces them by gevent's, in which a read that hangs stops every thread of the suite."""
    load = (
        "import importlib, pathlib, sys\n"
        "for file in sorted(pathlib.Path().glob('tests/[cl]*/*.py')):\n"
        "    importlib.import_module('.'.join(file.with_suffix('').parts))\n"
        "    assert 'pyinfra_cli' not in sys.modules, file\n"
    )
    done = subprocess.run([sys.executable, "-c", load], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRACKBED_LAB_DEBIAN", "11", "no such Debian\nGive 12, 12-backports, 13, 13-backports."),
        ("TRACKBED_LAB_LIKE", "rocky-8", "no such distribution\nGive rocky-9, ubuntu-22.04."),
    ],
)
def test_a_system_that_the_lab_does_not_know_is_refused_before_anything_is_built(
    state: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    failed = lab(state, "up")
    assert failed.returncode == 2
    assert f"{variable}={value}: {message}" in failed.stderr


@pytest.mark.parametrize("name", ["bookworm-1a", "trixie-backports-1a", "trixie-backports-like-rocky-9-1a"])
def test_an_image_s_name_says_its_debian(name: str) -> None:
    assert Image(Path(f"image-{name}")).debian.name == name.partition("-like-")[0].removesuffix("-1a")
