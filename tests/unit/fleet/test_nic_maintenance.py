"""A maintenance of one NIC: its devices are tainted, its pods end, the NIC is changed, and nothing stays tainted."""

import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from attrs import define, evolve
from lightkube.models.meta_v1 import LabelSelector

from agent.report import names
from fleet.maintenance import Maintenance
from fleet.maintenance_record import Record
from fleet.sweeping import decide, sweep
from tests.unit.fleet.nic_fleet import CLEAN, DONE, FORBIDDEN, PF, VF0, VF1, Fleet, budget, fleet
from tests.unit.fleet.nodes_api import Dra
from tests.unit.fleet.test_fleet import node
from tests.unit.fleet.test_kubeconfig import kubeconfig, trackbed

__all__ = ["fleet"]


def test_the_nics_pods_alone_end_before_it_is_changed(fleet: Fleet) -> None:
    rules: list[Any] = []

    def applies() -> bool:
        assert fleet.state() == (["pf", "vf0"], ["a"])
        assert json.loads(fleet.cluster.recorded()["a"])["cordoned"] is False
        assert fleet.dra.users == {"vf0": [], "pf": [], "other": ["u-web"]}
        rules.extend(fleet.dra.rules.values())
        return True

    fleet.node = evolve(fleet.node, applies=applies)
    assert fleet.maintenance().run(["a"], 1) == DONE
    assert fleet.state() == CLEAN
    assert fleet.node.asked[-1][1:4] == ["apply", "--allow", "vf-reset"]
    assert fleet.node.asked[-1][-2:] == ["--device", "rail0"]
    # Each rule taints one device, and is deleted with its Node.
    rule = rules[0]
    assert rule["spec"]["deviceSelector"] == {"driver": "sriov", "pool": "a", "device": "pf"}
    assert rule["spec"]["taint"] == {"key": names.MAINTENANCE, "value": "0000-3b-00.0", "effect": "NoExecute"}
    assert rule["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u-a"}]
    # A reporter must not take it for its own.
    assert rule["metadata"]["labels"] == {names.MAINTENANCE: "a"}


def killed_before(fleet: Fleet) -> Maintenance:
    """A run that resumes one which was killed while the node was about to change, or just after."""
    fleet.cluster.note("a", Record("first", "2026", "apply", False, "vf-reset", device="rail0"))
    fleet.cluster.nodes["a"]["spec"] = {}
    return fleet.maintenance(resume=True)


@pytest.mark.parametrize("again", ["resume", "undo"])
def test_a_run_that_is_killed_at_any_request_is_resumed_or_undone(fleet: Fleet, again: str) -> None:
    for number in range(100):
        fleet.dra.users["vf0"], fleet.requests, fleet.refuse_from = ["u-job"], 0, number
        before = fleet.node.applied()
        result = fleet.maintenance(user="first").run(["a"], 1)["a"]
        fleet.refuse_from = None
        if result == ("done", ""):
            assert number > 10
            break
        tainted, recorded = fleet.state()
        assert not tainted or recorded, f"request {number}: nobody would know of {tainted}"
        if recorded and number:
            assert result[0] == "failed"
            assert "trackbed fleet maintain a --undo" in result[1]
        second = fleet.maintenance(user="second", resume=True)
        if again == "undo":
            assert second.give_back("a") == ("undone", "")
        else:
            assert second.run(["a"], 1) == DONE
            assert fleet.node.applied() > before
        assert fleet.state() == CLEAN, f"request {number}"
    else:
        pytest.fail("it is never done")


def test_a_lost_answer_is_no_lost_rule(fleet: Fleet) -> None:
    for number in range(100):
        fleet.dra.users["vf0"], fleet.requests, fleet.lose = ["u-job"], 0, number
        assert fleet.maintenance().run(["a"], 1) == DONE, number
        assert fleet.state() == CLEAN, number
        if fleet.requests <= number:
            assert number > 10
            return
    pytest.fail("it is never done")


