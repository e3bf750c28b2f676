"""Which devices the real scheduler gives to claims, while the reporter says that some are bad. The Node is an object only."""

import json
from collections.abc import Callable
from typing import Any

from attrs import evolve

from agent.report.records import NicVerdict
from agent.reporter.settings import Quarantine
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import fleet
from tests.cluster.objects import (
    RESOURCE,
    device_class,
    manifest,
    patch_status,
    resource_slice,
    unschedulable,
    vf_device,
)
from tests.cluster.reporter.reporters import STATUS, Reporter, until
from tests.cluster.reporter.test_device_rules import SRIOV, plane, rules, start

__all__ = ["plane", "start"]

RAIL0 = NicVerdict("rail0", "0000:3b:00.0", True, True, vfs=("0000:3b:00.2",))
RAIL1 = NicVerdict("rail1", "0000:8a:00.0", True, True, vfs=("0000:8a:00.2",))
VF0, VF1 = "0000-3b-00-2", "0000-8a-00-2"
BAD = evolve(RAIL0, ready=False, reason="NoCarrier")


def schedulable(plane: ControlPlane, name: str) -> None:
    """Let the scheduler use the Node of this name, and give it a VF of each rail."""
    patch_status(plane, name, {"status": STATUS})
    devices = [vf_device(device, nic.vfs[0]) for device, nic in ((VF0, RAIL0), (VF1, RAIL1))]
    plane.apply(resource_slice(name, SRIOV, devices), device_class("vf", f"device.driver == '{SRIOV}'"))


def claim(plane: ControlPlane, name: str, on: str) -> None:
    """Make a pod on a node with a claim for one VF."""
    request = {"name": "vf", "exactly": {"deviceClassName": "vf", "count": 1}}
    container = {"name": "c", "image": "example.net/pause:1", "resources": {"claims": [{"name": "vf"}]}}
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": on},
        "tolerations": [{"operator": "Exists"}],
        "resourceClaims": [{"name": "vf", "resourceClaimName": name}],
        "containers": [container],
    }
    plane.apply(
        manifest(RESOURCE, "ResourceClaim", name, "default", spec={"devices": {"requests": [request]}}),
        manifest("v1", "Pod", name, "default", spec=pod),
    )


def given(plane: ControlPlane, name: str) -> str:
    """The device that the scheduler has given to a claim; empty: none yet."""
    status: dict[str, Any] = plane.get("resourceclaim", name).get("status", {})
    results = status.get("allocation", {}).get("devices", {}).get("results", [])
    return str(results[0]["device"]) if results else ""


def test_a_claim_gets_a_good_rail_and_one_for_a_bad_rail_waits_until_that_is_repaired(
    plane: ControlPlane, start: Callable[..., Reporter]
) -> None:
    reporter = start("claims")
    schedulable(plane, reporter.name)
    reporter.say(True, nics=(BAD, RAIL1))
    until(lambda: len(rules(plane, reporter.name)) == 1, "the bad rail's VF is tainted")
    claim(plane, "first", reporter.name)
    assert until(lambda: given(plane, "first"), "the first claim gets a VF") == VF1
    claim(plane, "second", reporter.name)
    until(lambda: unschedulable(plane.get("pod", "second")), "the second one waits")
    assert given(plane, "second") == ""
    reporter.say(True, nics=(RAIL0, RAIL1))
    assert until(lambda: given(plane, "second"), "it gets the VF of the rail that was repaired") == VF0


def test_the_pod_of_a_device_that_goes_bad_stays_until_the_policys_time_is_over_and_a_sweep_evicts_it(
    plane: ControlPlane, start: Callable[..., Reporter]
) -> None:
    reporter = start("evicted", Quarantine(evict_after=0))
    schedulable(plane, reporter.name)
    reporter.acknowledged(reporter.say(True, nics=(RAIL0, RAIL1)))
    claim(plane, "user", reporter.name)
    used = until(lambda: given(plane, "user"), "the claim gets a VF")
    broken = [evolve(nic, ready=False, reason="NoCarrier") if device == used else nic
              for device, nic in ((VF0, RAIL0), (VF1, RAIL1))]  # fmt: skip
    reporter.say(True, nics=tuple(broken))
    until(lambda: rules(plane, reporter.name), "its VF is tainted")
    assert "deletionTimestamp" not in plane.get("pod", "user")["metadata"]
    fleet(plane, "sweep", "--max-share=1", "--max-evict-share=1")
    there = ("get", "pod", "user", "--ignore-not-found", "-o", "json")

    def evicted() -> bool:
        left = plane.kubectl(*there)
        return not left or "deletionTimestamp" in json.loads(left)["metadata"]

    until(evicted, "Kubernetes evicts the pod")
