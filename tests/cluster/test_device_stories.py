"""One bad NIC costs one NIC: pods claim VFs by DRA on a node of the lab while a NIC's cable is pulled and plugged in.

They run with TRACKBED_TEST_KUBERNETES=v1.37.2, which has DeviceTaintRules. The driver of DRA is the lab's own, on the real
kubelet plugin library.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from attrs import evolve, frozen

from agent.report.names import OF_NODE
from agent.reporter.kubernetes.api import Api
from agent.reporter.kubernetes.quarantine import RULES
from lab import Node
from lab.cluster import dra_driver, join, manifests, programs
from lab.cluster.control_plane import ControlPlane
from lab.hardware import Nic
from tasks.kubernetes.manifests.device_plugins import SRIOV_DRIVER
from tests.cluster import rendered
from tests.cluster.conftest import LONG, Cluster, Say, is_open, joined, restore
from tests.cluster.fleet.fleet_commands import fleet
from tests.cluster.objects import claim_template, unschedulable
from tests.cluster.planes import WITH_DEVICE_TAINTS
from tests.cluster.reporter.reporters import by_admin
from tests.cluster.test_dra import with_kinds
from tests.lab.conftest import eventually, give, report, spec

NAMESPACE = "rails"
OUTAGE = 180.0
EVICT_AFTER = 120
TRIALS = int(os.environ.get("TRACKBED_TEST_TRIALS", "50"))
# Losses of many trials and stories quarantine no NIC, save where a story asks for it. Half of the trials are on each NIC.
PATIENT = {"losses": 50, "daily": 50, "quiet": 60, "probation": 60}
# The first node of the lab's cluster, whose pods get VFs by DRA and by nothing else.
INVENTORY = """
from pathlib import Path as _Path

from inventories.lab_cluster import lab as _nodes
from lab.cluster import manifests as _manifests

_name, _data = _nodes[0]
_dra = {"driver": "sriovnetwork.k8snetworkplumbingwg.io", "namespace": "rails"}
_plugins = {
    **_manifests.wanted(_Path($folder)),
    "shared_rdma": None,
    "test_pods": None,
    "networks": {"subnet": _manifests.SUBNET, "namespace": "rails"},
    "dra": _dra,
}

