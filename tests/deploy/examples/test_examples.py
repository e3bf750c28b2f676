"""What examples/ submits: valid in the schema of its kind, and for labels and resources that Trackbed publishes."""

import ast
import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.report.names import TAINT
from tasks import nccl
from tasks.kubernetes import labels, manifests
from tasks.kubernetes.label_keys import fault
from tests.deploy.conftest import Node
from tests.deploy.examples.perftest_commands import commands
from tests.deploy.hardware import CONNECTX, GPUS, has
from tests.deploy.kubernetes import custom_resources, kubernetes_api
from tests.deploy.kubernetes.custom_resources import ARENA_TFJOB, ARENA_TRAINING_JOB, MPI_JOB, SPARK_APPLICATION, TFJOB

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()

# By file: what its kinds are checked with.
SCHEMAS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "rdma-pod.yaml": kubernetes_api.faults,
    "perftest.yaml": kubernetes_api.faults,
    "tfjob.yaml": partial(custom_resources.faults, definition=ARENA_TFJOB),
    "deepspeed.yaml": partial(custom_resources.faults, definition=ARENA_TRAINING_JOB),
    "horovod.yaml": partial(custom_resources.faults, definition=MPI_JOB),
    "spark.yaml": partial(custom_resources.faults, definition=SPARK_APPLICATION),
    "acs-deployment.yaml": kubernetes_api.faults,
}

# Maps whose keys are names that the user gives, so that no schema can know them.
FREE = {
    "annotations",
    "labels",
    "limits",
    "matchLabels",
    "mpiReplicaSpecs",
    "nodeSelector",
    "requests",
    "tfReplicaSpecs",
}

# Each node of the fleet that the README's inventory describes: VFs with RDMA devices, and GPUs.
FLEET = has(CONNECTX, others=GPUS)

examples = pytest.mark.parametrize("name", SCHEMAS)


def documents(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((EXAMPLES / name).read_text()) if each]


