"""The reporter over real sockets: what it answers, and to whom."""

import http.client
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve, frozen
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from agent.report import drift
from agent.report.records import Change, Condition, NicVerdict, Outcome, Report, VfVerdict, report_to_json
from agent.report.verdict import STALE
from agent.reporter.http import server
from agent.reporter.http.address import Address
from agent.reporter.http.server import serve
from agent.reporter.settings import Settings, to_json
from agent.runtime import NOTIFY_TIMEOUT, boot_id, uptime
from cli.__main__ import cli
from tests.notify_socket import full_socket, wait_for
from tests.unit.reporter.scripted import api_server, certificates, token_of

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "templates" / "trackbed-reporter.service.j2"
NONE: frozenset[str] = frozenset()


def report(**more: object) -> Report:
    ready = Report(
        "n1",
        "h1",
        boot_id(),
        "v1",
        ready=True,
        up_to_date=True,
        generation=3,
        uptime=uptime(),
        conditions=(Condition("Converged", "True", "AsWanted"),),
        outcomes=(Outcome(Change("links", "0000:21:00.0", "mtu", 1500, 9000), "applied"),),
    )
    return evolve(ready, **more)  # type: ignore[arg-type]


NO_CARRIER = (
    Condition("Carrier", "False", "NoCarrier", "no carrier on ens1f0", stage="network"),
    Condition("Carrier", "True", "AllConnected", stage="network"),
    Condition("Clock", "False", "NotSynchronised", severity="warn"),
)


@frozen
class Served:
    """A running reporter."""

    file: Path
    port: int
    unix: Path

    def give(self, report: Report) -> None:
        self.file.write_text(report_to_json(report))

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        return ask(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10), path, method, headers)

    def get_by_unix(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(10)
        connection.sock.connect(str(self.unix))
        return ask(connection, path, "GET", {})

    def give_drift(self, text: str) -> None:
        self.file.with_name(drift.NAME).write_text(text)

    def metrics(self) -> dict[tuple[str, frozenset[str]], float]:
        """The samples by name and labels' values."""
        status, text = self.get("/metrics")
        assert status == 200
        families = text_string_to_metric_families(text)
        return {(s.name, frozenset(s.labels.values())): s.value for family in families for s in family.samples}


def ask(connection: http.client.HTTPConnection, path: str, method: str, headers: dict[str, str]) -> tuple[int, str]:
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def begin() -> Served:
        port: queue.Queue[int] = queue.Queue()
        file, unix = tmp_path / "report.json", tmp_path / "http.sock"
        file.write_text(report_to_json(report()))
        arguments = (file, Address("127.0.0.1", 0), unix, port.put)
        threading.Thread(target=serve, args=arguments, daemon=True).start()
        return Served(file, port.get(timeout=10), unix)

    return begin


@pytest.fixture
def served(start: Start) -> Served:
    return start()


def test_readyz_of_a_ready_node_is_200(served: Served) -> None:
    assert served.get("/readyz") == (200, "ready\n")
    assert served.get_by_unix("/readyz") == (200, "ready\n")
    assert served.get("/readyz", "HEAD") == (200, "")


def test_readyz_of_a_node_that_is_not_ready_is_503_with_the_reasons(served: Served) -> None:
    served.give(report(ready=False, conditions=NO_CARRIER))
    assert served.get("/readyz") == (503, "Carrier is False (NoCarrier): no carrier on ens1f0\n")


def test_a_stale_report_is_503(served: Served) -> None:
    for stale, reason in (
        (report(uptime=uptime() - STALE - 5), "the agent's last heartbeat is 35 s old"),
        (report(boot_id="another"), "the report is of an earlier boot"),
    ):
        served.give(stale)
        status, text = served.get("/readyz")
        assert (status, text[: len(reason)]) == (503, reason)
        assert served.metrics()["trackbed_ready", NONE] == 0
        assert served.metrics()["trackbed_report_fresh", NONE] == 0


@pytest.mark.parametrize("text", [None, "{"])
def test_without_a_report_it_is_alive_and_not_ready(served: Served, text: str | None) -> None:
    served.file.unlink() if text is None else served.file.write_text(text)
    assert served.get("/readyz")[0] == 503
    assert served.get("/status")[0] == 503
    assert served.get("/livez") == (200, "alive\n")
    assert served.metrics() == {("trackbed_ready", NONE): 0.0, ("trackbed_report_fresh", NONE): 0.0}


def test_the_status_is_the_report(served: Served) -> None:
    status, text = served.get("/status")
    assert (status, json.loads(text)) == (200, json.loads(served.file.read_text()))


def test_other_paths_and_methods_are_refused(served: Served) -> None:
    assert served.get("/")[0] == 404
    assert served.get("/readyz", "POST")[0] == 501


def test_the_metrics_are_what_prometheus_reads(served: Served) -> None:
    served.give(report(ready=False, up_to_date=False, heartbeat=1.8e9, conditions=NO_CARRIER))
    served.give_drift('{"repairs": {"vfs": 2, "links": 0}, "suspects": {"vfs": {"NetworkManager": 1}}}')
    metrics = served.metrics()
    assert metrics["trackbed_ready", NONE] == 0
    assert metrics["trackbed_up_to_date", NONE] == 0
    assert metrics["trackbed_generation", NONE] == 3
    assert metrics["trackbed_report_fresh", NONE] == 1
    assert metrics["trackbed_heartbeat_timestamp_seconds", NONE] == 1.8e9
    assert metrics["trackbed_drift_repairs_total", frozenset({"vfs"})] == 2
    assert metrics["trackbed_drift_repairs_total", frozenset({"links"})] == 0
    assert metrics["trackbed_drift_suspects_total", frozenset({"vfs", "NetworkManager"})] == 1
    assert metrics["trackbed_condition", frozenset({"Carrier", "False", "required"})] == 1
    assert metrics["trackbed_condition", frozenset({"Carrier", "True", "required"})] == 0
    assert metrics["trackbed_condition", frozenset({"Clock", "False", "warn"})] == 1
    assert metrics["trackbed_outcomes", frozenset({"applied"})] == 1
    assert metrics["trackbed_outcomes", frozenset({"failed"})] == 0
    assert metrics["trackbed_build_info", frozenset({"v1"})] == 1
    assert metrics["trackbed_spec_info", frozenset({"h1", "n1"})] == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"vfs": 1}',
        '{"repairs": {"vfs": 1}}',
        *(f'{{"repairs": {{"vfs": {count}}}, "suspects": {{}}}}' for count in ("-1", '"1"', "true")),
        *(f'{{"repairs": {{"vfs": 1}}, "suspects": {{"vfs": {count}}}}}' for count in ("1", '{"tuned": -1}')),
        "x" * (drift.LARGEST + 1),
    ],
)
def test_a_damaged_file_of_counts_is_left_out_of_the_metrics(served: Served, text: str) -> None:
    served.give_drift(text)
    metrics = served.metrics()
    assert metrics["trackbed_ready", NONE] == 1
    assert not any(name == "trackbed_drift_repairs_total" for name, _ in metrics)


