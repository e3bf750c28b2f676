"""Tests the fabric between the nodes of the inventory, and records on each node which of its NICs have passed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from io import StringIO
from ipaddress import ip_address
from typing import Any

import cattrs
import gevent
from attrs import field, frozen
from gevent.pool import Pool
from paramiko import SSHException
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.command import FileUploadCommand, FunctionCommand, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import ctx_host, host

from agent.report.fabric import RESULTS_FILE, FabricResults, NicResult, identity, results_to_json
from agent.report.printable import printable
from agent.spec.node import NodeSpec
from fleet.fabric.collective import LAUNCHER, PROGRAMS
from fleet.fabric.ends import OLD_SOURCE_OPTION, End, by_name
from fleet.fabric.journal import Damaged, Journal, Run, default_path
from fleet.fabric.runner import Nodes, Request, Runner
from fleet.fabric.stages import FabricSettings
from fleet.fabric.tests import ALL_REDUCE, LEAST_SECONDS, TESTS
from fleet.fabric.verdict import Verdict
from tasks.common.archive import ROOT
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, host_data, record
from tasks.common.status import COMMAND
from tasks.packages import INTERPRETERS, present, system

PROGRAM = ROOT / "templates" / "fabric.py"

LARGEST_SIZE = 1 << 30

LEAST_MESSAGES = 5
"""The fewest messages that perftest accepts (MIN_ITER in perftest_parameters.h)."""

ROUTED_GIDS = ("RoCE v2",)
"""The types of GIDs that are IP addresses by which packets are routed."""


def _settings(value: object) -> FabricSettings:
    made = record(FabricSettings)(value)
    if unknown := sorted(set(made.tests) - {*TESTS, ALL_REDUCE}):
        raise ValueError(f"tests: {unknown[0]!r} is not a test; tests are {', '.join((*TESTS, ALL_REDUCE))}")
    if not set(made.tests) & TESTS.keys():
        raise ValueError(f"tests: it has none of {', '.join(TESTS)}; leave it out for all tests")
    if not LEAST_SECONDS <= made.seconds <= 3600:
        raise ValueError(f"seconds: {made.seconds} is not valid; give {LEAST_SECONDS} to 3600")
    if not 1 <= made.grace <= 3600:
        raise ValueError(f"grace: {made.grace} is not valid; give 1 to 3600 seconds")
    for name, value, least in (
        ("size", made.size, 1),
        ("messages", made.messages, LEAST_MESSAGES),
        ("collective_size", made.collective_size, 4),
    ):
        if not least <= value <= LARGEST_SIZE:
            raise ValueError(f"{name}: {value} is not valid; give {least} to {LARGEST_SIZE}")
    if made.at_once is not None and made.at_once < 1:
        raise ValueError(f"at_once: {made.at_once} is not valid; give at least 1")
    return made


def _floors(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not valid; give a number for each of some tests")
    units = {**{name: test.unit for name, test in TESTS.items()}, ALL_REDUCE: "Gbit/s"}
    for test, floor in value.items():
        if test not in units:
            raise ValueError(f"{test!r} is not a test; tests are {', '.join(units)}")
        if isinstance(floor, bool) or not isinstance(floor, int | float) or floor <= 0:
            raise ValueError(f"{test}: {floor!r} is not valid; give a number of {units[test]}")
    return {str(test): float(floor) for test, floor in value.items()}


FABRIC = Key("fabric", FabricSettings(), _settings)
FLOORS: Key[dict[str, float]] = Key("fabric_floors", {}, _floors)
KEYS = (FABRIC, FLOORS)


# --- the ends of a node ------------------------------------------------------------------------------------

_FACTS = """
agent=$1; shift
[ -x "$agent" ] || exit 0
for program; do if command -v "$program" > /dev/null; then echo "program $program"; fi; done
if ib_send_bw --help 2>&1 | grep -q -e --bind_source_ip; then echo "source --bind_source_ip"; fi
python=$(command -v python3 || true)
if [ "$python" ] && "$python" -I -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("mpi4py"))'; then
  echo "program mpi4py"
