"""What a deploy prints of the time that its hosts are in an operation, through pyinfra's own command line and config.py."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.last_deploy import last_deploy
from tasks.common.archive import ROOT
from tasks.common.progress import running, say, slowest
from tests.deploy.fake import IMPORT

DEPLOY = 'from pyinfra.operations import server\nserver.shell(name="Nothing", commands=["true"])\n'
DELAY = "1.2"


def command(folder: Path) -> list[str]:
    (folder / "inventory.py").write_text(f'{IMPORT}hosts = ["@fake/node1", "@fake/node2"]\n')
    (folder / "nothing.py").write_text(DEPLOY)
    pyinfra = str(Path(sys.executable).with_name("pyinfra"))
    return [pyinfra, "-y", str(folder / "inventory.py"), str(folder / "nothing.py")]


def environment(folder: Path, **more: str) -> dict[str, str]:
    of_pyinfra = {"PYINFRA_FAKE_DELAY": DELAY, "PYINFRA_FAKE_DELAY_JITTER": "0"}
    return {**os.environ, **of_pyinfra, "XDG_STATE_HOME": str(folder), **more}


def test_an_operation_ends_with_the_time_of_each_host_and_the_deploy_with_that_of_each_operation(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        command(tmp_path), cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stderr.splitlines()]
    [took] = [line for line in lines if line.startswith("took ")]
    assert sorted(re.findall(r"@fake/(\w+) [\d.]+ s", took)) == ["node1", "node2"]
    [total] = [line for line in lines if line.startswith("operations took ")]
    assert re.fullmatch(r"operations took Nothing [\d.]+ s, all together [\d.]+ s", total)
    assert "hosts done" not in done.stderr


def test_a_deploy_notes_how_long_its_operations_took(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path), cwd=ROOT, env=environment(tmp_path), capture_output=True, check=True)
    noted = last_deploy(tmp_path / "trackbed" / "deploy.json")
    assert noted is not None
    assert [Path(file).name for file in noted.files] == ["inventory.py", "nothing.py"]
    [operation] = noted.operations
    assert (operation.name, operation.hosts) == ("Nothing", 2)
    assert operation.longest >= operation.median >= float(DELAY)
    assert noted.hosts[operation.slowest] == operation.longest == max(noted.hosts.values())
    assert noted.began < noted.noted


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_deploy_that_is_stopped_says_so_and_has_noted_each_operation_up_to_then(
    tmp_path: Path, stop: signal.Signals
) -> None:
    words = command(tmp_path)
    lines = ["import time", "from pyinfra.operations import python, server"]
    lines += [f'server.shell(name="{name}", commands=["true"])' for name in ("First", "Second")]
    lines += ['python.call(name="Third", function=lambda: time.sleep(600))']
    (tmp_path / "nothing.py").write_text("\n".join(lines) + "\n")
    quick = environment(tmp_path, PYINFRA_FAKE_DELAY="0")
    with subprocess.Popen(words, cwd=ROOT, env=quick, stderr=subprocess.PIPE, text=True) as running_deploy:
        assert running_deploy.stderr is not None
        assert any("Third" in line for line in running_deploy.stderr)
        running_deploy.send_signal(stop)
        _, said = running_deploy.communicate(timeout=60)
    assert (running_deploy.returncode, f"Stopped by {stop.name}" in said) == (128 + stop, True)
    noted = last_deploy(tmp_path / "trackbed" / "deploy.json")
    assert noted is not None
    assert [operation.name for operation in noted.operations] == ["First", "Second"]


def test_a_node_that_deploys_itself_notes_nothing(tmp_path: Path) -> None:
    words = command(tmp_path)
    (tmp_path / "inventory.py").write_text('hosts = ["@local"]\n')
    subprocess.run(words, cwd=ROOT, env=environment(tmp_path), capture_output=True, check=True)
    assert not (tmp_path / "trackbed").exists()


def on_a_terminal(folder: Path, **more: str) -> str:
    """What it prints there. script(1) has the terminal: to read from one here would stop gevent, which reaps the child."""
    done = subprocess.run(
        ["script", "--quiet", "--return", "--command", shlex.join(command(folder)), "/dev/null"],
        cwd=ROOT,
        env=environment(folder, TERM="xterm", COLUMNS="80", **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    # Text would have each carriage return as an end of line.
    assert done.returncode == 0, done.stdout
    return done.stdout.decode()


def test_on_a_terminal_the_hosts_that_are_in_an_operation_are_shown_with_their_times(tmp_path: Path) -> None:
    said = on_a_terminal(tmp_path)
    # What is printed next clears the line.
    assert re.search(
        r"    operation 1 of 1: 0 of 2 hosts done; @fake/node\d [\d.]+ s, @fake/node\d [\d.]+ s\r\x1b\[K", said
    )
    assert "0% (0/2) - {" not in said.partition("Starting operation")[2]


def test_progress_can_be_turned_off_as_in_pyinfra(tmp_path: Path) -> None:
    assert "hosts done" not in on_a_terminal(tmp_path, PYINFRA_PROGRESS="off")


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (200, "1 of 9 hosts done; b 1 min 15 s, a 5.0 s, c 5.0 s"),
        (48, "1 of 9 hosts done; b 1 min 15 s and 2 more"),
        (30, "1 of 9 hosts done"),
    ],
)
def test_the_hosts_that_take_longest_are_named_as_far_as_they_fit(width: int, said: str) -> None:
    assert running({"a": 5.0, "b": 75.0, "c": 5.0}, 1, 9, width) == said


def test_only_the_slowest_are_named() -> None:
    assert slowest({"a": 1.0, "b": 2.0}) == "b 2.0 s, a 1.0 s"
    assert slowest({"a": 1.0, "b": 2.0, "c": 3.0, "d": 12.4}) == "d 12 s, c 3.0 s, b 2.0 s (the slowest of 4)"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.04, "0.0 s"), (9.99, "10.0 s"), (59.7, "1 min 0 s"), (125, "2 min 5 s")]
)
def test_seconds_are_written_as_minutes_and_seconds(seconds: float, said: str) -> None:
    assert say(seconds) == said