def test_a_run_that_is_killed_while_the_node_changes_is_resumed_with_its_rules(fleet: Fleet) -> None:
    """The VFs are gone in the middle of the change, a rule was deleted by hand, and a budget forbids evictions by now."""
    fleet.dra.budgets = [budget(0, LabelSelector()).to_dict()]
    tainted: list[list[str]] = []

    def applies() -> bool:
        tainted.append(fleet.dra.tainted())
        return True

    fleet.node = evolve(fleet.node, applies=applies)
    for devices in ({}, {"pf": PF, "vf0": VF0}):
        fleet.dra.devices = devices
        assert killed_before(fleet).run(["a"], 1) == DONE
    assert tainted == [[], ["pf", "vf0"]]
    assert fleet.state() == CLEAN


def test_a_run_that_is_killed_after_the_change_is_resumed_without_another_eviction(fleet: Fleet) -> None:
    """Its rules are gone, its record is not, and pods have come back."""
    fleet.node.faults.clear()
    assert killed_before(fleet).run(["a"], 1) == DONE
    assert (fleet.state(), fleet.dra.made, fleet.dra.users["vf0"]) == (CLEAN, 0, ["u-job"])


def test_a_nic_of_which_no_change_waits_is_taken_from_nobody(fleet: Fleet) -> None:
    fleet.node.faults.clear()
    said: list[str] = []
    assert fleet.maintenance(tell=said.append).run(["a"], 1) == DONE
    assert "a: no change of rail0 waits, so nothing is tainted" in said
    assert (fleet.state(), fleet.dra.made, fleet.dra.users["vf0"]) == (CLEAN, 0, ["u-job"])


def test_a_nic_that_may_be_half_changed_stays_tainted_although_a_pod_has_it(fleet: Fleet) -> None:
    fleet.dra.tolerating = {"u-job"}
    result, why = evolve(killed_before(fleet), drain_timeout=0.0).run(["a"], 1)["a"]
    assert (result, "still ml/job" in why, "it stays in maintenance" in why) == ("failed", True, True)
    assert (fleet.state(), fleet.node.applied()) == ((["pf", "vf0"], ["a"]), 0)


def test_a_device_that_is_published_anew_is_tainted_once(fleet: Fleet) -> None:
    fleet.dra.generations = 2
    assert fleet.maintenance().run(["a"], 1) == DONE
    assert (fleet.dra.made, fleet.state()) == (2, CLEAN)


def test_a_device_that_appears_while_pods_end_is_tainted_too(fleet: Fleet) -> None:
    fleet.dra.tolerating = {"u-job"}
    fleet.node.nic["vfs"] = [VF0, VF1]

    def received(what: str) -> None:
        if what.endswith("/resourceclaims") and fleet.dra.tainted() == ["pf", "vf0"]:
            fleet.dra.devices["vf1"] = VF1
        if fleet.dra.tainted() == ["pf", "vf0", "vf1"]:
            fleet.dra.users["vf0"] = []

    fleet.received = received
    assert fleet.maintenance().run(["a"], 1) == DONE
    assert fleet.dra.made == 3
    assert fleet.state() == CLEAN


def test_while_pods_end_only_their_claims_are_read_and_at_the_end_all_claims_are(fleet: Fleet) -> None:
    """A large cluster has tens of thousands of claims. One of them may have got a device just before it was tainted."""
    fleet.dra.tolerating = {"u-job", "u-web"}
    asked: list[str] = []

    def received(what: str) -> None:
        if what.endswith("/resourceclaims"):
            asked.append(what)
            fleet.dra.users["vf0"] = ["u-job"] if len(asked) < 20 else []
            fleet.dra.users["pf"] = ["u-web"] if 20 <= len(asked) < 30 else []

    fleet.received = received
    assert fleet.maintenance().run(["a"], 1) == DONE
    of_cluster = [at for at, what in enumerate(asked) if "/namespaces/" not in what]
    # Before the first taint, after it, and after the known claims are free: another one, and then none.
    assert of_cluster == [0, 1, 20, 30]
    assert fleet.state() == CLEAN


