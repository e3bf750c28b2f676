"""The manifests of Multus, whereabouts, sriov-cni and rdma-cni: their rights, and whether the API accepts them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve
from jsonschema import Draft4Validator

from tasks.kubernetes import manifests as task
from tasks.kubernetes.manifests.device_plugins import (
    DevicePlugins,
    Multus,
    NetworkPlugins,
    RdmaCni,
    SriovCni,
    Whereabouts,
)
from tasks.kubernetes.manifests.network_plugins import NAMES, PROGRAMS, Displaced
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.conftest import Node, of
from tests.deploy.hardware import RAIL0, has
from tests.deploy.kubernetes.kubernetes_api import faults
from tests.deploy.kubernetes.test_device_plugins import FLEET, WANTED, documents
from tests.deploy.scripts import sh
from tests.stand_ins import text_file

EVERY = NetworkPlugins(Multus(), Whereabouts(), SriovCni(), RdmaCni())
ALL = evolve(WANTED, network_plugins=EVERY)
LEAST = {"folder": "made", "shared_rdma": None, "sriov": None}


def made(wanted: DevicePlugins = ALL) -> dict[str, list[dict[str, Any]]]:
    """The objects by their file's name in the folder."""
    rendered = manifests(wanted, FLEET)
    return {
        name.removeprefix("network-plugins/"): documents(text)
        for name, text in rendered.items()
        if name.startswith("network-plugins/")
    }


def kinds(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for file in made().values() for each in file if each["kind"] == kind}


def test_no_plugin_is_rendered_unless_it_is_chosen() -> None:
    assert made(WANTED) == {}
    assert set(made()) == {"kustomization.yaml", *(f"{name}.yaml" for name in NAMES)}
    (kustomization,) = made()["kustomization.yaml"]
    assert set(kustomization["resources"]) == set(made()) - {"kustomization.yaml"}
    assert set(made(evolve(WANTED, network_plugins=NetworkPlugins(Multus())))) == {"kustomization.yaml", "multus.yaml"}


def test_their_objects_are_valid_in_the_apis_schema() -> None:
    results = [faults(each) for name, file in made().items() if name != "kustomization.yaml" for each in file]
    assert len(results) > 10
    assert not any(results)


def test_they_run_on_every_node_even_before_it_is_ready() -> None:
    daemon_sets = kinds("DaemonSet")
    assert set(daemon_sets) == set(NAMES)
    for daemon_set in daemon_sets.values():
        pod = daemon_set["spec"]["template"]["spec"]
        assert pod["tolerations"] == [{"operator": "Exists"}]
        assert "nodeSelector" not in pod
        # The pod's own network would need the plugin that it installs.
        assert pod["hostNetwork"]


@pytest.mark.parametrize(
    ("name", "renews"),
    [
        pytest.param("multus", "--cleanup-config-on-exit=true", id="rke2-9313"),
        pytest.param("whereabouts", "\n/token-watcher.sh &\n", id="whereabouts-459"),
    ],
)
def test_plugins_keep_the_token_of_their_kubeconfig_valid(name: str, renews: str) -> None:
    (container,) = kinds("DaemonSet")[name]["spec"]["template"]["spec"]["containers"]
    assert renews in "\n".join(container["args"])


@pytest.mark.parametrize(
    "there", [pytest.param("00-multus.conf.cilium_bak", id="multus-cni-972"), "00-multus.conf", "10-crio.cilium_bak"]
)
def test_a_configuration_of_multus_that_cilium_has_renamed_is_named(node: Node, tmp_path: Path, there: str) -> None:
    text_file(tmp_path / "etc/cni/net.d" / there)
    node.data = {"device_plugins": {**LEAST, "folder": str(tmp_path), "network_plugins": {"multus": {}}}}
    answers = {of(Displaced): sh(Displaced.shell, tmp_path)}
    result = node.deploy(task.render, {**has(RAIL0), **answers})
    assert any("Cilium has renamed Multus" in line for line in result.log) == ("multus" in there and "bak" in there)


def test_each_image_has_a_version_and_may_be_another_registry_s(node: Node, tmp_path: Path) -> None:
    def images(file: list[dict[str, Any]]) -> set[str]:
        workloads = [each for each in file if each["kind"] in ("DaemonSet", "Deployment")]
        return {
            container["image"] for each in workloads for container in each["spec"]["template"]["spec"]["containers"]
        }

    defaults = {name: images(file) for name, file in made().items() if name != "kustomization.yaml"}
    assert all(len(each) == 1 and ":v" in min(each) for each in defaults.values())
    mine = {name.replace("-", "_"): {"image": f"registry.example.net/{name}:1"} for name in NAMES}
    node.data = {"device_plugins": {**LEAST, "folder": str(tmp_path), "network_plugins": mine}}
    assert not node.deploy(task.render, has(RAIL0)).failed
    for name in NAMES:
        file = yaml.safe_load_all((tmp_path / "network-plugins" / f"{name}.yaml").read_text())
        assert images(list(file)) == {f"registry.example.net/{name}:1"}


def test_the_networks_of_pods_are_what_the_kind_allows() -> None:
    definition = kinds("CustomResourceDefinition")["network-attachment-definitions.k8s.cni.cncf.io"]["spec"]
    networks = documents(manifests(ALL, FLEET)["networks.yaml"])
    assert networks
    (version,) = definition["versions"]
    for network in networks:
        assert (network["apiVersion"], network["kind"]) == (
            f"{definition['group']}/{version['name']}",
            definition["names"]["kind"],
        )
        assert set(network["spec"]) <= set(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])
        assert not list(Draft4Validator(version["schema"]["openAPIV3Schema"]).iter_errors(network))


@pytest.mark.parametrize("name", ["multus", "whereabouts"])
def test_no_plugin_may_write_nodes_or_their_leases(name: str) -> None:
    rules = kinds("ClusterRole")[name]["rules"]
    assert "leases" not in str(rules)
    writing = {
        resource for rule in rules if set(rule["verbs"]) - {"get", "list", "watch"} for resource in rule["resources"]
    }
    assert writing <= {"pods/status", "events", "ippools", "overlappingrangeipreservations"}
    assert "*" not in {word for rule in rules for words in rule.values() for word in words}


def test_plugins_that_only_copy_a_program_have_no_rights() -> None:
    for name in PROGRAMS:
        assert [each["kind"] for each in made()[f"{name}.yaml"]] == ["DaemonSet"]


def test_a_plugin_that_is_no_longer_chosen_is_removed(node: Node, tmp_path: Path) -> None:
    def files(plugins: dict[str, Any]) -> set[str]:
        node.data = {"device_plugins": {**LEAST, "folder": str(tmp_path), "network_plugins": plugins}}
        assert not node.deploy(task.render, has(RAIL0)).failed
        return {path.name for path in (tmp_path / "network-plugins").glob("*")}

    assert files({"multus": {}, "rdma_cni": {}}) == {"multus.yaml", "rdma-cni.yaml", "kustomization.yaml"}
    assert files({"multus": {}}) == {"multus.yaml", "kustomization.yaml"}
    assert files({}) == set()
