"""A maintenance whose API server does not always answer, or whose Node changes meanwhile."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User
from lightkube.resources.coordination_v1 import Lease

from agent.report import names
from agent.report.records import Disruption
from fleet.api import Api
from fleet.eviction import Rules
from fleet.inventory import CommandResult, Inventory
from fleet.maintenance import Maintenance
from fleet.maintenance_record import Record, annotated
from fleet.sweeping import SweepResult, decide, sweep
from tests.http_server import Request, serving
from tests.unit.fleet.nodes_api import REFUSED, status
from tests.unit.fleet.test_fleet import node
from tests.unit.fleet.test_maintenance import NOW, pod
from tests.unit.reporter.scripted import merged

PODS, EVICTION, NODE = "GET /api/v1/pods", "POST /api/v1/namespaces/ml/pods/job/eviction", "/api/v1/nodes/a"
GET, PATCH = f"GET {NODE}", f"PATCH {NODE}"
NODES, RULES = "GET /api/v1/nodes", "GET /apis/resource.k8s.io/v1/devicetaintrules"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{names.NAMESPACE}/leases"
BUSY = status(503, "it is being restarted")
BAD_GATEWAY = (502, "<html>bad gateway")
LOGIN = (200, "<html>please log in")
FIREWALL = (403, "<html>not from here")
FORBIDDEN = status(403, "nobody may do this")
UNUSED: tuple[int, dict[str, Any]] = (200, {"metadata": {"name": "a", "resourceVersion": "7"}})
NO_PODS: tuple[int, dict[str, Any]] = (200, {"items": []})
HEALTHY: dict[str, Any] = {
    "status": {"conditions": [{"type": each, "status": "True"} for each in ("Ready", names.READY, names.UP_TO_DATE)]}
}
ONE_POD = (200, {"items": [pod("job").to_dict()]})

Answers = dict[str, list[tuple[int, dict[str, Any] | str]]]


def recorded(step: str, by: str = "me", since: str = NOW.isoformat()) -> tuple[int, dict[str, Any]]:
    """A Node with the record of a maintenance."""
    record = {"by": by, "since": since, "step": step, "cordoned": True, "allow": "rebind"}
    notes = {names.MAINTENANCE: json.dumps(record)}
    metadata = {"name": "a", "resourceVersion": "7", "annotations": notes}
    return 200, {"metadata": metadata, "spec": {"unschedulable": True}, **HEALTHY}


def drains() -> Answers:
    """The answers to a maintenance that cordons a node without pods, and drains it."""
    return {PODS: [NO_PODS], EVICTION: [(201, {})], GET: [UNUSED, recorded("drain")], PATCH: [(200, {})]}


def sweeps(nodes: str, leases: Sequence[Lease] = ()) -> Answers:
    """The answers to a sweep of nodes that are named by a letter each."""
    there = [node(name).to_dict() for name in nodes]
    listed = {NODES: there, f"GET {LEASES}": [each.to_dict() for each in leases], RULES: []}
    return {what: [(200, {"items": [*items]})] for what, items in listed.items()}


@define
class Scripted:
    """An API server that answers each request with the next of its answers, then always the last.

    ``asked``: the requests; ``bodies``: the last body of each.
    """

    answers: Answers
    asked: list[str] = field(factory=list)
    bodies: dict[str, bytes] = field(factory=dict)
    before: Callable[[str], None] = lambda what: None

    def answer(self, request: Request) -> tuple[int, dict[str, Any] | str]:
        what = f"{request.method} {request.path}"
        self.before(what)
        self.asked.append(what)
        self.bodies[what] = request.body
        left = self.answers[what]
        return left.pop(0) if len(left) > 1 else left[0]


Serve = Callable[[Answers], tuple[Scripted, Maintenance]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start such a server, and a maintenance that uses it. The answers come before those of :func:`drains`."""
    monkeypatch.setattr("fleet.node_patch.CHECK_INTERVAL", 0.01)
    with ExitStack() as running:

        def begin(answers: Answers) -> tuple[Scripted, Maintenance]:
            script = Scripted({**drains(), **answers})
            url = running.enter_context(serving(script.answer))
            config = KubeConfig.from_one(cluster=Cluster(server=url), user=User(), context_name="a")
            api = Api(Client(config), "me", NOW, clock=lambda: 0.0)
            inventory = Inventory(tmp_path, {"a": "a"})
            limits = (60.0, 60.0, 60.0)
            return script, Maintenance(api, inventory, Disruption.VF_RESET, Rules(), *limits, lambda line: None)

        yield begin


