"""The scripts that install and start the agent: these tests run them in a temporary folder."""

import os
import subprocess
import sys
import tarfile
import time
from hashlib import sha256
from pathlib import Path

import pytest

from tasks import agent, node_spec, packages
from tests.deploy.scripts import sh
from tests.stand_ins import program


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "versions").mkdir()
    return tmp_path


def staged(base: Path, *versions: str) -> None:
    for version in versions:
        (base / "versions" / version).mkdir()


def versions(base: Path) -> agent.Versions:
    message = sh(agent._VERSIONS, base)
    return agent.AgentVersions().process(message) if message else agent.Versions()


def upload(base: Path, source: str) -> Path:
    (base / "agent.py").write_text(source)
    archive = base / "uploaded.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base / "agent.py", "agent.py")
    (base / "agent.py").unlink()
    return archive


def test_a_node_without_an_agent_has_no_versions(tmp_path: Path) -> None:
    assert versions(tmp_path / "absent") == agent.Versions()
    assert versions(tmp_path) == agent.Versions()


def unpack(base: Path, archive: Path, checksum: str = "") -> None:
    checksum = checksum or sha256(archive.read_bytes()).hexdigest()
    sh(agent._UNPACK, archive, base / "versions", "1-a", sys.executable, checksum)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_an_archive_is_unpacked_and_compiled_and_other_users_can_read_it(base: Path, umask: int) -> None:
    base.chmod(0o700)
    # As a deploy that was interrupted has left it.
    (base / "0-z.tar.gz").write_text("half")
    os.utime(base / "0-z.tar.gz", (0, 0))
    uploaded = upload(base, "print('here')\n")
    before = os.umask(umask)
    try:
        unpack(base, uploaded)
    finally:
        os.umask(before)
    assert [path.name for path in base.iterdir()] == ["versions"]
    assert [path.name for path in (base / "versions").iterdir()] == ["1-a"]
    there = [base, *(base / "versions").rglob("*")]
    assert len([path for path in there if path.suffix == ".pyc"]) == 1
    assert {path.stat().st_mode & 0o777 for path in there} == {0o755, 0o644}


@pytest.mark.parametrize(
    ("content", "checksum", "message"),
    [(b"not an archive", "", "gzip"), (b"theirs", "0" * 64, "is not what the control")],
)
def test_an_archive_that_is_none_or_another_than_was_sent_leaves_nothing_behind(
    base: Path, content: bytes, checksum: str, message: str
) -> None:
    broken = base / "uploaded.tar.gz"
    broken.write_bytes(content)
    with pytest.raises(AssertionError, match=message):
        unpack(base, broken, checksum)
    assert list((base / "versions").iterdir()) == []
    assert not broken.exists()


