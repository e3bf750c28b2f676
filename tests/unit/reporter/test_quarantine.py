"""The reporter's DeviceTaintRules: which devices of DRA it taints by which report, and when it writes nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field

from agent.report.names import DEVICES_READY, EVICT_AFTER, OF_NODE, QUARANTINE
from agent.report.records import NicVerdict, VfVerdict, report_to_json
from agent.report.verdict import STALE
from agent.reporter.kubernetes.device_rules import MOST
from agent.reporter.kubernetes.node import read_node
from agent.reporter.kubernetes.publish import Publication
from agent.reporter.kubernetes.quarantine import ABSENT, LOOK_EVERY, RULES, SLICES
from agent.reporter.kubernetes.steps import LONGEST_SLEEP
from agent.reporter.settings import Quarantine
from agent.runtime import boot_id, uptime
from tests.unit.reporter.publication import Clocks, Cluster, publishing, say
from tests.unit.reporter.scripted import merged, rules_answer
from tests.unit.reporter.test_node import NO_CARRIER, REPORT, document

# The names and attributes of dranet 1.4 (pkg/inventory/db.go) and of dra-driver-sriov (pkg/devicestate/discovery.go).
DRANET, SRIOV = "dra.net", "sriovnetwork.k8snetworkplumbingwg.io"
PF, VF0, VF1, OTHER = "0000:3b:00.0", "0000:3b:00.2", "0000:3b:00.3", "0000:8a:00.0"
RAIL0 = NicVerdict("rail0", PF, True, True, vfs=(VF0, VF1))
RAIL1 = NicVerdict("rail1", OTHER, True, True)
BAD0 = evolve(RAIL0, ready=False, reason="NoCarrier")
BAD1 = evolve(RAIL1, ready=False, reason="NoCarrier")
ALL_OF_RAIL0 = {(DRANET, "pci-0000-3b-00-0"), (SRIOV, "0000-3b-00-2"), (SRIOV, "0000-3b-00-3")}
ONLY_RAIL1 = {(DRANET, "pci-0000-8a-00-0")}


def by_dranet(pci: str) -> dict[str, Any]:
    name = f"pci-{pci.replace(':', '-').replace('.', '-')}"
    return {"name": name, "attributes": {"dra.net/pciAddress": {"string": pci}, "dra.net/virtual": {"bool": False}}}


def by_sriov(pci: str) -> dict[str, Any]:
    attributes = {"resource.kubernetes.io/pciBusID": pci, f"{SRIOV}/pciAddress": pci, f"{SRIOV}/pfPciAddress": PF}
    name = pci.replace(":", "-").replace(".", "-")
    return {"name": name, "attributes": {key: {"string": value} for key, value in attributes.items()}}


def resource_slice(driver: str, *devices: dict[str, Any], pool: str = "n1", generation: int = 1) -> dict[str, Any]:
    of_pool = {"name": pool, "generation": generation, "resourceSliceCount": 1}
    return {"spec": {"driver": driver, "nodeName": "n1", "pool": of_pool, "devices": list(devices)}}


@define
class Dra:
    """The DeviceTaintRules and ResourceSlices of an API server. ``refusing``: the status of the next answers."""

    slices: list[dict[str, Any]]
    rules: dict[str, dict[str, Any]] = field(factory=dict)
    asked: list[str] = field(factory=list)
    refusing: list[int | None] = field(factory=list)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]] | None:
        self.asked.append(f"{method} {path}")
        if self.refusing:
            status = self.refusing.pop(0)
            return None if status is None else (status, {"message": "no"})
        if path == SLICES:
            return 200, {"items": self.slices}
        return rules_answer(self.rules, method, path.rpartition("/")[2], body)

    @property
    def tainted(self) -> set[tuple[str, str]]:
        selectors = [rule["spec"]["deviceSelector"] for rule in self.rules.values()]
        assert all(selector["pool"] == "n1" for selector in selectors)
        return {(selector["driver"], selector["device"]) for selector in selectors}

    def writes(self) -> list[str]:
        """The writes since the last call."""
        written = [each.partition(" ")[0] for each in self.asked if not each.startswith("GET")]
        self.asked.clear()
        return written


@define
class Running:
    reporter: Publication
    cluster: Cluster
    clocks: Clocks
    dra: Dra

    def says(self, *nics: NicVerdict) -> float:
        """Publish a report with these NICs; the seconds until the next turn is due."""
        say(self.reporter, evolve(REPORT, nics=nics))
        return self.settles()

    def follows(self, policy: Quarantine | None) -> None:
        """Start the reporter anew with this policy, as after a deploy."""
        self.reporter.settings = evolve(self.reporter.settings, quarantine=policy)
        self.reporter.__attrs_post_init__()
        self.reporter.watch.known, self.reporter.watch.node = True, read_node(self.cluster.node)

    def later(self, seconds: float) -> float:
        self.clocks.goes_on(seconds)
        return self.settles()

    def settles(self) -> float:
        """Take turns until there is nothing to do now."""
        for _ in range(3 * MOST):
            if (wait := self.reporter.turn()) > 0:
                return wait
        raise AssertionError("the reporter never rests")

    @property
    def error(self) -> str:
        return self.reporter.acknowledged.now.error


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Running]:
    with publishing(tmp_path) as (reporter, cluster, clocks):
        slices = [
            resource_slice(DRANET, by_dranet(PF), by_dranet(OTHER)),
            resource_slice(SRIOV, *map(by_sriov, (VF0, VF1))),
        ]
        dra = Dra(slices)
        cluster.devices, cluster.keeps = dra.answer, True
        running = Running(reporter, cluster, clocks, dra)
        running.follows(Quarantine())
        yield running


def test_a_bad_nic_taints_what_its_node_publishes_of_it_and_a_good_one_loses_the_taint(node: Running) -> None:
    node.says(RAIL0, RAIL1)
    node.later(LONGEST_SLEEP - 1.0)
    assert node.dra.asked == [f"GET {RULES}"]
    node.says(BAD0, RAIL1)
    assert node.dra.tainted == ALL_OF_RAIL0
    rule = next(each for each in node.dra.rules.values() if each["spec"]["deviceSelector"]["driver"] == DRANET)
    assert rule["spec"]["taint"] == {"key": QUARANTINE, "value": "0000-3b-00.0", "effect": "NoSchedule"}
    assert rule["metadata"]["labels"] == {OF_NODE: "n1"}
    assert rule["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}]
    node.says(evolve(RAIL0, link="probation"), RAIL1)
    assert node.dra.rules == {}


def test_a_bad_vf_taints_that_vf_alone(node: Running) -> None:
    node.says(evolve(RAIL0, faulty_vfs=(VfVerdict(1, "NoDriver", "it has no driver"),)), RAIL1)
    assert node.dra.tainted == {(SRIOV, "0000-3b-00-3")}


@pytest.mark.parametrize(
    "nics",
    [
        [],
        [evolve(BAD0, certainty="unknown"), RAIL1],
        [evolve(BAD0, pci="", vfs=()), RAIL1],
        [evolve(RAIL0, certainty="unknown"), RAIL1],
        [evolve(RAIL0, faulty_vfs=tuple(VfVerdict(n, "X", "x", "unknown") for n in (0, 1, 7))), BAD1],
        [evolve(RAIL0, vfs=("", ""), faulty_vfs=(VfVerdict(0, "X", "x"),)), BAD1],
    ],
    ids=["no-nics", "unknown", "not-found", "unknown-ready", "unknown-vfs", "vfs-are-away"],
)
def test_what_is_not_known_for_certain_makes_and_removes_no_rule(node: Running, nics: list[NicVerdict]) -> None:
    vfs = ALL_OF_RAIL0 - {(DRANET, "pci-0000-3b-00-0")}
    node.says(*nics)
    assert not node.dra.tainted & vfs
    node.says(BAD0, RAIL1)
    assert node.dra.tainted == ALL_OF_RAIL0
    node.says(*nics)
    assert vfs <= node.dra.tainted


def test_a_report_that_is_not_fresh_changes_nothing(node: Running) -> None:
    node.says(BAD0, RAIL1)
    before = dict(node.dra.rules)
    node.dra.writes()
    fresh = evolve(REPORT, nics=(RAIL0, BAD1), boot_id=boot_id(), uptime=uptime())
    for stale in (evolve(fresh, boot_id="another"), evolve(fresh, uptime=uptime() - STALE - 1.0)):
        node.reporter.files.report.write_text(report_to_json(stale))
        node.settles()
        node.later(LONGEST_SLEEP)
        assert (node.dra.rules, node.dra.asked) == (before, [])


def test_devices_that_are_published_later_are_tainted_too(node: Running) -> None:
    slices, node.dra.slices = node.dra.slices, []
    node.says(BAD0, RAIL1)
    assert node.dra.rules == {}
    node.dra.slices = slices
    node.later(LOOK_EVERY[1])
    assert node.dra.tainted == ALL_OF_RAIL0


def test_a_slice_that_its_driver_has_replaced_counts_for_nothing(node: Running) -> None:
    """Its devices may have other names by now, and its names other devices."""
    before, others = resource_slice(SRIOV, {**by_sriov(VF0), "name": "vf-1"}), node.dra.slices[:1]
    node.dra.slices = [before, resource_slice(SRIOV, {**by_sriov(VF0), "name": "vf-2"}, generation=2), *others]
    node.says(BAD0, RAIL1)
    assert node.dra.tainted == {(SRIOV, "vf-2"), (DRANET, "pci-0000-3b-00-0")}


def test_a_rule_is_removed_by_its_own_address_though_its_device_is_not_published_any_more(node: Running) -> None:
    node.says(BAD0, RAIL1)
    node.dra.slices = []
    node.says(RAIL0, BAD1)
    assert node.dra.rules == {}


def test_the_rule_of_a_nic_that_left_the_spec_goes_once_all_others_are_good(node: Running) -> None:
    node.says(BAD0, RAIL1)
    node.says(BAD1)
    assert node.dra.tainted == ALL_OF_RAIL0 | ONLY_RAIL1
    node.says(RAIL1)
    assert node.dra.rules == {}


def test_the_rules_of_the_only_nic_go_once_the_spec_has_none(node: Running) -> None:
    node.says(BAD0)
    node.says()  # of a pass that ended early
    assert node.dra.tainted == ALL_OF_RAIL0
    say(node.reporter, evolve(REPORT, devices="of no NIC"))
    node.settles()
    assert node.dra.rules == {}


def test_a_rule_that_somebody_has_changed_keeps_its_name_and_stops_no_other(node: Running) -> None:
    """It is of no single device any more, so it is left alone, and its device gets another rule."""
    node.says(BAD0, RAIL1)
    changed = next(name for name, rule in node.dra.rules.items() if rule["spec"]["deviceSelector"]["driver"] == DRANET)
    del node.dra.rules[changed]["spec"]["deviceSelector"]["device"]
    for _ in range(3):
        node.clocks.goes_on(60.0)
        node.says(BAD0, BAD1)
    left = node.dra.rules.pop(changed)
    assert (node.dra.tainted, node.error) == (ALL_OF_RAIL0 | ONLY_RAIL1, "")
    node.dra.rules[changed] = left
    node.says(RAIL0, RAIL1)
    assert list(node.dra.rules) == [changed]


def test_a_rule_that_somebody_has_copied_is_left_to_them(node: Running) -> None:
    """The admission policy forbids a reporter to delete a rule of another name, and the rules after it would stay, too."""
    node.says(BAD0, RAIL1)
    own = node.dra.rules.copy()
    node.dra.rules["copy"] = merged(next(iter(own.values())), {"metadata": {"name": "copy", "uid": "of-copy"}})
    for _ in range(2):
        node.clocks.goes_on(60.0)
        node.says(BAD0, RAIL1)
    assert node.dra.rules.keys() == {*own, "copy"}
    node.says(RAIL0, RAIL1)
    assert list(node.dra.rules) == ["copy"]


def test_rules_that_somebody_has_deleted_come_back_and_are_not_fought_for(node: Running) -> None:
    node.says(BAD0, RAIL1)
    node.dra.rules.clear()
    node.dra.writes()
    node.settles()
    assert node.dra.asked == []
    node.later(LOOK_EVERY[1])
    assert node.dra.writes() == ["POST"] * 3


@pytest.mark.parametrize("status", [None, 409, 500, 503])
def test_an_outage_leaves_no_device_untainted_or_tainted_for_ever(node: Running, status: int | None) -> None:
    node.says(RAIL0, RAIL1)
    for nics, tainted in (((BAD0, RAIL1), ALL_OF_RAIL0), ((RAIL0, RAIL1), set())):
        say(node.reporter, evolve(REPORT, nics=nics))
        assert node.reporter.turn() == 0.0
        # The first write has succeeded. A connection that ends is tried once more.
        node.dra.refusing = [status, status]
        for _ in range(4):
            node.settles()
            node.clocks.goes_on(60.0)
        assert (node.dra.tainted, node.error) == (tainted, "")


def test_a_write_whose_answer_is_lost_makes_no_second_rule(node: Running) -> None:
    lost: list[str] = []

    def answered(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]] | None:
        done = node.dra.answer(method, path, body)
        if method == "POST" and len(lost) < 1:
            lost.append(path)
            return None
        return done

    node.cluster.devices = answered
    for _ in range(5):
        node.says(BAD0, RAIL1)
        node.clocks.goes_on(3.0)  # less than until the next look
    assert len(lost) == 1 and len(node.dra.rules) == 3
    assert node.dra.tainted == ALL_OF_RAIL0


def test_with_a_new_policy_no_device_is_ever_without_a_rule(node: Running) -> None:
    node.says(RAIL0, BAD1)
    for policy in (Quarantine("None"), Quarantine(evict_after=600)):
        node.follows(policy)
        node.dra.writes()
        node.says(RAIL0, BAD1)
        assert node.dra.writes() == ["POST", "DELETE"]
        (rule,) = node.dra.rules.values()
        assert rule["spec"]["taint"]["effect"] == policy.effect
    assert rule["metadata"]["labels"][EVICT_AFTER] == "600"
    rule["spec"]["taint"]["effect"] = "NoExecute"  # trackbed fleet sweep
    node.follows(Quarantine(evict_after=600))
    node.says(RAIL0, BAD1)
    assert node.dra.writes() == []
    node.follows(Quarantine())
    node.says(RAIL0, BAD1)
    assert [each["spec"]["taint"]["effect"] for each in node.dra.rules.values()] == ["NoSchedule"]


def test_without_a_policy_the_rules_of_before_are_removed(node: Running) -> None:
    node.says(BAD0, BAD1)
    node.follows(None)
    node.says(BAD0, BAD1)
    assert (node.dra.rules, node.error) == ({}, "")


@pytest.mark.parametrize("status", [403, 404])
def test_without_a_policy_a_cluster_that_knows_no_rules_is_no_trouble(node: Running, status: int) -> None:
    node.follows(None)
    node.dra.refusing = [status]
    node.says(BAD0, RAIL1)
    node.later(LONGEST_SLEEP - 1.0)
    assert (node.error, node.dra.asked) == ("", [f"GET {RULES}"])


def test_a_cluster_without_the_api_is_asked_once_an_hour_and_status_says_so(node: Running) -> None:
    node.dra.refusing = [404] * 9
    for nics in ((BAD0, RAIL1), (RAIL0, RAIL1), (BAD0, BAD1)):
        node.says(*nics)
        assert (node.error, len(node.dra.asked)) == (ABSENT, 1)
    assert node.reporter.acknowledged.now.ready
    node.dra.refusing = []
    node.later(LONGEST_SLEEP)
    assert (node.dra.tainted, node.error) == (ALL_OF_RAIL0 | ONLY_RAIL1, "")


def test_a_refused_rule_delays_nothing_else(node: Running) -> None:
    node.dra.refusing = [403] * 9
    node.says(BAD0, RAIL1)
    assert "fleet/cluster" in node.error
    assert node.reporter.acknowledged.now.ready


def test_a_node_that_loses_readiness_says_so_before_it_goes_on_with_its_devices(node: Running) -> None:
    node.says(RAIL0, RAIL1)
    say(node.reporter, evolve(REPORT, nics=(BAD0, RAIL1)))
    assert node.reporter.turn() == 0.0
    assert len(node.dra.rules) == 1
    node.cluster.writes.clear()
    say(node.reporter, evolve(REPORT, ready=False, conditions=(NO_CARRIER,), nics=(BAD0, RAIL1)))
    node.dra.asked.clear()
    node.reporter.turn()
    assert (node.cluster.writes[:2], len(node.dra.asked)) == (["n1", "status"], 1)
    node.settles()
    assert node.dra.tainted == ALL_OF_RAIL0


def test_a_node_that_was_made_anew_gets_rules_of_its_own(node: Running) -> None:
    node.says(RAIL0, BAD1)
    node.cluster.node = document(metadata={**document()["metadata"], "uid": "u2"})
    node.reporter.watch.node = read_node(node.cluster.node)
    node.settles()
    (rule,) = node.dra.rules.values()
    assert rule["metadata"]["ownerReferences"][0]["uid"] == "u2"


def test_devices_that_a_reporter_may_not_taint_are_named(node: Running) -> None:
    node.dra.slices = [resource_slice("other.example", by_sriov(PF), pool="rack7")]
    node.says(BAD0, RAIL1)
    assert node.dra.rules == {}
    assert node.error.startswith("other.example publishes a bad NIC in a pool ")


def test_the_number_of_rules_is_bounded(node: Running) -> None:
    vfs = tuple(
        f"0000:{bus:02x}:{device:02x}.{function}"
        for bus in (5, 6, 7, 8, 9)
        for device in range(32)
        for function in range(8)
    )
    node.dra.slices = [resource_slice(SRIOV, *map(by_sriov, vfs))]
    node.says(evolve(BAD0, vfs=vfs), RAIL1)
    assert len(node.dra.rules) == MOST < len(vfs)
    assert node.error == f"{len(vfs) - MOST} devices more than {MOST} are not quarantined"
    node.says(evolve(RAIL0, vfs=vfs), RAIL1)
    assert node.dra.rules == {}


@pytest.mark.parametrize("answer", [{"items": None}, {"items": [7]}, {}, {"items": [{"metadata": {"name": "x"}}]}])
def test_an_answer_that_cannot_be_read_changes_nothing(node: Running, answer: dict[str, Any]) -> None:
    node.cluster.devices = lambda method, path, body: (200, answer)
    node.says(BAD0, RAIL1)
    assert f"the API server's answer to {RULES} cannot be read" in node.error


def said(node: Running) -> tuple[str, str, str]:
    """What the Node's condition says: status, reason and message."""
    conditions = node.cluster.node["status"]["conditions"]
    found = [each for each in conditions if each["type"] == DEVICES_READY]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")


