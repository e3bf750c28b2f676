"""What a sweep does to the DeviceTaintRules of reporters: it removes some, evicts by others, and stops for the whole fleet."""

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
from attrs import evolve

from agent.report import names
from fleet.api import Api
from fleet.device_rules import DevicePlan, DeviceRule, plan
from fleet.sweeping import at_most, decide, sweep
from tests.unit.fleet.test_fleet import NOW, lease, node
from tests.unit.fleet.test_maintenance_requests import LEASES, Serve, serve

__all__ = ["serve"]

RULES = "/apis/resource.k8s.io/v1/devicetaintrules"


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


def test_rules_of_silent_and_deleted_nodes_are_removed_and_evict_nobody() -> None:
    gone, anew = rule("z"), evolve(rule("b"), owner="u-before")
    assert decided([rule("a"), gone, anew, rule("c", age=0.0)], silent="a") == DevicePlan(
        remove=(rule("a"), anew, gone), allowed=5
    )


def test_where_nobody_knows_how_the_node_is_nobody_is_evicted() -> None:
    assert decided([rule("a")], unsure="a") == DevicePlan(allowed=5)


def test_if_too_many_nodes_are_silent_their_rules_stay_and_nobody_is_evicted_anywhere() -> None:
    assert decided([rule("a"), rule("z"), rule("h")], silent="abcde", halted=True).remove == (rule("z"),)
    assert decided([rule("h")], silent="abcde", halted=True).evict == ()


def test_a_switch_that_takes_a_rail_of_many_nodes_evicts_nobody() -> None:
    """Not in small steps either: nodes whose rules evict already count."""
    evicting = [rule(name, effect="NoExecute") for name in "abcd"]
    assert decided([*evicting, rule("e")]).evict == (rule("e"),)
    refused = decided([*evicting, rule("e"), rule("f")])
    assert (refused.evict, refused.refused, refused.nodes) == ((), True, tuple("abcdef"))
    # What evicts already is left: there is nothing to decide.
    assert not decided([rule(name, effect="NoExecute") for name in "abcdefgh"]).refused


@pytest.mark.parametrize(("fleet", "allowed"), [(2, 1), (10, 5), (100, 5), (1000, 50)])
def test_a_twentieth_of_a_large_fleet_is_allowed_and_five_nodes_or_half_of_a_small_one(
    fleet: int, allowed: int
) -> None:
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


def there(name: str) -> dict[str, Any]:
    made: dict[str, Any] = node(name).to_dict()
    made["metadata"]["uid"] = f"u-{name}"
    return made


def test_a_sweep_removes_and_raises_rules_and_notes_what_fails(serve: Serve) -> None:
    listing = [document("a", 700.0), document("b", 700.0), document("gone", 0.0), document("lost", 0.0)]
    listing.append({"metadata": {"name": "theirs", "uid": "u-theirs"}, "spec": {"taint": {}}})
    script, maintenance = serve(
        {
            f"GET {RULES}": [(200, {"items": listing})],
            "GET /api/v1/nodes": [(200, {"items": [there("a"), there("b")]})],
            f"GET {LEASES}": [(200, {"items": [lease("a").to_dict(), lease("b").to_dict()]})],
            f"PATCH {RULES}/a.7": [(200, {})],
            f"PATCH {RULES}/b.7": [(409, {"kind": "Status", "code": 409, "message": "has been modified"})],
            f"DELETE {RULES}/gone.7": [(200, {})],
            f"DELETE {RULES}/lost.7": [(403, {"kind": "Status", "code": 403, "message": "no"})],
            f"DELETE {RULES}/theirs": [(404, {"kind": "Status", "code": 404, "message": "no"})],
        }
    )
    api = Api(maintenance.api.client, "me", NOW)
    swept = sweep(api, decide(api, 0.25, 1.0), threading.Event())
    assert [each.name for each in swept.removed] == ["gone.7"]
    assert [each.name for each in swept.evicting] == ["a.7"]
    assert list(swept.failed) == ["lost"]
    assert swept.failed["lost"].startswith("its DeviceTaintRule lost.7: ")
    assert script.asked.index(f"GET {RULES}") < script.asked.index("GET /api/v1/nodes")


@pytest.mark.parametrize("status", [403, 404])
def test_a_cluster_or_a_user_without_rules_is_swept_nevertheless(serve: Serve, status: int) -> None:
    refusal = (status, {"kind": "Status", "code": status, "message": "no"})
    _, maintenance = serve(
        {
            f"GET {RULES}": [refusal],
            "GET /api/v1/nodes": [(200, {"items": [there("a")]})],
            f"GET {LEASES}": [(200, {"items": [lease("a").to_dict()]})],
        }
    )
    assert decide(maintenance.api, 0.25).devices == DevicePlan(allowed=1)


def test_a_sweep_that_is_stopped_leaves_its_rules_to_the_next_one(serve: Serve) -> None:
    _, maintenance = serve(
        {
            f"GET {RULES}": [(200, {"items": [document("gone", 0.0)]})],
            "GET /api/v1/nodes": [(200, {"items": []})],
            f"GET {LEASES}": [(200, {"items": []})],
        }
    )
    stopped = threading.Event()
    stopped.set()
    assert sweep(maintenance.api, decide(maintenance.api, 0.25), stopped).left == ("gone.7",)