@pytest.mark.parametrize("active", [pytest.param(True, id="fapolicyd-135"), pytest.param(False, id="other fault")])
def test_where_python_may_not_open_the_agent_s_files_the_list_of_trusted_files_is_named(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, active: bool
) -> None:
    program(tmp_path / "bin/systemctl", "true" if active else "exit 3")
    program(tmp_path / "bin/python", "echo 'PermissionError: [Errno 1] Operation not permitted' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    with pytest.raises(AssertionError, match="Operation not permitted") as failed:
        unpack(base, upload(base, "x = 1\n"))
    assert (f"'allow perm=any all : dir={base}/'" in str(failed.value)) is active


def test_a_version_that_another_deploy_has_unpacked_is_left(base: Path) -> None:
    for _ in range(2):
        unpack(base, upload(base, "x = 1\n"))
    assert [path.name for path in (base / "versions").iterdir()] == ["1-a"]


def test_a_switch_keeps_only_the_previous_version(base: Path) -> None:
    staged(base, "1-a")
    sh(agent._SWITCH, base, "1-a", "")
    assert versions(base) == agent.Versions("1-a", None, frozenset({"1-a"}))
    staged(base, "2-b")
    sh(agent._SWITCH, base, "2-b", "1-a")
    assert versions(base) == agent.Versions("2-b", "1-a", frozenset({"1-a", "2-b"}))
    staged(base, "3-c")
    sh(agent._SWITCH, base, "3-c", "2-b")
    assert versions(base) == agent.Versions("3-c", "2-b", frozenset({"2-b", "3-c"}))
    # Back to the version before, and again: nothing is lost.
    for _ in range(2):
        sh(agent._SWITCH, base, "2-b", "3-c")
        assert versions(base) == agent.Versions("2-b", "3-c", frozenset({"2-b", "3-c"}))
    assert sorted(path.name for path in base.iterdir()) == ["current", "previous", "versions"]


def test_the_version_that_runs_stays_if_a_deploy_was_interrupted_after_its_switch(base: Path) -> None:
    staged(base, "1-a")
    sh(agent._SWITCH, base, "1-a", "")
    staged(base, "2-b")
    sh(agent._SWITCH, base, "2-b", "1-a")
    staged(base, "3-c")
    sh(agent._SWITCH, base, "3-c", "1-a")
    assert versions(base) == agent.Versions("3-c", "1-a", frozenset({"1-a", "3-c"}))


PLANNER = """
import sys
print(sys.argv[1:], file=sys.stderr)
print('{"spec_hash": "x", "changes": [], "errors": ["%s"]}' % sys.stdin.read().strip())
sys.exit(2)
"""


def plan(base: Path, version: str) -> list[str]:
    done = subprocess.run(
        ["sh", "-ec", node_spec._PLAN, "sh", sys.executable, str(base / "versions" / version), str(base / "current")],
        input="the spec", capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_the_command_finds_another_python_if_an_upgrade_has_removed_the_one_of_the_deploy(base: Path) -> None:
    (base / "current").write_text("import sys; print(sys.argv[1:])")
    command = base / "trackbed"

    def run(*interpreters: object) -> subprocess.CompletedProcess[str]:
        first, second = map(str, interpreters)
        text = agent.launcher_text("/absent/python3.11").replace(agent.BASE, str(base))
        command.write_text(text.replace(f"{' '.join(packages.INTERPRETERS)};", f"{first} {second};"))
        return subprocess.run(["sh", str(command), "plan", "a b"], capture_output=True, text=True, check=False)

    done = run("/absent/python3", sys.executable)
    assert (done.returncode, done.stdout) == (0, "['plan', 'a b']\n")
    without = run("/absent/python3", "/bin/false")
    assert (without.returncode, without.stdout) == (1, "")
    assert without.stderr == f"{packages.NO_PYTHON}\n"


def test_the_plan_uses_the_staged_version_or_else_the_current_one(base: Path) -> None:
    assert plan(base, "2-b") == []
    staged(base, "1-a")
    sh(agent._SWITCH, base, "1-a", "")
    staged(base, "2-b")
    for version in ("1-a", "2-b"):
        (base / "versions" / version / "__main__.py").write_text(PLANNER)
    fact = node_spec.NodePlan().process(plan(base, "2-b"))
    assert fact == node_spec.Plan("2-b", (), ("the spec",))
    sh('rm -r "$1"', base / "versions" / "2-b")
    assert node_spec.NodePlan().process(plan(base, "2-b")) == node_spec.Plan("1-a", (), ("the spec",))


def test_an_agent_that_cannot_plan_is_quoted(base: Path) -> None:
    staged(base, "1-a")
    (base / "versions" / "1-a" / "__main__.py").write_text("raise RuntimeError('no netlink')\n")
    fact = node_spec.NodePlan().process(plan(base, "1-a"))
    assert fact is not None
    assert fact.errors[0].startswith("agent 1-a could not plan (exit code 1)")
    assert fact.errors[0].endswith("RuntimeError: no netlink")


WRITTEN, FUTURE = 1700000000, 4000000000


def started(folder: Path, written: int, **shown: object) -> dict[str, str]:
    """A node's PATH with a service whose unit's file was written then, and that has started as systemd shows it."""
    unit = folder / "trackbed.service"
    unit.write_text("[Unit]\n")
    os.utime(unit, (written, written))
    properties = {"FragmentPath": unit, "MainPID": 0, **shown}
    cases = [f'*={name}) echo "{value}" ;;' for name, value in properties.items()]
    state = "*=ActiveState*) printf '%s\\n' ActiveState=active UnitFileState=enabled NeedDaemonReload=no ;;"
    program(folder / "bin/systemctl", f'case "$2" in {state} {" ".join(cases)} esac')
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("began", "written", "stale"),
    [
        ("Tue 2023-11-14 22:13:20 UTC", WRITTEN, False),
        ("Tue 2023-11-14 22:13:19 UTC", WRITTEN, True),
        ("", WRITTEN, False),
        # A restart would not change this, so each deploy would do one.
        ("Tue 2023-11-14 22:13:20 UTC", FUTURE, False),
    ],
    ids=["after its file", "before its file", "never", "a clock that was set back"],
)
def test_a_service_that_started_before_its_unit_file_was_written_is_found(
    tmp_path: Path, began: str, written: int, stale: bool
) -> None:
    """Also if a daemon-reload has come in between, after which systemd shows NeedDaemonReload=no."""
    path = started(tmp_path, written, ActiveEnterTimestamp=began)
    lines = sh(agent._SERVICE, "trackbed.service", "ActiveEnterTimestamp", **path)
    assert agent.AgentService().process(lines) == agent.Service(active=True, enabled=True, stale=stale)


@pytest.mark.parametrize(("age", "stale"), [(200, False), (50, True)], ids=["before the start", "after the start"])
def test_a_clock_that_was_set_later_makes_no_file_newer(tmp_path: Path, age: int, stale: bool) -> None:
    """systemd shows the start by the clock of that moment: here years too early, as in a boot without a real-time clock."""
    shown = {
        "ExecMainStartTimestamp": "Sat 2000-01-01 00:00:07 UTC",
        "ExecMainStartTimestampMonotonic": int((time.clock_gettime(time.CLOCK_BOOTTIME) - 100) * 1_000_000),
    }
    path = started(tmp_path, int(time.time()) - age, **shown)
    lines = sh(agent._SERVICE, "trackbed.service", "ExecMainStartTimestamp", **path)
    assert agent.AgentService().process(lines).stale == stale


@pytest.mark.parametrize(
    ("observed", "left"), [(None, "verified"), ("observed", "observed")], ids=["enforce", "observe"]
)
def test_a_new_version_that_does_not_start_goes_with_its_spec(
    base: Path, tmp_path: Path, observed: str | None, left: str
) -> None:
    staged(base, "old", "new")
    (base / "current").symlink_to("versions/new")
    (base / "previous").symlink_to("versions/old")
    spec = tmp_path / "node.json"
    for path, text in ((spec, "newest"), (tmp_path / "verified", "verified"), (tmp_path / "observed", observed)):
        if text is not None:
            path.write_text(text)
    program(tmp_path / "bin/systemctl", f'test "$(readlink {base}/current)" = versions/old')
    program(tmp_path / "bin/journalctl", "")
    trial = (agent._TRIAL, "sh", "unit", "trackbed", "1", base, spec, tmp_path / "verified", tmp_path / "observed")
    programs = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-ec", *map(str, trial)], capture_output=True, text=True, check=False, env=programs)
    assert (done.returncode, done.stderr, str((base / "current").readlink())) == (1, "", "versions/old")
    assert spec.read_text() == left