fi
for d in /sys/bus/pci/devices/*; do
  read -r class < "$d/class"; read -r vendor < "$d/vendor"
  a=${d##*/}
  if [ -e "$d/net" ] || [ -e "$d/infiniband" ]; then
    m=$(basename "$(readlink "$d/driver/module")" 2>/dev/null || true)
    v=; if [ -e "/sys/module/$m/srcversion" ]; then read -r v < "/sys/module/$m/srcversion"; fi
    echo "cpus $a $(cat "$d/local_cpulist") ${v:-$(uname -r)}"
  fi
  case "$vendor $class" in "0x10de 0x0300"*|"0x10de 0x0302"*) echo "gpu $a $(cat "$d/numa_node")" ;; esac
done
echo inspection
"$agent" inspect --json
"""


_CPUS = re.compile("[0-9,-]+")
"""A list of CPUs in sysfs."""


class NodeEnds(dict[str, Any]):
    """The JSON of `trackbed inspect`, with ``cpus`` and ``driver_version`` by PCI address and ``gpus`` by NUMA node.

    ``programs``: the installed programs of the collective stage. ``source_option``: the option of its perftest for a client's
    own address.
    """

    @classmethod
    def parse(cls, output: list[str]) -> NodeEnds:
        """Parse what :data:`_FACTS` prints.

        :raises ValueError: the node has no agent, or the agent printed nothing.
        """
        if "inspection" not in output:
            raise ValueError("it has no agent of Trackbed; run deploy.py first")
        at = output.index("inspection")
        lines = [line.split() for line in output[:at]]
        answer = json.loads("\n".join(output[at + 1 :]))
        answer["cpus"] = {line[1]: line[2] for line in lines if len(line) == 4 and _CPUS.fullmatch(line[2])}
        answer["driver_version"] = {line[1]: line[-1] for line in lines if line[0] == "cpus"}
        answer["programs"] = sorted(line[1] for line in lines if line[0] == "program")
        answer["source_option"] = next((line[1] for line in lines if line[0] == "source"), OLD_SOURCE_OPTION)
        answer["gpus"] = {line[2]: line[1] for line in reversed(lines) if line[0] == "gpu"}
        return cls(answer)


def read_ends(node: str, printed: list[str] | None, rails: Mapping[str, int], floors: Mapping[str, float]) -> list[End]:
    """The ends of a node, from what :data:`_FACTS` printed; None: the command failed.

    :raises ValueError: it cannot be read. Root on a node can answer anything, and so excludes only this node.
    """
    if printed is None:
        raise ValueError("its NICs cannot be read")
    try:
        made = ends_of(node, NodeEnds.parse(printed), rails, floors)
    except (LookupError, TypeError, AttributeError, RecursionError, cattrs.BaseValidationError) as error:
        raise ValueError(f"its NICs cannot be read: {type(error).__name__} in its answer") from None
    if not made:
        raise ValueError("no NIC of its spec has an RDMA device with an active port and an IP address")
    return made


def ends_of(node: str, facts: Mapping[str, Any], rails: Mapping[str, int], floors: Mapping[str, float]) -> list[End]:
    """The ends of a node. A NIC's end is the RDMA device of its PF, or of the first VF with an address if the PF has none."""
    owned = []
    for function in facts["functions"]:
        nic = function["nic"]
        if nic is None:
            continue
        for owner in (function, *function["vfs"]):
            if (end := _end(node, nic, owner, facts)) is not None:
                owned.append((end, owner))
                break
    ordered = sorted(owned, key=lambda each: each[0].pci)
    return [
        cattrs.structure({**cattrs.unstructure(end), "rail": rails.get(end.nic, place), "floors": dict(floors)}, End)
        for place, (end, _) in enumerate(ordered)
    ]


