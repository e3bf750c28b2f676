"""The scripts for package managers: these tests run them in a temporary folder."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import packages
from tasks.common.commands import script
from tasks.packages import holds
from tests.deploy.scripts import ran, sh
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
    sh(f'{holds.NOTED}note "$1"', tmp_path / "var/holds", programs=tmp_path / "bin")
    held.write_text(f"{held.read_text()}mine too\n")
    sh(f'{holds.NOTED}note "$1"', tmp_path / "var/holds", programs=tmp_path / "bin")
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
    done = ran(holds.release("debian", "ours"), tmp_path / "bin")
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
    sh(text, "jq", "kmod", programs=tmp_path / "bin")
    *before, last = log.read_text().splitlines()
    assert before == ["-q update", "slept", "-q update", "slept", "-q update"]
    assert last.startswith("-q -y -o DPkg::Lock::Timeout=300 ")
    assert last.endswith(" --no-install-recommends install -- jq kmod")


def test_needrestart_does_not_restart_services_after_apt(tmp_path: Path) -> None:
    # As the hook that apt runs after dpkg, in apt's environment (apt-pinvoke of needrestart 3.0 and later).
    hook = f'if [ -z "$NEEDRESTART_SUSPEND" ]; then touch {tmp_path}/restarted; fi'
    program(tmp_path / "bin/apt-get", f'echo "$*" >> {tmp_path}/ran; {hook}')
    text = f"{packages.APT}apt_update\napt_install install -- rdma-core"
    sh(text, programs=tmp_path / "bin")
    assert len((tmp_path / "ran").read_text().splitlines()) == 2
    assert not (tmp_path / "restarted").exists()


def test_other_errors_of_apt_end_it_at_once(tmp_path: Path) -> None:
    program(tmp_path / "bin/sleep", f"touch {tmp_path}/slept")
    program(tmp_path / "bin/apt-get", "echo 'E: The repository is not signed.' >&2; exit 100")
    with pytest.raises(AssertionError, match=r"E: The repository is not signed\."):
        sh(f"{packages.APT}apt_update", programs=tmp_path / "bin")
    assert not (tmp_path / "slept").exists()


LOCKED = """
echo "$*" >> calls
[ "$(wc -l < calls)" -gt {free_after} ] || {{ echo 'metadata already locked by 42' >&2; echo held; exit 200; }}
echo installed
exit {code}
"""


@pytest.mark.parametrize(
    ("free_after", "code", "result"),
    [(3, 0, (0, "", 4)), (1000, 0, (200, "metadata already locked by 42\n", 60)), (0, 1, (1, "", 1))],
    ids=["it ends", "it never ends", "another failure"],
)
def test_another_dnf_is_waited_for(tmp_path: Path, free_after: int, code: int, result: tuple[int, str, int]) -> None:
    program(tmp_path / "bin/dnf", LOCKED.format(free_after=free_after, code=code))
    program(tmp_path / "bin/sleep")
    done = ran(packages.dnf_install("a b", "c"), tmp_path / "bin", tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert (done.returncode, done.stderr, len(calls)) == result
    assert (done.stdout.split()[-1] == "installed") is (free_after < len(calls))
    assert set(calls) == {"--setopt=exit_on_lock=1 install -y --refresh -- a b c"}
