"""The command line as people and scripts use it: its messages and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.__main__ import cli
from tests.programs import failure

ROOT = Path(__file__).parents[3]


def trackbed(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=60,
    )


def test_a_plan_of_a_spec_that_wants_nothing_is_empty() -> None:
    planned = trackbed("plan", "--spec", "-", stdin='{"node_name": "n1"}')
    assert (planned.returncode, planned.stdout) == (0, "nothing to change\n")


def test_a_plan_as_json_says_all_that_the_deploy_needs() -> None:
    planned = trackbed("plan", "--json", "--spec", "-", stdin='{"node_name": "n1"}')
    document = json.loads(planned.stdout)
    assert planned.returncode == 0
    assert (document["changes"], document["errors"], len(document["spec_hash"])) == ([], [], 16)


def test_the_installed_command_is_this_project_wherever_it_is_called(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("trackbed")), "schema"]
    installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (installed.returncode, installed.stdout) == (0, trackbed("schema").stdout)
    fleet = subprocess.run([command[0], "fleet", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "maintain" in fleet.stdout


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("plan", "--spec", "-"), "{", "stdin: not valid JSON"),
        (("plan", "--spec", "-"), '{"node_name": "n1", "nic": []}', "unknown key 'nic'; did you mean 'nics'?"),
        (("plan", "--spec", "/nonexistent"), "", "No such file"),
        (("plan", "--spce", "x"), "", "No such option"),
        (("plan", "--spec", "/"), "", "'/' cannot be read: it is not a regular file; give a file with a spec"),
        (("plan", "--spec", "/dev/zero"), "", "it is not a regular file"),
        (("plan", "--spec", "-"), "\udcff", "stdin: not UTF-8 text"),
        (("plna",), "", "No such command 'plna'; see: trackbed --help"),
        (("plan", "--spec", "-"), '{"node_number": %s}' % ("9" * 5000), "a number has too many digits"),
        (("wait", "--first-pass", "--hash", "x"), "", "--hash does not belong to --first-pass"),
        (("stat", "--count", "3"), "", "--interval and --count belong to -l"),
        (("stat", "--interval", "1"), "", "--interval and --count belong to -l"),
        (("apply", "--spec", "-", "--allow", ""), '{"node_name": "n1"}', "'' is not a disruption; one of none"),
        (("wait", "--let-go", "3"), "", "--let-go belongs to --first-pass"),
        (("inspect", "--as-inventory", "--as-spec"), "", "exclude each other"),
        (("inspect", "--node-name", ""), "", "--nic and --node-name belong to --as-spec and --as-inventory"),
        (("bundle", "--output", "/nonexistent/x"), "", "/nonexistent/x cannot be written: No such file"),
        (("reporter", "--listen", "x:1"), "", "'x:1' is not an address; give an IP address and a port from 0 to 65535"),
        (("reporter", "--kubernetes-secret", "/dev/null"), "", "--kubernetes and --kubernetes-secret belong together"),
        (("fleet", "maintain", "\udcff", "--inventory", "/dev/null"), "", "'\\udcff' is not the name of a Node"),
        (("fleet", "maintain", "x" * 300, "--undo"), "", "is not the name of a Node"),
        (("fleet", "report", "--prometheus", "\udcff"), "", "\\udcff is no URL of a Prometheus"),
        (("fleet", "fabric", "report", "--results", "/dev/zero"), "", "it is not a regular file"),
        (("apply", "--spec", "-", "--allow", "all"), '{"node_name": "n1"}', "'all' is not a disruption; one of none"),
        (
            ("apply", "--spec", "-"),
            '{"node_name": "n1", "nics": [{"name": "rail0", "select": {"pci": "ffff:ff:1f.7"}}]}',
            "NIC rail0 (pci=ffff:ff:1f.7) is not there",
        ),
    ],
)
def test_every_error_is_one_message_and_exit_code_1(arguments: tuple[str, ...], stdin: str, message: str) -> None:
    failed = trackbed(*arguments, stdin=stdin)
    assert failed.returncode == 1
    assert message in failed.stderr
    assert failed.stderr.startswith("trackbed: ")
    assert len(failed.stderr.splitlines()) == 1
    assert "a fault of trackbed" not in failed.stderr


def test_a_closed_standard_input_is_one_message() -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "cli", "plan", "--spec", "-"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("trackbed: stdin is closed; give ")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_command_whose_outputs_are_closed_ends_as_usual(closed: str) -> None:
    live = ("stat", "-d", "lo", "-l", "--count", "1", "--interval", "0.1")
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "cli", *live]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_that_is_full_is_one_message() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "cli", "plan", "--spec", "-"]
        failed = subprocess.run(
            command, cwd=ROOT, input='{"node_name": "n1"}', stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert failed.returncode == 1
    assert ": No space left on device" in failed.stderr


@pytest.mark.parametrize(
    "arguments",
    [("plan", "--spec"), ("reporter", "--socket"), ("fleet", "fabric", "report", "--results")],
    ids=" ".join,
)
def test_a_fifo_is_refused_and_not_waited_for(arguments: tuple[str, ...], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-m", "cli", *arguments, str(tmp_path / "fifo")]
    failed = failure(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60))
    assert "fifo" in failed
    assert "is not a regular file" in failed or "is not a socket" in failed
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e300", "soon", ""])
@pytest.mark.parametrize(
    "option",
    [
        ("wait", "--timeout"),
        ("wait", "--let-go"),
        ("apply", "--timeout"),
        ("stat", "--interval"),
        ("history", "--since"),
        ("fleet", "sweep", "--max-share"),
        ("fleet", "maintain", "n1", "--inventory", "/dev/null", "--drain-timeout"),
        ("fleet", "maintain", "n1", "--inventory", "/dev/null", "--apply-timeout"),
        ("fleet", "maintain", "n1", "--inventory", "/dev/null", "--ready-timeout"),
    ],
    ids=" ".join,
)
def test_an_invalid_number_is_refused(option: tuple[str, ...], value: str) -> None:
    *names, last = option
    refused = CliRunner().invoke(cli, [*names, f"{last}={value}"])
    assert refused.exit_code != 0
    assert f"Invalid value for '{last}': it is {value!r}; give " in refused.output


@pytest.mark.parametrize(
    ("path", "said"),
    [("-", "did you mean 'node_name'?"), ("/nonexistent", "/nonexistent: No such"), ("/", "'/' cannot"), ("", "'' ")],
)
def test_errors_of_a_plan_as_json_are_in_the_json(path: str, said: str) -> None:
    failed = trackbed("plan", "--json", "--spec", path, stdin='{"node_nam": "n1"}')
    assert (failed.returncode, failed.stderr) == (1, "")
    assert said in " ".join(json.loads(failed.stdout)["errors"])


def test_commands_that_need_a_report_name_the_remedy(tmp_path: Path) -> None:
    if Path("/run/trackbed/report.json").exists():
        pytest.skip("an agent runs on this machine")
    assert "systemctl start trackbed" in trackbed("status").stderr
    waited = trackbed("wait", "--timeout", "0.2")
    assert waited.returncode == 1
    assert "not ready after" in waited.stderr
    waited = trackbed("wait", "--timeout", "0.2", "--json")
    assert waited.returncode == 1
    assert json.loads(waited.stdout)["ready"] is False
