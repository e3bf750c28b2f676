"""The worked example, inventories/prod.py: what the deploy declares for a node of each group, in order (operations.txt)."""

import datetime
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.addresses import api_server_warning
from tasks.common import archive
from tasks.drivers.ofed.modules import OfedStack
from tasks.kubernetes.labels import LABELS_KEY
from tasks.kubernetes.manifests.node_labels import possible_labels
from tasks.node_spec import node_spec
from tasks.packages.dkms import ModuleState
from tests.deploy.conftest import DEBIAN, Node, of
from tests.deploy.examples.inventories import inventory_of
from tests.deploy.kubernetes.test_kubernetes import certificate
from tests.deploy.pinned import assert_pinned

NAMES = ("gpu-01.example.net", "spark-01.example.net", "10.0.1.11", "10.0.1.21")
"""A host of each group."""
# No driver is built for the running kernel yet.
KERNEL = "6.1.0-37-amd64"
FRESH = {"uname -m": "x86_64", of(ModuleState): ["path"], of(OfedStack): [f"kernel {KERNEL}"], "uname -r": KERNEL}
ALINUX = {"*-release": ["/etc/os-release", "ID=alinux", 'VERSION_ID="3"', "---"], "uname -r": "5.10.134-18.al8.x86_64"}


@cache
def hosts() -> dict[str, dict[str, Any]]:
    """The data of each host of the example."""
    return {host.name: host.data.dict() for host in inventory_of(archive.ROOT / "inventories" / "prod.py")}


@pytest.fixture(autouse=True)
def authorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the example names on the control host."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config" / "trackbed"
    folder.mkdir(parents=True)
    for name in ("own-cluster.pem", "managed-cluster.pem"):
        (folder / name).write_bytes(certificate(datetime.datetime.now(datetime.timezone.utc)))


def test_each_group_declares_its_operations_in_the_order_of_the_file(node: Node) -> None:
    lines = []
    for name in NAMES:
        node.data = {key: value for key, value in hosts()[name].items() if not key.startswith("ssh_")}
        system = ALINUX if name.startswith("10.") else DEBIAN
        result = node.deploy(lambda: runpy.run_path(str(archive.ROOT / "deploy.py")), {**FRESH, **system})
        lines += [name, *(f"    {operation}" for operation in result.planned)]
    assert_pinned(Path(__file__).with_name("operations.txt"), "\n".join(lines) + "\n")


def test_no_host_reaches_its_api_server_by_a_rail() -> None:
    for name, data in hosts().items():
        assert api_server_warning(node_spec(data, name), data["kubernetes"]["server"]) is None


def listed() -> set[str]:
    """The labels that the admission policy lets a reporter write, with examples/own-cluster."""
    overlay = yaml.safe_load((archive.ROOT / "examples" / "own-cluster" / "kustomization.yaml").read_text())
    (patch,) = overlay["patches"]
    return set(yaml.safe_load(patch["patch"])["data"]["labels"].split(" "))


def test_the_cluster_s_policy_lists_each_label_that_the_nodes_publish() -> None:
    published = {key for data in hosts().values() for key in possible_labels(LABELS_KEY.read(data, "a"))}
    assert listed() == {*published, "trackbed.internal/ready"}


def pods(value: Any) -> Iterator[tuple[dict[str, str], set[str]]]:
    """Of each pod that an object describes: the labels by which it selects nodes, and the resources that it requests."""
    if isinstance(value, list):
        for each in value:
            yield from pods(each)
    elif isinstance(value, dict):
        if "containers" in value or "nodeSelector" in value:
            limits = [each.get("resources", {}).get("limits", {}) for each in value.get("containers", ())]
            yield value.get("nodeSelector", {}), {name for each in limits for name in each if "/" in name}
        for each in value.values():
            yield from pods(each)


def examples() -> dict[str, list[tuple[dict[str, str], set[str]]]]:
    """The pods of each file of examples/; those of Alibaba Cloud's ACS run on no node of ours."""
    files = sorted((archive.ROOT / "examples").glob("*.yaml"))
    return {
        path.name: [pod for document in yaml.safe_load_all(path.read_text()) for pod in pods(document)]
        for path in files
        if path.name != "acs-deployment.yaml"
    }


@pytest.mark.parametrize(("name", "described"), examples().items())
def test_each_pod_of_the_examples_finds_a_node_without_taints_that_has_its_resources(
    name: str, described: list[tuple[dict[str, str], set[str]]]
) -> None:
    nodes = [
        (possible_labels(LABELS_KEY.read(data, "a")), set(data["kubernetes"]["required_resources"]))
        for data in hosts().values()
    ]
    assert described
    for selector, asked in described:
        assert any(selector.items() <= labels.items() and asked <= resources for labels, resources in nodes), selector


def test_executors_of_spark_take_no_node_with_gpus() -> None:
    (selector,) = [selector for selector, _ in examples()["spark.yaml"] if selector]
    matching = [
        data for data in hosts().values() if selector.items() <= possible_labels(LABELS_KEY.read(data, "a")).items()
    ]
    assert matching
    assert not [data for data in matching if "nvidia.com/gpu" in data["kubernetes"]["required_resources"]]
