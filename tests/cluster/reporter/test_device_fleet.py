"""A thousand reporters with eight rails each: the rules of bad rails, what they cost the API server, and the sweep's brake."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from agent.report.records import NicVerdict
from agent.reporter.kubernetes.api import Api, Refused
from agent.reporter.kubernetes.lease import LEASE_EVERY
from agent.reporter.kubernetes.quarantine import LOOK_EVERY, RULES, SLICES
from agent.reporter.settings import Quarantine
from lab.cluster.control_plane import ControlPlane
from tests.cluster.conftest import Say
from tests.cluster.dra_drivers import DRANET, RAILS, VFS, resource_slice
from tests.cluster.fleet import fleet_commands
from tests.cluster.planes import WITH_DEVICE_TAINTS, received, running
from tests.cluster.reporter.fleet_process import Said
from tests.cluster.reporter.reporters import by_admin, prepare, until
from tests.cluster.reporter.test_reporter_fleet import FLEET, NAMES, USER, Fleet, cpu_during, folder

__all__ = ["folder"]

NICS = tuple(
    NicVerdict(rail.name, rail.address, True, True, vfs=tuple(rail.vf(index) for index in range(VFS))) for rail in RAILS
)
# Each node renews its Lease about once in this time.
STEADY = sum(LEASE_EVERY) / 2
# One per cent of all rails, two on a node: one on each of twice as many of a thousand nodes would meet the brake.
FEW = dict.fromkeys(NAMES[: FLEET // 25], (RAILS[0].name, RAILS[1].name))
# A switch takes all rails of every tenth node. The test needs 50 nodes: of fewer, five or half of them are always allowed.
SWITCH = dict.fromkeys(NAMES[len(FEW) : len(FEW) + FLEET // 10], tuple(rail.name for rail in RAILS))
DEADLINE = 600.0
OF_DRA = ("devicetaintrules", "resourceslices")
WATCHES = re.compile(r'^apiserver_longrunning_requests\{.*[,{]resource="(\w*)".*verb="WATCH".*\} (\d+)$', re.MULTILINE)

Device = tuple[str, str]

pytestmark = pytest.mark.campaign


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of its own, since a sweep reads all Nodes of a cluster."""
    with running(tmp_path / "control-plane", WITH_DEVICE_TAINTS) as plane:
        prepare(plane)
        yield plane


def devices(bad: Mapping[str, tuple[str, ...]]) -> set[Device]:
    """The devices of bad rails, by the names of their pool and of the device."""
    addresses = {rail.name: {rail.address, *(rail.vf(index) for index in range(VFS))} for rail in RAILS}

    def of(name: str, rails: tuple[str, ...]) -> set[Device]:
        wanted = set().union(*(addresses[rail] for rail in rails))
        listed = [(each["name"], each["attributes"]) for each in resource_slice(name, DRANET)["spec"]["devices"]]
        return {(name, device) for device, a in listed if a.get(f"{DRANET}/pciAddress", {}).get("string") in wanted}

    return set().union(*(of(name, rails) for name, rails in bad.items()))


def watches(plane: ControlPlane) -> Counter[str]:
    """The watches that the API server holds, by resource."""
    held: Counter[str] = Counter()
    for resource, count in WATCHES.findall(plane.kubectl("get", "--raw", "/metrics")):
        held[resource] += int(count)
    return held


def counted(held: Counter[str]) -> str:
    """The number of watches, and of those that matter here."""
    return f"{held.total()}, " + ", ".join(f"{held[resource]} of {resource}" for resource in ("nodes", *OF_DRA))


def effects(plane: ControlPlane) -> dict[Device, str]:
    """The effect of each rule, by its pool and device."""
    specs = [rule["spec"] for rule in plane.get("devicetaintrules")["items"]]
    return {
        (spec["deviceSelector"]["pool"], spec["deviceSelector"]["device"]): spec["taint"]["effect"] for spec in specs
    }


@frozen
class Steady:
    """What the API server did for a while: its CPU seconds in a second, and the requests in its audit log."""

    cpu: float
    requests: list[dict[str, Any]]

    @classmethod
    def seen(cls, plane: ControlPlane) -> "Steady":
        mark = len(plane.audit())
        cpu = cpu_during(plane, STEADY)
        return cls(cpu, plane.audit()[mark:])

    def of_reporters(self, *verbs: str) -> Counter[str]:
        """The reporters' requests of these verbs, by resource."""
        ours = [event for event in self.requests if event["user"]["username"] == USER]
        return Counter(event["objectRef"]["resource"] for event in ours if event["verb"] in verbs)

    @property
    def looks(self) -> int:
        """The reporters' lists of rules and ResourceSlices."""
        return sum(self.of_reporters("list")[resource] for resource in OF_DRA)

    def __str__(self) -> str:
        written = [event for event in self.requests if event["verb"] in ("create", "update", "patch", "delete")]
        ours = self.of_reporters("create", "update", "patch", "delete").total()
        return (
            f"{self.cpu:.4f} CPU s/s, {len(written) / STEADY:.2f} writes a second ({ours / STEADY:.2f} of the reporters), "
            f"{self.looks / STEADY:.2f} lists of rules and slices a second"
        )