lab = [
    (
        _name,
        {
            **_data,
            "nics": [{**nic, "rdma": None} for nic in _data["nics"]],
            "device_plugins": _plugins,
            "readiness": {"granularity": "device", "at_least": 1, "flaps": $flaps},
            "kubernetes": {
                **_data["kubernetes"], "required_resources": [], "quarantine": {"evict_after": $evict_after}
            },
        },
    )
]
"""

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        programs.kubernetes_version() != WITH_DEVICE_TAINTS, reason=f"TRACKBED_TEST_KUBERNETES={WITH_DEVICE_TAINTS}"
    ),
]


@frozen
class Rails:
    """The node, its rails, and pods that claim their VFs. ``inventory``: the file that it was deployed by."""

    plane: ControlPlane
    node: Node
    name: str
    inventory: str

    def devices(self, rail: Nic) -> set[str]:
        """The devices of a rail that the driver publishes."""
        slices = self.plane.get("resourceslices", f"--field-selector=spec.nodeName={self.name}")["items"]
        published = [device for each in slices for device in each["spec"].get("devices", ())]
        of_rail = {"string": rail.pci}
        return {each["name"] for each in published if each["attributes"][f"{SRIOV_DRIVER}/pfPciAddress"] == of_rail}

    def rules(self, api: Api | None = None) -> list[dict[str, Any]]:
        """The node's DeviceTaintRules."""
        api = api or Api(self.plane.url, by_admin(self.plane).session)
        rules: list[dict[str, Any]] = api.ask("GET", RULES, {"labelSelector": f"{OF_NODE}={self.name}"})["items"]
        return rules

    def wait_tainted(self, devices: set[str]) -> None:
        """Wait until exactly these devices are tainted, each by one rule."""
        api = Api(self.plane.url, by_admin(self.plane).session)

        def tainted() -> bool:
            return sorted(rule["spec"]["deviceSelector"]["device"] for rule in self.rules(api)) == sorted(devices)

        eventually(f"{len(devices)} devices are tainted", tainted, LONG)
        api.close()

    def claim(self, pod: str, template: str) -> None:
        """Create a pod whose claim is made from this template."""
        self.plane.apply(self.claiming(pod, template))

    def claiming(self, pod: str, template: str) -> dict[str, Any]:
        """The manifest of such a pod."""
        made = manifests.pod(pod, ["sleep", "infinity"], selector={"kubernetes.io/hostname": self.name})
        made["metadata"]["namespace"] = NAMESPACE
        made["spec"]["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": template}]
        made["spec"]["containers"][0]["resources"] = {"claims": [{"name": "devices"}]}
        return made

    def claim_of(self, pod: str, rail: Nic) -> None:
        """Create a pod with a claim of one rail's VF."""
        self.claim(pod, self.template_of(rail))

    def template_of(self, rail: Nic) -> str:
        """Make a template for claims of one rail's VF, by the rail's rendered DeviceClass; its name."""
        template = f"vf-of-{rail.name}"
        self.plane.apply(claim_template(template, NAMESPACE, deviceClassName=f"vf-{rail.name}"))
        return template

    def pod(self, name: str) -> dict[str, Any]:
        return self.plane.get("-n", NAMESPACE, "pod", name)

    def runs(self, name: str) -> bool:
        return bool(self.pod(name)["status"].get("phase") == "Running")

    def wait_refused(self, name: str) -> None:
        """Wait until the scheduler has found no devices for a pod."""
        eventually(f"the scheduler refuses {name}", lambda: unschedulable(self.pod(name)), LONG)

    def wait_runs_with(self, pod: str, rails: tuple[Nic, ...]) -> None:
        """Wait until a pod runs with the netdev of a VF of each of these rails, which has carrier there."""
        eventually(f"{pod} runs", lambda: self.runs(pod), LONG)
        (status,) = self.pod(pod)["status"]["resourceClaimStatuses"]
        claim = self.plane.get("-n", NAMESPACE, "resourceclaim", status["resourceClaimName"])
        given = [each["device"] for each in claim["status"]["allocation"]["devices"]["results"]]
        assert len(given) == len(rails)
        for rail in rails:
            (index,) = (n for n, pci in enumerate(rail.vf_pcis) if pci.replace(":", "-").replace(".", "-") in given)
            assert self.node.run(["ip", "link", "show", f"{rail.netdev}v{index}"]).returncode != 0
            carrier = ("exec", "-n", NAMESPACE, pod, "--", "cat", f"/sys/class/net/{rail.netdev}v{index}/carrier")
            eventually("carrier in the pod", lambda words=carrier: self.plane.kubectl(*words) == "1\n", LONG)  # type: ignore[misc]

    def has_carrier(self, rail: Nic) -> bool:
        return self.node.sh(f"cat /sys/class/net/{rail.netdev}/carrier") == "1\n"

    def start_driver(self) -> None:
        """Start the driver, and wait until it has published the VFs of all rails."""
        dra_driver.start(self.node)
        eventually("the VFs are published", lambda: all(map(self.devices, self.node.machine.nics)), LONG)


@pytest.fixture(scope="module")
def deployed(fresh_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rails]:
    """The node, deployed for claims and joined, with the driver."""
    work, alone = tmp_path_factory.mktemp("rails"), evolve(fresh_cluster, nodes=fresh_cluster.nodes[:1])
    with_kinds(alone.plane, NAMESPACE)
    with rendered.deployed(alone, work, INVENTORY, restore, flaps=PATIENT, evict_after=EVICT_AFTER):
        made = Rails(alone.plane, alone.nodes[0], alone.names[0], str(work / "lab_cluster.py"))
        made.start_driver()
        yield made


