"""The worked example, inventories/prod.py: what the deploy declares for a node of each group, in order."""

from __future__ import annotations

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
from tasks.kubernetes.labels import LABELS_KEY
from tasks.kubernetes.manifests.node_labels import possible_labels
from tasks.node_spec import node_spec
from tasks.packages.dkms import ModuleState
from tests.deploy.conftest import DEBIAN, Node, of
from tests.deploy.examples.inventories import inventory_of
from tests.deploy.kubernetes.test_kubernetes import certificate

OPTIONS = "Kernel module options"
KERNEL = ["Kernel | Kernel and headers", "Kernel | Kernel updates held", "Kernel | Kernel of the next boot"]
DOCA = [
    "OFED | No MLNX_OFED",
    "OFED | doca: key of its repository",
    "OFED | doca: repository",
    "OFED | The vendor's rdma-core is preferred",
    "OFED | Kernel headers",
    "OFED | DOCA-OFED",
    "OFED | Packages of the same release",
    "OFED | The vendor's rdma-core",
    "OFED | Modules for the running kernel",
    "OFED | Loaded modules",
]
GPU_DRIVER = [
    "GPU driver | No driver in use replaced",
    "GPU driver | The kernel's own drivers not loaded",
    "GPU driver | nvidia-driver: key of its repository",
    "GPU driver | nvidia-driver: repository",
    "GPU driver | Version",
    "GPU driver | Packages",
    "GPU driver | Modules for the running kernel",
    "GPU driver | Loaded modules",
    "GPU driver | NVLink subnet manager",
    "GPU driver | Fabric manager",
    "GPU driver | Persistence mode",
    "GPU driver | Persistence daemon",
    "GPU driver | nvidia-smi",
]
ENGINE = [
    "Container engine | No engine of another source",
    "Container engine | docker: no repository",
    "Container engine | docker: no key of a repository",
    "Container engine | Packages",
    "Container engine | containerd enabled",
    "Container engine | containerd for Kubernetes",
]
ERDMA = [
    "eRDMA | erdma: no repository",
    "eRDMA | erdma: no key of a repository",
    "eRDMA | Driver's options",
    "eRDMA | Build's options",
    "eRDMA | Installer's packages",
    "eRDMA | Installer",
    "eRDMA | Driver built",
    "eRDMA | Driver at boot",
    "eRDMA | Driver loaded",
]
REST = [
    "Limits | Locked memory",
    "Kernel modules at boot",
    "Kernel modules now",
    "irqbalance off",
    "irqbalance's drop-in",
    "Network managers | networkd leaves rules",
    "Network managers | Mark VFs",
    "Boot | Kernel arguments",
    "Boot | Kernel arguments of this boot",
    "Boot | Sysctls at boot",
    "Boot | Sysctls now",
    "Boot | Initramfs",
    "Firmware | Settings",
    "Firmware | Settings of this boot",
    "Reboot",
    "Agent | Stage",
    "Spec | Plan and write",
    "Agent | Switch",
    "Agent | Command",
    "Agent | Unit",
    "Agent | Service",
    "Hardware settled",
    "Labels | Files",
    "NCCL",
    "Manifests | Hardware of the node",
    "Manifests | Write",
    "Kubernetes | Settings and token",
    "Reporter | Unit",
    "Reporter | Service",
    "Kubelet's gate",
    "Pull | No timer",
    "Ready",
    "Back in service",
]
GROUPS = {
    "gpu-01.example.net": [
        "Original state",
        "Base packages",
        OPTIONS,
        *KERNEL,
        *DOCA,
        *GPU_DRIVER,
        "GPU peer memory | nvidia_peermem now",
        "GPU peer memory | nvidia_peermem at boot",
        *ENGINE,
        "Container runtime | nvidia-container-toolkit: key of its repository",
        "Container runtime | nvidia-container-toolkit: repository",
        "Container runtime | Packages",
        "Container runtime | NVIDIA's runtime in containerd",
        *REST,
    ],
    "spark-01.example.net": ["Original state", "Base packages", OPTIONS, "OFED | Inbox", *REST],
    "10.0.1.11": [
        "Original state",
        "Base packages",
        "RDMA tools",
        OPTIONS,
        *KERNEL,
        *ERDMA,
        "Container runtime | nvidia-container-toolkit: key of its repository",
        "Container runtime | nvidia-container-toolkit: repository",
        "Container runtime | Packages",
        "Container runtime | NVIDIA's runtime in containerd",
        *REST,
    ],
    "10.0.1.21": ["Original state", "Base packages", "RDMA tools", OPTIONS, *KERNEL, *ERDMA, *REST],
}
# No driver is built for the running kernel yet.
FRESH = {"uname -m": "x86_64", of(ModuleState): ["path"]}
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


@pytest.mark.parametrize("name", GROUPS)
def test_each_group_declares_its_operations_in_this_order(node: Node, name: str) -> None:
    node.data = {key: value for key, value in hosts()[name].items() if not key.startswith("ssh_")}
    system = ALINUX if name.startswith("10.") else DEBIAN
    result = node.deploy(lambda: runpy.run_path(str(archive.ROOT / "deploy.py")), {**FRESH, **system})
    assert list(result.planned) == GROUPS[name]


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