def test_each_nic_has_its_metrics_and_a_stale_report_says_that_none_is_ready(served: Served) -> None:
    vfs = ("0000:21:10.0", "", "0000:21:10.4")
    faulty = (VfVerdict(2, "NoCarrier", "dark"),)
    nics = (
        NicVerdict("rail0", "0000:21:00.0", True, True, vfs=vfs, faulty_vfs=faulty),
        NicVerdict("rail1", "", True, False, "NicMissing"),
    )
    served.give(report(nics=nics))
    metrics = served.metrics()
    rail0, rail1 = frozenset({"rail0"}), frozenset({"rail1"})
    assert (metrics["trackbed_nic_ready", rail0], metrics["trackbed_nic_ready", rail1]) == (1, 0)
    assert (metrics["trackbed_nic_vfs", rail0], metrics["trackbed_nic_ready_vfs", rail0]) == (3, 1)
    assert json.loads(served.get("/status")[1])["nics"][0]["faulty_vfs"][0]["reason"] == "NoCarrier"
    served.give(report(nics=nics, uptime=uptime() - 100))
    metrics = served.metrics()
    assert (metrics["trackbed_nic_ready", rail0], metrics["trackbed_nic_ready_vfs", rail0]) == (0, 0)


def test_slow_clients_are_cut_off(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TIMEOUT", 0.5)
    served = start()
    for slow in [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(server.AT_ONCE)]:
        with slow:
            assert slow.recv(100) == b""
    monkeypatch.setattr(server, "TIMEOUT", 60.0)
    assert served.get("/readyz")[0] == 200


def test_a_socket_left_behind_is_replaced(tmp_path: Path, start: Start) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "http.sock"))
    assert start().get_by_unix("/livez")[0] == 200


def test_a_request_has_bounds(served: Served) -> None:
    """Any user of the node can send one, and the unit's memory is for all of them."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        client.sendall(b"GET /readyz HTTP/1.0\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 4000) for n in range(5)))
        assert b" 431 " in client.recv(100)
    status, _ = served.get("/readyz", **{"X-Long": "x" * 8000})
    assert status == 200


SERVES = """
import sys
from pathlib import Path
from agent.reporter.http.address import Address
from agent.reporter.http.server import serve

