"""Tests the fabric between the nodes of the inventory, and records on each node which of its NICs have passed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import gevent
from attrs import field, frozen
from gevent.pool import Pool
from paramiko import SSHException
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from agent.report.fabric import RESULTS_FILE, FabricResults, NicResult, results_to_json
from agent.report.printable import printable
from agent.spec.node import NodeSpec
from fleet.fabric.collective import LAUNCHER, PROGRAMS
from fleet.fabric.ends import End, by_name
from fleet.fabric.journal import Damaged, Journal, Run, UnderWay, default_path
from fleet.fabric.runner import Nodes, Request, Runner
from fleet.fabric.tests import ALL_REDUCE, TESTS, FabricSettings
from fleet.fabric.verdict import Verdict
from tasks.common import answers
from tasks.common.archive import ROOT
from tasks.common.commands import Commands, refuse, script
from tasks.common.connection import arguments
from tasks.common.data import Key, host_data, record, this_host
from tasks.common.status import COMMAND
from tasks.common.texts import replace
from tasks.fabric.ends import FACTS, rails_of, read_ends, with_rdma
from tasks.packages import INTERPRETERS, present, system

PROGRAM = ROOT / "templates" / "fabric.py"

_RUN = """
program=$1; shift
for python; do if [ -x "$python" ]; then exec "$python" -I -c "$program"; fi; done
"""


def _floors(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not valid; give tests with their numbers, as {{'ib_write_bw': 90}}")
    units = {**{name: test.unit for name, test in TESTS.items()}, ALL_REDUCE: "Gbit/s"}
    for test, floor in value.items():
        if test not in units:
            raise ValueError(f"{test!r} is not a test; tests are {', '.join(units)}")
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 < floor < math.inf:
            raise ValueError(f"{test}: {floor!r} is not valid; give a number of {units[test]}")
    return {str(test): float(floor) for test, floor in value.items()}


FABRIC = Key("fabric", FabricSettings(), record(FabricSettings))
FLOORS: Key[dict[str, float]] = Key("fabric_floors", {}, _floors)


# --- the connection ----------------------------------------------------------------------------------------


@frozen
class Connected(Nodes):
    """Reaches the nodes by pyinfra's connections. Sends the program as an argument, and the request on standard input."""

    state: State
    hosts: Mapping[str, Host]
    program: str = field(factory=PROGRAM.read_text)

    @property
    def at_once(self) -> int:
        """What pyinfra's `--parallel` allows."""
        return int(self.state.config.PARALLEL)

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Mapping[str, Mapping[str, Any] | None]:
        """Send requests to nodes, to no more than ``at_once`` at the same time."""
        pool = Pool(self.at_once)
        asked = {node: pool.spawn(self._ask, node, request, timeout) for node, request in requests.items()}
        pool.join()
        return {node: each.value for node, each in asked.items()}

    def _ask(self, node: str, request: Request, timeout: float) -> Mapping[str, Any] | None:
        output = self.output(node, script(_RUN, self.program, *INTERPRETERS), json.dumps(request), timeout)
        try:
            answer = json.loads(output[-1]) if output else None
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def output(self, node: str, command: StringCommand, stdin: str | None, timeout: float) -> list[str] | None:
        """The lines that a command prints; None if it fails or the connection is lost."""
        asked = self.hosts[node]
        given = {**arguments(asked), "_stdin": stdin, "_timeout": int(timeout)}
        try:
            with gevent.Timeout(timeout + 10, TimeoutError("no answer")):
                done, printed, _ = answers.ask(command, partial(asked.run_shell_command, **given))
        except (OSError, EOFError, SSHException):
            return None
        return printed.stdout_lines if done else None


# --- the deploy --------------------------------------------------------------------------------------------


def prepare() -> None:
    """Install perftest, unless the inventory has a source of OFED, which brings its own."""
    if host_data().get("ofed") is None:
        present(name="perftest", names=("perftest",), family=system().family)


_verdicts: dict[State, Verdict] = {}
_absent: dict[State, Mapping[str, str]] = {}
_ends: dict[str, End] = {}
"""The verdict, the untested nodes and NICs, and the ends of this deploy's test. Each node gets its part of them."""


@deploy("Fabric")
def prove(spec: NodeSpec) -> None:
    """Test all nodes, then record on each node the results of its NICs."""
    settings, first = FABRIC.here(), _first_settings()
    if settings != first:
        raise DeployError(
            f"{host.name}.fabric: other hosts have other settings; give all hosts the same, or use --limit"
        )
    test(name="Test", settings=settings, rails=rails_of(spec), floors=FLOORS.here(), nics=with_rdma(spec))
    record_results(name="Result")


