"""The Makefile's virtual environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.fake import IMPORT
from tests.deploy.test_cli import DATA, FRESH
from tests.programs import success
from tests.stand_ins import program, text_file

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_environment_that_was_interrupted_before_it_had_pip_is_made_again(tmp_path: Path) -> None:
    """`python -m venv` makes bin/python first, and pip last."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "requirements").mkdir()
    for name in ("control", "test"):
        (tmp_path / f"requirements/{name}.txt").write_text("")
    environment = tmp_path / ".venv/bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(os.path.realpath(sys.executable))
    # The packages themselves are of no interest: PIP is a command that does nothing.
    words = ["make", "-C", str(tmp_path), f"PYTHON={sys.executable}", "PIP=true", ".venv/.installed"]
    subprocess.run(words, check=True, capture_output=True)
    subprocess.run([environment / "pip", "--version"], check=True, capture_output=True)


def control_beside(folder: Path, **pythons: str) -> subprocess.CompletedProcess[str]:
    """`make .venv/.control` where PATH has these programs, and what make itself needs."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").write_text("")
    text_file(folder / "requirements/control.txt", "")
    path = folder / "path"
    path.mkdir()
    for name in ("make", "sh", "id", "nproc", "expr", "touch", "true"):
        (path / name).symlink_to(str(shutil.which(name)))
    for name, text in pythons.items():
        program(path / name.replace("_", "."), text)
    # The packages themselves are of no interest: PIP is a command that does nothing.
    words = [str(path / "make"), "-C", str(folder), "PIP=true", ".venv/.control"]
    return subprocess.run(words, env={"PATH": str(path)}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_newer_python_beside_one_that_is_too_old_makes_the_environment(tmp_path: Path) -> None:
    """As on Rocky Linux 9: python3 is 3.9, and python3.12 is a package of its own."""
    success(control_beside(tmp_path, python3="exit 1", python3_12=f'exec {sys.executable} "$@"'))
    assert (tmp_path / ".venv/bin/pip").exists()


def test_without_a_python_that_is_new_enough_the_remedy_is_named(tmp_path: Path) -> None:
    done = control_beside(tmp_path, python3="exit 1")
    assert done.returncode != 0
    assert "older than Python 3.10" in done.stderr


def test_a_first_deploy_that_fails_ends_with_what_to_do(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name, does in (("python", 'echo "$*"'), ("pyinfra", "echo '[node1] no room' >&2; exit 1")):
        program(programs / name, does)
    words = ["make", "-C", str(tmp_path), "--old-file=.venv/.installed", "lab"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said[:2] == ["[node1] no room", "-m lab status --ready"]
    assert said[2].endswith("`make lab` goes on from here")


# All that `trackbed fleet` and the tasks import, and that no test tool is there.
IMPORTS = """
import importlib, importlib.util, pkgutil
import fleet, tasks
for package in (fleet, tasks):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
assert not importlib.util.find_spec("pytest")
"""


@pytest.mark.slow
def test_the_control_host_s_environment_has_what_the_deploy_and_the_fleet_s_commands_import(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "README.md", "config.py", "deploy.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("agent", "cli", "deploys", "fleet", "lab", "requirements", "tasks", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/deploy").mkdir(parents=True)
    shutil.copy(ROOT / "tests/deploy/fake.py", tmp_path / "tests/deploy")
    subprocess.run(["make", "-C", str(tmp_path), f"PYTHON={sys.executable}", "control"], check=True)
    programs = tmp_path / ".venv/bin"
    hosts = [("@fake/a", {**DATA, "fake_responses": FRESH})]
    (tmp_path / "inventory.py").write_text(f"{IMPORT}hosts = {hosts!r}\n")
    for words in (
        ("python", "-c", IMPORTS),
        ("trackbed", "fleet", "report", "--help"),
        ("pyinfra", "inventory.py", "deploy.py", "--dry"),
    ):
        done = subprocess.run(
            [programs / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
