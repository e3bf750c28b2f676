"""Two virtual servers for all suites of this folder: booted and deployed once, restored from a snapshot for each test."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

# The suite's own lab: one that a person has running is left alone.
os.environ["TRACKBED_LAB"] = os.environ.get("TRACKBED_TEST_LAB", "test")

from lab import LabError, Node, fleet, logs, repository
from tests.programs import success

ROOT = Path(__file__).parent.parent.parent
FRESH = "fresh"
DEPLOYED = "deployed"
SPEC = "/etc/trackbed/node.json"
# For hangs, not for speed: emulated nodes share whatever this host has left.
DEADLINE = 300.0
STALL = re.compile(r"rcu: INFO: \w+ (?:self-)?detected|kthread (?:timer wakeup didn't happen|starved)|soft lockup")


Done = subprocess.CompletedProcess[str]


def pyinfra(*arguments: str, timeout: float = 1800) -> Done:
    """Run pyinfra as an operator does, from the project's root."""
    command = [str(Path(sys.executable).with_name("pyinfra")), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def deploy(**data: object) -> Done:
    """Deploy the first node, with these values in place of the inventory's."""
    return pyinfra("-y", "--json", "inventories/lab.py", "deploy.py", "--limit", "node1", *inventory_data(data))


def said(done: Done) -> str:
    """What a deploy printed, as one line."""
    return " ".join((done.stdout + done.stderr).split())


def succeeded(done: Done) -> Done:
    """A deploy that must have succeeded."""
    assert done.returncode == 0, said(done)
    return done


def refusal(done: Done) -> str:
    """What a deploy printed that must have failed, and without a traceback."""
    text = said(done)
    assert done.returncode != 0, text
    assert "Traceback" not in text
    return text


def changed(done: Done, names: tuple[str, ...] = ("node1",)) -> list[str]:
    """The operations that did something on one of these nodes. The deploy was run with --json, and must have succeeded."""
    operations = json.loads(succeeded(done).stdout)["results"]["operations"]
    return [operation["name"] for operation in operations if operation["no_change"] != [*names]]


def inventory_data(values: Mapping[str, object]) -> list[str]:
    """pyinfra's options that give values in place of the inventory's."""
    return [word for key, value in values.items() for word in ("--data", f"{key}={json.dumps(value)}")]


@contextmanager
def booted(count: int | None = None) -> Iterator[tuple[Node, ...]]:
    """The nodes as their image makes them, or, with TRACKBED_KEEP_LAB set, as an earlier run left them: perhaps off."""
    if not os.environ.get("TRACKBED_KEEP_LAB"):
        fleet.down()
    if not kept():
        fleet.up(count=count)
    yield fleet.nodes()
    if not os.environ.get("TRACKBED_KEEP_LAB"):
        fleet.down()


def kept() -> bool:
    """Whether this run uses the lab of an earlier run, with its snapshots."""
    if not os.environ.get("TRACKBED_KEEP_LAB"):
        return False
    try:
        return all(node.has(name) for node in fleet.nodes() for name in (FRESH, DEPLOYED))
    except LabError:
        return False


def deployed_once(nodes: tuple[Node, ...]) -> Done:
    """The deploy of fresh nodes, with snapshots before and after it. One of an earlier run is not done again."""
    if kept():
        return subprocess.CompletedProcess([], 0, "", "")
    for node in nodes:
        node.snapshot(FRESH)
    done = pyinfra("-y", "inventories/lab.py", "deploy.py")
    if done.returncode == 0:
        for node in nodes:
            settled(node)
            node.snapshot(DEPLOYED)
    return done


@pytest.fixture(scope="session")
def fresh_nodes() -> Iterator[tuple[Node, ...]]:
    """The suite's two nodes."""
    with booted() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def first_deploy(fresh_nodes: tuple[Node, ...]) -> Done:
    """The deploy of the fresh nodes; every other test starts from what it left."""
    return deployed_once(fresh_nodes)


@pytest.fixture(scope="session")
def deployed(first_deploy: Done, fresh_nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes; a snapshot of each after the first deploy exists."""
    succeeded(first_deploy)
    return fresh_nodes


@pytest.fixture
def nodes(deployed: tuple[Node, ...]) -> tuple[Node, ...]:
    """Both nodes as the first deploy left them, whatever the tests before did."""
    for node in deployed:
        node.restore(DEPLOYED)
    for node in deployed:
        wait_ready(node)
    return deployed


@pytest.fixture
def node(deployed: tuple[Node, ...]) -> Node:
    """The first of them, where one is enough."""
    deployed[0].restore(DEPLOYED)
    wait_ready(deployed[0])
    return deployed[0]


@pytest.fixture
def url(vendor: repository.Repository) -> Iterator[str]:
    """Where the nodes find the packages of a module's ``vendor``."""
    with repository.serve(vendor.folder) as served:
        yield served


def report(node: Node) -> dict[str, Any]:
    """The node's report, read from its file."""
    document: dict[str, Any] = json.loads(node.sh("cat /run/trackbed/report.json"))
    return document


def condition(node: Node, type: str) -> dict[str, Any]:
    """A condition of the report, empty if it is not there."""
    return next((each for each in report(node)["conditions"] if each["type"] == type), {})


def spec(node: Node) -> dict[str, Any]:
    """The node's spec, read from its file."""
    document: dict[str, Any] = json.loads(node.sh(f"cat {SPEC}"))
    return document


def give(node: Node, wanted: Mapping[str, Any]) -> None:
    """Replace the node's spec."""
    node.run(["sh", "-c", f"cat > {SPEC}; systemctl reload trackbed"], check=True, stdin=json.dumps(wanted))


def take_up(node: Node, wanted: Mapping[str, Any]) -> None:
    """Replace the node's spec by another one, and wait until the report is of that."""
    before = report(node)["spec_hash"]
    give(node, wanted)
    eventually("a report of the new spec", lambda: report(node)["spec_hash"] != before)


def ready(node: Node) -> bool:
    """Whether `trackbed status` says so."""
    return node.run(["trackbed", "status"]).returncode == 0


def wait_ready(node: Node, within: float = DEADLINE) -> None:
    """Wait until the node reports that it is ready, and otherwise show its reasons. The first report after a boot is slow."""
    _wait(node, within)


def wait_first_pass(node: Node) -> None:
    """Wait until the agent has verified the node once since it booted. The kubelet waits for the same."""
    _wait(node, DEADLINE, "--first-pass")


def _wait(node: Node, within: float, *options: str) -> None:
    success(node.run(["trackbed", "wait", *options, "--timeout", str(int(within))], timeout=within + 30))


def settled(node: Node) -> None:
    """Wait until the node is ready and nothing is left to change: a VF's link may still bounce once."""
    wait_ready(node)
    # On a busy host an emulated node takes more than a minute for one plan.
    eventually("an empty plan", lambda: node.run(["trackbed", "plan"], timeout=DEADLINE).returncode == 0)


def eventually(what: str, probe: Callable[[], bool], within: float = DEADLINE) -> float:
    """Wait until ``probe`` holds; the seconds that it took."""
    began = time.monotonic()
    while not probe():
        assert time.monotonic() - began < within, f"{what}: not within {within:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test once more if the emulator stopped during it: such a failure says nothing about the tested code."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    lengths = consoles()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed for report in reports) and (stalled := stalled_nodes(lengths)):
        print(f"\nthe emulated CPUs of {', '.join(stalled)} stood still; once more: {item.nodeid}")  # noqa: T201
        item._initrequest()  # type: ignore[attr-defined]  # pytest has no public way to set a test up again
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def consoles() -> dict[Path, int]:
    """How many bytes each node's console has said so far."""
    try:
        return {node.console_log: node.console_log.stat().st_size for node in fleet.nodes() if node.pid() is not None}
    except (LabError, FileNotFoundError):
        return {}


def stalled_nodes(lengths: dict[Path, int]) -> list[str]:
    """The nodes whose kernel has complained since ``said`` that a CPU did not run, or got no timer interrupts."""
    return [
        log.parent.name
        for log in consoles()
        if STALL.search(log.read_bytes()[lengths.get(log, 0) :].decode(errors="replace"))
    ]


WITH_NODES = frozenset({"fresh_nodes", "three_nodes", "fresh_cluster"})
"""The fixtures that boot nodes."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep what a failed test's nodes said, in one folder that the failure names."""
    outcome: Any = yield
    if outcome.failed and WITH_NODES.intersection(getattr(item, "fixturenames", ())):
        try:
            nodes = fleet.nodes()
        except LabError:
            return outcome  # type: ignore[no-any-return]  # there are none: they could not be made
        folder = nodes[0].folder.parent / "failures" / re.sub(r"\W+", "-", item.name)
        shutil.rmtree(folder, ignore_errors=True)
        for node in nodes:
            logs.keep(node, folder / node.name)
        outcome.sections.append(("lab", f"logs of the nodes: {folder}"))
    return outcome  # type: ignore[no-any-return]
