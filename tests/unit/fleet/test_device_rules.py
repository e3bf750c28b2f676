"""What a sweep does to the DeviceTaintRules of reporters: it removes some, evicts by others, and stops for the whole fleet."""

import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from attrs import evolve

from agent.report import names
from fleet.api import Api
from fleet.device_rules import DevicePlan, DeviceRule, plan
from fleet.sweeping import at_most, decide, sweep
from tests.unit.fleet.nodes_api import status
from tests.unit.fleet.test_fleet import NOW, lease
from tests.unit.fleet.test_maintenance_requests import NODES, RULES, Serve, serve, sweeps, swept
from tests.unit.reporter.scripted import merged

__all__ = ["serve"]


def rule(of: str, age: float = 700.0, effect: str = "NoSchedule", evict_after: int | None = 600) -> DeviceRule:
    created = NOW - timedelta(seconds=age)
    return DeviceRule(f"{of}.7", f"u-{of}.7", of, f"u-{of}", "0000-3b-00-2 of x", effect, created, evict_after)


def decided(
    rules: Iterable[DeviceRule], silent: str = "", unsure: str = "", halted: bool = False, allowed: int = 5
) -> DevicePlan:
    """The plan for a fleet of the nodes a to h."""
    fleet = "abcdefgh"
    speaking = set(fleet) - set(silent) - set(unsure)
    return plan(rules, {name: f"u-{name}" for name in fleet}, set(silent), speaking, halted, allowed, NOW)


@pytest.mark.parametrize(
    ("one", "due"),
    [
        (rule("a"), True),
        (rule("a", age=599.0), False),
        (rule("a", evict_after=None), False),
        (rule("a", effect="None"), False),
        (rule("a", effect="NoExecute"), False),
        (evolve(rule("a"), created=None), False),
    ],
)
def test_pods_are_evicted_only_where_the_policy_asks_for_it_and_after_its_time(one: DeviceRule, due: bool) -> None:
    assert decided([one]).evict == ((one,) if due else ())


GONE, ANEW = rule("z"), evolve(rule("b"), owner="u-before")


@pytest.mark.parametrize(
    ("rules", "nodes", "removed"),
    [
        ([rule("a"), GONE, ANEW, rule("c", age=0.0)], {"silent": "a"}, (rule("a"), ANEW, GONE)),
        ([rule("a")], {"unsure": "a"}, ()),
        # Too many nodes are silent.
        ([rule("a"), GONE, rule("h")], {"silent": "abcde", "halted": True}, (GONE,)),
    ],
    ids=["silent and deleted", "nobody knows", "halted"],
)
def test_rules_of_silent_and_deleted_nodes_are_removed_and_evict_nobody(
    rules: list[DeviceRule], nodes: dict[str, Any], removed: tuple[DeviceRule, ...]
) -> None:
    made = decided(rules, **nodes)
    assert (made.remove, made.evict, made.refused) == (removed, (), False)


def test_a_switch_that_takes_a_rail_of_many_nodes_evicts_nobody() -> None:
    """Not in small steps either: nodes whose rules evict already count."""
    evicting = [rule(name, effect="NoExecute") for name in "abcd"]
    assert decided([*evicting, rule("e")]).evict == (rule("e"),)
    refused = decided([*evicting, rule("e"), rule("f")])
    assert (refused.evict, refused.refused, refused.nodes) == ((), True, tuple("abcdef"))
    # What evicts already is left: there is nothing to decide.
    assert not decided([rule(name, effect="NoExecute") for name in "abcdefgh"]).refused


@pytest.mark.parametrize(("fleet", "allowed"), [(2, 1), (10, 5), (100, 5), (1000, 50)])
def test_a_twentieth_of_a_large_fleet_is_allowed_and_more_of_a_small_one(fleet: int, allowed: int) -> None:
    assert at_most(0.05, fleet) == allowed


