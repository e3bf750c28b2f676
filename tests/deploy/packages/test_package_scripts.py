"""The scripts for package managers: these tests run them in a temporary folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import packages
from tasks.common.commands import script
from tasks.packages import holds
from tests.deploy.scripts import sh
from tests.stand_ins import program


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """The list of an apt-mark that refuses to hold `refused`, and is interrupted after it has held `last`."""
    file = tmp_path / "held"
    program(
        tmp_path / "bin/apt-mark",
        f"""
        if [ "$1" != hold ]; then exec cat {file}; fi
        if [ "$2" = refused ]; then exit 7; fi
        echo "$2" >> {file}
        if [ "$2" = last ]; then kill -9 0; fi
        """,
    )
    return file


def hold(tmp_path: Path, package: str) -> int:
    """Hold a package as a task does; the exit status."""
    command = script(f'{holds.NOTED}noted "$@"', f"{tmp_path}/var/holds", "apt-mark", "hold", package)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    return subprocess.run(shlex.split(str(command)), env={"PATH": path}, check=False, start_new_session=True).returncode


@pytest.mark.parametrize("others", ["", "mine\n"])
def test_only_holds_that_a_command_sets_are_noted(tmp_path: Path, held: Path, others: str) -> None:
    held.write_text(others)
    assert [hold(tmp_path, package) for package in ("ours", "refused", "other")] == [0, 7, 0]
    assert held.read_text() == f"{others}ours\nother\n"
    assert (tmp_path / "var/holds").read_text() == "ours\nother\n"
    assert [path.name for path in (tmp_path / "var").iterdir()] == ["holds"]


def test_the_holds_from_before_are_on_the_disk_before_others_are_set(tmp_path: Path, held: Path) -> None:
    held.write_text("mine\n")
    program(tmp_path / "bin/sync", f'cat "$1" {held} > {tmp_path}/synced')
    assert hold(tmp_path, "ours") == 0
    assert (tmp_path / "synced").read_text() == "mine\nmine\n"


@pytest.mark.parametrize("others", ["", "mine\n"])
def test_holds_of_an_interrupted_deploy_are_noted_by_the_next(tmp_path: Path, held: Path, others: str) -> None:
    held.write_text(others)
    assert hold(tmp_path, "last") == -9
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    sh(f'{holds.NOTED}note "$1"', tmp_path / "var/holds", PATH=path)
    held.write_text(f"{held.read_text()}mine too\n")
    sh(f'{holds.NOTED}note "$1"', tmp_path / "var/holds", PATH=path)
    assert hold(tmp_path, "ours") == 0
    assert (tmp_path / "var/holds").read_text() == "last\nours\n"


def test_a_hold_waits_for_another_dpkg(tmp_path: Path, held: Path) -> None:
    program(tmp_path / "bin/sleep", f"echo slept >> {tmp_path}/log")
    marks = (tmp_path / "bin/apt-mark").rename(tmp_path / "apt-mark")
    # As apt 2.6.1 and dpkg 1.21.22 print it.
    said = "dpkg: error: dpkg frontend lock was locked by another process with pid 612"
    program(
        tmp_path / "bin/apt-mark",
        f'if [ "$1" = hold ] && [ "$(grep -c slept {tmp_path}/log)" -lt 2 ]; then echo "{said}" >&2; exit 100; fi\n'
        f'exec {marks} "$@"',
    )
    held.touch()
    (tmp_path / "log").touch()
    assert hold(tmp_path, "ours") == 0
    assert (tmp_path / "var/holds").read_text() == "ours\n"
    (tmp_path / "log").unlink()
    program(tmp_path / "bin/apt-mark", f'echo "{said}" >&2; exit 100')
    done = subprocess.run(
        shlex.split(str(holds.release("apt-mark", "unhold", "ours"))),
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (100, f"{said}\n")


def test_the_first_python_that_works_is_found() -> None:
    assert sh(packages.FIND_PYTHON, "/absent/python3", "/bin/false", sys.executable) == [sys.executable]
    assert sh(packages.FIND_PYTHON, "/absent/python3") == []


def test_another_apt_is_waited_for(tmp_path: Path) -> None:
    text = f'{packages.APT}apt_update\napt_install install -- "$@"'
    held, log = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 612 (apt-get)", tmp_path / "log"
    program(tmp_path / "bin/sleep", f"echo slept >> {log}")
    program(
        tmp_path / "bin/apt-get",
        f'echo "$*" >> {log}; if [ $(grep -c update {log}) -lt 3 ] && [ "$2" = update ]; then echo "{held}" >&2; exit 100; fi',
    )
    sh(text, "jq", "kmod", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    *before, last = log.read_text().splitlines()
    assert before == ["-q update", "slept", "-q update", "slept", "-q update"]
    assert last.startswith("-q -y -o DPkg::Lock::Timeout=300 ")
    assert last.endswith(" --no-install-recommends install -- jq kmod")


def test_needrestart_does_not_restart_services_after_apt(tmp_path: Path) -> None:
    # As the hook that apt runs after dpkg, in apt's environment (apt-pinvoke of needrestart 3.0 and later).
    hook = f'if [ -z "$NEEDRESTART_SUSPEND" ]; then touch {tmp_path}/restarted; fi'
    program(tmp_path / "bin/apt-get", f'echo "$*" >> {tmp_path}/ran; {hook}')
    text = f"{packages.APT}apt_update\napt_install install -- rdma-core"
    sh(text, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert len((tmp_path / "ran").read_text().splitlines()) == 2
    assert not (tmp_path / "restarted").exists()


def test_other_errors_of_apt_end_it_at_once(tmp_path: Path) -> None:
    program(tmp_path / "bin/sleep", f"touch {tmp_path}/slept")
    program(tmp_path / "bin/apt-get", "echo 'E: The repository is not signed.' >&2; exit 100")
    with pytest.raises(AssertionError, match=r"E: The repository is not signed\."):
        sh(f"{packages.APT}apt_update", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert not (tmp_path / "slept").exists()


LOCKED = """
echo "$*" >> calls
[ "$(wc -l < calls)" -gt {free_after} ] || {{ echo 'metadata already locked by 42' >&2; echo held; exit 200; }}
echo installed
exit {code}
"""


def install_by_dnf(tmp_path: Path, **node: int) -> subprocess.CompletedProcess[str]:
    program(tmp_path / "bin/dnf", LOCKED.format(**node))
    program(tmp_path / "bin/sleep")
    return subprocess.run(
        shlex.split(str(packages.dnf_install("a b", "c"))),
        cwd=tmp_path, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_another_dnf_is_waited_for(tmp_path: Path) -> None:
    done = install_by_dnf(tmp_path, free_after=3, code=0)
    assert (done.returncode, done.stdout.split()[-1], done.stderr) == (0, "installed", "")
    assert set((tmp_path / "calls").read_text().splitlines()) == {"--setopt=exit_on_lock=1 install -y -- a b c"}


def test_a_dnf_that_never_ends_is_named(tmp_path: Path) -> None:
    done = install_by_dnf(tmp_path, free_after=1000, code=0)
    assert (done.returncode, done.stderr) == (200, "metadata already locked by 42\n")
    assert len((tmp_path / "calls").read_text().splitlines()) == 60


def test_another_failure_of_dnf_is_not_tried_again(tmp_path: Path) -> None:
    done = install_by_dnf(tmp_path, free_after=0, code=1)
    assert done.returncode == 1
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