def swept(api: Api, devices: float = 0.0) -> SweepResult:
    return sweep(api, decide(api, 0.25, devices), threading.Event())


@pytest.mark.parametrize("busy", [BUSY, REFUSED, BAD_GATEWAY], ids=["JSON", "text", "proxy"])
def test_a_restarting_api_server_is_asked_again(serve: Serve, busy: tuple[int, Any]) -> None:
    own = recorded("drain")
    script, maintenance = serve(
        {PODS: [busy, ONE_POD, ONE_POD, busy, NO_PODS], EVICTION: [busy, (201, {})], GET: [busy, *[own] * 5, busy, own]}
    )
    maintenance._drain("a")
    asked = [each for each in script.asked if each != GET]
    assert asked == [PODS, PODS, EVICTION, PODS, EVICTION, PODS, PODS]
    maintenance._wait("a")


def test_a_maintenance_waits_while_etcd_elects_a_leader(serve: Serve) -> None:
    elects, own = status(500, "etcdserver: leader changed"), recorded("drain")
    script, maintenance = serve(
        {PODS: [elects, NO_PODS], GET: [elects, own, own, elects, own, elects, own], PATCH: [elects, (200, {})]}
    )
    maintenance._drain("a")
    maintenance._wait("a")
    assert evolve(maintenance, resume=True).give_back("a") == ("undone", "")
    assert script.asked[-4:] == [GET, PATCH, GET, PATCH]


def test_an_api_server_that_forbids_everything_as_it_starts_is_asked_again(serve: Serve) -> None:
    """Until it has read all roles."""
    own = recorded("drain")
    script, maintenance = serve(
        {
            PODS: [ONE_POD, FORBIDDEN, NO_PODS],
            GET: [UNUSED, own, FORBIDDEN, own, own, FORBIDDEN, own, FORBIDDEN, own],
            PATCH: [(200, {}), FORBIDDEN, (200, {})],
        }
    )
    maintenance._begin("a")
    maintenance._drain("a")
    maintenance._wait("a")
    maintenance._end("a", maintenance._is_own)
    assert script.asked[-5:] == [GET, GET, PATCH, GET, PATCH]


def test_the_node_of_a_rebooted_host_is_brought_back_after_an_api_server_that_forbids_everything(serve: Serve) -> None:
    """The deploy connects anew after the reboot."""
    _, maintenance = serve({GET: [recorded("drain")], PATCH: [FORBIDDEN, (200, {}), FORBIDDEN, (200, {})]})
    assert evolve(maintenance, resume=True).bring_back("a") == ("done", "")


def test_a_pod_of_several_budgets_undoes_the_drain(serve: Serve) -> None:
    _, maintenance = serve({PODS: [ONE_POD], EVICTION: [status(500, "This pod has more than one PodDisruptionBudget")]})
    assert maintenance.run(["a"], 1)["a"] == ("undone", "ml/job: This pod has more than one PodDisruptionBudget")


