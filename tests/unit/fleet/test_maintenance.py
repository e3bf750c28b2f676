"""What a drain evicts, what a maintenance records, and how an inventory's hosts are found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer
from typing import Any

import pytest
from attrs import define, evolve, field
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User
from lightkube.models.core_v1 import (
    Container,
    EmptyDirVolumeSource,
    NodeCondition,
    NodeStatus,
    PodSpec,
    PodStatus,
    Volume,
)
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.core_v1 import Node, Pod

from agent.report import names
from agent.report.records import Disruption
from fleet.api import Api, Failed
from fleet.eviction import MIRROR, Rules, drain, full_name
from fleet.inventory import Host, Inventory
from fleet.maintenance import Maintenance
from fleet.maintenance_record import Record, record_of
from fleet.objects import CHANGED, unready
from fleet.sweeping import decide, sweep
from tests.unit.fleet.test_fleet import node
from tests.unit.fleet.test_kubeconfig import trackbed

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def pod(
    name: str,
    owner: str | None = "ReplicaSet",
    phase: str = "Running",
    annotations: dict[str, str] | None = None,
    emptydir: EmptyDirVolumeSource | None = None,
    ending: bool = False,
    controller: bool | None = True,
) -> Pod:
    owners = [OwnerReference(apiVersion="v1", kind=owner, name="o", uid="u", controller=controller)] if owner else None
    deleted = NOW if ending else None
    metadata = ObjectMeta(
        name=name, namespace="ml", annotations=annotations, ownerReferences=owners, deletionTimestamp=deleted
    )
    volumes = [Volume(name="scratch", emptyDir=emptydir)] if emptydir else None
    spec = PodSpec(containers=[Container(name="c")], volumes=volumes)
    return Pod(metadata=metadata, spec=spec, status=PodStatus(phase=phase))


def test_daemons_static_and_finished_pods_stay() -> None:
    pods = [
        pod("job"),
        pod("plugin", owner="DaemonSet"),
        pod("static", owner="Node", annotations={MIRROR: "x"}),
        pod("done", phase="Succeeded"),
        pod("failed", phase="Failed"),
        pod("pending", phase="Pending"),
    ]
    planned = drain(pods, Rules())
    assert [full_name(one) for one in planned.evict] == ["ml/job", "ml/pending"]
    assert planned.blockers == ()


def test_a_pod_without_a_controller_is_evicted_only_with_force() -> None:
    assert "ml/bare has no controller" in drain([pod("bare", owner=None)], Rules()).blockers[0]
    assert drain([pod("bare", owner=None)], Rules(force=True)).blockers == ()


@pytest.mark.parametrize("controller", [None, False])
def test_an_owner_that_is_not_the_controller_starts_no_pod_again(controller: bool | None) -> None:
    bare = pod("bare", owner="ConfigMap", controller=controller)
    assert "ml/bare has no controller" in drain([bare], Rules()).blockers[0]
    assert drain([bare], Rules(force=True)).blockers == ()


def test_local_data_is_deleted_only_on_request_and_shared_memory_does_not_count() -> None:
    for disk in (EmptyDirVolumeSource(), EmptyDirVolumeSource(medium="")):
        assert "emptyDir scratch" in drain([pod("a", emptydir=disk)], Rules()).blockers[0]
        assert drain([pod("a", emptydir=disk)], Rules(delete_emptydir_data=True)).blockers == ()
    for medium in ("Memory", "HugePages", "HugePages-2Mi"):
        assert drain([pod("a", emptydir=EmptyDirVolumeSource(medium=medium))], Rules()).blockers == ()


def test_a_pod_that_is_being_deleted_is_waited_for_and_forbids_no_drain() -> None:
    planned = drain([pod("bare", owner=None, ending=True)], Rules())
    assert (len(planned.evict), planned.blockers) == (1, ())


def noted(text: str) -> Node:
    return Node(metadata=ObjectMeta(name="a", annotations={names.MAINTENANCE: text}))


def test_a_record_is_read_back_as_it_was_written() -> None:
    assert record_of(Node(metadata=ObjectMeta(name="a"))) is None
    text = '{"by": "x", "since": "2026", "step": "apply", "cordoned": true, "allow": "rebind"}'
    assert record_of(noted(text)) == Record("x", "2026", "apply", True, "rebind")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON"])
def test_a_record_that_cannot_be_read_is_reported(text: str) -> None:
    with pytest.raises(Failed, match="cannot be read"):
        record_of(noted(text))


def test_a_node_is_ready_again_when_all_conditions_are_true() -> None:
    there = node()
    assert there.status and there.status.conditions
    there.status.conditions.append(NodeCondition("True", names.UP_TO_DATE))
    assert unready(there, CHANGED) == []
    assert unready(node(taints=(names.TAINT,)), CHANGED)[-1] == f"it has the taint {names.TAINT}"
    there.status = NodeStatus(conditions=[NodeCondition("False", names.READY, reason="NoCarrier", message="rail0")])
    assert unready(there, CHANGED) == [
        "TrackbedReady is False (NoCarrier): rail0",
        "TrackbedUpToDate is not there",
        "Ready is not there",
    ]


def test_an_inventorys_hosts_are_found_by_their_nodes_names(tmp_path: Path) -> None:
    file = tmp_path / "fleet.py"
    file.write_text('print("[hello]"[1:])\nhosts = ["h1", ("h2", {"node_name": "10.0.0.2"})]\n')
    assert {node: host.name for node, host in Inventory.read(file).hosts.items()} == {"h1": "h1", "10.0.0.2": "h2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hosts = ["h1", ("h2", {"node_name": "h1"})]', "h1 and h2 have the same node_name"),
        (
            'hosts = [(name, {"node_name": "n", "kubernetes": {"server": f"https://{name}"}}) for name in ("h1", "h2")]',
            "h1 and h2 have the same node_name, n; .* in two clusters, choose one cluster's hosts with --limit GROUP",
        ),
        ("hosts = [", "is not an inventory that pyinfra can read: SyntaxError: '\\[' was never closed"),
        ("import nothing_of_this_name", "pyinfra can read: ModuleNotFoundError: No module named"),
    ],
)
def test_an_inventory_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "fleet.py"
    file.write_text(f"{text}\n")
    with pytest.raises(Failed, match=message):
        Inventory.read(file)


TWO_CLUSTERS = """
a = [("h1", {"node_name": "n1"}), ("h2", {"node_name": "n2"})]
b = [("h3", {"node_name": "n1"})]
"""


@pytest.mark.parametrize(
    ("limit", "hosts"),
    [
        (("a",), {"n1": "h1", "n2": "h2"}),
        (("b",), {"n1": "h3"}),
        (("b", "h2"), {"n1": "h3", "n2": "h2"}),
        (("h[12]",), {"n1": "h1", "n2": "h2"}),
        (("fleet", "h*"), "h1 and h3 have the same node_name, n1"),
        (("c",), "has no group and no host 'c'; its groups are a, b, fleet"),
        (("b", "n2"), "has no group and no host 'n2'"),
    ],
)
def test_the_hosts_of_one_cluster_are_chosen_as_for_pyinfra(
    tmp_path: Path, limit: tuple[str, ...], hosts: dict[str, str] | str
) -> None:
    file = tmp_path / "fleet.py"
    file.write_text(TWO_CLUSTERS)
    if isinstance(hosts, str):
        with pytest.raises(Failed, match=hosts):
            Inventory.read(file, limit)
    else:
        assert {node: host.name for node, host in Inventory.read(file, limit).hosts.items()} == hosts


@pytest.mark.slow
def test_a_command_runs_on_a_nodes_host_with_each_word_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "fleet.py"
    file.write_text('hosts = [("@local", {"node_name": "a"})]\n')
    inventory = Inventory.read(file)
    ran = inventory.run("a", ["printf", "%s|", "two words", "$HOME", "it's"], 60)
    assert (ran.failed, ran.output) == (False, "two words|$HOME|it's|")
    assert inventory.run("a", ["sh", "-c", "echo why >&2; exit 3"], 60).failed
    assert inventory.run("a", ["sh", "-c", "echo why >&2; exit 3"], 60).output.startswith("why")
    assert "no answer" in inventory.run("a", ["sleep", "30"], 2.5).output


@contextmanager
def ssh_server(connected: list[str], name: str) -> Iterator[int]:
    """Its port. It ends each connection, and adds this name to ``connected``."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            connected.append(name)

    with TCPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "text"),
    [("gpu1.py", "servers = [({0}), ({1})]"), ("fleet.py", "gpu1 = [({1})]\nservers = [({0})]")],
    ids=["file", "list"],
)
def test_a_command_runs_on_a_host_alone_that_has_the_name_of_a_group(tmp_path: Path, file: str, text: str) -> None:
    connected: list[str] = []
    with ssh_server(connected, "gpu1") as first, ssh_server(connected, "gpu2") as second:
        data = {"ssh_hostname": "127.0.0.1", "ssh_password": "p", "ssh_connect_retries": 0}
        hosts = [f"{name!r}, { {**data, 'ssh_port': port}!r}" for name, port in (("gpu1", first), ("gpu2", second))]
        (tmp_path / file).write_text(text.format(*hosts))
        assert Inventory.read(tmp_path / file).run("gpu1", ["true"], 60).failed
    assert set(connected) == {"gpu1"}


