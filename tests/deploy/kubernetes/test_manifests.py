"""The task that renders device plugins' manifests: the files that it writes, and the values that it refuses."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve

from tasks.kubernetes import manifests as task
from tests.deploy.conftest import Answers, Node, OwnConnector, Result
from tests.deploy.fake import deployed
from tests.deploy.hardware import ERDMA, GPUS, RAIL0, VIRTIO, has
from tests.programs import failure, success
from tests.stand_ins import text_file

FEATURE = "feature.node.kubernetes.io"
CONFIGURED = f"{FEATURE}/network-sriov.configured"
ERI, GPU = "aliyun.accelerator/erdma", "nvidia.com/gpu.present"
LABELS = {"capabilities": ["rdma", ERI, CONFIGURED, GPU]}
RENDER = "from tasks.kubernetes import manifests\nmanifests.render()\n"
DATA = {"fake_responses": has(RAIL0), "labels": LABELS}


def fleet(
    folder: Path, hosts: Mapping[str, Mapping[str, Any]], *options: str, code: str = RENDER, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Render for hosts with a rail, into the folder `made` unless their data have another one."""
    data = {**DATA, "device_plugins": {"folder": str(folder / "made")}}
    made = {name: {**data, "node_name": name, **own} for name, own in hosts.items()}
    return deployed(folder, made, code, *options, **environment)


def deploy(node: Node, folder: Path, answers: Answers, **more: Any) -> Result:
    node.data = {"device_plugins": {"folder": str(folder)}, "labels": LABELS, **more}
    return node.deploy(task.render, answers)


def test_manifests_are_written_on_the_control_host_and_only_once(node: Node, tmp_path: Path) -> None:
    result = deploy(node, tmp_path / "made", has(RAIL0), nccl={"network_type": 1})
    assert not result.failed
    assert result.uploads == {}
    written = {path.name for path in (tmp_path / "made").iterdir()}
    assert written == {
        *("nodes", "rdma-shared-device-plugin.yaml", "sriov-device-plugin.yaml", "nccl.yaml"),
        *("rdma-test-pods.yaml", "kustomization.yaml"),
    }
    assert deploy(node, tmp_path / "made", has(RAIL0), nccl={"network_type": 1}).did_nothing


def test_files_of_removed_hosts_are_deleted_and_the_operators_stay(node: Node, tmp_path: Path) -> None:
    deploy(node, tmp_path, has(RAIL0))
    (part,) = (tmp_path / "nodes").iterdir()
    part.rename(tmp_path / "nodes" / "gone.json")
    (tmp_path / "mine.yaml").write_text("mine")
    deploy(node, tmp_path, has(ERDMA))
    assert [path.name for path in (tmp_path / "nodes").iterdir()] == ["@fake_node-a.json"]
    assert not (tmp_path / "rdma-shared-device-plugin.yaml").exists()
    assert (tmp_path / "erdma-device-plugin.yaml").exists()
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_a_folder_without_objects_is_one_that_kustomize_builds(node: Node, tmp_path: Path) -> None:
    deploy(node, tmp_path, has(RAIL0))
    assert not deploy(node, tmp_path, has(VIRTIO)).failed
    assert [path.name for path in tmp_path.glob("**/*.yaml")] == ["kustomization.yaml"]
    # Without any value but [] it would be "empty" for kustomize 5.2 and later (CheckEmpty, api/types/kustomization.go).
    assert yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["resources"] == []


def test_a_node_that_deploys_itself_writes_no_manifests(node: Node, tmp_path: Path) -> None:
    itself = evolve(node, connector=OwnConnector)
    result = deploy(itself, tmp_path / "made", has(RAIL0))
    assert result.planned == {}
    assert not (tmp_path / "made").exists()


def test_deploys_of_several_shards_write_the_same_files(tmp_path: Path) -> None:
    """Each host is a shard of its own, and all have one folder. No deploy may take away what another is about to rename."""
    # As another shard leaves it while it writes.
    (tmp_path / "made/.kustomization.yaml.new").mkdir(parents=True)
    for shard in ("1/2", "2/2"):
        success(fleet(tmp_path, {"a": {}, "b": {}}, TRACKBED_SHARD=shard))
    assert sorted(path.name for path in (tmp_path / "made/nodes").iterdir()) == ["@fake_a.json", "@fake_b.json"]