def values_of(value: Any, key: str) -> Iterator[Any]:
    """All values of a key in an object, at any depth."""
    if isinstance(value, dict):
        yield from (each for name, each in value.items() if name == key)
        for each in value.values():
            yield from values_of(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from values_of(each, key)


def misspelt(value: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of an object, each with one field's name misspelt, and that field's place; names that users give are left."""
    if isinstance(value, dict):
        for key, each in value.items():
            if parent not in FREE:
                yield f"{parent}.{key}", {(f"{name}x" if name == key else name): other for name, other in value.items()}
            for place, changed in misspelt(each, key):
                yield place, {**value, key: changed}
    elif isinstance(value, list):
        for index, each in enumerate(value):
            for place, changed in misspelt(each, parent):
                yield place, [*value[:index], changed, *value[index + 1 :]]


def inventory() -> dict[str, Any]:
    """The keys of the inventory that the README asks for."""
    (text,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return {
        target.id: ast.literal_eval(line.value)
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    }


@pytest.fixture
def published(node: Node) -> list[dict[str, Any]]:
    """The labels that such an inventory publishes for such a node, with the resources of the plugins that they select."""
    node.data = {"labels": inventory()["labels"]}
    uploads = node.deploy(labels.publish, FLEET).uploads
    written: list[dict[str, Any]] = json.loads(uploads["/etc/trackbed/.labels.json.new"])["labels"]
    return written


@pytest.fixture
def networks(node: Node, tmp_path: Path) -> dict[str, str]:
    """The networks that such an inventory makes, by name, each with its resource; the two keys do not contradict each other."""
    given = inventory()
    node.data = {**given, "device_plugins": {**given["device_plugins"], "folder": str(tmp_path)}}
    assert not node.deploy(manifests.render, FLEET).failed
    made = yaml.safe_load_all((tmp_path / "networks.yaml").read_text())
    name = "k8s.v1.cni.cncf.io/resourceName"
    return {each["metadata"]["name"]: each["metadata"].get("annotations", {}).get(name) for each in made}


def test_each_file_is_checked_and_explained() -> None:
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file()}
    # tests/deploy/examples/test_slurm_prolog.py runs the prolog, tests/deploy/examples/test_example.py reads the overlay, and
    # tests/unit/reporter/test_prometheus.py loads the rules; tests/cluster/test_manifests_applied.py applies the proxy.
    prometheus = {f"prometheus/{name}.yaml" for name in ("cluster", "nodes", "prometheus", "proxy")}
    assert files == {*SCHEMAS, *prometheus, "README.md", "slurm/prolog.sh", "own-cluster/kustomization.yaml"}
    assert files - {"README.md"} == set(re.findall(r"^## `([\w./-]+)`", README, re.MULTILINE))


@examples
def test_each_example_is_valid_in_the_schema_of_its_kind(name: str) -> None:
    found_faults = [SCHEMAS[name](document) for document in documents(name)]
    assert found_faults
    assert not any(found_faults)


@examples
def test_each_misspelt_field_is_found(name: str) -> None:
    wrong = [(place, changed) for document in documents(name) for place, changed in misspelt(document)]
    assert len(wrong) > 10
    for place, changed in wrong:
        if place not in (".apiVersion", ".kind"):
            assert SCHEMAS[name](changed), place


@examples
def test_nodes_are_selected_by_labels_that_trackbed_publishes(name: str, published: list[dict[str, Any]]) -> None:
    known = {each["key"]: each["value"] for each in published}
    page = (ROOT / "docs" / "labels.md").read_text()
    for document in documents(name):
        for key, value in {
            key: value for each in values_of(document, "nodeSelector") for key, value in each.items()
        }.items():
            assert known.get(key) == value
            assert f"`{key}={value}`" in page
            assert fault(key, value, "reporter") is None


@examples
def test_resources_are_those_of_the_plugins(
    name: str, published: list[dict[str, Any]], networks: dict[str, str]
) -> None:
    known = {each["resource"] for each in published} | set(networks.values())
    for document in documents(name):
        asked = {key for kind in ("limits", "requests") for each in values_of(document, kind) for key in each}
        assert {key for key in asked if "/" in key} <= known


@examples
def test_a_container_that_has_rdma_may_lock_memory(name: str) -> None:
    for document in documents(name):
        for container in (each for group in values_of(document, "containers") for each in group):
            asked = container.get("resources", {}).get("limits", {})
            rdma = any(key.startswith("rdma/") or key.endswith("_rdma") for key in asked)
            allowed = container.get("securityContext", {}).get("capabilities", {}).get("add", [])
            assert rdma == ("IPC_LOCK" in allowed)


@examples
def test_the_scheduler_and_the_taint_decide_where_it_runs(name: str) -> None:
    for document in documents(name):
        assert not list(values_of(document, "nodeName"))
        assert not [
            each for group in values_of(document, "tolerations") for each in group if each.get("key") in (None, TAINT)
        ]


@examples
def test_pods_in_the_node_s_network_still_find_services(name: str) -> None:
    for document in documents(name):
        for spec in (each for each in values_of(document, "spec") if each.get("hostNetwork")):
            assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"


@examples
def test_a_pod_with_a_vf_has_the_network_that_the_deploy_makes_for_it(name: str, networks: dict[str, str]) -> None:
    for template in (each for document in documents(name) for each in values_of(document, "template")):
        asked = {key for limits in values_of(template["spec"], "limits") for key in limits}
        annotations = template.get("metadata", {}).get("annotations", {})
        network = annotations.get("k8s.v1.cni.cncf.io/networks", "").removeprefix("default/")
        assert asked & set(filter(None, networks.values())) == ({networks[network]} if network else set())


@pytest.mark.parametrize(("pods", "address"), [("perftest", "RAIL"), ("rdma-test", "ADDRESS")])
def test_perftest_s_commands_are_those_of_the_guides_to_roce(pods: str, address: str) -> None:
    common = ["-d", "DEVICE", "-F", "--report_gbits"]

    def own(command: str) -> str:
        return " ".join(word for word in command.split() if word not in common)

    assert [(own(server), own(client)) for server, client in commands(pods)] == [
        ("ib_write_bw", f"ib_write_bw {address}"),
        ("ib_read_bw -q 30", f"ib_read_bw -q 30 {address}"),
        ("ib_send_bw -R", f"ib_send_bw -R {address}"),
        ("ib_write_bw -a", f"ib_write_bw -D 10 --cpu_util {address}"),
    ]
    assert all(set(common) <= set(command.split()) for pair in commands(pods) for command in pair)


# --- arena ---------------------------------------------------------------------------------------------------


def test_the_tfjob_is_what_arena_writes_for_the_training_operator_too() -> None:
    (job,) = copy.deepcopy(documents("tfjob.yaml"))
    job["spec"]["runPolicy"] = {"cleanPodPolicy": job["spec"].pop("cleanPodPolicy")}
    assert custom_resources.faults(job, TFJOB) == []
    replicas = {
        kind: (spec["replicas"], spec["template"]["spec"]["containers"][0]["resources"]["limits"])
        for kind, spec in job["spec"]["tfReplicaSpecs"].items()
    }
    assert replicas == {"PS": (1, {"rdma/hca": "1"}), "Worker": (1, {"nvidia.com/gpu": "8", "rdma/hca": "1"})}


def test_deepspeed_s_launcher_has_the_secret_that_the_readme_makes_and_its_workers_the_gpus() -> None:
    (job,) = documents("deepspeed.yaml")
    made = re.search(r"kubectl create secret generic (\S+) (.*)$", README, re.MULTILINE)
    assert made is not None
    assert job["metadata"]["annotations"]["arena.kubeflow.org/ssh-secret"] == made[1]
    # As et-operator mounts them (pkg/util/ssh.go).
    assert set(re.findall(r"--from-file=([\w.]+)=", made[2])) == {"config", "id_rsa", "id_rsa.pub"}
    replicas = job["spec"]["etReplicaSpecs"]
    asked = {kind: each["template"]["spec"]["containers"][0]["resources"]["limits"] for kind, each in replicas.items()}
    assert asked == {"launcher": {"rdma/hca": "1"}, "worker": {"nvidia.com/gpu": "8", "rdma/hca": "1"}}


# --- horovod -------------------------------------------------------------------------------------------------


def test_horovod_starts_a_rank_for_each_gpu() -> None:
    (job,) = documents("horovod.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"}
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert job["spec"]["slotsPerWorker"] == int(worker["resources"]["limits"]["nvidia.com/gpu"])
    ranks = int(launcher["command"][launcher["command"].index("-np") + 1])
    assert ranks == job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]


# --- Alibaba Cloud's ACS -------------------------------------------------------------------------------------


def test_acs_pods_have_the_labels_the_gpus_and_nccl_s_settings_of_their_series(node: Node) -> None:
    (deployment,) = documents("acs-deployment.yaml")
    template = deployment["spec"]["template"]
    acs_labels = {key.partition("/")[2]: value for key, value in template["metadata"]["labels"].items() if "/" in key}
    series = acs_labels["gpu-model-series"]
    assert acs_labels == {
        "compute-class": "gpu",
        "compute-qos": "default",
        "gpu-model-series": series,
        "hpn-type": "rdma",
    }
    (container,) = template["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    # The task refuses an instance whose GPUs are not as many as its series has.
    result = node.deploy(nccl.configure, has(CONNECTX, others=(GPUS * 2)[:gpus]), nccl={"series": series})
    assert not result.failed
    written = result.uploads["/etc/.nccl.conf.new"].decode().splitlines()
    assert [f"{each['name']}={each['value']}" for each in container["env"]] == written[1:]


def test_acs_pods_are_ready_only_with_the_nic_of_the_rdma_network() -> None:
    (deployment,) = documents("acs-deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (*_, path) = container["readinessProbe"]["exec"]["command"]
    assert path == "/sys/class/net/hpn0"
    assert f"cat {path}/" in README