@pytest.fixture
def rails(deployed: Rails) -> Iterator[Rails]:
    """With all cables plugged in and no pods, afterwards too."""
    deployed.wait_tainted(set())
    yield deployed
    for rail in deployed.node.machine.nics:
        deployed.node.connect(rail, cable=True)
    deployed.plane.kubectl("delete", "pods", "--all", "-n", NAMESPACE, timeout=LONG)
    deployed.wait_tainted(set())


def test_a_pod_gets_a_vf_of_a_good_rail_while_another_has_no_carrier(rails: Rails) -> None:
    bad, good = rails.node.machine.nics
    rails.node.connect(bad, cable=False)
    rails.wait_tainted(rails.devices(bad))
    rails.claim("any", "vf")
    rails.wait_runs_with("any", (good,))
    assert is_open(rails.plane, rails.name)


def test_a_pod_on_a_rail_that_goes_bad_stays_until_a_sweep_evicts_it_by_the_policys_time(rails: Rails) -> None:
    bad, good = rails.node.machine.nics
    rails.claim_of("evicted", bad)
    rails.claim_of("stays", good)
    rails.wait_runs_with("evicted", (bad,))
    rails.wait_runs_with("stays", (good,))
    rails.node.connect(bad, cable=False)
    rails.wait_tainted(rails.devices(bad))
    made = max(datetime.fromisoformat(rule["metadata"]["creationTimestamp"]) for rule in rails.rules()).timestamp()

    def sweep() -> set[str]:
        done = fleet(rails.plane, "sweep", "--json", "--max-share=1", "--max-evict-share=1")
        assert done.code == 0, done.out + done.err
        return {rule["spec"]["taint"]["effect"] for rule in rails.rules()}

    assert sweep() == {"NoSchedule"}
    assert rails.runs("evicted")
    assert time.time() < made + EVICT_AFTER
    # The API server's clock is this host's, and it writes whole seconds.
    eventually("the policy's time is over", lambda: time.time() > made + EVICT_AFTER + 1, LONG)
    assert sweep() == {"NoExecute"}
    gone = ("get", "-n", NAMESPACE, "pod", "evicted", "-o", "name", "--ignore-not-found")
    eventually("the pod is evicted", lambda: rails.plane.kubectl(*gone) == "", LONG)
    assert rails.runs("stays")
    rails.node.connect(bad, cable=True)
    rails.wait_tainted(set())
    rails.claim_of("after", bad)
    rails.wait_runs_with("after", (bad,))


def test_a_claim_for_all_rails_waits_for_the_bad_one(rails: Rails) -> None:
    bad, _ = every = rails.node.machine.nics
    rails.node.connect(bad, cable=False)
    rails.wait_tainted(rails.devices(bad))
    rails.claim("training", "vf-of-each-rail")
    rails.wait_refused("training")
    rails.node.connect(bad, cable=True)
    rails.wait_runs_with("training", every)


def test_the_api_server_is_away_for_three_minutes_while_a_rail_goes_bad_and_another_while_it_is_repaired(
    rails: Rails,
) -> None:
    bad, good = rails.node.machine.nics
    rails.claim_of("runs", good)
    rails.wait_runs_with("runs", (good,))
    uid = rails.pod("runs")["metadata"]["uid"]
    for cable, wanted in ((False, rails.devices(bad)), (True, set())):
        rails.plane.kill_api_server()
        try:
            rails.node.connect(bad, cable=cable)
            time.sleep(OUTAGE)
        finally:
            rails.plane.start_api_server()
        rails.wait_tainted(wanted)
    assert rails.pod("runs")["metadata"]["uid"] == uid
    rails.wait_runs_with("runs", (good,))


def test_the_reporter_dies_before_during_and_after_its_writes(rails: Rails) -> None:
    bad, _ = rails.node.machine.nics
    devices, kill = rails.devices(bad), "systemctl kill --signal=KILL trackbed-reporter"
    rails.node.connect(bad, cable=False)
    rails.node.sh(kill)
    eventually("a rule", lambda: bool(rails.rules()), LONG)
    rails.node.sh(kill)
    rails.wait_tainted(devices)
    rails.node.sh(kill)
    rails.node.connect(bad, cable=True)
    rails.wait_tainted(set())