def test_a_damaged_file_is_written_anew(node: Node, tmp_path: Path) -> None:
    deploy(node, tmp_path, has(RAIL0))
    damaged = (tmp_path / "nodes/@fake_node-a.json", tmp_path / "kustomization.yaml")
    texts = [path.read_bytes() for path in damaged]
    for path in damaged:
        path.write_bytes(b"\xff\xfe")
    assert not deploy(node, tmp_path, has(RAIL0)).failed
    assert [path.read_bytes() for path in damaged] == texts


@pytest.mark.parametrize("place", ["", "nodes", "nodes/@fake_node-a.json", "kustomization.yaml"])
def test_a_folder_that_cannot_be_written_fails_the_host_with_the_reason(node: Node, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "made"
    if place in ("", "nodes"):
        text_file(folder / place, "a file, and no folder")
    else:
        (folder / place).mkdir(parents=True)
    result = deploy(node, folder, has(RAIL0))
    assert result.failed
    (message,) = [line for line in result.log if "device_plugins.folder" in line]
    assert " cannot be written: " in message
    assert "Traceback" not in "\n".join(result.log)


def test_hosts_with_the_same_folder_must_have_the_same_value(tmp_path: Path) -> None:
    other = {"folder": str(tmp_path / "made"), "namespace": "rdma"}
    said = failure(fleet(tmp_path, {"a": {}, "b": {"device_plugins": other}}))
    assert "has another value for the same folder" in said


@pytest.mark.parametrize("limit", [(), ("--limit", "@fake/b")])
def test_the_hosts_of_a_cluster_must_have_the_same_folder(tmp_path: Path, limit: tuple[str, ...]) -> None:
    one, other = ({"server": f"https://10.0.0.{number}:6443", "ca_file": "ca.pem"} for number in (1, 2))
    clusters = {"a": one, "b": one, "c": other}
    folders = {name: {"folder": str(tmp_path / name)} for name in clusters}
    hosts = {name: {"device_plugins": folders[name], "kubernetes": key} for name, key in clusters.items()}
    assert "@fake/b.device_plugins.folder: @fake/a " in failure(fleet(tmp_path, hosts, *limit))
    assert not (tmp_path / "b").exists()


def test_a_host_that_gets_another_folder_or_none_leaves_the_former_one(tmp_path: Path) -> None:
    for folders in ({"a": "x", "b": "x", "c": "x/"}, {"a": "x", "b": "y", "c": None}):
        keys = {name: {"folder": f"{tmp_path}/{folder}"} if folder else None for name, folder in folders.items()}
        success(fleet(tmp_path, {name: {"device_plugins": key} for name, key in keys.items()}))
    assert [path.name for path in (tmp_path / "x/nodes").iterdir()] == ["@fake_a.json"]
    assert [path.name for path in (tmp_path / "y/nodes").iterdir()] == ["@fake_b.json"]


def test_the_manifests_of_each_folder_are_written(tmp_path: Path) -> None:
    """Two clusters in one inventory, as in inventories/prod.py."""
    plugins = {name: {"folder": str(tmp_path / name[0])} for name in ("a1", "a2", "b1")}
    success(fleet(tmp_path, {name: {"device_plugins": key} for name, key in plugins.items()}))
    assert (tmp_path / "a" / "kustomization.yaml").exists()
    assert (tmp_path / "b" / "kustomization.yaml").exists()


def test_the_manifests_are_for_all_hosts_though_one_is_done_before_the_next_begins(tmp_path: Path) -> None:
    hardware = {"a": has(RAIL0), "b": has(ERDMA), "c": has(RAIL0, others=GPUS)}
    success(fleet(tmp_path, {name: {"fake_responses": answers} for name, answers in hardware.items()}, "--serial"))
    plugins = {path.name for path in (tmp_path / "made").glob("*-device-plugin.yaml")}
    assert plugins == {f"{name}-device-plugin.yaml" for name in ("rdma-shared", "erdma", "nvidia", "sriov")}


@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_the_manifests_are_written_if_a_host_of_the_cluster_fails_earlier(tmp_path: Path, failing: str) -> None:
    code = BREAKS.format(failing=f"@fake/{failing}")
    done = fleet(tmp_path, {"a": {}, "b": {}, "c": {}}, "--fail-percent", "50", code=code)
    assert (done.returncode, f"[@fake/{failing}] it is broken" in done.stderr) == (1, True), done.stderr
    written = {path.stem for path in (tmp_path / "made" / "nodes").iterdir()}
    assert written == {f"@fake_{name}" for name in "abc" if name != failing}
    assert (tmp_path / "made" / "kustomization.yaml").exists()
    of_write = done.stderr.partition("Manifests | Write")[2].partition("-->")[0]
    assert (of_write.count("Success"), of_write.count("No changes")) == (1, 1)


BREAKS = """
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import refuse
from tasks.kubernetes import manifests


@operation()
def break_down():
    if host.name == "{failing}":
        yield refuse("it is broken")


break_down(name="Break down")
manifests.render()
"""


def test_a_node_with_unknown_hardware_is_refused(node: Node, tmp_path: Path) -> None:
    result = deploy(node, tmp_path, {})
    assert result.failed
    assert "hardware is unknown" in "\n".join(result.log)


@pytest.mark.parametrize(
    ("pods", "networks", "warned"),
    [(64, {"subnet": "10.56.217.0/24"}, True), (63, {"subnet": "10.56.217.0/24"}, False), (1000, None, False)],
)
def test_more_pods_than_gids_of_a_roce_port_are_a_warning(
    node: Node, tmp_path: Path, pods: int, networks: dict[str, str] | None, warned: bool
) -> None:
    plugins = {"folder": str(tmp_path), "shared_rdma": {"rdma_hca_max": pods}, "networks": networks}
    result = deploy(node, tmp_path, has(RAIL0), device_plugins=plugins)
    assert not result.failed
    assert sum(f"rdma_hca_max: {pods} pods may share a port" in line for line in result.log) == warned


@pytest.mark.parametrize(
    ("distribution", "plugins", "warned"),
    [("k3s", {"multus": {}}, 1), ("rke2", {"multus": {}}, 0), ("k3s", {}, 0), (None, {"multus": {}}, 0)],
)
def test_network_plugins_in_folders_that_k3s_does_not_use_are_a_warning(
    node: Node, tmp_path: Path, distribution: str | None, plugins: dict[str, Any], warned: bool
) -> None:
    """Pods get none of their networks then, and no error."""
    given = {"folder": str(tmp_path), "network_plugins": plugins}
    kubelet = {"kubelet": {"policy": "hold", "distribution": distribution}} if distribution else {}
    result = deploy(node, tmp_path, has(RAIL0), device_plugins=given, **kubelet)
    assert not result.failed
    assert sum("they are installed in /opt/cni/bin" in line for line in result.log) == warned


def without(key: str) -> dict[str, Any]:
    return {"capabilities": [each for each in LABELS["capabilities"] if each != key]}


RACK = {"shared_rdma": {"node_selector": {"rack": "7"}}}
SELECTS = "selects nodes by the label"
NONE = "which the reporter publishes on none of the hosts that need the plugin"


@pytest.mark.parametrize(
    ("labels", "plugins", "hardware", "message"),
    [
        (without("rdma"), {}, has(RAIL0), f"shared_rdma: the DaemonSet rdma-shared-device-plugin {SELECTS} rdma=hca"),
        (without("rdma"), {}, has(RAIL0), f"{NONE} (@fake/node-a); add it to labels.capabilities, and"),
        (without(CONFIGURED), {}, has(RAIL0), f"sriov: the DaemonSet sriov-device-plugin {SELECTS} {CONFIGURED}="),
        (without(ERI), {}, has(ERDMA), f"erdma: the DaemonSet erdma-device-plugin {SELECTS} {ERI}=true"),
        (without(GPU), {}, has(others=GPUS), f"nvidia: the DaemonSet nvidia-device-plugin {SELECTS} {GPU}=true"),
        (None, {}, has(ERDMA), f"{ERI}=true, {NONE}"),
        (LABELS, RACK, has(RAIL0), f"{NONE} (@fake/node-a); add it to labels.policy, and"),
        ({**LABELS, "policy": {"rack": "8"}}, RACK, has(RAIL0), f"{NONE} (@fake/node-a with rack=8); add"),
        (
            {**LABELS, "policy": {"rack": "7"}, "writers": {"rack": "kubelet"}}, RACK, has(RAIL0),
            f"{NONE} (@fake/node-a); add it to labels.policy, and leave it out of labels.writers",
        ),
        (LABELS, {}, has(RAIL0, rdma_cm=False), f"rdma=hca, {NONE}"),
    ],
)  # fmt: skip
def test_a_daemon_set_whose_label_no_host_publishes_is_refused(
    node: Node, tmp_path: Path, labels: dict[str, Any] | None, plugins: dict[str, Any], hardware: Answers, message: str
) -> None:
    result = deploy(node, tmp_path, hardware, labels=labels, device_plugins={"folder": str(tmp_path), **plugins})
    assert result.failed
    assert message in "\n".join(result.log)
    assert list(tmp_path.glob("*.yaml")) == []


def test_a_host_that_was_not_deployed_to_yet_may_publish_the_label(tmp_path: Path) -> None:
    """Node a has another label than the shared plugin. Node b may publish it, and is not in the limit."""
    plugins = {"folder": str(tmp_path / "made"), "sriov": None}

    def deploy_a(labels_of_b: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        labels = {"a": without("rdma"), "b": labels_of_b}
        hosts = {name: {"device_plugins": plugins, "labels": each} for name, each in labels.items()}
        return fleet(tmp_path, hosts, "--limit", "@fake/a")

    assert NONE in failure(deploy_a(without("rdma")))
    success(deploy_a(LABELS))
    assert [path.name for path in (tmp_path / "made").glob("*.yaml")] == ["kustomization.yaml"]


def test_bad_labels_of_a_host_outside_the_limit_do_not_stop_the_deploy(tmp_path: Path) -> None:
    done = fleet(tmp_path, {"a": {}, "b": {"labels": {"policy": {"rack": "a b"}}}}, "--limit", "@fake/a")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made/rdma-shared-device-plugin.yaml").exists()
    [warning] = [line for line in done.stderr.splitlines() if "@fake/b.labels: " in line]
    assert "made without the labels of this host" in warning


BOTH = has(RAIL0, ERDMA)


@pytest.mark.parametrize(
    ("plugins", "labels", "hardware"),
    [
        (RACK, {**LABELS, "policy": {"rack": "7"}}, has(RAIL0)),
        # No hardware of the host needs the plugin.
        ({}, {}, has(ERDMA)),
        ({"shared_rdma": {"resource_name": "hca"}}, {**LABELS, "resources": {"rdma": "rdma/hca"}}, BOTH),
        ({"erdma": {"plugin": "ack"}}, {**LABELS, "resources": {ERI: "rdma/hca"}}, BOTH),
        ({"erdma": {"plugin": "rdma-device-plugin"}}, {**LABELS, "resources": {ERI: "rdma/hca"}}, BOTH),
        ({"erdma": {"plugin": "controller"}}, {**LABELS, "resources": {ERI: "aliyun/erdma"}}, BOTH),
    ],
)
def test_a_daemon_set_whose_label_some_host_publishes_or_none_needs_is_written(
    node: Node, tmp_path: Path, plugins: dict[str, Any], labels: dict[str, Any], hardware: Answers
) -> None:
    """refused.txt has labels with the resource of another plugin."""
    given = {"device_plugins": {"folder": str(tmp_path), **plugins}, "labels": labels}
    assert not deploy(node, tmp_path, hardware, **given).failed
