"""What the deploy renders for each group of inventories/prod.py, and what examples/ submits, given to a real API server.

The server validates strictly: it refuses a field that it does not know. There are no nodes, so nothing starts.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from agent.spec.node import from_mapping
from lab.cluster import manifests
from lab.cluster.control_plane import ControlPlane
from tasks.kubernetes.manifests import DEVICE_PLUGINS
from tasks.kubernetes.manifests.discovered import discover
from tasks.kubernetes.manifests.rendered import manifests as made
from tests.cluster.fleets import CLUSTERS, rendered
from tests.deploy.hardware import function, hardware, nic, rdma
from tests.deploy.kubernetes import go_modules
from tests.deploy.kubernetes.custom_resources import (
    ARENA_TFJOB,
    ARENA_TRAINING_JOB,
    MPI_JOB,
    SPARK_APPLICATION,
    Definition,
)
from tests.lab.conftest import ROOT
from tests.stand_ins import text_file

PLUGINS = {
    "own_cluster": {"rdma-shared-device-plugin", "sriov-device-plugin", "nvidia-device-plugin"},
    "managed_cluster": {"erdma-device-plugin", "nvidia-device-plugin"},
}
NETWORK_PLUGINS = {"multus", "whereabouts", "sriov-cni"}
KINDS = "crd/network-attachment-definitions.k8s.cni.cncf.io"
EXAMPLES: dict[str, tuple[Definition, ...]] = {
    "rdma-pod.yaml": (),
    "perftest.yaml": (),
    "acs-deployment.yaml": (),
    "tfjob.yaml": (ARENA_TFJOB,),
    "deepspeed.yaml": (ARENA_TRAINING_JOB,),
    "horovod.yaml": (MPI_JOB,),
    "spark.yaml": (SPARK_APPLICATION,),
}


def apply(plane: ControlPlane, *words: str) -> list[str]:
    """`kubectl apply`, where the server validates strictly; a line for each object."""
    return plane.kubectl("apply", "--validate=strict", *words, timeout=120).splitlines()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return rendered(tmp_path_factory.mktemp("rendered"))


@pytest.fixture
def clean(control_plane: ControlPlane, folders: dict[str, Path]) -> Iterator[ControlPlane]:
    """The control plane; afterwards nothing of the manifests is left, since both clusters have some in common."""
    yield control_plane
    for folder in folders.values():
        for each in (folder, folder / "network-plugins"):
            if each.exists():
                control_plane.try_kubectl("delete", "-k", str(each), "--ignore-not-found", "--wait=true", timeout=120)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_api_server_accepts_all_that_is_rendered(clean: ControlPlane, folders: dict[str, Path], name: str) -> None:
    folder, plane = folders[name], clean
    with_networks = (folder / "network-plugins").exists()
    assert with_networks == (name == "own_cluster")
    if with_networks:
        # As docs/inventory/device-plugins.md says.
        apply(plane, "-k", str(folder / "network-plugins"))
        plane.wait_established(KINDS)
    applied = apply(plane, "-k", str(folder))
    assert applied
    assert all(line.endswith(" created") for line in applied), applied
    sets = {each["metadata"]["name"] for each in plane.get("daemonsets", "-A")["items"]}
    assert sets == PLUGINS[name] | (NETWORK_PLUGINS if with_networks else set())
    again = apply(plane, "-k", str(folder))
    assert all(line.endswith(" unchanged") for line in again), again
    pods = [
        line
        for file in sorted(folder.glob("*-pods.yaml"))
        for line in apply(plane, "--dry-run=server", "-f", str(file))
    ]
    assert len(pods) == 2 * len(list(folder.glob("*-pods.yaml"))) > 0
    # Each file of the folder was given to the server.
    resources = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = {path.name for path in folder.glob("*.yaml") if not path.name.endswith("-pods.yaml")}
    assert files == {*resources, "kustomization.yaml"}


def test_the_api_server_refuses_an_unknown_field(clean: ControlPlane, folders: dict[str, Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    text = (folders["managed_cluster"] / "erdma-device-plugin.yaml").read_text()
    wrong.write_text(text.replace("hostNetwork: true", "hostNetworks: true"))
    done = clean.try_kubectl("apply", "--validate=strict", "--dry-run=server", "-f", str(wrong))
    assert done.returncode != 0
    assert 'unknown field "spec.template.spec.hostNetworks"' in done.stderr


def test_the_plugins_of_networks_have_the_rights_that_their_programs_use(
    clean: ControlPlane, folders: dict[str, Path]
) -> None:
    apply(clean, "-k", str(folders["own_cluster"] / "network-plugins"))

    def may(account: str, *words: str) -> bool:
        user = f"--as=system:serviceaccount:kube-system:{account}"
        return clean.try_kubectl("auth", "can-i", *words, user).stdout.strip() == "yes"

    assert may("multus", "get", "network-attachment-definitions.k8s.cni.cncf.io", "-n", "default")
    assert may("multus", "update", "pods", "--subresource=status", "-n", "default")
    assert may("whereabouts", "patch", "ippools.whereabouts.cni.cncf.io", "-n", "kube-system")
    assert may("whereabouts", "update", "leases/whereabouts", "-n", "kube-system")
    assert not may("whereabouts", "update", "leases/kube-scheduler", "-n", "kube-system")
    assert not may("whereabouts", "update", "leases", "-n", "kube-node-lease")
    assert not may("multus", "patch", "nodes")
    assert not may("sriov-cni", "get", "pods", "-n", "default")


def test_the_lab_s_cluster_is_given_what_the_deploy_renders(clean: ControlPlane, tmp_path: Path) -> None:
    wanted = DEVICE_PLUGINS.read({"device_plugins": manifests.wanted(tmp_path)}, "node1")
    assert wanted is not None
    vf = function("0000:21:10.0", "8086:10ca", "ens1f0v0", rdma("rocep33s0f0v0"), index=0, driver="igbvf")
    pf = nic("fab0", function("0000:21:00.0", "8086:10c9", "ens1f0", driver="igb", vfs=[vf]))
    spec = from_mapping({"node_name": "node1", "nics": [{"name": "fab0", "select": {"pci": "0000:21:00.0"}}]})
    for name, text in made(wanted, {"node1": discover(hardware(pf), spec, {"rdma": "hca"})}).items():
        text_file(tmp_path / name, text)
    manifests.apply(clean, tmp_path)
    try:
        assert clean.get("daemonset", "-n", manifests.NAMESPACE, manifests.PLUGIN)
        config = clean.get("configmap", "-n", manifests.NAMESPACE, "rdma-shared-devices")["data"]["config.json"]
        (resource,) = json.loads(config)["configList"]
        assert f"{resource['resourcePrefix']}/{resource['resourceName']}" == manifests.RESOURCE
        assert resource["rdmaHcaMax"] == manifests.SHARES
    finally:
        clean.kubectl("delete", "-k", str(tmp_path), timeout=120)


@pytest.fixture(scope="module")
def kinds(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with the kinds of the jobs' operators."""
    for definition in {each for several in EXAMPLES.values() for each in several}:
        path = go_modules.file(definition.module, definition.version, definition.path)
        # By the server: the annotation that the client would make is longer than one may be.
        control_plane.kubectl("apply", "--server-side", "-f", str(path), timeout=120)
        control_plane.wait_established("-f", str(path))
    return control_plane


def test_every_example_is_tried() -> None:
    assert set(EXAMPLES) == {path.name for path in (ROOT / "examples").glob("*.yaml")}


@pytest.mark.parametrize("name", [*EXAMPLES, "prometheus/proxy.yaml"])
def test_the_api_server_accepts_each_example(kinds: ControlPlane, name: str) -> None:
    # Objects in it cannot be tried without it.
    kinds.try_kubectl("create", "namespace", "trackbed-system")
    applied = apply(kinds, "--dry-run=server", "-f", str(ROOT / "examples" / name))
    documents = [each for each in yaml.safe_load_all((ROOT / "examples" / name).read_text()) if each]
    assert len(applied) == len(documents)
    assert all("(server dry run)" in line for line in applied)


def test_the_api_server_accepts_the_overlay_of_the_examples(control_plane: ControlPlane) -> None:
    # The namespace comes first, since objects in it cannot be tried without it.
    control_plane.try_kubectl("create", "namespace", "trackbed-system")
    applied = apply(control_plane, "--dry-run=server", "-k", str(ROOT / "examples" / "own-cluster"))
    assert any("configmap/reporter" in line for line in applied)
