"""Claims of DRA on a real control plane without kubelets: the scheduler, what the deploy renders, and the reporter's rules.

The Node is an object only. Its ResourceSlices are as the drivers publish them.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from attrs import field, frozen

from agent.report.dra_devices import read_devices
from agent.reporter.kubernetes import device_rules
from agent.reporter.settings import Quarantine
from lab.cluster.control_plane import ControlPlane
from tasks.kubernetes.manifests.device_plugins import SRIOV_DRIVER, DevicePlugins, Dra, Networks
from tasks.kubernetes.manifests.rendered import manifests
from tests.cluster.dra_drivers import DEVICES, DRANET, GPU_DRIVER, RAILS, VFS, discovered, resource_slice
from tests.cluster.objects import device_class, manifest, unschedulable
from tests.cluster.reporter.reporters import STATUS, until
from tests.lab.conftest import ROOT

DEADLINE = 120.0
NODE, NAMESPACE = "dgx", "training"
GPU_CLASS = device_class(
    GPU_DRIVER, f"device.driver == '{GPU_DRIVER}' && device.attributes['{GPU_DRIVER}'].type == 'gpu'"
)
"""As the manifests of NVIDIA's driver have it."""


Driver = Literal["dra.net", "sriovnetwork.k8snetworkplumbingwg.io"]
Rendered = tuple[ControlPlane, Driver, Path]


def custom(group: str, plural: str, kind: str, version: str) -> dict[str, Any]:
    """A CRD of a project, without the schema."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": plural, "kind": kind}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [served]}
    return manifest("apiextensions.k8s.io/v1", "CustomResourceDefinition", f"{plural}.{group}", spec=spec)


KINDS = (
    custom("k8s.cni.cncf.io", "network-attachment-definitions", "NetworkAttachmentDefinition", "v1"),
    custom(SRIOV_DRIVER, "sriovresourcepolicies", "SriovResourcePolicy", "v1alpha1"),
)
"""The kinds of the manifests that are rendered for DRA."""


def with_kinds(plane: ControlPlane, *namespaces: str) -> None:
    """Give the control plane these kinds and namespaces."""
    plane.apply(*KINDS, *(manifest("v1", "Namespace", name) for name in (*namespaces, "dra-driver-sriov")))
    plane.wait_established(*(f"crd/{each['metadata']['name']}" for each in KINDS))


@frozen
class Claims:
    """Pods with claims of one driver's devices on the Node."""

    plane: ControlPlane
    driver: Driver
    # The names of the rules, by the rail that they are for.
    rules: dict[str, list[str]] = field(factory=dict)

    def pod(self, name: str, template: str) -> None:
        """Create a pod with a claim by a rendered template."""
        container = {"name": "main", "image": "example.net/none:1", "resources": {"claims": [{"name": "devices"}]}}
        claims = [{"name": "devices", "resourceClaimTemplateName": template}]
        spec = {"containers": [container], "resourceClaims": claims}
        self.plane.apply(manifest("v1", "Pod", name, NAMESPACE, spec=spec))

    def devices(self, name: str) -> dict[str, Any]:
        """The devices of a pod by its requests, as their driver publishes them, once it is on the Node."""
        until(lambda: self._pod(name)["spec"].get("nodeName"), f"{name} is scheduled", DEADLINE)
        (status,) = self._pod(name)["status"]["resourceClaimStatuses"]
        claim = self.plane.get("-n", NAMESPACE, "resourceclaim", status["resourceClaimName"])
        published = {(each, device["name"]): device for each in DEVICES for device in DEVICES[each]()}
        return {
            each["request"]: published[each["driver"], each["device"]]
            for each in claim["status"]["allocation"]["devices"]["results"]
        }

    def rail(self, name: str) -> str:
        """The rail of the only VF of a pod."""
        (device,) = self.devices(name).values()
        return self.rail_of(device)

    def rail_of(self, device: dict[str, Any]) -> str:
        """The rail of a VF; a PF has none."""
        address = device["attributes"][f"{self.driver}/pciAddress"]["string"]
        (name,) = [rail.name for rail in RAILS if address in map(rail.vf, range(VFS))]
        return name

    def wait_refused(self, name: str) -> None:
        """Wait until the scheduler has found no node for a pod."""
        until(lambda: unschedulable(self._pod(name)), f"the scheduler finds no node for {name}", DEADLINE)

    def taint(self, rails: Collection[str]) -> None:
        """Make the rules that the Node's reporter makes while these rails are bad."""
        devices, _ = read_devices(self.plane.get("resourceslices"), NODE)
        uid = self.plane.get("node", NODE)["metadata"]["uid"]
        for rail in (rail for rail in RAILS if rail.name in rails):
            bad = dict.fromkeys((rail.address, *map(rail.vf, range(VFS))), False)
            judged = device_rules.Judged(bad, whole=False)
            made = device_rules.writes(NODE, uid, Quarantine(), judged, devices, ()).create
            # dranet publishes the PF, too.
            assert len(made) == VFS + (self.driver == DRANET)
            self.plane.apply(*made)
            self.rules[rail.name] = [each["metadata"]["name"] for each in made]

    def repair(self, rail: str) -> None:
        """Delete a rail's rules."""
        self.plane.kubectl("delete", "devicetaintrule", *self.rules.pop(rail))

    def _pod(self, name: str) -> dict[str, Any]:
        return self.plane.get("-n", NAMESPACE, "pod", name)