UNKNOWN_VF = VfVerdict(1, "ProbeTimedOut", "no answer", "unknown")


@pytest.mark.parametrize(
    ("nics", "condition"),
    [
        ((RAIL0, RAIL1), ("True", "AllReady", "")),
        ((BAD0, RAIL1), ("False", "SomeNotReady", "rail0 (NoCarrier)")),
        ((evolve(RAIL0, faulty_vfs=(UNKNOWN_VF,)), RAIL1), ("Unknown", "SomeNotReady", "rail0 VF 1 (ProbeTimedOut)")),
        (
            (evolve(RAIL0, faulty_vfs=(UNKNOWN_VF,)), BAD1),
            ("False", "SomeNotReady", "rail0 VF 1 (ProbeTimedOut); rail1 (NoCarrier)"),
        ),
        ((), ("", "", "")),
    ],
    ids=["ready", "a-nic", "a-vf-unknown", "both", "no-nics"],
)
def test_a_condition_of_the_node_names_the_nics_that_are_not_ready(
    node: Running, nics: tuple[NicVerdict, ...], condition: tuple[str, str, str]
) -> None:
    node.says(*nics)
    assert said(node) == condition
    assert node.error == ""


def test_the_condition_is_unknown_once_there_is_no_fresh_verdict(node: Running) -> None:
    node.says(BAD0, RAIL1)
    node.says()
    assert said(node) == ("Unknown", "NotYetRead", "")
    node.reporter.files.report.unlink()
    node.settles()
    assert said(node) == ("Unknown", "AgentSilent", "")


def test_a_policy_of_before_that_refuses_the_condition_refuses_nothing_else(node: Running) -> None:
    node.says(RAIL0, RAIL1)
    node.cluster.refusing = {"status": 403}
    node.says(BAD0, RAIL1)
    assert (node.dra.tainted, said(node)[0]) == (ALL_OF_RAIL0, "True")
    assert node.reporter.acknowledged.now.ready
    assert "fleet/cluster" in node.error
