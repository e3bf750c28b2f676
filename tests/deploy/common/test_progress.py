"""What a deploy shows of the steps of its hosts and their times, through pyinfra's own command line and config.py."""

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import pytest
from gevent.event import Event

from fleet.last_deploy import duration, last_deploy
from tasks.common import progress
from tasks.common.archive import ROOT
from tasks.common.progress import shown, slowest
from tests.deploy.fake import inventory, pyinfra

DEPLOY = 'from pyinfra.operations import server\nserver.shell(name="Nothing", commands=["true"])\n'
DELAY = 1.2


def command(folder: Path) -> list[str]:
    made = inventory(folder / "inventory.py", [(f"@fake/node{number}", {"fake_delay": DELAY}) for number in (1, 2)])
    (folder / "nothing.py").write_text(DEPLOY)
    return [str(Path(sys.executable).with_name("pyinfra")), "-y", str(made), str(folder / "nothing.py")]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder), **more}


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    done = pyinfra(*command(folder)[1:], XDG_STATE_HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return done


def test_the_time_of_each_host_and_each_operation_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path)
    lines = [line.strip() for line in done.stderr.splitlines()]
    [took] = [line for line in lines if line.startswith("took ")]
    assert sorted(re.findall(r"@fake/(\w+) [\d.]+ s", took)) == ["node1", "node2"]
    [total] = [line for line in lines if line.startswith("operations took ")]
    assert re.fullmatch(r"operations took Nothing [\d.]+ s, all together [\d.]+ s", total)
    assert "1 of 1" not in done.stderr, "each operation was shorter than the time between two lines"


def test_a_deploy_notes_how_long_its_operations_took(tmp_path: Path) -> None:
    run(tmp_path)
    noted = last_deploy(tmp_path / "trackbed" / "deploy.json")
    assert noted is not None
    assert [Path(file).name for file in noted.files] == ["inventory.py", "nothing.py"]
    [operation] = noted.operations
    assert (operation.name, operation.hosts) == ("Nothing", 2)
    assert operation.longest >= operation.median >= DELAY
    assert noted.hosts[operation.slowest] == operation.longest == max(noted.hosts.values())
    assert noted.began < noted.noted


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_deploy_that_is_stopped_has_noted_its_operations(tmp_path: Path, stop: signal.Signals) -> None:
    words = command(tmp_path)
    lines = ["import time", "from pyinfra.operations import python, server"]
    lines += [f'server.shell(name="{name}", commands=["true"])' for name in ("First", "Second")]
    lines += ['python.call(name="Third", function=lambda: time.sleep(600))']
    (tmp_path / "nothing.py").write_text("\n".join(lines) + "\n")
    inventory(tmp_path / "inventory.py", ["@fake/node1"])
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    ) as running_deploy:
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
    assert pyinfra(*words[1:], XDG_STATE_HOME=str(tmp_path)).returncode == 0
    assert not (tmp_path / "trackbed").exists()