@pytest.mark.parametrize(
    "why",
    [
        pytest.param("Cannot evict pod as it would violate the pod's disruption budget.", id="kured-82"),
        pytest.param("admission webhook denied the request: Evacuation in progress", id="harvester-9150"),
    ],
)
def test_a_pod_that_may_never_be_evicted_undoes_the_drain_in_time_and_is_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Public reports of drains that wait for ever for a PodDisruptionBudget, or for who answers like one."""
    script, maintenance = serve({PODS: [ONE_POD], EVICTION: [status(429, why)]})
    monkeypatch.setattr("fleet.maintenance.monotonic", lambda: 10.0 * script.asked.count(EVICTION))
    result, reason = maintenance.run(["a"], 1)["a"]
    assert (result, "ml/job" in reason, why in reason) == ("undone", True, True)
    assert script.asked.count(EVICTION) == 6
    assert script.asked[-2:] == [GET, PATCH]


def test_a_drain_that_is_forbidden_is_undone(serve: Serve) -> None:
    script, maintenance = serve({PODS: [FORBIDDEN]})
    assert maintenance.run(["a"], 1) == {"a": ("undone", "nobody may do this")}
    assert script.asked[-2:] == [GET, PATCH]


@pytest.mark.parametrize("during", [PODS, EVICTION], ids=["the last look at the pods", "an eviction"])
def test_an_interruption_evicts_no_further_pod_and_begins_no_change(serve: Serve, during: str) -> None:
    pods = [pod(name).to_dict() for name in ("job", "other")] if during == EVICTION else []
    script, maintenance = serve({PODS: [(200, {"items": pods})]})
    script.before = lambda what: maintenance.stop.set() if what == during else None
    assert maintenance.run(["a"], 1) == {"a": ("undone", "interrupted before anything was changed")}
    assert script.asked[-3:] == [during, GET, PATCH]


def test_an_api_server_that_does_not_answer_while_the_drain_is_undone_leaves_a_node_that_is_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, maintenance = serve({GET: [UNUSED, recorded("drain"), BUSY]})
    monkeypatch.setattr("fleet.node_patch.monotonic", lambda: 10.0 * script.asked.count(GET))
    script.before = lambda what: maintenance.stop.set() if what == PODS else None
    result, reason = evolve(maintenance, ready_timeout=3600.0).run(["a"], 1)["a"]
    assert (result, reason.startswith("the API server refuses: it is being restarted")) == ("failed", True)
    assert "; it stays cordoned; then trackbed fleet maintain a --inventory" in reason
    assert script.asked.count(GET) == 5


def test_a_node_that_another_run_has_begun_meanwhile_is_left_to_it(serve: Serve) -> None:
    script, maintenance = serve({GET: [recorded("apply", by="bob", since="2026")]})
    results = maintenance.run(["a", "b"], 1)
    assert (results["a"][0], results["b"]) == ("failed", ("not started", ""))
    assert results["a"][1].startswith("bob began to maintain a at 2026 and has not finished")
    assert script.asked == [GET]


def test_a_node_that_an_earlier_run_has_begun_is_taken_over_on_request(serve: Serve) -> None:
    _, maintenance = serve({GET: [recorded("apply", by="bob")]})
    taken = evolve(maintenance, resume=True)._begin("a")
    assert (taken.by, taken.step, taken.cordoned) == ("me", "apply", True)


def test_a_node_that_somebody_has_uncordoned_since_is_drained_again_and_uncordoned_in_the_end(serve: Serve) -> None:
    """It has pods again, also if it was cordoned before its maintenance."""
    uncordoned = merged(UNUSED[1], annotated(Record("bob", "2026", "apply", False, "rebind")))
    script, maintenance = serve({PODS: [ONE_POD, NO_PODS], GET: [(200, uncordoned), recorded("drain")]})
    cordons: list[Any] = []
    script.before = lambda what: cordons.append(script.bodies.get(PATCH))
    assert evolve(maintenance, resume=True).take_out("a") == ("done", "")
    assert EVICTION in script.asked
    first = json.loads(next(filter(None, cordons)))
    assert json.loads(first["metadata"]["annotations"][names.MAINTENANCE])["cordoned"] is True


@pytest.mark.parametrize(
    ("answer", "why"), [(LOGIN, "gives no answer of an API server"), (FIREWALL, "which may be no API server")]
)
def test_an_answer_that_is_no_json_undoes_the_drain(serve: Serve, answer: tuple[int, str], why: str) -> None:
    script, maintenance = serve({PODS: [answer]})
    results = maintenance.run(["a", "b"], 1)
    assert (results["a"][0], why in results["a"][1], results["b"][0]) == ("undone", True, "not started")
    assert script.asked[-2:] == [GET, PATCH]


@pytest.mark.parametrize("answer", [LOGIN, FIREWALL], ids=["log in", "firewall"])
def test_an_answer_that_is_no_json_fails_its_node_alone(serve: Serve, answer: tuple[int, str]) -> None:
    _, maintenance = serve({GET: [answer]})
    results = maintenance.run(["a", "b"], 1)
    assert (results["a"][0], results["b"][0]) == ("failed", "not started")
    result, reason = evolve(maintenance, resume=True).give_back("a")
    assert (result, "API server" in reason) == ("failed", True)


@pytest.mark.parametrize("answer", [LOGIN, FIREWALL, BAD_GATEWAY], ids=["log in", "firewall", "proxy"])
def test_an_answer_that_is_no_json_keeps_no_other_node_from_being_swept(serve: Serve, answer: tuple[int, str]) -> None:
    there: Answers = {f"{NODES}/b": [(200, node("b").to_dict())], f"POST {LEASES}": [(201, {})]}
    _, maintenance = serve({**sweeps("ab"), GET: [answer], **there})
    done = swept(maintenance.api)
    assert (done.renewed, list(done.failed)) == (("b",), ["a"])
    assert done.failed["a"].startswith("its Lease was deleted and cannot be created again: ")


@pytest.mark.parametrize(
    ("of_node", "of_lease", "why"),
    [
        (200, 404, 'namespaces "trackbed-system" not found'),
        (200, 422, "a policy denies it"),
        # It has a Lease again, or is gone.
        (200, 409, ""),
        (404, 201, ""),
    ],
)
def test_a_lease_that_cannot_be_made_anew_is_not_called_a_node_that_came_back(
    serve: Serve, of_node: int, of_lease: int, why: str
) -> None:
    there = (200, node("a").to_dict()) if of_node == 200 else status(of_node, "")
    _, maintenance = serve({**sweeps("a"), GET: [there], f"POST {LEASES}": [status(of_lease, why)]})
    done = swept(maintenance.api)
    assert (done.renewed, done.recovered) == ((), () if why else ("a",))
    assert why in done.failed.get("a", "")


@pytest.mark.parametrize("busy", [BUSY, REFUSED, BAD_GATEWAY], ids=["JSON", "text", "proxy"])
def test_a_step_is_recorded_and_undone_although_the_api_server_restarts(serve: Serve, busy: tuple[int, Any]) -> None:
    script, maintenance = serve({GET: [busy, recorded("apply")], PATCH: [busy, (200, {}), busy, (200, {})]})
    maintenance._note("a", "wait", maintenance._is_own)
    assert script.asked == [GET, GET, PATCH, GET, PATCH]
    assert evolve(maintenance, resume=True).give_back("a") == ("undone", "")
    _, maintenance = serve({GET: [busy]})
    assert evolve(maintenance, ready_timeout=0.05).give_back("a")[0] == "failed"


def test_a_record_whose_answer_was_lost_is_this_runs_own(serve: Serve) -> None:
    script, maintenance = serve({PATCH: [(504, "<html>time-out")]})
    assert maintenance._begin("a") == Record("me", NOW.isoformat(), "drain", True, "rebind")
    assert script.asked == [GET, PATCH, GET]


def test_a_pod_of_a_namespace_that_is_being_deleted_is_waited_for(serve: Serve) -> None:
    causes = [{"reason": "NamespaceTerminating", "message": "namespace ml is being terminated"}]
    terminating = {**FORBIDDEN[1], "details": {"causes": causes}}
    script, maintenance = serve({PODS: [ONE_POD, NO_PODS], EVICTION: [(403, terminating)], GET: [recorded("drain")]})
    maintenance._drain("a")
    assert script.asked == [GET, PODS, EVICTION, GET, PODS]


def test_a_pod_that_comes_back_to_the_cordoned_node_is_evicted_once(serve: Serve) -> None:
    first = pod("job").to_dict()
    first["spec"]["tolerations"] = [{"operator": "Exists"}]
    another = merged(first, {"metadata": {"creationTimestamp": "2026-01-01T00:00:07Z"}})
    script, maintenance = serve(
        {PODS: [(200, {"items": [each]}) for each in (first, another)], GET: [recorded("drain")]}
    )
    maintenance._drain("a")
    assert script.asked.count(EVICTION) == 1


def test_a_pod_with_fields_that_another_version_of_kubernetes_has_is_evicted(serve: Serve) -> None:
    """Fields of alpha features change their types: this one needs a priority in 1.37."""
    later = merged(pod("job").to_dict(), {"spec": {"evictionResponders": [{"name": "x"}]}, "status": {"hostIPs": "x"}})
    later["spec"]["volumes"] = [{"name": "v", "fabric": 1}]
    script, maintenance = serve({PODS: [(200, {"items": [later]}), NO_PODS], GET: [recorded("drain")]})
    maintenance._drain("a")
    assert EVICTION in script.asked


def test_the_pod_that_was_listed_is_evicted_and_no_other_of_its_name(serve: Serve) -> None:
    """A StatefulSet has started another one meanwhile, on another node."""
    other = status(409, "Precondition failed: UID in precondition: u-job")
    script, maintenance = serve({PODS: [ONE_POD, NO_PODS], EVICTION: [other], GET: [recorded("drain")]})
    maintenance._drain("a")
    assert json.loads(script.bodies[EVICTION])["deleteOptions"]["preconditions"] == {"uid": "u-job"}


@pytest.mark.parametrize(
    ("notes", "result"),
    [
        ({names.MAINTENANCE: None}, ("failed", "its maintenance was undone by somebody else")),
        ({}, ("undone", "somebody has uncordoned it")),
    ],
)
def test_a_node_that_somebody_has_given_back_is_not_drained_any_further(
    serve: Serve, notes: dict[str, None], result: tuple[str, str]
) -> None:
    """Its pods come back to it."""
    own = recorded("drain")
    given_back = (200, merged(own[1], {"metadata": {"annotations": notes}, "spec": {"unschedulable": None}}))
    script, maintenance = serve({PODS: [ONE_POD], GET: [UNUSED, own, given_back]})
    assert maintenance.run(["a"], 1) == {"a": result}
    assert script.asked.count(EVICTION) == 1


LEASE = f"GET {LEASES}/a"
ABSENT = status(404, "not found")


def published(**statuses: str) -> tuple[int, dict[str, Any]]:
    """A Node with these conditions; ready and up to date without others."""
    types = {"READY": "True", "UP_TO_DATE": "True", **statuses}
    conditions = [{"type": getattr(names, type), "status": status} for type, status in types.items() if status]
    return 200, {**UNUSED[1], "status": {"conditions": conditions}}


def renewed(seconds: float, **notes: str) -> tuple[int, dict[str, Any]]:
    """The Lease of a reporter that renewed it so many seconds ago."""
    when = (NOW - timedelta(seconds=seconds)).isoformat()
    annotations = {getattr(names, key): note for key, note in notes.items()}
    return 200, {"metadata": {"name": "a", "annotations": annotations}, "spec": {"renewTime": when}}


def begins(serve: Serve, of_node: tuple[int, Any], lease: tuple[int, Any], **more: Any) -> tuple[Any, bool, list[str]]:
    """Maintain a node whose drain is forbidden: the result, whether the Node was written, and what was said."""
    said: list[str] = []
    script, maintenance = serve({PODS: [FORBIDDEN], GET: [of_node, recorded("drain")], LEASE: [lease]})
    results = evolve(maintenance, tell=said.append, **more).run(["a"], 1)
    return results["a"], PATCH in script.asked, said


@pytest.mark.parametrize("of_node", [published(), published(DEVICES_READY="True")], ids=["no NIC", "NICs"])
def test_a_node_whose_report_says_that_nothing_waits_is_not_drained(serve: Serve, of_node: tuple[int, Any]) -> None:
    left = "by its report no change waits, so it is left as it is"
    assert begins(serve, of_node, renewed(899)) == (("done", left), False, [f"a: {left}"])


@pytest.mark.parametrize(
    ("of_node", "lease", "unknown"),
    [
        (published(UP_TO_DATE="False"), renewed(1), ""),
        (published(READY="False"), renewed(1), ""),
        # A NIC that the node does not require waits.
        (published(DEVICES_READY="False"), renewed(1), ""),
        (published(), renewed(1, NOT_READY="no carrier"), ""),
        (published(), renewed(901), "no heartbeat for 15m1s"),
        (published(), ABSENT, "its Lease is gone"),
        (published(), FORBIDDEN, "this user may not read its Lease (rights: docs/fleet.md)"),
        (published(UP_TO_DATE="Unknown"), renewed(1), "its Node does not say"),
        (published(UP_TO_DATE=""), renewed(1), "its Node does not say"),
        (published(DEVICES_READY="Unknown"), renewed(1), "its Node does not say"),
    ],
)
def test_a_node_on_which_a_change_may_wait_is_drained(
    serve: Serve, of_node: tuple[int, Any], lease: tuple[int, Any], unknown: str
) -> None:
    result, written, said = begins(serve, of_node, lease)
    assert (result, written) == (("undone", "nobody may do this"), True)
    expected = [f"a: it is not known whether a change waits: {unknown}"] if unknown else []
    assert said[: said.index("a: cordoned")] == expected


def test_a_deploy_drains_a_node_on_which_nothing_waits(serve: Serve) -> None:
    """It reboots the node, or is ahead of the report."""
    assert begins(serve, published(), renewed(1), again="deploy again")[1]


class Unreachable(Inventory):
    def run(self, node: str, command: Sequence[str], timeout: float) -> CommandResult:
        return CommandResult(True, "no answer from a within 120 s")


@pytest.mark.parametrize(("kubelet", "result"), [("True", "undone"), ("Unknown", "failed")])
def test_a_node_that_does_not_answer_after_its_change_began_is_given_back_only_if_its_kubelet_is_ready(
    serve: Serve, kubelet: str, result: str
) -> None:
    """The change may have cut the node off, and then its Node says for a while what was true before."""
    conditions = [{"type": names.READY, "status": "True"}, {"type": "Ready", "status": kubelet}]
    script, maintenance = serve({GET: [(200, {**recorded("apply")[1], "status": {"conditions": conditions}})]})
    ended = evolve(maintenance, hosts=Unreachable(Path(), {"a": "a"}), resume=True).run(["a"], 1)["a"]
    assert (ended[0], "no answer" in ended[1]) == (result, True)
    assert (PATCH in script.asked) == (result == "undone")


def test_a_failed_maintenance_names_the_whole_commands_that_go_on(serve: Serve) -> None:
    _, maintenance = serve({GET: [recorded("wait", since="2025-12-31T00:00:00+00:00")], PATCH: [FORBIDDEN]})
    limited = Inventory(Path("/site/prod.py"), {"a": "a"}, ("own_cluster", "gpu-0*"))
    result, reason = evolve(maintenance, resume=True, hosts=limited).run(["a"], 1)["a"]
    command = "trackbed fleet maintain a"
    chosen = "--inventory /site/prod.py --limit own_cluster --limit 'gpu-0*'"
    go_on = f"{command} {chosen} --allow vf-reset --resume"
    assert (result, reason.partition("; then ")[2]) == ("failed", f"{go_on}, or {command} --undo")


def test_a_node_that_is_gone_has_no_maintenance_to_go_on_with(serve: Serve) -> None:
    _, maintenance = serve({GET: [status(404, 'nodes "a" not found')]})
    said = ("failed", 'there is no Node a: nodes "a" not found; see: trackbed fleet status')
    assert maintenance.run(["a"], 1)["a"] == said
    assert evolve(maintenance, resume=True).give_back("a") == said


def test_an_interruption_before_the_cordon_is_confirmed_does_not_say_that_it_is_there(serve: Serve) -> None:
    script, maintenance = serve({GET: [UNUSED], PATCH: [BUSY]})
    script.before = lambda what: maintenance.stop.set() if what == PATCH else None
    result, reason = maintenance.run(["a"], 1)["a"]
    assert (result, reason.partition("; ")[0]) == ("interrupted", "it may be cordoned")
    assert reason.endswith("or give it back: trackbed fleet maintain a --undo")
