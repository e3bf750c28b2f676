"""Public reports of what the fleet's commands read: lists of many pages, and claims of DRA."""

import json
from typing import Any

import pytest
from attrs import evolve

from fleet.maintenance_record import KEPT
from fleet.sweeping import decide
from tests.unit.fleet.nic_fleet import CLEAN, DONE, Fleet, fleet
from tests.unit.fleet.nodes_api import status
from tests.unit.fleet.test_fleet import node
from tests.unit.fleet.test_maintenance_requests import NODES, Serve, serve, sweeps

__all__ = ["fleet", "serve"]


def test_a_long_list_whose_pages_expire_is_read_anew(serve: Serve) -> None:
    """etcd has compacted the revision of the first page. The Node of that page is gone by now."""
    first = {"metadata": {"continue": "next"}, "items": [node("gone").to_dict()]}
    expired = status(410, "The provided continue parameter is too old")
    anew = sweeps("ab")
    answers = {what: [(200, first if what == NODES else {**first, "items": []}), expired, *anew[what]] for what in anew}
    script, maintenance = serve(answers)
    assert sorted(maintenance.api.nodes().objects) == ["a", "b"]
    assert decide(maintenance.api, 0.25).fleet == 2
    assert [script.asked.count(what) for what in anew] == [4, 3, 4]


EVERY = [{"effect": "NoExecute", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("group", "tolerations", "why"),
    [
        pytest.param(
            "train",
            [],
            "it is reserved for the PodGroup train, and pods that come back get the same device",
            id="enhancements-5736",
        ),
        pytest.param("", EVERY, "it tolerates each taint", id="kubernetes-134434"),
    ],
)
def test_a_claim_whose_device_no_taint_frees_is_left_to_its_pods(
    fleet: Fleet, group: str, tolerations: list[Any], why: str
) -> None:
    fleet.dra.group, fleet.dra.tolerations = group, tolerations
    said = f"the claim ml/of-vf0 has a device: {why}; end its workload, or maintain the node without --device"
    assert fleet.maintenance().run(["a"], 1) == {"a": ("undone", said)}
    assert (fleet.state(), fleet.dra.made) == (CLEAN, 0)


def test_a_claim_that_tolerates_another_taint_or_for_some_time_is_freed(fleet: Fleet) -> None:
    of_time = {**EVERY[0], "tolerationSeconds": 30}
    fleet.dra.tolerations = [of_time, {**EVERY[0], "key": "example.com/other"}, {**EVERY[0], "effect": "NoSchedule"}]
    assert fleet.maintenance().run(["a"], 1) == DONE


@pytest.mark.parametrize(
    "was",
    [
        pytest.param({}, id="kured-707"),
        pytest.param(dict.fromkeys(KEPT, "true"), id="autoscaler-4919"),
        {KEPT[0]: "false"},
    ],
)
def test_no_autoscaler_deletes_a_node_that_is_empty_for_its_maintenance(fleet: Fleet, was: dict[str, str]) -> None:
    """What somebody else has set stays as it was."""
    there = fleet.cluster.nodes["a"]["metadata"]
    there["annotations"] = dict(was)
    fleet.cluster.pods.clear()
    whole = evolve(fleet.maintenance(again="deploy again"), nic="")
    assert whole.take_out("a") == ("done", "")
    assert {**dict.fromkeys(KEPT, "true"), **was}.items() <= fleet.cluster.nodes["a"]["metadata"]["annotations"].items()
    resumed = evolve(fleet.maintenance(user="second", resume=True), nic="")
    assert resumed.give_back("a") == ("undone", "")
    assert fleet.cluster.nodes["a"]["metadata"]["annotations"] == was
    assert json.dumps(fleet.cluster.nodes["a"]["spec"]) == "{}"


def test_an_api_server_that_is_below_a_path_is_asked_there(fleet: Fleet) -> None:
    """Rancher is a proxy of many clusters."""
    asked: list[str] = []
    fleet.received, fleet.url = asked.append, f"{fleet.url}/k8s/clusters/c-m-1"
    assert fleet.maintenance().run(["a"], 1) == DONE
    assert {each.partition(" /k8s/clusters/c-m-1/")[1] for each in asked} == {" /k8s/clusters/c-m-1/"}