def test_a_pod_is_waited_for_although_its_device_is_no_longer_published(fleet: Fleet) -> None:
    """The driver is updated, or has crashed: the kubelet then deletes its ResourceSlices."""
    fleet.dra.tolerating = {"u-job"}

    def received(what: str) -> None:
        if what.endswith("/resourceclaims") and fleet.dra.tainted() == ["pf", "vf0"]:
            fleet.dra.devices = {}

    fleet.received = received
    result, why = fleet.maintenance(drain_timeout=0.2).run(["a"], 1)["a"]
    assert (result, "still ml/job" in why, fleet.node.applied()) == ("undone", True, 0)


def test_a_pod_that_does_not_end_has_the_taints_removed(fleet: Fleet) -> None:
    fleet.dra.tolerating = {"u-job"}
    said = "after 0 s there are still ml/job: they do not end"
    assert fleet.maintenance(drain_timeout=0.0).run(["a"], 1) == {"a": ("undone", said)}
    assert (fleet.state(), fleet.node.applied()) == (CLEAN, 0)


def test_pods_that_a_drain_would_not_evict_refuse_the_eviction(fleet: Fleet) -> None:
    del fleet.cluster.pods[0]["metadata"]["ownerReferences"]
    result, why = fleet.maintenance().run(["a"], 1)["a"]
    assert (result, "ml/job has no controller" in why, fleet.dra.made) == ("undone", True, 0)
    fleet.cluster.pods.pop(0)
    assert fleet.maintenance().run(["a"], 1)["a"] == ("undone", "ml/job uses a device, and is no pod of the node")


@pytest.mark.parametrize(
    ("devices", "pool", "said"),
    [
        # Its pods have it by a device plugin.
        ({"other": "0000:5e:00.0"}, "a", "no driver of DRA publishes a device of rail0; maintain the node without"),
        pytest.param(
            {"pf": PF}, "shared", "sriov publishes rail0 in a pool that is not named as the Node", id="cilium-48922"
        ),
    ],
)
def test_a_nic_without_a_device_of_the_node_is_not_maintained_alone(
    fleet: Fleet, devices: dict[str, str], pool: str, said: str
) -> None:
    fleet.dra.devices, fleet.dra.pool = devices, pool
    result, why = fleet.maintenance().run(["a"], 1)["a"]
    assert (result, said in why) == ("undone", True)
    assert (fleet.state(), fleet.node.applied()) == (CLEAN, 0)


def test_a_nic_that_the_node_does_not_have_is_named(fleet: Fleet) -> None:
    result, why = evolve(fleet.maintenance(), nic="rail7").run(["a"], 1)["a"]
    assert (result, "rail7" in why, why.endswith("it has: rail0")) == ("undone", True, True)
    assert evolve(fleet.maintenance(), nic=PF).run(["a"], 1)["a"][1].endswith("give --device rail0")
    assert fleet.state() == CLEAN


@pytest.mark.parametrize("good", [True, False])
def test_a_change_that_fails_leaves_a_nic_tainted_unless_it_is_good(fleet: Fleet, good: bool) -> None:
    fleet.node = evolve(fleet.node, applies=lambda: False)
    fleet.node.nic["ready"] = good
    result, why = fleet.maintenance().run(["a"], 1)["a"]
    assert why.startswith("trackbed apply on the node failed: a pod has it")
    assert (result, fleet.state()) == (("undone", CLEAN) if good else ("failed", (["pf", "vf0"], ["a"])))
    assert ("it stays in maintenance, with rail0 tainted" in why) == (not good)
    assert fleet.maintenance(resume=True).give_back("a") == ("undone", "")
    assert fleet.state() == CLEAN