def test_a_node_that_is_deleted_and_made_anew_has_its_rules_again(rails: Rails) -> None:
    bad, good = rails.node.machine.nics
    devices = rails.devices(bad)
    rails.node.connect(bad, cable=False)
    rails.wait_tainted(devices)
    before = {rule["metadata"]["uid"] for rule in rails.rules()}
    rails.node.sh("systemctl stop kubelet")
    rails.plane.kubectl("delete", "node", rails.name)
    rails.wait_tainted(set())
    joined(rails.plane, rails.node, rails.inventory)
    join.wait_ready(rails.plane, rails.node)
    rails.start_driver()
    rails.wait_tainted(devices)
    assert before.isdisjoint(rule["metadata"]["uid"] for rule in rails.rules())
    eventually("ready and untainted", lambda: is_open(rails.plane, rails.name), LONG)
    rails.claim("any", "vf")
    rails.wait_runs_with("any", (good,))


def test_a_rail_that_flaps_is_quarantined_until_its_probation(rails: Rails) -> None:
    bad, _ = rails.node.machine.nics
    devices, before = rails.devices(bad), spec(rails.node)
    wanted = spec(rails.node)
    # A slow machine must not miss the probation: it lasts until the former spec is given back.
    wanted["readiness"]["flaps"] |= {"losses": 3, "probation": 86400}

    def state() -> str:
        (nic,) = (each for each in report(rails.node)["nics"] if each["name"] == bad.name)
        return str(nic["link"])

    give(rails.node, wanted)
    try:
        for _ in range(3):
            for cable in (False, True):
                rails.node.connect(bad, cable=cable)
                eventually("the node sees it", lambda cable=cable: rails.has_carrier(bad) == cable, LONG)  # type: ignore[misc]
        repaired = time.time()
        eventually("quarantined", lambda: state() == "quarantined", LONG)
        rails.wait_tainted(devices)
        assert rails.has_carrier(bad)
        rails.wait_tainted(set())
        # From the last loss, which was just before the repair.
        assert time.time() > repaired + 0.8 * PATIENT["quiet"]
        assert state() == "probation"
        rails.claim_of("again", bad)
        rails.wait_runs_with("again", (bad,))
    finally:
        give(rails.node, before)
    eventually("good again", lambda: state() in ("good", "suspect"), LONG)


def seconds(plane: ControlPlane, verb: str, since: float) -> float:
    """How long after a moment the last rule was written, by the audit log. Both clocks are this host's."""
    stamps = [
        event["stageTimestamp"]
        for event in plane.audit()
        if (event["verb"], event.get("objectRef", {}).get("resource")) == (verb, "devicetaintrules")
        and event["responseStatus"]["code"] in (200, 201)
    ]
    return datetime.fromisoformat(max(stamps)).timestamp() - since


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def test_seconds_from_carrier_loss_to_no_new_claims_and_from_repair_to_allocatable(rails: Rails, say: Say) -> None:
    lost: list[float] = []
    repaired: list[float] = []
    for number in range(TRIALS):
        rail = rails.node.machine.nics[number % 2]
        steps: list[tuple[bool, str, set[str], list[float]]] = [
            (False, "create", rails.devices(rail), lost),
            (True, "delete", set(), repaired),
        ]
        for cable, verb, wanted, measured in steps:
            rails.node.connect(rail, cable=cable)
            # QEMU has told the card, and its driver learns it now.
            since = time.time()
            rails.wait_tainted(wanted)
            measured.append(seconds(rails.plane, verb, since))
    for what, values in (("from loss of carrier to no new claims", lost), ("from repair to allocatable", repaired)):
        say(
            f"{what}, {len(values)} trials: p50 {percentile(values, 0.5):.2f} s, p99 {percentile(values, 0.99):.2f} s, "
            f"each {json.dumps([round(value, 2) for value in values])}"
        )