serve(Path(sys.argv[1]), Address("127.0.0.1", 0), None, lambda port: print(port, flush=True))
"""


def test_all_clients_at_once_fit_into_the_units_memory(tmp_path: Path) -> None:
    """Any user of the node can send as many requests as are answered at a time. The report has just made a thousand VFs."""
    unit = UNIT.read_text()
    limit = re.search(r"^MemoryMax=(\d+)M$", unit, re.MULTILINE)
    assert limit
    environment = {**os.environ, **dict(re.findall(r"^Environment=(MALLOC_\w+)=(\w+)$", unit, re.MULTILINE))}
    written = (Change("vf_attributes", f"0000:21:00.0#{n}", "mac", "", "02:00:5e:00:00:01") for n in range(12_000))
    file = tmp_path / "report.json"
    file.write_text(report_to_json(report(outcomes=tuple(Outcome(change, "applied") for change in written))))
    command = [sys.executable, "-c", SERVES, str(file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(server.AT_ONCE)]
            for client in clients:
                client.sendall(b"GET /status HTTP/1.0\r\n\r\n")
            for client in clients:
                with client, client.makefile("rb") as answer:
                    assert b" 200 " in answer.readline()
                    answer.read()
            memory = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", memory, re.MULTILINE)
    assert peak
    # What publishes to Kubernetes needs the rest.
    assert int(peak[1]) < int(limit[1]) * 1024 * 0.75


def test_a_port_that_was_taken_is_served_once_it_is_free(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "another"
    folder.mkdir()
    unix = folder / "http.sock"
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    free.listen()
    port = free.getsockname()[1]
    started: queue.Queue[int] = queue.Queue()
    arguments = (served.file, Address("127.0.0.1", port), unix, started.put, True)
    threading.Thread(target=serve, args=arguments, daemon=True).start()
    assert started.get(timeout=10) == 0
    second = Served(served.file, port, unix)
    assert second.get_by_unix("/readyz") == (200, "ready\n")
    free.close()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            assert second.get("/readyz") == (200, "ready\n")
        except ConnectionRefusedError:
            continue
        return
    pytest.fail("the port is free, and nobody listens there")


def test_it_publishes_although_its_port_is_taken(served: Served, tmp_path: Path) -> None:
    """Another user of the node may take it while the reporter is restarted."""
    secret, settings = tmp_path / "token", tmp_path / "settings.json"
    secret.write_text(token_of("n1"))
    asked: queue.Queue[str] = queue.Queue()

    def answer(method: str, path: str, _: object) -> tuple[int, dict[str, object]]:
        asked.put(f"{method} {path}")
        return 503, {}

    with api_server(tmp_path, answer) as (url, authority):
        settings.write_text(to_json(Settings("n1", url, str(authority))))
        words = ("--listen", f"127.0.0.1:{served.port}", "--kubernetes", settings, "--kubernetes-secret", secret)
        command = [sys.executable, "-m", "cli", "reporter", *map(str, words)]
        here = {**os.environ, "STATE_DIRECTORY": str(tmp_path)}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=here) as process:
            assert process.stderr is not None
            said = next((line for line in process.stderr if "cannot listen" in line), "")
            assert "Address already in use; " in said
            # It still sends requests to the API server.
            for _ in range(2):
                assert asked.get(timeout=60)
            process.terminate()
            assert process.wait(timeout=60) == 0


def test_it_ends_if_the_thread_that_watches_the_node_does(tmp_path: Path) -> None:
    """Otherwise it would go on, and see no change of the Node. systemd starts it again."""
    secret, settings = tmp_path / "token", tmp_path / "settings.json"
    secret.write_text(token_of("n1"))
    settings.write_text(to_json(Settings("n1", "https://127.0.0.1:65536", str(certificates(tmp_path)[0]))))
    words = ("--listen", "127.0.0.1:0", "--kubernetes", settings, "--kubernetes-secret", secret)
    here = {**os.environ, "STATE_DIRECTORY": str(tmp_path)}
    command = [sys.executable, "-m", "cli", "reporter", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, env=here, timeout=60)
    assert ended.returncode == 1 and "Port out of range" in ended.stderr


def test_systemd_learns_that_the_reporter_is_ready_although_its_socket_was_full(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cli", "reporter", "--listen", "127.0.0.1:0"]
    with full_socket(tmp_path / "notify") as full:
        here = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=here) as process:
            try:
                assert process.stderr is not None
                port = int(next(line for line in process.stderr if "on port" in line).rpartition(" ")[2])
                # It answers meanwhile.
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                assert ask(connection, "/livez", "GET", {})[0] == 200
                time.sleep(2 * NOTIFY_TIMEOUT)  # the socket is full for longer than other messages wait
                wait_for(b"READY=1", full)
            finally:
                process.terminate()
        assert process.returncode == 0


def test_a_taken_port_is_logged(served: Served) -> None:
    refused = CliRunner().invoke(cli, ["reporter", "--listen", f"127.0.0.1:{served.port}"])
    assert refused.exit_code == 1
    assert "Address already in use" in refused.output