def reported(fleet: Fleet, bad: Mapping[str, tuple[str, ...]], rules: int, verb: str) -> float:
    """Let all agents report, and wait until there are so many rules. :returns: seconds until the last request of a verb."""
    plane, mark, began = fleet.plane, len(fleet.plane.audit()), time.time()
    api = Api(plane.url, by_admin(plane).session)

    def count() -> int | None:
        with suppress(OSError, Refused):  # the API server is busy with the rules
            answer = api.ask("GET", RULES, {"limit": "1"})
            return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount", 0))
        return None

    fleet.say(Said(True, bad))
    until(lambda: count() == rules, f"there are {rules} rules", DEADLINE)
    done = [each for each in plane.audit()[mark:] if each["verb"] == verb]
    return max(received(each) for each in done if each["objectRef"]["resource"] == "devicetaintrules") - began


def test_bad_rails_of_a_large_fleet_cost_little_and_a_switch_that_takes_a_tenth_of_the_nodes_evicts_nobody(
    plane: ControlPlane, folder: Path, say: Say
) -> None:
    api = Api(plane.url, by_admin(plane).session)
    for name in NAMES:
        api.ask("POST", SLICES, body=resource_slice(name, DRANET))
    few, many = devices(FEW), devices({**FEW, **SWITCH})
    alone = watches(plane)
    fleet = Fleet.start(plane, folder, Quarantine(evict_after=0), NICS)
    try:
        fleet.say(Said(True))
        fleet.all_published(True, DEADLINE)
        time.sleep(LEASE_EVERY[1])  # the first renewals came all at once
        good, held = Steady.seen(plane), watches(plane)
        say(
            f"{FLEET} reporters, each with {len(RAILS)} rails of {VFS} VFs; watches without reporters: {counted(alone)}"
        )
        say(f"all rails are good: {good}; watches: {counted(held)}")

        first = reported(fleet, FEW, len(few), "create")
        assert effects(plane) == dict.fromkeys(few, "NoSchedule")
        sweeps: list[int] = []

        def swept() -> bool:
            done = fleet_commands.fleet(plane, "sweep", "--json")
            assert done.code == 0, done.err
            sweeps.append(len(done.document["rules_evicting"]))
            return effects(plane) == dict.fromkeys(few, "NoExecute")

        until(swept, "the sweeps evict", DEADLINE)
        until(
            lambda: all("status" in rule for rule in plane.get("devicetaintrules")["items"]),
            "Kubernetes evicts",
            DEADLINE,
        )
        bad, later = Steady.seen(plane), watches(plane)
        say(
            f"1 % of the rails are bad: the last of {len(few)} rules after {first:.1f} s; each sweep made evict: {sweeps}"
        )
        say(f"then {bad}; watches: {counted(later)}")

        second = reported(fleet, {**FEW, **SWITCH}, len(many), "create")
        expected = {**dict.fromkeys(many, "NoSchedule"), **dict.fromkeys(few, "NoExecute")}
        assert effects(plane) == expected
        say(
            f"a switch takes all rails of {len(SWITCH)} nodes: the last of {len(many) - len(few)} rules after {second:.1f} s"
        )
        refused = fleet_commands.fleet(plane, "sweep")
        assert effects(plane) == expected

        last = reported(fleet, {}, 0, "delete")
        say(f"all rails are good again: the last of {len(many)} rules deleted after {last:.1f} s")
    finally:
        fleet.process.kill()
    allowed = max(5, FLEET // 20)
    assert refused.code == 2
    assert (
        f"bad devices would evict pods on {len(FEW) + len(SWITCH)} of {FLEET} nodes, and at most {allowed} are allowed: "
        "no pod was evicted" in refused.err
    )
    assert good.looks == 0
    for steady in (good, bad):
        assert {*steady.of_reporters("create", "update", "patch", "delete")} == {"leases"}
    assert 0 < bad.looks <= 2 * len(FEW) * (STEADY / LOOK_EVERY[0] + 1)
    for resource in OF_DRA:
        assert alone[resource] == held[resource] == later[resource]
