"""The reporter's DeviceTaintRules on a real control plane, and what an attacker with its credentials cannot do with them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from attrs import evolve

from agent.report.names import EVICT_AFTER, OF_NODE, QUARANTINE
from agent.report.records import NicVerdict
from agent.reporter.kubernetes import quarantine
from agent.reporter.kubernetes.api import JSON, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from agent.reporter.kubernetes.quarantine import RULES
from agent.reporter.settings import Quarantine
from fleet import device_rules
from fleet.api import api
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import ended, make_node
from tests.cluster.fleet.fleet_commands import start as run
from tests.cluster.fleet.test_fleet_rights import LEASES, user_with
from tests.cluster.fleet.test_fleet_rights import rule as right
from tests.cluster.objects import LEASES as NAMESPACED
from tests.cluster.objects import RESOURCE, manifest, patch, resource_slice
from tests.cluster.reporter.conftest import Start
from tests.cluster.reporter.reporters import Reporter, by_token, holder, node, prepare, until
from tests.cluster.reporter.test_bounds import DATED, DEEP, LONG, MANY
from tests.cluster.reporter.thief import APPLY, OTHER, OWN, Thief, add

SRIOV = "sriovnetwork.k8snetworkplumbingwg.io"
PF, VF = "0000:3b:00.0", "0000:3b:00.2"
GOOD = NicVerdict("rail0", PF, True, True, vfs=(VF,))
BAD = evolve(GOOD, ready=False, reason="NoCarrier", message="no carrier on rail0")


@pytest.fixture(scope="module")
def plane(device_taints_plane: ControlPlane) -> ControlPlane:
    prepare(device_taints_plane)
    device_taints_plane.apply(node(OWN), node(OTHER))
    return device_taints_plane


@pytest.fixture(scope="module")
def thief(plane: ControlPlane) -> Thief:
    return Thief(plane, by_token(plane, OWN))


@pytest.fixture
def start(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start the reporter of a new Node, with quarantine; it looks again every second."""
    monkeypatch.setattr(quarantine, "LOOK_EVERY", (1.0, 1.0))
    return lambda name, policy=Quarantine(): start(name, quarantine=policy)  # noqa: B008  it is frozen


def publish(plane: ControlPlane, name: str) -> None:
    """Publish the devices of a node's NIC, as dranet publishes a PF and dra-driver-sriov a VF."""
    for driver, device, attributes in (
        ("dra.net", "pci-0000-3b-00-0", {"dra.net/pciAddress": PF}),
        (SRIOV, "0000-3b-00-2", {"resource.kubernetes.io/pciBusID": VF, f"{SRIOV}/pfPciAddress": PF}),
    ):
        described = {"name": device, "attributes": {key: {"string": value} for key, value in attributes.items()}}
        plane.apply(resource_slice(name, driver, [described], f"{name}-{driver}"))