@pytest.fixture(scope="module", params=[DRANET, SRIOV_DRIVER])
def rendered(
    request: pytest.FixtureRequest, device_taints_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rendered]:
    """The control plane with a Node and its drivers' slices, the driver, and the manifest, which is not applied yet."""
    plane, driver = device_taints_plane, cast(Driver, request.param)
    networks = Networks("10.56.217.0/24") if driver == SRIOV_DRIVER else None
    wanted = DevicePlugins(
        "made", sriov=None, shared_rdma=None, nvidia=None, networks=networks, dra=Dra(driver, NAMESPACE)
    )
    file = tmp_path_factory.mktemp("manifests") / "device-classes.yaml"
    file.write_text(manifests(wanted, {NODE: discovered()})[file.name])
    slices = [resource_slice(NODE, each) for each in (driver, GPU_DRIVER)]
    with_kinds(plane, NAMESPACE)
    plane.apply(manifest("v1", "Node", NODE, status=STATUS), *slices, GPU_CLASS)
    account = ("-n", NAMESPACE, "serviceaccount", "default")
    until(lambda: plane.try_kubectl("get", *account).returncode == 0, "the namespace's account", DEADLINE)
    yield plane, driver, file
    plane.kubectl("delete", "-f", str(file))
    plane.kubectl("delete", "resourceslice", *(each["metadata"]["name"] for each in slices))


@pytest.fixture
def claims(rendered: Rendered) -> Iterator[Claims]:
    """With the manifest applied; afterwards there are no pods, claims and rules."""
    plane, driver, file = rendered
    plane.kubectl("apply", "--validate=strict", "-f", str(file))
    yield Claims(plane, driver)
    # No kubelet ends them.
    plane.kubectl("delete", "-n", NAMESPACE, "pods", "--all", "--force", "--grace-period=0")
    plane.kubectl("delete", "devicetaintrules", "--all")
    left = ("get", "-n", NAMESPACE, "resourceclaims", "-o", "name")
    until(lambda: plane.kubectl(*left) == "", "the claims are gone", DEADLINE)


def test_the_api_server_accepts_what_is_rendered(rendered: Rendered) -> None:
    plane, driver, file = rendered
    apply = ("apply", "--validate=strict", "-f", str(file))
    dry = plane.kubectl(*apply, "--dry-run=server").splitlines()
    assert len(dry) == len(RAILS) + 1 + (4 if driver == DRANET else 3 + 2)
    assert [line for line in dry if not line.endswith(" created (server dry run)")] == []
    assert [line for line in plane.kubectl(*apply).splitlines() if not line.endswith(" created")] == []
    assert [line for line in plane.kubectl(*apply).splitlines() if not line.endswith(" unchanged")] == []


def test_a_claim_for_a_vf_of_any_rail_gets_a_good_one(claims: Claims) -> None:
    good, repaired = RAILS[5].name, RAILS[2].name
    claims.taint([rail.name for rail in RAILS if rail.name != good])
    for pod in ("one", "two"):
        claims.pod(pod, "vf")
        assert claims.rail(pod) == good
    # A good rail's PF, a bad rail's VF and a netdev that is no PCI device are left.
    claims.pod("three", "vf")
    claims.wait_refused("three")
    claims.repair(repaired)
    assert claims.rail("three") == repaired
    # The scheduler takes the first devices that it may: without rules, two pods have VFs of other rails.
    assert claims.rail("one") == claims.rail("two") == good


def test_a_claim_for_a_vf_of_each_rail_waits_for_the_bad_one(claims: Claims) -> None:
    claims.taint(["rail3"])
    claims.pod("training", "vf-of-each-rail")
    claims.wait_refused("training")
    # A bad rail costs the others nothing.
    claims.pod("beside", "vf")
    assert claims.rail("beside") != "rail3"
    claims.repair("rail3")
    taken = claims.devices("training")
    assert {request: claims.rail_of(device) for request, device in taken.items()} == {
        rail.name: rail.name for rail in RAILS
    }


def test_the_template_of_the_page_claims_a_vf_on_its_numa_node(claims: Claims) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "dra.md").read_text(), re.DOTALL)
    claims.plane.kubectl("apply", "--validate=strict", "-n", NAMESPACE, "-f", "-", stdin=text)
    claims.pod("by-the-page", "vf-on-node-1")
    (device,) = claims.devices("by-the-page").values()
    assert device["attributes"]["dra.net/numaNode"] == {"int": 1}


def test_a_gpu_and_its_vf_share_a_pcie_root(claims: Claims) -> None:
    assert _shared(claims, "gpu-and-vf", "resource.kubernetes.io/pcieRoot") == len(RAILS)


# dra-driver-sriov publishes no resource.kubernetes.io/numaNode.
@pytest.mark.parametrize("rendered", [DRANET], indirect=True)
def test_a_gpu_and_its_vf_are_on_one_numa_node(claims: Claims) -> None:
    assert _shared(claims, "gpu-and-vf-numa", "resource.kubernetes.io/numaNode") == 2


def _shared(claims: Claims, template: str, attribute: str) -> int:
    """Give each GPU to a pod with a VF of the same attribute; how many values it has."""
    pods = [f"{template}-{n}" for n in range(len(DEVICES[GPU_DRIVER]()))]
    for pod in pods:
        claims.pod(pod, template)
    values: list[str | int] = []
    for pod in pods:
        gpu, vf = (claims.devices(pod)[request]["attributes"][attribute] for request in ("gpu", "vf"))
        assert gpu == vf
        values.append(*gpu.values())
    return len(set(values))
