"""The whole deploy through pyinfra's command line, as an operator runs it."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.report.records import Report
from agent.spec.node import spec_hash, to_json
from tasks import node_spec
from tasks.common import archive
from tasks.common import status as tasks_status
from tasks.common.texts import HEADER
from tasks.host import kernel_modules
from tasks.kubernetes import reporter
from tasks.original_state import Recorded
from tasks.reboot import NodeRebootRequests
from tests.deploy import fake
from tests.deploy.conftest import DEBIAN, PYTHON, Answers, file_answers, of, status
from tests.deploy.kubernetes.test_reporter import LOOPBACK
from tests.deploy.packages.test_packages import DEB
from tests.deploy.systems import dpkg
from tests.deploy.test_agent import BASE, FILES, NEW, service, versions
from tests.deploy.test_node_spec import ABSENT, COUNT, STUCK, plan
from tests.programs import failure, success

DATA: dict[str, Any] = {"node_name": "node-a", "kernel_modules": ["igbvf"]}
SPEC = node_spec.node_spec({"node_name": "node-a"}, "node-a")
REPORT = Report("node-a", spec_hash(SPEC), "boot", NEW, ready=True, up_to_date=True)
# No reboot request, and no limits.
QUIET: Answers = {of(NodeRebootRequests): ["boot-1"], "LimitMEMLOCK": ["logins"]}
SETTLED = {
    **BASE,
    **QUIET,
    of(Recorded): ["here"],
    **dpkg(*DEB),
    **file_answers(kernel_modules.AT_BOOT, f"{HEADER}igbvf\n"),
    **FILES,
    **versions(NEW, NEW),
    **service(NEW),
    **status(REPORT),
    **file_answers(tasks_status.SPEC, to_json(SPEC)),
    **plan(version=NEW),
    **file_answers(reporter.UNIT_FILE, LOOPBACK),
}
FRESH = {**QUIET, **DEBIAN, "uname -m": "x86_64", **ABSENT, PYTHON: ""}


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    return tmp_path / "fleet.py"


def fleet(**hosts: tuple[Answers, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Hosts with their answers, and their data beside DATA."""
    return [(f"@fake/{name}", {**DATA, "fake_responses": answers, **data}) for name, (answers, data) in hosts.items()]


def pyinfra(
    inventory: Path, *options: str, **hosts: tuple[Answers, dict[str, Any]]
) -> subprocess.CompletedProcess[str]:
    return deployed(inventory, fleet(**hosts), *options)


def deployed(inventory: Path, hosts: object, *options: str) -> subprocess.CompletedProcess[str]:
    """Deploy to an inventory of these hosts."""
    return fake.pyinfra(fake.inventory(inventory, hosts), "deploy.py", *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "there is no terminal to answer pyinfra's question; give -y"),
        (["--dry", "-y"], "--dry with -y prints no changes; leave out -y"),
        (["--data", "mode"], "--data 'mode' has no value; give it as --data key=value"),
        (["--parallel", "-1"], "--parallel -1 is no number of hosts"),
        (["--parallel", "0"], "--parallel 0 is no number of hosts"),
        (["-y", "--no-wait"], "with --no-wait pyinfra ends with 0 although operations have failed; leave it out"),
        (["-y", "--limit", "typo"], "--limit and --exclude leave no host of the inventory"),
        (["-y", "--exclude", "@fake/*"], "--limit and --exclude leave no host of the inventory"),
    ],
)
def test_options_with_which_pyinfra_would_do_something_else_or_nothing_are_one_error(
    inventory: Path, options: list[str], said: str
) -> None:
    done = pyinfra(inventory, *options, a=(FRESH, {}))
    assert done.returncode == 1
    assert said in " ".join(done.stderr.split())
    assert not re.search("Traceback|exception|EOFError|Connecting to hosts|error in /", done.stderr)


def test_an_error_of_pyinfra_names_no_line_of_trackbed(inventory: Path) -> None:
    # The host answers nothing.
    done = deployed(inventory, [("@fake/a", {"node_name": "a"})], "--dry")
    assert done.stderr.rstrip().endswith("\n--> pyinfra error: No hosts remaining!")