def test_a_second_run_leaves_the_nic_to_the_first(fleet: Fleet) -> None:
    results: list[Any] = []

    def applies() -> bool:
        results.append(fleet.maintenance(user="second").run(["a"], 1)["a"])
        results.append(evolve(fleet.maintenance(user="third", resume=True), nic="rail1").run(["a"], 1)["a"])
        results.append(evolve(fleet.maintenance(user="fourth", resume=True), nic="").run(["a"], 1)["a"])
        assert fleet.state() == (["pf", "vf0"], ["a"])
        return True

    fleet.node = evolve(fleet.node, applies=applies)
    assert fleet.maintenance(user="first").run(["a"], 1) == DONE
    for result, why in results:
        assert (result, why.startswith("first began to maintain a at 2026-01-01")) == ("failed", True)
        assert why.endswith("give --device rail0 --resume or --undo")


@pytest.mark.parametrize("tolerating", ["", "u-job"], ids=["its pods end", "a pod stays"])
def test_a_run_whose_maintenance_was_undone_changes_nothing_and_leaves_no_rule(fleet: Fleet, tolerating: str) -> None:
    fleet.dra.tolerating = {tolerating}

    def received(what: str) -> None:
        if what.startswith("POST"):
            fleet.received = lambda what: None
            fleet.cluster.nodes["a"]["metadata"]["annotations"] = {}

    fleet.received = received
    result, why = fleet.maintenance().run(["a"], 1)["a"]
    assert (result, "by somebody else" in why) == ("failed", True)
    assert (fleet.state(), fleet.dra.made, fleet.node.applied()) == (CLEAN, 2, 0)


def fails_to_apply(fleet: Fleet) -> None:
    """Its NIC stays tainted, for it may be half changed."""
    fleet.node = evolve(fleet.node, applies=lambda: False)
    fleet.node.nic["ready"] = False
    fleet.maintenance().run(["a"], 1)


def leave_a_rule(fleet: Fleet) -> None:
    """As an undo of an earlier version that knows nothing of rules."""
    fails_to_apply(fleet)
    fleet.cluster.nodes["a"]["metadata"]["annotations"] = {}


def test_rules_without_a_record_are_removed_by_an_undo_and_by_a_sweep_alone(fleet: Fleet) -> None:
    leave_a_rule(fleet)
    assert fleet.maintenance(resume=True).give_back("a") == ("undone", "")
    assert fleet.state() == CLEAN
    leave_a_rule(fleet)
    assert [rule.device for rule in fleet.sweep().removed] == ["pf of sriov", "vf0 of sriov"]
    assert fleet.state() == CLEAN


def test_a_sweep_leaves_a_rule_that_somebody_has_made_anew_since_it_looked(fleet: Fleet) -> None:
    """A node that returns gives its rules the same names as before."""
    leave_a_rule(fleet)
    api = fleet.api()
    decided = decide(api, 1.0)
    anew, *_ = fleet.dra.rules.values()
    anew["metadata"]["uid"] = "u-anew"
    swept = sweep(api, decided, Event())
    assert ([rule.device for rule in swept.removed], swept.failed) == (["vf0 of sriov"], {})
    assert fleet.dra.tainted() == ["pf"]


OF_EARLIER_VERSION = {"by": "first", "since": "2025", "step": "apply", "cordoned": False, "allow": "vf-reset"}


@pytest.mark.parametrize("record", ["", json.dumps(OF_EARLIER_VERSION), "of a later version"])
def test_a_sweep_leaves_the_rules_of_a_recorded_maintenance(fleet: Fleet, record: str) -> None:
    fails_to_apply(fleet)
    if record:
        fleet.cluster.nodes["a"]["metadata"]["annotations"] = {names.MAINTENANCE: record}
    assert fleet.sweep().removed == ()
    assert fleet.state() == (["pf", "vf0"], ["a"])


def test_a_sweep_removes_the_rules_once_the_record_of_an_earlier_version_is_undone(fleet: Fleet) -> None:
    fails_to_apply(fleet)
    fleet.cluster.nodes["a"]["metadata"]["annotations"] = {names.MAINTENANCE: json.dumps(OF_EARLIER_VERSION)}
    assert fleet.maintenance(resume=True).give_back("a") == ("undone", "")
    assert len(fleet.sweep().removed) == 2
    assert fleet.state() == CLEAN