def test_an_unknown_level_is_refused_before_any_request(tmp_path: Path) -> None:
    file = tmp_path / "fleet.py"
    file.write_text("hosts = []\n")
    done = trackbed("maintain", "a", "--inventory", str(file), "--allow", "explode")
    assert done.returncode == 1
    assert "'explode' is not one of 'none', 'rebind', 'link-flap'" in done.stderr


# --- an API server that does not always answer -----------------------------------------------------------------


PODS, EVICTION, NODE = "GET /api/v1/pods", "POST /api/v1/namespaces/ml/pods/job/eviction", "/api/v1/nodes/a"
BUSY = (503, {"kind": "Status", "code": 503, "message": "it is being restarted"})
BUSY_AS_TEXT = (429, "Too many requests, please try again later.")
BAD_GATEWAY = (502, "<html>bad gateway")
LOGIN = (200, "<html>please log in")
FIREWALL = (403, "<html>not from here")
FORBIDDEN: tuple[int, dict[str, Any]] = (403, {"kind": "Status", "code": 403, "message": "nobody may do this"})
NO_PODS: tuple[int, dict[str, Any]] = (200, {"items": []})
HEALTHY: dict[str, Any] = {
    "status": {"conditions": [{"type": each, "status": "True"} for each in ("Ready", names.READY, names.UP_TO_DATE)]}
}
ONE_POD = (200, {"items": [pod("job").to_dict()]})