def on_a_terminal(words: list[str], folder: Path, **more: str) -> tuple[int, str]:
    """Its exit code, and what it writes there. script(1) has the terminal: to read from one would stop gevent, which reaps."""
    done = subprocess.run(
        ["script", "--quiet", "--return", "--command", shlex.join(words), "/dev/null"],
        cwd=ROOT,
        env=environment(folder, TERM="xterm", COLUMNS="80", **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    # Text would have each carriage return as an end of line.
    return done.returncode, done.stdout.decode()


def seen(written: str) -> list[str]:
    """The lines that a terminal has at the end, with those that have left it at its top."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif not part.startswith("\x1b"):
            lines[row] = f"{lines[row][:column]:<{column}}{part}{lines[row][column + len(part) :]}"
            column += len(part)
        else:
            assert part.endswith("m"), part
    return [line.rstrip() for line in lines]


SLOW = """
import gevent
from pyinfra.operations import python, server


def takes_long(state, host):
    gevent.sleep(host.data.get("sleeps"))
    return not host.data.get("fails")


python.call(name="Slow", function=takes_long)
server.shell(name="Last", commands=["true"])
"""


def slow(folder: Path, *hosts: Mapping[str, float]) -> list[str]:
    """The command of a deploy whose first operation takes these seconds, on a host each."""
    words = command(folder)
    inventory(folder / "inventory.py", [(f"@fake/node{number}", data) for number, data in enumerate(hosts)])
    (folder / "nothing.py").write_text(SLOW)
    return words


def test_on_a_terminal_each_host_has_a_line_with_its_step_and_since_when(tmp_path: Path) -> None:
    # pyinfra itself counts only the hosts that may run at the same time.
    words = slow(tmp_path, *[{"sleeps": 2}] * 4)
    code, written = on_a_terminal([*words, "--parallel", "2"], tmp_path)
    assert code == 0, written
    of_a_host = r"    @fake/node[0-3] +\d\.\d s  Slow"
    assert re.search(rf"    operation 1 of 2: 2 of 4 hosts done\r\n{of_a_host}\r\n{of_a_host}\r\x1b\[3A", written), (
        written
    )
    assert "{@fake" not in written, "pyinfra's own line"
    assert "operation 1 of 2" not in "\n".join(seen(written)), "what comes next takes the place of the lines"


def test_a_host_has_a_line_before_the_first_operation_and_after_the_last_one(tmp_path: Path) -> None:
    words = command(tmp_path)
    (tmp_path / "nothing.py").write_text(
        "from pyinfra.context import host\nfrom pyinfra.facts.server import Arch\nhost.get_fact(Arch)\n"
    )
    _, written = on_a_terminal(words, tmp_path)
    for step in ("reading Arch", "taking the lock", "giving the lock back"):
        assert re.search(rf"    @fake/node1 +\d\.\d s  {step}\r", written), written


def test_as_many_hosts_are_shown_as_the_terminal_has_lines(tmp_path: Path) -> None:
    _, written = on_a_terminal(slow(tmp_path, *[{"sleeps": 2}] * 20), tmp_path, LINES="8")
    blocks = re.findall(r"((?:\n    [^\r\n]*\r?)+)\x1b\[(\d+)A", written)
    assert blocks
    assert {int(up) for _, up in blocks} == {7}
    assert all("operation 1 of 2: 0 of 20 hosts done" in block for block, _ in blocks), written
    assert all(block.rstrip("\r").endswith("    and 15 more") for block, _ in blocks)


def test_a_host_that_fails_meanwhile_is_named_above_the_lines_of_the_others(tmp_path: Path) -> None:
    words = slow(tmp_path, {"sleeps": 1, "fails": 1}, {"sleeps": 3}, {"sleeps": 3})
    code, written = on_a_terminal([*words, "--fail-percent", "50"], tmp_path)
    assert code == 1
    # The lines that were drawn before are cleared, and the next ones are drawn below it.
    around = r"node0[^\n]*Slow.*\x1b\[J[^\n]*node0[^\n]*Error: .*node1[^\n]*Slow"
    assert re.search(around, written, re.DOTALL), written
    screen = "\n".join(seen(written))
    assert "[@fake/node0] Error: executed 0 commands" in screen
    assert "operation 1 of 2" not in screen


def test_ctrl_c_leaves_no_line_behind(tmp_path: Path) -> None:
    words = shlex.join(slow(tmp_path, {"sleeps": 600}, {"sleeps": 600}))
    given = environment(tmp_path, TERM="xterm", COLUMNS="80")
    # The terminal itself would drop what it has not shown yet at Ctrl-C, so the signal is sent to the process.
    on_terminal = ["script", "--quiet", "--flush", "--command", f"echo $$; exec {words}", "/dev/null"]
    with subprocess.Popen(on_terminal, cwd=ROOT, env=given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as deploy:
        assert deploy.stdout
        pid = int(deploy.stdout.readline())
        written = ""
        while "  Slow\r" not in written:
            written += deploy.stdout.readline().decode()
        os.kill(pid, signal.SIGINT)
        screen = seen(written + deploy.stdout.read().decode())
    assert "--> Stopped by SIGINT" in screen
    assert "operation 1 of 2" not in "\n".join(screen)


def test_progress_can_be_turned_off_as_in_pyinfra_and_json_has_none(tmp_path: Path) -> None:
    assert "operation 1" not in on_a_terminal(slow(tmp_path, {"sleeps": 1.5}), tmp_path, PYINFRA_PROGRESS="off")[1]
    assert "operation 1" not in on_a_terminal([*slow(tmp_path, {"sleeps": 1.5}), "--json"], tmp_path)[1]


class Twice(Event):  # type: ignore[misc]
    """Of pyinfra: it waits a second time for the hosts, and then no longer. No time passes."""

    def wait(self, timeout: float | None = None) -> bool:
        waited, self.waited = getattr(self, "waited", 0.0), timeout
        return bool(waited)


def test_without_a_terminal_the_same_lines_are_printed_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    ended = Twice()
    with caplog.at_level(logging.INFO, "pyinfra"):
        progress.show(ended, deque(["50% (1/2) - {node2}"]))
    assert caplog.messages == ["50% (1/2) - {node2}"]
    assert ended.waited == progress.BEAT


STEPS = {"a": ("Kernel", 5.0), "b": ("Reboot", 75.0), "c": ("Kernel", 5.0)}


@pytest.mark.parametrize(
    ("head", "width", "height", "lines"),
    [
        ("6 of 9", 80, 9, ["6 of 9", "b  1 min 15 s  Reboot", "a       5.0 s  Kernel", "c       5.0 s  Kernel"]),
        ("6 of 9", 18, 3, ["6 of 9", "b  1 min 15 s  Reb", "and 2 more"]),
        ("6 of 9", 80, 1, ["6 of 9", "and 3 more"]),
        ("", 80, 2, ["b  1 min 15 s  Reboot", "and 2 more"]),
    ],
)  # fmt: skip
def test_the_hosts_that_take_longest_are_named_as_far_as_they_fit(
    head: str, width: int, height: int, lines: list[str]
) -> None:
    assert shown(STEPS, head, width, height) == lines


def test_only_the_slowest_are_named() -> None:
    assert slowest({"a": 1.0, "b": 2.0}) == "b 2.0 s, a 1.0 s"
    assert slowest({"a": 1.0, "b": 2.0, "c": 3.0, "d": 12.4}) == "d 12 s, c 3.0 s, b 2.0 s (the slowest of 4)"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.04, "0.0 s"), (9.99, "10.0 s"), (59.7, "1 min 0 s"), (125, "2 min 5 s")]
)
def test_seconds_are_written_as_minutes_and_seconds(seconds: float, said: str) -> None:
    assert duration(seconds) == said