def _end(node: str, nic: str, owner: Mapping[str, Any], facts: Mapping[str, Any]) -> End | None:
    """The end of a function; None if it has no RDMA device with an active port and an address."""
    for device in owner["rdma"]:
        for port in device["ports"]:
            reached = _address(device, port, owner)
            if port["state"] != "ACTIVE" or reached is None:
                continue
            address, gid = reached
            return End(
                node=node,
                nic=nic,
                rail=0,
                group=f"{owner['vendor']}:{owner['device']} {port['rate'] or ''}".strip(),
                pci=owner["address"],
                device=device["name"],
                port=port["number"],
                netdev=port["netdev"] or "",
                address=address,
                gid_index=gid,
                cpus=facts["cpus"].get(owner["address"], ""),
                gpu=facts["gpus"].get(str(owner["numa_node"])),
                programs=tuple(facts["programs"]),
                source_option=facts["source_option"],
                identity=identity(
                    owner["driver"],
                    facts["driver_version"].get(owner["address"]),
                    device["firmware"],
                    device["node_guid"],
                    port["link_layer"],
                    port["rate"],
                ),
            )
    return None


def _address(
    device: Mapping[str, Any], port: Mapping[str, Any], owner: Mapping[str, Any]
) -> tuple[str, int | None] | None:
    """The IP address of a port, and on RoCE the index of its GID. IPv4 is preferred, as perftest uses it by default."""
    gids = [gid for gid in port["gids"] if gid["type"] in ROUTED_GIDS and not gid["address"].startswith("fe80:")]
    if device["transport"] == "RoCE":
        best = min(gids, key=lambda gid: (":" in gid["address"], gid["index"]), default=None)
        return (_plain(best["address"]), best["index"]) if best else None
    addresses = [each.partition("/")[0] for netdev in owner["netdevs"] for each in netdev["addresses"]]
    usable = [each for each in addresses if not each.startswith("fe80:")]
    return (_plain(min(usable, key=lambda each: ":" in each)), None) if usable else None


def _plain(address: str) -> str:
    """The address in its usual form. It is checked, since it goes onto command lines and into files of other nodes.

    :raises ValueError: it is not an IP address, or it has a scope, which may be any text.
    """
    if "%" in address:
        raise ValueError(f"{address[:60]!r} is an address with a scope")
    return str(ip_address(address))


def _rails(spec: NodeSpec) -> dict[str, int]:
    """The rails that the spec gives, by the names of the NICs."""
    return {nic.name: nic.rail for nic in spec.nics if isinstance(nic.rail, int)}


# --- the connection ----------------------------------------------------------------------------------------


@frozen
class Connected(Nodes):
    """Reaches the nodes by pyinfra's connections. Sends the program as an argument, and the request on standard input."""

    state: State
    hosts: Mapping[str, Host]
    program: str = field(factory=PROGRAM.read_text)

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Mapping[str, Mapping[str, Any] | None]:
        """Send requests to nodes, to no more at once than pyinfra's `--parallel` allows."""
        pool = Pool(self.state.config.PARALLEL)
        asked = {node: pool.spawn(self._ask, node, request, timeout) for node, request in requests.items()}
        pool.join()
        return {node: each.value for node, each in asked.items()}

    def _ask(self, node: str, request: Request, timeout: float) -> Mapping[str, Any] | None:
        find = 'for python; do if [ -x "$python" ]; then exec "$python" -I -c "$program"; fi; done'
        output = self.output(
            node, script(f"program=$1; shift; {find}", self.program, *INTERPRETERS), json.dumps(request), timeout
        )
        try:
            answer = json.loads(output[-1]) if output else None
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def output(self, node: str, command: StringCommand, stdin: str | None, timeout: float) -> list[str] | None:
        """The lines that a command prints; None if it fails or the connection is lost."""
        asked = self.hosts[node]
        with ctx_host.use(asked):
            arguments, _ = pop_global_arguments(self.state, asked, {})
        given = {key: arguments[key] for key in CONNECTOR_ARGUMENT_KEYS if key in arguments}  # type: ignore[literal-required]
        given |= {"_stdin": stdin, "_timeout": int(timeout)}
        try:
            with gevent.Timeout(timeout + 10, TimeoutError("no answer")):
                done, printed = asked.run_shell_command(command, **given)
        except (OSError, EOFError, SSHException):
            return None
        return printed.stdout_lines if done else None


# --- the deploy --------------------------------------------------------------------------------------------