def document(of: str, age: float, **more: Any) -> dict[str, Any]:
    created = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    owners = [{"apiVersion": "v1", "kind": "Node", "name": of, "uid": f"u-{of}"}]
    labels = {names.OF_NODE: of, names.EVICT_AFTER: "600"}
    metadata = {"name": f"{of}.7", "uid": f"u-{of}.7", "creationTimestamp": created}
    selector = {"driver": "dra.net", "pool": of, "device": "pci-0000-3b-00-0"}
    taint = {"key": names.QUARANTINE, "value": "0000-3b-00.0", "effect": "NoSchedule"}
    spec = {"deviceSelector": selector, "taint": taint}
    return {"metadata": {**metadata, "labels": labels, "ownerReferences": owners, **more}, "spec": spec}


def listings(*rules: Sequence[dict[str, Any]]) -> list[tuple[int, Any]]:
    """The answers to the lists of a sweep: reporters' rules when it begins, those of maintenances, then reporters' rules."""
    first, later = ((200, {"items": [*each]}) for each in rules)
    return [first, (200, {"items": []}), later]


def test_a_sweep_removes_and_raises_rules_and_notes_what_fails(serve: Serve) -> None:
    rules = [document("a", 700.0), document("b", 700.0), document("gone", 0.0), document("lost", 0.0)]
    without_b = [each for each in rules if each["metadata"]["name"] != "b.7"]
    path = RULES.removeprefix("GET ")
    script, maintenance = serve(
        {
            **sweeps("ab", [lease("a"), lease("b")]),
            RULES: listings(rules, without_b),
            f"PATCH {path}/a.7": [(200, {})],
            f"PATCH {path}/b.7": [status(409, "has been modified")],
            f"DELETE {path}/gone.7": [(200, {})],
            f"DELETE {path}/lost.7": [status(403, "no")],
        }
    )
    done = swept(Api(maintenance.api.client, "me", NOW), devices=1.0)
    assert [each.name for each in done.removed] == ["gone.7"]
    assert [each.name for each in done.evicting] == ["a.7"]
    assert list(done.failed) == ["lost"]
    assert done.failed["lost"].startswith("its DeviceTaintRule lost.7: ")
    assert script.asked.index(RULES) < script.asked.index(NODES)


def test_a_write_that_a_policy_refuses_is_said_and_its_rule_is_not_gone(serve: Serve) -> None:
    """ValidatingAdmissionPolicies answer 422 by default, as does a test of a JSON patch that fails."""
    rules = [document(name, 700.0) for name in ("a", "b", "gone", "lost")]
    changed = [rules[0], merged(rules[1], {"spec": {"taint": {"effect": "None"}}}), rules[2]]
    denied, path = status(422, "a policy denies it"), RULES.removeprefix("GET ")
    _, maintenance = serve(
        {
            **sweeps("ab", [lease("a"), lease("b")]),
            RULES: listings(rules, changed),
            f"PATCH {path}/a.7": [denied],
            f"PATCH {path}/b.7": [denied],
            f"DELETE {path}/gone.7": [denied],
            f"DELETE {path}/lost.7": [status(409, "another uid")],
        }
    )
    done = swept(Api(maintenance.api.client, "me", NOW), devices=1.0)
    assert (done.removed, done.evicting, sorted(done.failed)) == ((), (), ["a", "gone"])
    assert "a policy denies it" in done.failed["a"]


@pytest.mark.parametrize("code", [403, 404])
def test_a_cluster_or_a_user_without_rules_is_swept_nevertheless(serve: Serve, code: int) -> None:
    _, maintenance = serve({**sweeps("a", [lease("a")]), RULES: [status(code, "no")]})
    assert decide(maintenance.api, 0.25).devices == DevicePlan(allowed=1)


def test_a_sweep_that_is_stopped_leaves_its_rules_to_the_next_one(serve: Serve) -> None:
    _, maintenance = serve({**sweeps(""), RULES: listings([document("gone", 0.0)], [])})
    stopped = threading.Event()
    stopped.set()
    assert sweep(maintenance.api, decide(maintenance.api, 0.25), stopped).left == ("gone.7",)