def _first_settings() -> FabricSettings:
    first = next(each for each in host.state.inventory if host.state.is_host_in_limit(each))
    return FABRIC.read(first.data.dict(), first.name)  # type: ignore[no-untyped-call]


_specs: dict[Host, tuple[Mapping[str, int], Mapping[str, float], tuple[str, ...]]] = {}


@operation()
def test(settings: FabricSettings, rails: dict[str, int], floors: dict[str, float], nics: tuple[str, ...]) -> Commands:
    """Test all nodes. Each host adds its rails, floors and NICs; the first host's turn runs the test for all of them."""
    _specs[this_host()] = (rails, floors, nics)
    yield FunctionCommand(_test, (settings,), {})


def _test(state: State, host: Host, settings: FabricSettings) -> bool:
    active = sorted(state.inventory.get_active_hosts(), key=lambda each: each.name)
    if host is not active[0]:
        return True
    connected = Connected(state, {each.name: each for each in active})
    ends, absent = _connected_ends(connected)
    selected = [each.name for each in state.inventory if state.is_host_in_limit(each)]
    absent |= {name: "it cannot be reached" for name in selected if name not in connected.hosts}
    for name, why in sorted(absent.items()):
        host.log(printable(f"fabric: {name} is not tested: {why}"))
    try:
        journal = Journal.open(default_path(), Run(tuple(ends), settings, absent, time.time()))
        if journal.results:
            host.log(f"fabric: going on with a stopped run: {len(journal.results)} tests are done")
        runner = Runner(by_name(journal.run.ends), settings, connected, journal, lambda line: host.log(printable(line)))
        _ends.update(runner.ends)
        _absent[state] = journal.run.absent
        _verdicts[state] = runner.run()
    except (Damaged, UnderWay, OSError) as error:
        host.log(printable(f"fabric: {error}"))
        return False
    host.log(f"fabric: `trackbed fleet fabric report` shows the results: {journal.path}")
    return True


def _connected_ends(connected: Connected) -> tuple[list[End], dict[str, str]]:
    """The ends of all nodes, and for each node or NIC without an end the reason."""
    pool = Pool(connected.at_once)
    command = script(FACTS, COMMAND, LAUNCHER, *PROGRAMS)
    asked = {name: pool.spawn(connected.output, name, command, None, 60.0) for name in connected.hosts}
    pool.join()
    ends: list[End] = []
    absent: dict[str, str] = {}
    for name, each in asked.items():
        try:
            made, untested = read_ends(name, each.value, *_specs[connected.hosts[name]])
            ends += made
            absent |= {f"{name}/{nic}": why for nic, why in untested.items()}
        except ValueError as error:
            absent[name] = str(error)
    return sorted(ends, key=lambda end: end.name), absent


@operation()
def record_results() -> Commands:
    """Write the results of the node's NICs to the node; fail if a NIC or one of its paths is not good."""
    verdict = _verdicts.get(host.state)
    if verdict is None:
        yield refuse("fabric: nothing was tested")
        return
    results = FabricResults(time.time(), tuple(_nic_results(verdict, host.name)))
    yield from replace({}, {RESULTS_FILE: results_to_json(results)})
    if faults := list(_faults(verdict, _absent[host.state], host.name)):
        yield refuse("\n".join(f"fabric: {line}" for line in faults))


def _nic_results(verdict: Verdict, node: str) -> Iterator[NicResult]:
    for each in verdict.ends:
        end = _ends.get(each.end)
        if end is not None and end.node == node:
            good = each.status == "good"
            yield NicResult(end.nic, end.pci, end.device, good, "" if good else each.message, dict(end.identity))


def _faults(verdict: Verdict, absent: Mapping[str, str], node: str) -> Iterator[str]:
    mine = [each for each in verdict.ends if each.end.startswith(f"{node}/")]
    if not mine:
        yield "it was not tested"
    for each in mine:
        if each.status != "good":
            yield f"{each.end} is {each.kind or each.status}: {each.message}"
    for name, why in sorted(absent.items()):
        if name.startswith(f"{node}/"):
            yield f"{name} was not tested: {why}"
    for path in verdict.paths:
        if path.client.startswith(f"{node}/"):
            yield f"from {path.client} to {path.server}: {path.message}"
    for collective in verdict.collectives:
        members = collective.group.ends
        if collective.message and any(name.startswith(f"{node}/") for name in members):
            yield f"{ALL_REDUCE} of {', '.join(members)}: {collective.message}"