def test_a_dry_run_for_a_program_needs_no_answer(inventory: Path) -> None:
    assert pyinfra(inventory, "--dry", "-y", "--json", a=(FRESH, {})).returncode == 0


def test_the_faults_of_all_hosts_are_named_at_once_and_one_of_their_group_once(inventory: Path) -> None:
    rails = {"nics": [{"name": "rail0", "select": {"pci": "0000:18:00.0"}, "mtu": "9000"}]}
    wrong = {name: (FRESH, {**rails, "node_name": name, "node_number": name[-1]}) for name in ("a1", "b2", "c3")}
    done = pyinfra(inventory, "--dry", "--limit", "@fake/[ab]?", **wrong)
    assert done.returncode == 1
    assert done.stderr.partition("--> pyinfra error: @fake/a1.")[2].split("\n@fake/") == [
        'nics[0].mtu: "9000" is not a whole number; write digits, without quotes (on 2 hosts)',
        'a1.node_number: "1" is not a whole number; write digits, without quotes',
        'b2.node_number: "2" is not a whole number; write digits, without quotes\n',
    ]


def test_a_dry_run_without_a_terminal_shows_the_other_hosts_if_one_is_away(inventory: Path) -> None:
    # Nothing listens there.
    away = ("127.0.0.1", {"ssh_port": 1, "node_name": "away"})
    said = failure(deployed(inventory, [away, *fleet(a=(FRESH, {}))], "--dry"))
    assert "[@fake/a] plan: unknown until" in said
    assert "continue?" not in said and "exception" not in said


def test_ctrl_d_at_the_question_is_one_error_and_nothing_is_done(inventory: Path) -> None:
    fake.inventory(inventory, fleet(a=(FRESH, {})))
    ours, theirs = pty.openpty()
    # A terminal turns this byte into the end of input, also if it is there before the question.
    os.write(ours, b"\x04")
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", str(inventory), "deploy.py"],
        cwd=archive.ROOT, stdin=theirs, capture_output=True, text=True, check=False,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 1
    assert "no answer (Ctrl-D)" in done.stderr
    assert "exception" not in done.stderr and "Beginning operation run" not in done.stderr


FAILING = """
from pyinfra.context import host
from pyinfra.operations import server
from tasks.common.commands import refuse
from pyinfra.api.operation import operation


@operation()
def first():
    if host.data.site_fails:
        yield refuse("failed")


first()
server.shell(name="second", commands=["true"])
"""


def test_a_second_run_changes_nothing(inventory: Path) -> None:
    results = json.loads(success(pyinfra(inventory, "--json", "-y", a=(SETTLED, {}))))["results"]
    changed = [operation["name"] for operation in results["operations"] if operation["no_change"] != ["@fake/a"]]
    assert changed == []
    assert results["totals"]["no_change"] == len(results["operations"]) >= 9


def test_a_dry_run_shows_the_plan(inventory: Path) -> None:
    answers = {**SETTLED, **ABSENT, **plan(COUNT, STUCK, version=NEW)}
    done = pyinfra(inventory, "--dry", a=(answers, {}))
    assert done.returncode == 0, done.stderr
    made, stuck, total, blocked = re.findall("plan: (.*)", done.stderr)
    assert (made.partition("  ")[0], stuck) == (str(COUNT), str(STUCK))
    assert "2 to change" in total and f"{STUCK}: {STUCK.blocker}; {STUCK.remedy}" in blocked


@pytest.mark.parametrize("staged", [False, True])
def test_a_dry_run_of_an_upgrade_names_both_versions_and_the_changes(inventory: Path, staged: bool) -> None:
    old = "0.9.0-0123456789ab"
    on_node = {**versions(old, old, *([NEW] if staged else [])), **service(old), **plan(version=NEW if staged else old)}
    done = pyinfra(inventory, "--dry", a=({**SETTLED, **on_node}, {}), b=(SETTLED, {}))
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stderr.splitlines()]
    assert [line for line in lines if " -> " in line] == [f"[@fake/a] agent: {old} -> {NEW}"]
    assert (f"[@fake/a] plan: made by agent {old}, which is on the node" in lines) == (not staged)
    changed = {line.partition("  ")[0] for line in lines if "1 (@fake/a)" in line}
    upgraded = {"Agent | Stage", "Agent | Switch", "Agent | Service", "Reporter | Service"}
    assert changed == upgraded - ({"Agent | Stage"} if staged else set())