def test_several_nodes_are_maintained_one_after_the_other_until_one_fails(fleet: Fleet) -> None:
    fleet.cluster.nodes |= {name: node(name).to_dict() for name in ("b", "c")}
    fleet.node.hosts.update(b="b", c="c")

    def received(what: str) -> None:
        # The driver of the node that is maintained now.
        if what.startswith("PATCH /api/v1/nodes/"):
            fleet.dra.pool, fleet.dra.users["vf0"] = what.rpartition("/")[2], ["u-job"]

    def applies() -> bool:
        (name,) = fleet.cluster.recorded()
        assert {rule["metadata"]["labels"][names.MAINTENANCE] for rule in fleet.dra.rules.values()} == {name}
        fleet.node.nic["ready"] = name != "b"
        return name != "b"

    fleet.received, fleet.node = received, evolve(fleet.node, applies=applies)
    results = fleet.maintenance().run(["a", "b", "c"], 1)
    assert {name: result for name, (result, _) in results.items()} == {"a": "done", "b": "failed", "c": "not started"}
    assert (fleet.state(), fleet.node.applied()) == ((["pf", "vf0"], ["b"]), 2)


def test_an_undo_that_may_not_list_rules_says_so(fleet: Fleet) -> None:
    said: list[str] = []
    answer, fleet.cluster.dra = fleet.dra.answer, Dra({}, {})

    @define
    class Refusing(Dra):
        def answer(self, method: str, path: str, body: Any) -> tuple[int, Any] | None:
            return FORBIDDEN if path.endswith("/devicetaintrules") else answer(method, path, body)

    fleet.cluster.dra = Refusing({}, {})
    undone = evolve(fleet.maintenance(resume=True), tell=said.append, nic="")
    assert undone.give_back("a") == ("undone", "")
    assert said[0].endswith("this user may not list DeviceTaintRules, so some may be left (rights: docs/fleet.md)")


def test_status_and_sweep_name_the_devices_that_a_maintenance_has_tainted(fleet: Fleet, tmp_path: Path) -> None:
    options = ("--kubeconfig", str(kubeconfig(tmp_path, fleet.url)))
    leave_a_rule(fleet)
    shown = trackbed("status", *options).stdout
    assert "a: pf of sriov is tainted by a maintenance that is not recorded; trackbed fleet sweep removes" in shown
    swept = trackbed("sweep", *options, "--max-share", "1").stdout
    assert "a: no maintenance is recorded; its rule for pf of sriov is removed" in swept
    fleet.maintenance().run(["a"], 1)
    listed = json.loads(trackbed("status", *options, "--json").stdout)["maintenance_rules"]
    assert [(each["node"], each["device"], each["recorded"]) for each in listed] == [
        ("a", "pf of sriov", True),
        ("a", "vf0 of sriov", True),
    ]


@pytest.mark.parametrize(
    ("has_rules", "said"), [(False, "the cluster has no DeviceTaintRule of resource.k8s.io/v1"), (True, "nobody")]
)
def test_a_cluster_or_user_without_these_rules_is_refused_before_anything_is_begun(
    fleet: Fleet, tmp_path: Path, has_rules: bool, said: str
) -> None:
    (tmp_path / "fleet.py").write_text('hosts = ["a"]\n')
    words = ("--kubeconfig", str(kubeconfig(tmp_path, fleet.url)), "--inventory", str(tmp_path / "fleet.py"))
    if not has_rules:
        fleet.cluster.dra = None
    else:
        # Its name is its first request.
        fleet.refuse_from = 1
    refused = trackbed("maintain", "a", *words, "--device", "rail0")
    assert (refused.returncode, said in refused.stderr, fleet.cluster.recorded()) == (1, True, {})
