"""The lock of a node's deploy: the scripts as a shell runs them, and a deploy to a node that another one holds."""

import logging
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest
from click import Command, Context
from gevent import Timeout
from paramiko import SSHClient
from pyinfra.api.connect import connect_all
from pyinfra.api.state import State
from pyinfra.context import ctx_state

from tasks.common import lock
from tasks.common.commands import script
from tests.deploy.conftest import state_of
from tests.deploy.fake import deployed, pyinfra

ALICE, BOB = "boot/1:1:1:a", "boot/2:2:2:b"


def take(file: Path, token: str, over: str = "none", seconds: int = 3600) -> tuple[int, list[str]]:
    words = ["sh", "-ec", lock.TAKE, "sh", str(file), token, str(seconds), f"owner of {token}", over]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def give_back(file: Path, token: str) -> None:
    subprocess.run(["sh", "-ec", lock.GIVE_BACK, "sh", str(file), token], check=True)


def test_a_lock_that_is_held_says_by_whom_until_it_is_given_back(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert take(file, ALICE) == (0, [])
    assert take(file, ALICE) == (0, [])
    assert take(file, BOB) == (lock.HELD, [ALICE, "60", f"owner of {ALICE}"])
    give_back(file, BOB)
    assert take(file, BOB)[0] == lock.HELD
    give_back(file, ALICE)
    assert not file.exists()
    assert take(file, BOB) == (0, [])


def test_another_user_cannot_open_the_lock_and_keep_deploys_waiting(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    words = shlex.split(str(script(lock.TAKE, str(file), ALICE, "60", "alice", "none")))
    subprocess.run(words, check=True)
    assert oct(file.stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize(("over", "code"), [("all", 0), (ALICE, 0), ("none", lock.HELD), ("boot/3:3:3:c", lock.HELD)])
def test_a_lock_is_taken_over_on_request_or_from_the_holder_that_is_gone(tmp_path: Path, over: str, code: int) -> None:
    take(tmp_path / "lock", ALICE)
    assert take(tmp_path / "lock", BOB, over)[0] == code


@pytest.mark.parametrize(
    "content", ["", "\n", f"{ALICE}\n", f"{ALICE}\n0\nalice\n", f"{ALICE}\nsoon\nalice\n", "\0\xff"]
)
def test_a_lock_that_has_expired_or_cannot_be_read_holds_nobody_off(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    assert take(tmp_path / "lock", BOB) == (0, [])


def test_a_lock_of_a_clock_that_was_ahead_expires_as_any_other(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.write_text(f"{ALICE}\n9999999999\nalice\n")
    assert take(file, BOB) == (lock.HELD, [ALICE, "60", "alice"])
    token, until, owner = file.read_text().splitlines()
    assert (token, owner) == (ALICE, "alice")
    assert int(until) <= time.time() + 3600


def test_of_many_deploys_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    words = ["sh", "-ec", lock.TAKE, "sh", str(tmp_path / "lock")]
    running = [subprocess.Popen([*words, f"t{at}", "60", "o", "none"], stdout=subprocess.DEVNULL) for at in range(20)]
    assert sorted(each.wait(60) for each in running) == [0] + [lock.HELD] * 19


def test_the_token_of_a_process_that_has_ended_is_known_on_its_own_control_host() -> None:
    live = lock.Deploy().token
    assert not lock._is_gone(live)
    processes, pid, began, _ = live.split(":")
    assert lock._is_gone(f"{processes}:{pid}:{int(began) - 1}:x")
    assert not lock._is_gone(f"another/1:{pid}:{int(began) - 1}:x")
    assert not lock._is_gone("nonsense")


def test_a_lock_is_renewed_while_the_deploy_runs_and_one_that_was_taken_over_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "lock"
    for name, value in (("FILE", str(file)), ("RENEWED_S", 0.05), ("GOOD_FOR", 7200)):
        monkeypatch.setattr(lock, name, value)
    state = state_of(["@local"])

    def expires() -> float:
        # It may be written just now.
        return float([*file.read_text().split(), "0", "0"][1])

    def until(condition: Callable[[], bool]) -> None:
        with Timeout(30):
            while not condition():
                gevent.sleep(0.01)

    def run(state: State) -> None:
        token = file.read_text().split()[0]
        # As if three hours had passed.
        take(file, token, seconds=1)
        until(lambda: expires() > time.time() + 3600)
        take(file, BOB, "all")
        until(lambda: f"owner of {BOB} has taken over the lock of this node" in caplog.text)

    with caplog.at_level(logging.INFO, "pyinfra"), ctx_state.use(state), Context(Command("x")) as context:
        context.params["operations"] = ("deploy.py",)
        connect_all(state)
        lock.running(run)(state)
    assert file.read_text().startswith(BOB)


def test_the_lock_of_a_host_that_is_away_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one that did not come back from its reboot: its SSH client has no connection."""
    state = state_of(["node-a"])
    host = state.inventory.get_host("node-a")
    monkeypatch.setattr(host.connector, "client", SSHClient())
    lock.Deploy(held=[host]).give_back(state, host)


DEPLOY = "from pyinfra.operations import server\nserver.shell(name='Change', commands=['true'])\n"


def test_a_node_that_another_deploy_holds_fails_alone_and_says_who_has_it(tmp_path: Path) -> None:
    warning = "sudo: unable to resolve host a"
    held = {"success": False, "stdout": f"{ALICE}\n7\nalice on ctl1 since 06:00", "stderr": warning}
    denied = {"success": False, "stdout": "", "stderr": "one\ntwo\nPermission denied"}
    hosts: dict[str, dict[str, Any]] = {"a": {"fake_responses": {lock.FILE: held}}, "b": {}}
    hosts["c"] = {"fake_responses": {lock.FILE: denied}}
    done = deployed(tmp_path, hosts, DEPLOY, "--fail-percent", "100", **{lock.STEAL: ""})
    assert done.returncode == 1, done.stderr
    assert "alice on ctl1 since 06:00 deploys this" in done.stderr
    assert f"the lock {lock.FILE} cannot be taken: one two Permission" in done.stderr
    assert "[@fake/b] Success" in done.stderr
    assert "[@fake/a] Success" not in done.stderr
    files = (tmp_path / "fleet.py", tmp_path / "deploy.py")
    for harmless in (("--dry", *files), ("-y", files[0], "exec", "--", "true")):
        done = pyinfra(*harmless, **{lock.STEAL: ""})
        assert (done.returncode, "alice" in done.stderr) == (0, False), done.stderr