def test_a_dry_run_on_a_fresh_node_shows_the_first_operations(inventory: Path) -> None:
    done = pyinfra(inventory, "--dry", "--json", a=(FRESH, {}))
    assert done.returncode == 0, done.stderr
    assert "plan: unknown until" in done.stderr
    changes = [operation["name"] for operation in json.loads(done.stdout)["plan"] if operation["hosts_with_change"]]
    assert changes == [
        "Original state",
        "Base packages",
        "Kernel modules at boot",
        "Agent | Stage",
        "Spec | Plan and write",
        "Agent | Switch",
        "Agent | Command",
        "Agent | Unit",
        "Agent | Service",
        "Reporter | Unit",
        "Reporter | Service",
        "Ready",
    ]


@pytest.mark.parametrize("options", [["--dry"], ["-y"]])
def test_bad_data_is_one_message_before_any_node_is_touched(inventory: Path, options: list[str]) -> None:
    bad = {"nics": [{"name": "fabric0", "select": {"pci": "1:0"}}]}
    said = failure(pyinfra(inventory, *options, a=(SETTLED, {}), b=(SETTLED, bad)))
    assert "@fake/b.nics[0].select: pci: '1:0'" in said
    assert "Starting operation" not in said


def test_a_path_of_no_inventory_is_one_error() -> None:
    said = failure(fake.pyinfra("~/fleet/inventories/absent.py", "deploy.py", "--dry"))
    assert "~/fleet/inventories/absent.py is neither" in said
    assert "give the path of an inventory's file" in said


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ('[("@fake/a", "hunter2")]', "hosts: the entry of '@fake/a' is not a name and a mapping"),
        (
            '["@fake/a"]\nRAILS = {"rail0": {"mtu": 9000}}\nVLANS = {1, 2}\ncluster = {"server": "https://10.0.0.1"}\n'
            'storage = {"@fake/b": {}}',
            "fleet.py: storage: it is a dict",
        ),
        ('["@fake/a"]\nPORTS = (1, 2)', "a value that is no group begins with _"),
        ("[]", "the inventory has no hosts"),
        ('["@fake/b", ("@fake/a", {"ssh_usr": "admin"})]', "@fake/a: unknown key 'ssh_usr'; did you mean 'ssh_user'?"),
    ],
)
def test_an_inventory_that_pyinfra_would_misread_is_one_message_before_any_host_is_connected_to(
    inventory: Path, hosts: str, message: str
) -> None:
    said = failure(deployed(inventory, hosts, "-y"))
    assert message in said
    assert "Connecting" not in said
    assert "exception" not in said
    assert "hunter2" not in said


def test_a_node_that_fails_does_not_stop_the_others(inventory: Path) -> None:
    objects = {**SETTLED, **ABSENT, **plan(STUCK, version=NEW)}
    done = pyinfra(inventory, "--json", "-y", a=(SETTLED, {}), b=(objects, {}))
    assert done.returncode == 1
    results = json.loads(done.stdout)["results"]
    assert results["failed_hosts"] == ["@fake/b"]
    assert "it offers 7 VFs at most" in done.stderr
    by_name = {operation["name"]: operation for operation in results["operations"]}
    assert by_name["Ready"]["no_change"] == ["@fake/a"]


@pytest.mark.parametrize(
    ("hosts", "options", "stops"), [(3, [], False), (11, [], False), (3, ["--fail-percent", "10"], True)]
)
def test_a_single_node_that_fails_stops_the_others_only_if_the_operator_says_so(
    tmp_path: Path, hosts: int, options: list[str], stops: bool
) -> None:
    made = {f"h{number}": {"site_fails": not number} for number in range(hosts)}
    said = failure(fake.deployed(tmp_path, made, FAILING, *options))
    assert ("Starting operation: second" in said) == (not stops)
    assert ("hosts failed" in said) == stops
