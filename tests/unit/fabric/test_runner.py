"""A run of the fabric's test: templates/fabric.py on three "nodes" of this machine, with programs like perftest's."""

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field

from fleet.fabric import launch, runner
from fleet.fabric.ends import End, Ends, by_name
from fleet.fabric.journal import Damaged, Journal, Run, UnderWay
from fleet.fabric.results import FabricResult
from fleet.fabric.runner import Request, Runner
from fleet.fabric.tests import FabricSettings
from fleet.fabric.verdict import Verdict

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SETTINGS = FabricSettings(tests=("ib_write_bw",), seconds=3, across_rails=False)

# Listens or connects as perftest does, and prints its table. The device's name says what is wrong with it.
PERFTEST = """\
#!{python}
import socket, sys, time
words = sys.argv[1:]
device, port = words[words.index("-d") + 1], int(words[words.index("-p") + 1])
is_client = words[-1].startswith("127.")
if device == "absent":
    sys.exit(" Unable to find the Infiniband/RoCE device")
if is_client:
    with socket.create_connection((words[-1], port)) as peer:
        peer.sendall(device.encode())
        peer.shutdown(socket.SHUT_WR)
        server = peer.recv(100).decode()
    if "blocked" in (device, server):
        sys.exit(" Completion with error at client\\n Failed status 12: wr_id 0 syndrom 0x0")
    print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
    print(f" 65536      664644           0.00               {{30.0 if device == 'slow' else 100.0:.2f}}      0.2")
else:
    address = words[words.index("-x") + 1]
    with socket.create_server((f"127.0.0.{{address}}", port)) as made:
        peer, _ = made.accept()
        with peer:
            peer.recv(100)
            peer.sendall(device.encode())
    if device == "one-sided":
        sys.exit(" Completion with error at server")
"""

# Listens as sshd would for the first node, by the files that it is given.
SSHD = r"""#!PYTHON
import pathlib, socket, sys
words = dict(line.split(" ", 1) for line in pathlib.Path(sys.argv[-1]).read_text().splitlines())
if words["ListenAddress"].startswith("DEAD"):
    sys.exit("Cannot bind any address.")
assert pathlib.Path(words["HostKey"]).stat().st_mode & 0o077 == 0 and pathlib.Path(words["AuthorizedKeysFile"]).exists()
with socket.create_server((words["ListenAddress"], int(words["Port"]))) as made:
    while True:
        made.accept()[0].close()
"""

# Reaches all sshds as mpirun does by ssh, then says what the program says.
MPIRUN = r"""#!PYTHON
import pathlib, re, socket, sys
words = sys.argv[1:]
config = pathlib.Path(words[words.index("plm_rsh_agent") + 1].split()[2]).read_text()
for file in re.findall(r"(?:IdentityFile|UserKnownHostsFile) (/\S+)", config):
    assert pathlib.Path(file).stat().st_mode & 0o077 == 0
for address, port in re.findall(r"Host (127\S+)\n  Port (\d+)", config):
    socket.create_connection((address, int(port))).close()
print("# Size       Avg Latency(us)")
print(words[words.index("-m") + 1].split(":")[0], "LATENCY")
sys.exit(STATUS)
"""