Answers = dict[str, list[tuple[int, dict[str, Any] | str]]]


@define
class Scripted:
    """An API server that answers each request with the next of its answers, then always the last. ``asked``: the requests."""

    answers: Answers
    asked: list[str] = field(factory=list)
    before: Callable[[str], None] = lambda what: None

    def answer(self, what: str) -> tuple[int, dict[str, Any] | str]:
        self.before(what)
        self.asked.append(what)
        left = self.answers[what]
        return left.pop(0) if len(left) > 1 else left[0]


Serve = Callable[[Answers], tuple[Scripted, Maintenance]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start such a server, and a maintenance that uses it."""
    monkeypatch.setattr("fleet.maintenance.CHECK_INTERVAL", 0.01)
    running: list[HTTPServer] = []

    def begin(answers: Answers) -> tuple[Scripted, Maintenance]:
        script = Scripted(answers)

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                code, document = script.answer(f"{self.command} {self.path.partition('?')[0]}")
                kind = "text/plain" if isinstance(document, str) else "application/json"
                text = document.encode() if isinstance(document, str) else json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        running.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{running[-1].server_address[1]}"
        config = KubeConfig.from_one(cluster=Cluster(server=url), user=User(), context_name="a")
        api = Api(Client(config), "me", NOW)
        inventory = Inventory(tmp_path, {"a": Host("a", "a")})
        return script, Maintenance(api, inventory, Disruption.VF_RESET, Rules(), 5.0, 5.0, 5.0, lambda line: None)

    yield begin
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("busy", [BUSY, BUSY_AS_TEXT, BAD_GATEWAY], ids=["JSON", "text", "proxy"])
def test_a_restarting_api_server_is_asked_again(serve: Serve, busy: tuple[int, Any]) -> None:
    script, maintenance = serve(
        {
            PODS: [busy, ONE_POD, ONE_POD, busy, NO_PODS],
            EVICTION: [busy, (201, {})],
            f"GET {NODE}": [busy, (200, HEALTHY)],
        }
    )
    maintenance._drain("a")
    assert script.asked == [PODS, PODS, EVICTION, PODS, EVICTION, PODS, PODS]
    maintenance._wait("a")


def test_while_etcd_elects_a_leader_a_maintenance_waits(serve: Serve) -> None:
    elects = (500, {"kind": "Status", "code": 500, "message": "etcdserver: leader changed"})
    script, maintenance = serve(
        {
            PODS: [elects, NO_PODS],
            f"GET {NODE}": [elects, (200, HEALTHY), elects, recorded("wait")],
            f"PATCH {NODE}": [elects, (200, {})],
        }
    )
    maintenance._drain("a")
    maintenance._wait("a")
    assert maintenance.give_back("a") == ("undone", "")
    assert script.asked[-4:] == [f"GET {NODE}", f"PATCH {NODE}", f"GET {NODE}", f"PATCH {NODE}"]


def test_a_pod_of_several_budgets_undoes_the_drain(serve: Serve) -> None:
    several = (500, {"kind": "Status", "code": 500, "message": "This pod has more than one PodDisruptionBudget"})
    unused = (200, {"metadata": {"name": "a", "resourceVersion": "7"}})
    answers: Answers = {PODS: [ONE_POD], EVICTION: [several], f"GET {NODE}": [unused, recorded("drain")]}
    _, maintenance = serve({**answers, f"PATCH {NODE}": [(200, {})]})
    assert maintenance.run(["a"], 1)["a"] == ("undone", "ml/job: This pod has more than one PodDisruptionBudget")


@pytest.mark.parametrize(
    "why",
    [
        pytest.param("Cannot evict pod as it would violate the pod's disruption budget.", id="kured-82"),
        pytest.param("Cannot evict pod as it would violate the pod's disruption budget.", id="claudie-1508"),
        pytest.param("Cannot evict pod as it would violate the pod's disruption budget.", id="longhorn-5910"),
        pytest.param("admission webhook denied the request: Evacuation in progress", id="harvester-9150"),
    ],
)
def test_a_pod_that_may_never_be_evicted_undoes_the_drain_in_time_and_is_named(serve: Serve, why: str) -> None:
    """Public reports of drains that wait for ever for a PodDisruptionBudget, or for who answers like one."""
    refused = (429, {"kind": "Status", "code": 429, "message": why})
    unused = (200, {"metadata": {"name": "a", "resourceVersion": "7"}})
    answers: Answers = {PODS: [ONE_POD], EVICTION: [refused], f"GET {NODE}": [unused, recorded("drain")]}
    script, maintenance = serve({**answers, f"PATCH {NODE}": [(200, {})]})
    result, reason = evolve(maintenance, drain_timeout=0.1).run(["a"], 1)["a"]
    assert result == "undone"
    assert "ml/job" in reason
    assert why in reason
    assert script.asked.count(f"POST {EVICTION.partition(' ')[2]}") > 1
    assert script.asked[-2:] == [f"GET {NODE}", f"PATCH {NODE}"]


def test_a_drain_that_is_forbidden_is_undone(serve: Serve) -> None:
    begun = {names.MAINTENANCE: '{"by": "me", "since": "2026", "step": "drain", "cordoned": true, "allow": "rebind"}'}
    answers: list[tuple[int, Any]] = [
        (200, {"metadata": {"name": "a", "resourceVersion": "7", "annotations": notes}}) for notes in ({}, begun)
    ]
    script, maintenance = serve({PODS: [FORBIDDEN], f"GET {NODE}": answers, f"PATCH {NODE}": [(200, {})]})
    assert maintenance.run(["a"], 1) == {"a": ("undone", "nobody may do this")}
    assert script.asked[-2:] == [f"GET {NODE}", f"PATCH {NODE}"]


def test_an_interruption_during_the_last_look_at_the_pods_begins_no_change(serve: Serve) -> None:
    begun = {names.MAINTENANCE: '{"by": "me", "since": "2026", "step": "drain", "cordoned": true, "allow": "rebind"}'}
    answers: list[tuple[int, Any]] = [
        (200, {"metadata": {"name": "a", "resourceVersion": "7", "annotations": notes}}) for notes in ({}, begun)
    ]
    script, maintenance = serve({PODS: [NO_PODS], f"GET {NODE}": answers, f"PATCH {NODE}": [(200, {})]})
    script.before = lambda what: maintenance.stop.set() if what == PODS else None
    assert maintenance.run(["a"], 1) == {"a": ("undone", "interrupted before anything was changed")}


def test_an_api_server_that_does_not_answer_while_the_drain_is_undone_leaves_a_node_that_is_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.maintenance.CLEAN_UP", 0.05)
    unused = (200, {"metadata": {"name": "a", "resourceVersion": "7"}})
    script, maintenance = serve({PODS: [NO_PODS], f"GET {NODE}": [unused, BUSY], f"PATCH {NODE}": [(200, {})]})
    script.before = lambda what: maintenance.stop.set() if what == PODS else None
    result, reason = evolve(maintenance, ready_timeout=3600.0).run(["a"], 1)["a"]
    assert (result, reason.startswith("the API server refuses: it is being restarted")) == ("failed", True)
    assert "; it stays cordoned; then trackbed fleet maintain a --inventory" in reason
    assert script.asked.count(f"GET {NODE}") > 2


def test_a_node_that_is_gone_does_not_keep_others_from_being_given_back(serve: Serve) -> None:
    gone = (404, {"kind": "Status", "code": 404, "message": 'nodes "a" not found'})
    _, maintenance = serve({f"GET {NODE}": [gone]})
    result, reason = maintenance.give_back("a")
    assert (result, 'nodes "a" not found' in reason) == ("failed", True)


def recorded(step: str, by: str = "me", since: str = "2026") -> tuple[int, dict[str, Any]]:
    """A Node with the record of a maintenance."""
    record = {"by": by, "since": since, "step": step, "cordoned": True, "allow": "rebind"}
    notes = {names.MAINTENANCE: json.dumps(record)}
    return 200, {"metadata": {"name": "a", "resourceVersion": "7", "annotations": notes}, **HEALTHY}


def test_a_node_that_another_run_has_begun_meanwhile_is_left_to_it(serve: Serve) -> None:
    script, maintenance = serve({f"GET {NODE}": [recorded("apply", by="bob")], f"PATCH {NODE}": [(200, {})]})
    assert maintenance.run(["a", "b"], 1) == {
        "a": (
            "failed",
            "bob began to maintain a at 2026 and has not finished; if that run is over, give --resume or --undo",
        ),
        "b": ("not started", ""),
    }
    assert script.asked == [f"GET {NODE}"]


def test_a_node_that_an_earlier_run_has_begun_is_taken_over_on_request(serve: Serve) -> None:
    _, maintenance = serve({f"GET {NODE}": [recorded("apply", by="bob")], f"PATCH {NODE}": [(200, {})]})
    taken = evolve(maintenance, resume=True)._begin("a")
    assert (taken.by, taken.step, taken.cordoned) == ("me", "apply", True)


@pytest.mark.parametrize(
    ("answer", "why"), [(LOGIN, "gives no answer of an API server"), (FIREWALL, "which may be no API server")]
)
def test_an_answer_that_is_no_json_undoes_the_drain_and_begins_no_other_node(
    serve: Serve, answer: tuple[int, str], why: str
) -> None:
    unused = (200, {"metadata": {"name": "a", "resourceVersion": "7"}})
    answers: Answers = {PODS: [answer], f"GET {NODE}": [unused, recorded("drain")], f"PATCH {NODE}": [(200, {})]}
    script, maintenance = serve(answers)
    results = maintenance.run(["a", "b"], 1)
    assert (results["a"][0], why in results["a"][1], results["b"][0]) == ("undone", True, "not started")
    assert script.asked[-2:] == [f"GET {NODE}", f"PATCH {NODE}"]


@pytest.mark.parametrize("answer", [LOGIN, FIREWALL], ids=["log in", "firewall"])
def test_an_answer_that_is_no_json_fails_its_node_alone(serve: Serve, answer: tuple[int, str]) -> None:
    _, maintenance = serve({f"GET {NODE}": [answer]})
    results = maintenance.run(["a", "b"], 1)
    assert (results["a"][0], results["b"][0]) == ("failed", "not started")
    result, reason = maintenance.give_back("a")
    assert (result, "API server" in reason) == ("failed", True)


LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{names.NAMESPACE}/leases"


@pytest.mark.parametrize("answer", [LOGIN, FIREWALL, BAD_GATEWAY], ids=["log in", "firewall", "proxy"])
def test_an_answer_that_is_no_json_keeps_no_other_node_from_being_swept(serve: Serve, answer: tuple[int, str]) -> None:
    _, maintenance = serve(
        {
            "GET /api/v1/nodes": [(200, {"items": [node("a").to_dict(), node("b").to_dict()]})],
            f"GET {LEASES}": [(200, {"items": []})],
            f"GET {NODE}": [answer],
            "GET /api/v1/nodes/b": [(200, node("b").to_dict())],
            f"POST {LEASES}": [(201, {})],
        }
    )
    swept = sweep(maintenance.api, decide(maintenance.api, 0.25), threading.Event())
    assert (swept.renewed, list(swept.failed)) == (("b",), ["a"])
    assert swept.failed["a"].startswith("its Lease was deleted and cannot be created again: ")


@pytest.mark.parametrize("busy", [BUSY, BUSY_AS_TEXT, BAD_GATEWAY], ids=["JSON", "text", "proxy"])
def test_a_step_is_recorded_and_undone_although_the_api_server_restarts(serve: Serve, busy: tuple[int, Any]) -> None:
    script, maintenance = serve(
        {f"GET {NODE}": [busy, recorded("apply")], f"PATCH {NODE}": [busy, (200, {}), busy, (200, {})]}
    )
    maintenance._note("a", "wait")
    assert script.asked == [f"GET {NODE}", f"GET {NODE}", f"PATCH {NODE}", f"GET {NODE}", f"PATCH {NODE}"]
    assert maintenance.give_back("a") == ("undone", "")
    _, maintenance = serve({f"GET {NODE}": [busy]})
    assert evolve(maintenance, ready_timeout=0.05).give_back("a")[0] == "failed"


def test_a_record_whose_answer_was_lost_is_this_runs_own(serve: Serve) -> None:
    unused = (200, {"metadata": {"name": "a", "resourceVersion": "7"}})
    written = recorded("drain", since=NOW.isoformat())
    script, maintenance = serve({f"GET {NODE}": [unused, written], f"PATCH {NODE}": [(504, "<html>time-out")]})
    stopped = Api(maintenance.api.client, "me", NOW, clock=lambda: 0.0)
    assert evolve(maintenance, api=stopped)._begin("a") == Record("me", NOW.isoformat(), "drain", True, "rebind")
    assert script.asked == [f"GET {NODE}", f"PATCH {NODE}", f"GET {NODE}"]


def test_a_pod_of_a_namespace_that_is_being_deleted_is_waited_for(serve: Serve) -> None:
    causes = [{"reason": "NamespaceTerminating", "message": "namespace ml is being terminated"}]
    terminating = {**FORBIDDEN[1], "details": {"causes": causes}}
    script, maintenance = serve({PODS: [ONE_POD, NO_PODS], EVICTION: [(403, terminating)]})
    maintenance._drain("a")
    assert script.asked == [PODS, EVICTION, PODS]


def test_a_failed_maintenance_names_the_whole_commands_that_go_on(serve: Serve) -> None:
    _, maintenance = serve({f"GET {NODE}": [recorded("wait")], f"PATCH {NODE}": [FORBIDDEN]})
    limited = evolve(maintenance.inventory, limit=("own_cluster", "gpu-0*"))
    result, reason = evolve(maintenance, resume=True, inventory=limited).run(["a"], 1)["a"]
    command = "trackbed fleet maintain a"
    chosen = f"--inventory {maintenance.inventory.path} --limit own_cluster --limit 'gpu-0*'"
    go_on = f"{command} {chosen} --allow vf-reset --resume"
    assert (result, reason.partition("; then ")[2]) == ("failed", f"{go_on}, or {command} --undo")


def test_a_node_that_is_gone_has_no_maintenance_to_go_on_with(serve: Serve) -> None:
    gone = (404, {"kind": "Status", "code": 404, "message": 'nodes "a" not found'})
    _, maintenance = serve({f"GET {NODE}": [gone]})
    said = ("failed", 'there is no Node a: nodes "a" not found; see: trackbed fleet status')
    assert maintenance.run(["a"], 1)["a"] == said
    assert maintenance.give_back("a") == said


def test_an_interruption_before_the_cordon_is_confirmed_does_not_say_that_it_is_there(serve: Serve) -> None:
    unused = (200, {"metadata": {"name": "a", "resourceVersion": "7"}})
    script, maintenance = serve({f"GET {NODE}": [unused], f"PATCH {NODE}": [BUSY]})
    script.before = lambda what: maintenance.stop.set() if what == f"PATCH {NODE}" else None
    said = "it may be cordoned; if it is, give it back: trackbed fleet maintain a --undo"
    assert maintenance.run(["a"], 1) == {"a": ("interrupted", said)}