def prepare() -> None:
    """Install perftest, unless the inventory has a source of OFED, which brings its own."""
    if host_data().get("ofed") is None:
        present(name="perftest", names=("perftest",), family=system().family)


_verdicts: dict[State, Verdict] = {}
_ends: dict[str, End] = {}
"""The verdict and the ends of this deploy's test. Each node gets its part of them."""


@deploy("Fabric")
def prove(spec: NodeSpec) -> None:
    """Test all nodes, then record on each node the results of its NICs."""
    settings, first = FABRIC.here(), _first_settings()
    if settings != first:
        raise DeployError(f"{host.name}.fabric: other hosts have other settings; give all hosts the same")
    test(name="Test", settings=settings, rails=_rails(spec), floors=FLOORS.here())
    record_results(name="Result")


def _first_settings() -> FabricSettings:
    first = next(iter(host.state.inventory))
    return FABRIC.read(first.data.dict(), first.name)  # type: ignore[no-untyped-call]


_specs: dict[Host, tuple[Mapping[str, int], Mapping[str, float]]] = {}


@operation()
def test(settings: FabricSettings, rails: dict[str, int], floors: dict[str, float]) -> Commands:
    """Test all nodes. Each host adds its rails and floors; the first host's turn runs the test for all of them."""
    _specs[host.state.inventory.get_host(host.name)] = (rails, floors)
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
        _verdicts[state] = runner.run()
    except (Damaged, OSError) as error:
        host.log(printable(f"fabric: {error}"))
        return False
    host.log(f"fabric: `trackbed fleet fabric report` shows the results: {journal.path}")
    return True


def _connected_ends(connected: Connected) -> tuple[list[End], dict[str, str]]:
    """The ends of all nodes, and for each node without ends the reason."""
    pool = Pool(connected.state.config.PARALLEL)
    command = script(_FACTS, COMMAND, LAUNCHER, *PROGRAMS)
    asked = {name: pool.spawn(connected.output, name, command, None, 60.0) for name in connected.hosts}
    pool.join()
    ends: list[End] = []
    absent: dict[str, str] = {}
    for name, each in asked.items():
        try:
            ends += read_ends(name, each.value, *_specs[connected.hosts[name]])
        except ValueError as error:
            absent[name] = str(error)
    return sorted(ends, key=lambda end: end.name), absent


# The rename shows the agent the old file or the new one.
_RECORD = 'chmod 644 "$1.new"; mv -T "$1.new" "$1"'


@operation()
def record_results() -> Commands:
    """Write the results of the node's NICs to the node; fail if a NIC or one of its paths is not good."""
    verdict = _verdicts.get(host.state)
    if verdict is None:
        yield refuse("fabric: nothing was tested")
        return
    results = FabricResults(time.time(), tuple(_nic_results(verdict, host.name)))
    new = f"{RESULTS_FILE}.new"
    yield FileUploadCommand(StringIO(results_to_json(results)), new, remote_temp_filename=host.get_temp_filename(new))
    yield script(_RECORD, RESULTS_FILE)
    if faults := list(_faults(verdict, host.name)):
        yield refuse("\n".join(f"fabric: {line}" for line in faults))


def _nic_results(verdict: Verdict, node: str) -> Iterator[NicResult]:
    for each in verdict.ends:
        end = _ends.get(each.end)
        if end is not None and end.node == node:
            good = each.status == "good"
            yield NicResult(end.nic, end.pci, end.device, good, "" if good else each.message, dict(end.identity))


def _faults(verdict: Verdict, node: str) -> Iterator[str]:
    mine = [each for each in verdict.ends if each.end.startswith(f"{node}/")]
    if not mine:
        yield "it was not tested"
    for each in mine:
        if each.status != "good":
            yield f"{each.end} is {each.kind or each.status}: {each.message}"
    for path in verdict.paths:
        if path.client.startswith(f"{node}/"):
            yield f"from {path.client} to {path.server}: {path.message}"
    for collective in verdict.collectives:
        members = collective.group.ends
        if collective.message and any(name.startswith(f"{node}/") for name in members):
            yield f"{ALL_REDUCE} of {', '.join(members)}: {collective.message}"