@define
class Local:
    """Nodes that are folders of this machine. ``dies``: by node, the number of the request from which on it does not answer."""

    folder: Path
    dies: dict[str, int] = field(factory=dict)
    asked: dict[str, int] = field(factory=dict)
    stop_after: int | None = None
    at_once: int = 64

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Mapping[str, Mapping[str, Any] | None]:
        return {node: self._ask(node, request, timeout) for node, request in requests.items()}

    def _ask(self, node: str, request: Request, timeout: float) -> Mapping[str, Any] | None:
        self.asked[node] = self.asked.get(node, 0) + 1
        if self.stop_after is not None and sum(self.asked.values()) > self.stop_after:
            raise KeyboardInterrupt
        if self.asked[node] > self.dies.get(node, 1 << 30):
            return None
        done = subprocess.run(
            [sys.executable, "-I", str(ROOT / "templates" / "fabric.py")],
            input=json.dumps(request),
            env={"PATH": f"{self.folder}:{os.environ['PATH']}", "TRACKBED_FABRIC": str(self.folder / node)},
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "ib_write_bw"
    program.write_text(PERFTEST.format(python=sys.executable))
    program.chmod(0o755)
    # A port of this test's own.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    monkeypatch.setattr(runner, "PORT", 21000 + 50 * worker)
    return tmp_path


def fleet(nodes: Sequence[str] = "abc", **devices: str) -> Ends:
    """Nodes of one rail, by default named by a letter each. The GID index is the last number of the end's loopback address."""
    ends = [
        End(n, "fab0", 0, "x", device="fine", address=f"127.0.0.{i}", gid_index=i, programs=("mpirun", "osu_allreduce"))
        for i, n in enumerate(nodes, 2)
    ]
    return by_name(tuple(evolve(end, device=devices.get(end.node, "fine")) for end in ends))


def journal(folder: Path, ends: Ends, settings: FabricSettings = SETTINGS) -> Journal:
    return Journal.open(folder / "results.jsonl", Run(tuple(ends.values()), settings, {}, 1.0))


def run(
    folder: Path, ends: Ends, nodes: Local, settings: FabricSettings = SETTINGS
) -> tuple[Verdict, list[FabricResult]]:
    kept = journal(folder, ends, settings)
    said = Runner(ends, settings, nodes, kept, lambda line: None).run()
    assert Journal.read(kept.path).results == kept.results
    assert Journal.read(kept.path).collectives == kept.collectives
    return said, kept.results


def bad(said: Verdict) -> dict[str, tuple[str, str]]:
    return {each.end: (each.status, each.kind) for each in said.ends if each.status != "good"}


@pytest.mark.parametrize(
    ("device", "fault", "kind"),
    [("blocked", "client", "blocked"), ("absent", "no-server", "blocked"), ("one-sided", "server", "blocked")],
)
def test_an_end_that_fails_is_a_result_and_is_blamed(programs: Path, device: str, fault: str, kind: str) -> None:
    said, results = run(programs, fleet(b=device), Local(programs))
    assert bad(said) == {"b/fab0": ("bad", kind)}
    assert any(result.fault == fault and "b/fab0" in (result.server, result.client) for result in results)
    assert all(result.value == 100.0 for result in results if "b/fab0" not in (result.server, result.client))


def test_an_end_that_sends_slowly_is_blamed(programs: Path) -> None:
    said, _ = run(programs, fleet(c="slow"), Local(programs))
    assert bad(said) == {"c/fab0": ("bad", "slow")}
    assert "30%" in next(each.message for each in said.ends if each.end == "c/fab0")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of the program that runs on a node, with a folder of their own."""
    monkeypatch.setenv("TRACKBED_FABRIC", str(tmp_path))
    return runpy.run_path(str(ROOT / "templates" / "fabric.py"))


@pytest.mark.slow  # the other client must end in time, also on a busy machine
def test_a_node_answers_although_a_client_does_not_end(
    node: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a client leaves behind keeps its output open, as a client does that the kernel does not let go.
    lasting = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid"]
    jobs = [
        {"id": "a b", "argv": lasting, "port": 1, "seconds": 10},
        {"id": "c d", "argv": ["echo", "fine"], "port": 2, "seconds": 10},
    ]
    monkeypatch.setitem(node["measure"].__globals__, "KILLED", 0.1)
    try:
        assert node["measure"](jobs) == {
            "a b": [124, "it has not ended although its time is over"],
            "c d": [0, "fine\n"],
        }
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


def test_a_server_that_prints_bytes_that_are_no_text_is_a_result(node: dict[str, Any]) -> None:
    job = {"id": "a b", "argv": ["printf", r"caf\351"], "port": 1, "seconds": 60, "rdma_cm": False}
    assert node["serve"]([job]) == {"a b": "exit status 0: caf\ufffd"}


def test_another_programs_port_is_not_taken_for_that_of_the_server(node: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        listens = f"import socket\ntry:\n socket.create_server(('', {port}))\nexcept OSError as e:\n exit(e.strerror)"
        argv = [sys.executable, "-I", "-c", listens]
        answers = node["serve"]([{"id": "a b", "argv": argv, "port": port, "seconds": 60, "rdma_cm": False}])
    assert answers["a b"].startswith("exit status 1: Address already in use")


def test_a_server_that_a_stopped_run_has_left_is_not_taken_for_another_program(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listens = f"import socket\nwith socket.create_server(('127.0.0.1', {port})) as made:\n while True: made.accept()[0].close()"
    argv = [sys.executable, "-I", "-c", listens]
    job = {"id": "a b", "argv": argv, "port": port, "seconds": 60, "rdma_cm": False, "ends": False}
    try:
        assert node["serve"]([job]) == {"a b": ""}
        # However short this is, the next server must listen before its client is started.
        monkeypatch.setitem(node["serve"].__globals__, "UP", 0.0)
        assert node["serve"]([job]) == {"a b": ""}
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        node["collect"]([job])


@define
class Lying(Local):
    """Nodes of which ``b`` answers what it likes: ``says`` gets its true answer and all that was asked for."""

    says: Callable[[dict[str, Any], Mapping[str, Request]], Any] = field(kw_only=True)

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Mapping[str, Mapping[str, Any] | None]:
        answers = dict(super().ask(requests, timeout))
        return {**answers, "b": self.says(dict(answers["b"] or {}), requests)} if "b" in answers else answers


def test_a_node_answers_for_its_own_tests_alone(programs: Path) -> None:
    def says(answer: dict[str, Any], requests: Mapping[str, Request]) -> Any:
        others = [job["id"] for node, request in requests.items() if node != "b" for job in request["jobs"]]
        made_up: Any = "no" if requests["b"]["do"] == "serve" else [1, "no"]
        return {**dict.fromkeys(others, made_up), **answer}

    # Of four nodes, two pairs are tested at the same time.
    said, results = run(programs, fleet("abcd"), Lying(programs, says=says))
    assert said.proven
    assert {result.value for result in results} == {100.0}


@pytest.mark.parametrize("made_up", [5, [], [1], [0, 5], ["0", ""], [None, None], {"a": 1}, None, [0, "", 1]])
def test_a_node_that_answers_nonsense_is_lost_and_the_others_are_tested(programs: Path, made_up: Any) -> None:
    def says(answer: dict[str, Any], requests: Mapping[str, Request]) -> Any:
        return dict.fromkeys(answer, made_up)

    said, results = run(programs, fleet(), Lying(programs, says=says))
    assert bad(said) == {"b/fab0": ("lost", "")}
    assert {result.value for result in results if "b/fab0" not in (result.server, result.client)} == {100.0}


def test_a_node_that_is_lost_half_way_is_a_result(programs: Path) -> None:
    said, results = run(programs, fleet(), Local(programs, dies={"b": 3}))
    assert bad(said) == {"b/fab0": ("lost", "")}
    lost = [result for result in results if result.fault == "lost"]
    assert lost and {result.text for result in lost} == {"b"}
    assert said.finished and not said.proven


def test_a_stopped_run_goes_on_and_repeats_no_test(programs: Path) -> None:
    ends = fleet(b="blocked")
    with pytest.raises(KeyboardInterrupt):
        run(programs, ends, Local(programs, stop_after=12))
    path = programs / "results.jsonl"
    before = Journal.read(path).results
    assert 0 < len(before) < 6
    # A power cut may leave half a line.
    with path.open("a") as file:
        file.write('{"result":{"sta')
    said, results = run(programs, ends, Local(programs))
    assert results[: len(before)] == before
    assert len({result.key for result in results}) == len(results)
    assert bad(said) == {"b/fab0": ("bad", "blocked")}


def test_a_finished_run_is_kept_beside_the_next_one(programs: Path) -> None:
    run(programs, fleet(), Local(programs))
    _, results = run(programs, fleet(), Local(programs))
    assert len(results) == 6
    assert len(list(programs.glob("results*.jsonl"))) == 2


OPENS = """
import sys
from pathlib import Path
from tests.unit.fabric.test_runner import fleet, journal
journal(Path(sys.argv[1]), fleet(sys.argv[2]))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("nodes", ["abc", "de"])
def test_a_second_run_at_the_same_time_is_refused_and_leaves_the_first_one_its_file(tmp_path: Path, nodes: str) -> None:
    command = [sys.executable, "-c", OPENS, str(tmp_path), "abc"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout and first.stdout.readline() == "open\n"
        with pytest.raises(UnderWay, match=r"another test is under way, and writes to .*results\.jsonl; wait"):
            journal(tmp_path, fleet(nodes))
        assert Journal.read(tmp_path / "results.jsonl").run.ends == tuple(fleet("abc").values())
        first.kill()
    assert journal(tmp_path, fleet(nodes)).run.ends == tuple(fleet(nodes).values())


@pytest.mark.parametrize(("key", "value"), [("test", "ib_new_bw"), ("server", "zz/rail0")])
def test_a_result_that_this_version_cannot_place_is_named_with_its_line(programs: Path, key: str, value: str) -> None:
    run(programs, fleet(), Local(programs))
    path = programs / "results.jsonl"
    lines = path.read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith('{"result"'))
    lines[number] = json.dumps({"result": {**json.loads(lines[number])["result"], key: value}})
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(Damaged, match=f"line {number + 1}, cannot be read"):
        Journal.read(path)


@define
class Many:
    """Nodes that are asked in turn, by a clock of their own: a server starts in 3 s, a client measures in 6."""

    at_once: int = 1
    now: float = 0.0
    until: dict[str, float] = field(factory=dict)

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Mapping[str, Mapping[str, Any] | None]:
        return {node: self._answers(request) for node, request in requests.items()}

    def _answers(self, request: Request) -> dict[str, Any]:
        self.now += {"serve": 3.0, "measure": 6.0, "collect": 1.0}[request["do"]]
        return {job["id"]: self._answer(request["do"], job) for job in request["jobs"]}

    def _answer(self, do: str, job: Mapping[str, Any]) -> Any:
        if do == "serve":
            self.until[job["id"]] = self.now + job["seconds"]
            return ""
        if do == "collect":
            return [0 if self.until.pop(job["id"], self.now) >= self.now else 124, ""]
        if "osu_allreduce" in job["argv"]:
            alive = all(until >= self.now for until in self.until.values())
            return [0, "1000000 1000.0"] if alive else [1, "no route to an sshd"]
        if self.until[job["id"]] < self.now:
            return [1, "Couldn't connect"]
        return [0, " #bytes #iterations BW average[Gb/sec] MsgRate[Mpps]\n 65536 1 100.0 0.2"]


COLLECTIVE = evolve(SETTINGS, tests=("ib_write_bw", "all_reduce"), collective_size=1_000_000)


def test_a_server_waits_for_its_client_however_many_nodes_are_asked_before(tmp_path: Path) -> None:
    ends = fleet([f"n{number}" for number in range(40)])
    kept = journal(tmp_path, ends, COLLECTIVE)
    said = Runner(ends, COLLECTIVE, Many(), kept, lambda line: None).run()
    assert {result.text for result in kept.results if result.fault} == set()
    assert [each.message for each in said.collectives] == ["", ""]
    assert said.proven


@pytest.fixture
def mpi(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts an mpirun and an sshd of the test on the nodes."""

    def make(latency: str = "1000.0", status: str = "0", dead: str = "none") -> Path:
        words = {"PYTHON": sys.executable, "LATENCY": latency, "STATUS": status, "DEAD": dead}
        for name, text in (("mpirun", MPIRUN), ("sshd", SSHD)):
            program = programs / name
            program.write_text(reduce(lambda made, word: made.replace(word, words[word]), words, text))
            program.chmod(0o755)
        monkeypatch.setattr(launch, "SSHD", str(programs / "sshd"))
        return programs

    return make


def test_good_nodes_reduce_together_and_keep_no_keys(mpi: Callable[..., Path]) -> None:
    folder = mpi()
    said, _ = run(folder, fleet(), Local(folder), COLLECTIVE)
    (each,) = said.collectives
    assert (each.group.ends, each.group.program) == (("a/fab0", "b/fab0", "c/fab0"), "osu_allreduce")
    # A megabyte in a millisecond is 8 Gbit/s; of three, each sends and receives 4/3 of it.
    assert each.value == pytest.approx(8.0 * 4 / 3)
    assert said.proven
    assert not list(folder.glob("*/*.files"))


def test_a_bad_nic_is_not_in_the_collective(mpi: Callable[..., Path]) -> None:
    folder = mpi()
    said, _ = run(folder, fleet(b="blocked"), Local(folder), COLLECTIVE)
    assert [each.group.ends for each in said.collectives] == [("a/fab0", "c/fab0")]
    assert not said.proven


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"status": "3"}, "client: "),
        ({"latency": "nan"}, "output: "),
        ({"dead": "127."}, "no-server: b/fab0: exit status 1: Cannot bind any address."),
    ],
)
def test_a_collective_that_fails_is_a_result(mpi: Callable[..., Path], made: dict[str, str], message: str) -> None:
    folder = mpi(**made)
    said, _ = run(folder, fleet(), Local(folder), COLLECTIVE)
    assert said.collectives[0].message.startswith(message)
    assert bad(said) == {} and not said.proven


def test_a_node_that_is_lost_in_a_collective_is_a_result_and_is_not_asked_again(mpi: Callable[..., Path]) -> None:
    folder = mpi()
    # A node is asked twice for each of its two servers, and once for each of its two clients.
    nodes = Local(folder, dies={"b": 6})
    said, _ = run(folder, fleet(), nodes, COLLECTIVE)
    assert said.collectives[0].message == "lost: b"
    assert bad(said) == {"b/fab0": ("lost", "")}
    assert Journal.read(folder / "results.jsonl").ended is not None