def rules(plane: ControlPlane, name: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = plane.get("devicetaintrules", f"--selector={OF_NODE}={name}")["items"]
    return items


def tainted(plane: ControlPlane, name: str) -> set[tuple[str, str]]:
    selectors = [rule["spec"]["deviceSelector"] for rule in rules(plane, name)]
    return {(selector["driver"], selector["device"]) for selector in selectors if selector["pool"] == name}


BOTH = {("dra.net", "pci-0000-3b-00-0"), (SRIOV, "0000-3b-00-2")}


def test_devices_of_a_bad_nic_are_tainted_also_those_that_come_later_until_it_is_good(
    plane: ControlPlane, start: Callable[..., Reporter]
) -> None:
    reporter = start("devices-later")
    reporter.acknowledged(reporter.say(True, nics=(BAD,)))
    assert rules(plane, reporter.name) == []
    publish(plane, reporter.name)
    until(lambda: tainted(plane, reporter.name) == BOTH, "both devices are tainted")
    assert reporter.published().error == ""
    assert {rule["spec"]["taint"]["effect"] for rule in rules(plane, reporter.name)} == {"NoSchedule"}
    reporter.say(True, nics=(evolve(BAD, certainty="unknown"),))
    reporter.acknowledged(reporter.say(True, nics=()))
    assert tainted(plane, reporter.name) == BOTH
    reporter.say(True, nics=(evolve(GOOD, link="probation"),))
    until(lambda: not rules(plane, reporter.name), "the rules go on probation")


def test_after_an_outage_the_rules_are_as_the_report_says(plane: ControlPlane, start: Callable[..., Reporter]) -> None:
    reporter = start("devices-outage")
    publish(plane, reporter.name)
    reporter.acknowledged(reporter.say(True, nics=(GOOD,)))
    for nic, wanted in ((BAD, BOTH), (GOOD, set())):
        plane.kill_api_server()
        try:
            reporter.say(True, nics=(nic,))
            until(lambda: reporter.published().error, "the reporter notices")
        finally:
            plane.start_api_server()
        until(lambda: tainted(plane, reporter.name) == wanted, f"{len(wanted)} devices are tainted", deadline=90.0)  # noqa: B023


def test_a_sweep_evicts_by_the_nodes_policy_and_removes_the_rules_of_silent_nodes(
    plane: ControlPlane, start: Callable[..., Reporter]
) -> None:
    reporter = start("devices-evicted", Quarantine(evict_after=0))
    publish(plane, reporter.name)
    reporter.acknowledged(reporter.say(True, nics=(BAD,)))
    until(lambda: tainted(plane, reporter.name) == BOTH, "both devices are tainted")
    make_node(plane, "devices-silent", life=1)
    plane.apply(rule(plane, "devices-silent"))
    # The rights that docs/fleet.md lists.
    sweeps = user_with(
        plane,
        "sweeps-devices",
        [
            right("", ("nodes",), ("list", "get")),
            right("", ("nodes", "nodes/status"), ("patch",)),
            right("resource.k8s.io", ("devicetaintrules",), ("list", "patch", "delete")),
        ],
        [right(*LEASES, ("list", "get", "create"))],
    )

    def sweep(*words: str) -> Any:
        return ended(run(sweeps, "sweep", "--json", "--max-share=1", "--max-evict-share=1", *words)).document

    seen = until(lambda: sweep("--dry")["rules_to_remove"], "its Lease expires")
    assert seen == ["devices-silent.7"]
    assert not sweep()["failed"]
    assert rules(plane, "devices-silent") == []
    names = {each["metadata"]["name"] for each in rules(plane, reporter.name)}
    assert [each["spec"]["taint"]["effect"] for each in rules(plane, reporter.name)] == ["NoExecute"] * 2
    # The controller of evictions has taken them up, and the reporter leaves them as they are.
    until(lambda: all(each.get("status") for each in rules(plane, reporter.name)), "Kubernetes evicts by them")
    assert {each["metadata"]["name"] for each in rules(plane, reporter.name)} == names
    reporter.say(True, nics=(GOOD,))
    until(lambda: not rules(plane, reporter.name), "the rules go")


def test_a_rule_evicts_if_only_its_status_was_written_since_it_was_listed(plane: ControlPlane) -> None:
    """Kubernetes writes the status of a new rule within seconds."""
    name = "devices-listed"
    plane.apply(node(name))
    plane.apply(rule(plane, name))
    with api(plane.admin) as admin:
        (listed,) = (each for each in device_rules.listed(admin) if each.node == name)
        condition = {
            "type": "Seen",
            "status": "True",
            "reason": "Seen",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        body = {"status": {"conditions": [condition]}}
        patch(plane, "devicetaintrule", listed.name, body, "--subresource=status")
        assert device_rules.evict(admin, listed)
        assert [each["spec"]["taint"]["effect"] for each in rules(plane, name)] == ["NoExecute"]
        assert not device_rules.evict(admin, listed)
        plane.kubectl("delete", "devicetaintrule", listed.name)
        plane.apply(rule(plane, name))
        assert not device_rules.evict(admin, listed)
        assert [each["spec"]["taint"]["effect"] for each in rules(plane, name)] == ["NoSchedule"]


def test_the_rules_of_a_deleted_node_go_with_it(plane: ControlPlane, start: Callable[..., Reporter]) -> None:
    reporter = start("devices-deleted")
    publish(plane, reporter.name)
    reporter.say(True, nics=(BAD,))
    until(lambda: tainted(plane, reporter.name) == BOTH, "both devices are tainted")
    plane.kubectl("delete", "node", reporter.name)
    until(lambda: not rules(plane, reporter.name), "the garbage collector deletes them", deadline=90.0)


@cache
def uid_of(plane: ControlPlane, name: str) -> str:
    return str(plane.get("node", name)["metadata"]["uid"])


def rule(plane: ControlPlane, of: str = OWN, number: int | str = 7, **more: Any) -> dict[str, Any]:
    """A rule as a reporter makes it; ``more``: other values by the path of their field, with "__" between its parts."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": of, "uid": uid_of(plane, of)}
    spec = {
        "deviceSelector": {"driver": SRIOV, "pool": of, "device": "0000-3b-00-2"},
        "taint": {"key": QUARANTINE, "value": "0000-3b-00.2", "effect": "NoSchedule"},
    }
    metadata = {"labels": {OF_NODE: of}, "ownerReferences": [owner]}
    made = manifest(RESOURCE, "DeviceTaintRule", f"{of}.{number}", metadata=metadata, spec=spec)
    for path, value in more.items():
        *folders, last = path.split("__")
        place = made
        for folder in folders:
            place = place[folder]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return made


ENTRY = {"manager": "trackbed-reporter", "operation": "Update", "apiVersion": RESOURCE, "fieldsType": "FieldsV1"}
GONE = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "u"}
REFUSED: dict[str, dict[str, Any]] = {
    "another's name": {"metadata__name": f"{OTHER}.7"},
    "a name of its own choice": {"metadata__name": "anything"},
    "a number of four digits": {"metadata__name": f"{OWN}.1000"},
    "a name with a zero in front": {"metadata__name": f"{OWN}.07"},
    "a name below its own": {"metadata__name": f"{OWN}.x.7"},
    "a generated name": {"metadata__name": None, "metadata__generateName": f"{OWN}."},
    "another's label": {"metadata__labels": {OF_NODE: OTHER}},
    "no label": {"metadata__labels": {}},
    "another label": {"metadata__labels": {OF_NODE: OWN, "example.net/a": "b"}},
    "a time that is none": {"metadata__labels": {OF_NODE: OWN, EVICT_AFTER: "soon"}},
    "annotations": {"metadata__annotations": {"example.net/a": "b" * 200_000}},
    "finalizers": {"metadata__finalizers": ["example.net/never"]},
    "no owner": {"metadata__ownerReferences": []},
    "another owner": {"metadata__ownerReferences": [GONE]},
    "another Node's uid": {"metadata__ownerReferences": [{**GONE, "kind": "Node", "name": OWN}]},
    "another's pool": {"spec__deviceSelector__pool": OTHER},
    "no pool": {"spec__deviceSelector__pool": None},
    "no driver": {"spec__deviceSelector__driver": None},
    "no device": {"spec__deviceSelector__device": None},
    "an empty selector": {"spec__deviceSelector": {}},
    "no selector": {"spec__deviceSelector": None},
    "NoExecute": {"spec__taint__effect": "NoExecute"},
    "another taint": {"spec__taint__key": "example.net/a"},
    "no address": {"spec__taint__value": None},
    "another value": {"spec__taint__value": "x"},
    "the year 0": {"spec__taint__timeAdded": "0000-01-01T00:00:00Z"},
    "the year 10000": {"spec__taint__timeAdded": "9999-12-31T23:59:59-23:59"},
    "another manager": {
        "metadata__managedFields": [{**ENTRY, "manager": "m", "fieldsV1": {"f:spec": {"f:taint": {}}}}]
    },
    "many managed fields": {"metadata__managedFields": [{**ENTRY, "fieldsV1": MANY}]},
    "deep managed fields": {"metadata__managedFields": [{**ENTRY, "fieldsV1": DEEP}]},
    "long managed fields": {"metadata__managedFields": [{**ENTRY, "fieldsV1": LONG}]},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_reporter_makes_only_rules_for_one_device_of_its_own_node(thief: Thief, what: str) -> None:
    # The API server itself checks some of them first.
    assert thief.tries("POST", RULES, rule(thief.plane, **REFUSED[what])) in (403, 422)


def test_a_reporter_makes_and_deletes_its_own_rules(thief: Thief) -> None:
    for number in (0, 42, 999):
        labels = {OF_NODE: OWN, EVICT_AFTER: "600"}
        assert thief.tries("POST", RULES, rule(thief.plane, number=number, metadata__labels=labels)) == 200
        assert thief.tries("DELETE", f"{RULES}/{OWN}.{number}") == 200


@pytest.mark.parametrize("time", ["0000-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59"])
def test_no_rule_has_a_time_that_clients_cannot_read(thief: Thief, time: str) -> None:
    thief.plane.kubectl("delete", "devicetaintrules", "--all")
    thief.tries("POST", RULES, rule(thief.plane, metadata__managedFields=[{**ENTRY, **DATED, "time": time}]))
    made = thief.plane.get("devicetaintrules", "--show-managed-fields")["items"]
    assert all(entry["time"].startswith("20") for each in made for entry in each["metadata"]["managedFields"])


@pytest.mark.parametrize("of", [OWN, OTHER, "a-person"])
@pytest.mark.parametrize("kind", [JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY])
def test_a_reporter_changes_no_rule_and_deletes_none_of_others(thief: Thief, of: str, kind: str) -> None:
    plane = thief.plane
    plane.kubectl("delete", "devicetaintrules", "--all")
    theirs = rule(plane, of if of != "a-person" else OWN)
    if of == "a-person":
        theirs["metadata"] |= {"name": "by-a-person", "labels": {OF_NODE: OWN}, "ownerReferences": []}
    plane.apply(theirs)
    place = f"{RULES}/{theirs['metadata']['name']}"
    before = plane.get("devicetaintrules")["items"]
    effect = {"spec": {"taint": {"effect": "NoExecute"}}}
    body = add("/spec/taint/effect", "NoExecute") if kind == JSON_PATCH else {**theirs, **effect}
    assert thief.tries("PATCH", place, body, kind) == 403
    assert thief.tries("PATCH", f"{place}/status", body, kind) == 403
    assert thief.tries("PUT", place, {**before[0], **effect}) == 403
    assert thief.tries("DELETE", RULES) == 403
    assert of == OWN or thief.tries("DELETE", place, {}, JSON) == 403
    assert plane.get("devicetaintrules")["items"] == before


def test_a_node_that_is_shut_out_makes_and_deletes_no_rule(thief: Thief) -> None:
    plane = thief.plane

    def shut_out(why: str | None) -> None:
        patch(plane, "configmap", "shut-out", {"data": {OWN: why}}, NAMESPACED)

    plane.kubectl("delete", "devicetaintrules", "--all")
    plane.apply(rule(plane))
    shut_out("its disk was stolen")
    try:
        until(lambda: thief.tries("POST", RULES, rule(plane)) == 403, "it is shut out")
        assert thief.tries("DELETE", f"{RULES}/{OWN}.7") == 403
    finally:
        shut_out(None)
    until(lambda: thief.tries("DELETE", f"{RULES}/{OWN}.7") == 200, "it is let in again")


def test_a_token_of_no_node_makes_and_deletes_no_rule(plane: ControlPlane) -> None:
    plane.kubectl("delete", "devicetaintrules", "--all")
    loose = Thief(plane, holder(plane))
    assert loose.tries("POST", RULES, rule(plane)) == 403
    plane.apply(rule(plane))
    assert loose.tries("DELETE", f"{RULES}/{OWN}.7") == 403
