"""Device plugins' manifests: what they are made of, what they say, and whether the API would take them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve
from pyinfra.api.exceptions import DeployError

from tasks import manifests as task
from tasks.common import archive
from tasks.manifests.device_plugins import (
    DevicePlugins,
    Discovered,
    Networks,
    Nvidia,
    SharedRdma,
    Sriov,
    discover,
    manifests,
)
from tests.deploy.conftest import Answers, Node, Result
from tests.deploy.hardware import CONNECTX, ERDMA, GPUS, SECOND, VF, VIRTIO, function, hardware, has, rdma
from tests.deploy.kubernetes_api import faults

TAINT = {"key": "readiness.k8s.io/trackbed", "operator": "Exists", "effect": "NoSchedule"}
WANTED = DevicePlugins("made", networks=Networks("10.56.217.0/24"))
PLAIN = function("0000:21:00.2", "8086:10ca", "ens3f0v0", index=0, driver="igbvf")
PASSED = function("0000:21:00.4", "8086:10ca", None, index=1, driver="vfio-pci")
INTEL = function("0000:61:00.0", "8086:10c9", "ens3f0", driver="igb", total_vfs=7, vfs=[PASSED, PLAIN])
SECOND_VF = {**VF, "address": "0000:21:00.7", "index": 5, "rdma": [rdma("mlx5_7")]}
FLEET = {
    "gpu-1": discover(
        hardware({**CONNECTX, "vfs": [VF, SECOND_VF]}, SECOND, VIRTIO, others=GPUS), "NCCL_IB_HCA=mlx5\n"
    ),
    "gpu-2": discover(hardware(CONNECTX, others=GPUS), "NCCL_IB_HCA=mlx5\n"),
    "erdma-1": discover(hardware(ERDMA, VIRTIO), "NCCL_IB_DISABLE=1\nNCCL_IB_HCA=\n"),
    "cpu-1": discover(hardware(INTEL, VIRTIO)),
}


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def every(found: dict[str, str]) -> list[dict[str, Any]]:
    return [each for name, text in found.items() if name != "kustomization.yaml" for each in documents(text)]


def config(found: dict[str, str], plugin: str) -> Any:
    (told,) = [each for each in documents(found[f"{plugin}-device-plugin.yaml"]) if each["kind"] == "ConfigMap"]
    return json.loads(told["data"]["config.json"])


def daemon_sets(found: dict[str, str]) -> list[dict[str, Any]]:
    return [each for each in every(found) if each["kind"] == "DaemonSet"]


def test_shared_rdma_s_configuration() -> None:
    assert config(manifests(WANTED, FLEET), "rdma-shared") == {
        "periodicUpdateInterval": 300,
        "configList": [
            {
                "resourceName": "hca_shared_devices_b",
                "resourcePrefix": "rdma",
                "rdmaHcaMax": 1000,
                "selectors": {"vendors": ["15b3"], "deviceIDs": ["101b"]},
            }
        ],
    }


def test_another_resource_name_and_limits() -> None:
    wanted = evolve(WANTED, shared_rdma=SharedRdma(resource_name="hca", rdma_hca_max=8, periodic_update_interval=0))
    found = config(manifests(wanted, FLEET), "rdma-shared")
    assert (found["periodicUpdateInterval"], found["configList"][0]["rdmaHcaMax"]) == (0, 8)
    assert found["configList"][0]["resourceName"] == "hca"


def test_sriov_s_configuration_has_a_resource_for_each_kind_of_vf() -> None:
    assert config(manifests(WANTED, FLEET), "sriov")["resourceList"] == [
        {
            "resourceName": "vf",
            "selectors": {"vendors": ["8086"], "devices": ["10ca"], "drivers": ["igbvf"], "pfNames": ["ens3f0#0"]},
        },
        {
            "resourceName": "vf_rdma",
            "selectors": {
                "vendors": ["15b3"],
                "devices": ["101c"],
                "drivers": ["mlx5_core"],
                "pfNames": ["ens1f0#0,5"],
                "isRdma": True,
            },
        },
        {
            "resourceName": "vf_vfio",
            "selectors": {"vendors": ["8086"], "devices": ["10ca"], "drivers": ["vfio-pci"], "pfNames": ["ens3f0#1"]},
        },
    ]


def test_only_the_given_vfs_are_allocated() -> None:
    found = config(manifests(evolve(WANTED, sriov=Sriov(vfs="1-7")), FLEET), "sriov")["resourceList"]
    assert [pool["selectors"]["pfNames"] for pool in found] == [["ens1f0#5"], ["ens3f0#1"]]


def test_erdma_s_configuration() -> None:
    assert config(manifests(WANTED, FLEET), "erdma") == {"mode": "hca", "deviceType": "eRDMA"}


def test_no_two_config_maps_share_a_name() -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in every(manifests(WANTED, FLEET))]
    assert len(names) == len(set(names))
    assert ("ConfigMap", "rdma-shared-devices") in names
    assert ("ConfigMap", "erdma-devices") in names


def test_each_plugin_selects_nodes_by_its_label_and_tolerates_the_taint() -> None:
    found = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in daemon_sets(manifests(WANTED, FLEET))
    }
    assert {name: spec["nodeSelector"] for name, spec in found.items()} == {
        "rdma-shared-device-plugin": {"rdma": "hca"},
        "sriov-device-plugin": {"feature.node.kubernetes.io/network-sriov.configured": "true"},
        "erdma-device-plugin": {"aliyun.accelerator/erdma": "true"},
        "nvidia-device-plugin": {"nvidia.com/gpu.present": "true"},
    }
    assert all(TAINT in spec["tolerations"] for spec in found.values())


def test_another_configuration_makes_new_pods() -> None:
    def digest(wanted: DevicePlugins) -> str:
        (found,) = [
            e for e in daemon_sets(manifests(wanted, FLEET)) if e["metadata"]["name"] == "rdma-shared-device-plugin"
        ]
        return str(found["spec"]["template"]["metadata"]["annotations"]["trackbed.internal/config"])

    assert digest(WANTED) == digest(evolve(WANTED, namespace="rdma"))
    assert digest(WANTED) != digest(evolve(WANTED, shared_rdma=SharedRdma(rdma_hca_max=8)))


def test_test_pods_lock_memory_ask_for_one_and_leave_the_node_to_the_scheduler() -> None:
    found = manifests(WANTED, FLEET)
    for name, resource in (("rdma", "rdma/hca_shared_devices_b"), ("erdma", "aliyun/erdma")):
        for pod in documents(found[f"{name}-test-pods.yaml"]):
            (container,) = pod["spec"]["containers"]
            assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
            assert container["resources"] == {"limits": {resource: "1"}}
            assert pod["spec"]["nodeSelector"]
    assert not any("nodeName" in text for name, text in found.items() if "pods" not in name)
    assert not any("nodeName" in each.get("spec", {}) for each in every(found))


def test_networks() -> None:
    found = {each["metadata"]["name"]: each for each in documents(manifests(WANTED, FLEET)["networks.yaml"])}
    macvlan = json.loads(found["macvlan-ens1f0"]["spec"]["config"])
    addresses = {"type": "whereabouts", "range": "10.56.217.0/24"}
    assert macvlan == {
        "cniVersion": "0.3.1", "name": "macvlan-ens1f0", "type": "macvlan",
        "master": "ens1f0", "mode": "bridge", "mtu": 9000, "ipam": addresses,
    }  # fmt: skip
    sriov = found["sriov-vf-rdma"]
    assert sriov["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/resourceName": "sriov/vf_rdma"}
    assert json.loads(sriov["spec"]["config"])["ipam"] == addresses
    assert "ipam" not in json.loads(found["sriov-vf-vfio"]["spec"]["config"])


def test_nccl_s_settings_are_one_config_map_for_each_content() -> None:
    found = {each["metadata"]["name"]: each["data"] for each in documents(manifests(WANTED, FLEET)["nccl.yaml"])}
    assert found == {
        "nccl-type-1": {"nccl.conf": "NCCL_IB_HCA=mlx5\n"},
        "nccl-type-2": {"nccl.conf": "NCCL_IB_DISABLE=1\nNCCL_IB_HCA=\n"},
    }
    mixed = {**FLEET, "gpu-2": evolve(FLEET["gpu-2"], nccl="NCCL_IB_HCA==a\n")}
    names = [each["metadata"]["name"] for each in documents(manifests(WANTED, mixed)["nccl.yaml"])]
    assert len(set(names)) == 3
    assert "nccl-type-2" in names


def test_the_same_input_makes_the_same_bytes() -> None:
    assert manifests(WANTED, FLEET) == manifests(WANTED, dict(reversed(FLEET.items())))


def test_only_what_some_node_needs_is_written() -> None:
    assert set(manifests(WANTED, {"a": Discovered()})) == {"kustomization.yaml"}
    none = evolve(WANTED, shared_rdma=None, sriov=None, erdma=None, nvidia=None, test_pods=None, networks=None)
    assert set(manifests(none, FLEET)) == {"kustomization.yaml", "nccl.yaml"}


def test_the_kustomization_leaves_the_test_pods_out() -> None:
    found = manifests(WANTED, FLEET)
    (kustomization,) = documents(found["kustomization.yaml"])
    assert set(found) - set(kustomization["resources"]) == {
        "kustomization.yaml",
        "rdma-test-pods.yaml",
        "erdma-test-pods.yaml",
    }


def test_settings_reach_the_manifests() -> None:
    wanted = evolve(WANTED, nvidia=Nvidia(image="a.b/c:1", runtime_class="nvidia"), namespace="gpu")
    (found,) = [
        each for each in daemon_sets(manifests(wanted, FLEET)) if each["metadata"]["name"] == "nvidia-device-plugin"
    ]
    assert found["metadata"]["namespace"] == "gpu"
    assert found["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert found["spec"]["template"]["spec"]["containers"][0]["image"] == "a.b/c:1"


def test_every_file_that_may_be_rendered_is_known() -> None:
    assert set(manifests(WANTED, FLEET)) == task.OURS


def test_every_object_of_a_core_kind_is_valid_in_the_api_s_schema() -> None:
    found = [each for each in every(manifests(WANTED, FLEET)) if each["kind"] != "NetworkAttachmentDefinition"]
    assert len(found) == 4 + 4 + 1 + 4 + 1
    assert {each["metadata"]["name"]: faults(each) for each in found if faults(each)} == {}


def test_the_api_s_schema_would_say_what_is_wrong() -> None:
    (pod, *_) = documents(manifests(WANTED, FLEET)["rdma-test-pods.yaml"])
    pod["spec"]["nodeSelecter"] = pod["spec"].pop("nodeSelector")
    pod["spec"]["containers"][0]["command"] = "sleep infinity"
    assert {each.partition(":")[0] for each in faults(pod)} == {"$.spec", "$.spec.containers[0].command"}


# --- the task ------------------------------------------------------------------------------------------------


def deploy(node: Node, folder: Path, answers: Answers, **more: Any) -> Result:
    node.data = {"device_plugins": {"folder": str(folder)}, **more}
    return node.deploy(task.render, answers)


def test_they_are_written_on_this_machine_and_not_again(node: Node, tmp_path: Path) -> None:
    result = deploy(node, tmp_path / "made", has(CONNECTX), nccl={"network_type": 1})
    assert not result.failed
    assert result.uploads == {}
    written = {path.name for path in (tmp_path / "made").iterdir()}
    assert written == {
        *("nodes", "rdma-shared-device-plugin.yaml", "sriov-device-plugin.yaml", "nccl.yaml"),
        *("rdma-test-pods.yaml", "kustomization.yaml"),
    }
    again = deploy(node, tmp_path / "made", has(CONNECTX), nccl={"network_type": 1})
    assert not any(again.planned.values())
    assert again.flat == []


def test_the_parts_of_hosts_that_do_not_take_part_count_and_those_of_strangers_go(node: Node, tmp_path: Path) -> None:
    deploy(node, tmp_path, has(CONNECTX))
    (part,) = (tmp_path / "nodes").iterdir()
    part.rename(tmp_path / "nodes" / "gone.json")
    (tmp_path / "mine.yaml").write_text("mine")
    deploy(node, tmp_path, has(ERDMA))
    assert [path.name for path in (tmp_path / "nodes").iterdir()] == ["@fake_node-a.json"]
    assert not (tmp_path / "rdma-shared-device-plugin.yaml").exists()
    assert (tmp_path / "erdma-device-plugin.yaml").exists()
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_hosts_with_the_same_folder_must_have_the_same_value(tmp_path: Path) -> None:
    inventory = tmp_path / "fleet.py"
    answers = {"fake_responses": has(CONNECTX), "fake_delay": 0, "fake_delay_jitter": 0}
    keys = [{"folder": str(tmp_path / "made")}, {"folder": str(tmp_path / "made"), "namespace": "rdma"}]
    made = [(f"@fake/{name}", {**answers, "device_plugins": key}) for name, key in zip("ab", keys, strict=True)]
    inventory.write_text(f"hosts = {made!r}\n")
    (tmp_path / "deploy.py").write_text("from tasks import manifests\nmanifests.render()\n")
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", str(inventory), str(tmp_path / "deploy.py")],
        cwd=archive.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "has another value for the same folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_key_there_is_nothing_to_do(node: Node) -> None:
    assert node.deploy(task.render, {}).planned == {}


def test_a_node_with_unknown_hardware_is_refused(node: Node, tmp_path: Path) -> None:
    result = deploy(node, tmp_path, {})
    assert result.failed
    assert "hardware is unknown" in "\n".join(result.log)


def test_plugin_and_label_must_have_the_same_resource(node: Node, tmp_path: Path) -> None:
    node.data = {"device_plugins": {"folder": str(tmp_path), "shared_rdma": {"resource_name": "hca"}}, "labels": {}}
    with pytest.raises(DeployError) as caught:
        node.deploy(task.render, has(CONNECTX))
    assert "the plugin's resource is rdma/hca, but labels.resources has rdma/hca_shared" in str(caught.value)
    node.data["labels"] = {"resources": {"rdma": "rdma/hca"}}
    assert not node.deploy(task.render, has(CONNECTX)).failed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the key 'folder' is missing"),
        ({"folder": ""}, "folder: it is empty"),
        ({"folder": "x", "namespace": "Kube"}, "namespace: 'Kube' is not valid"),
        (
            {"folder": "x", "shared_rdma": {"resource_name": "hca-b"}},
            "resource_name: 'hca-b' is not valid; give letters",
        ),
        ({"folder": "x", "shared_rdma": {"rdma_hca_max": 0}}, "rdma_hca_max: 0 is out of range"),
        (
            {"folder": "x", "shared_rdma": {"periodic_update_interval": -1}},
            "periodic_update_interval: -1 is out of range",
        ),
        ({"folder": "x", "shared_rdma": {"node_selector": {}}}, "without a label the plugin would run on every node"),
        ({"folder": "x", "sriov": {"vfs": "0-x"}}, "sriov: vfs:"),
        ({"folder": "x", "sriov": {"image": "a b"}}, "image: 'a b' is not valid"),
        ({"folder": "x", "erdma": {"resource": "erdma"}}, "resource: 'erdma' is not valid; give it as 'aliyun/erdma'"),
        ({"folder": "x", "networks": {"subnet": "10.0.0.0"}}, "subnet: '10.0.0.0' is not valid"),
        ({"folder": "x", "limits": {"memory": "lots"}}, "memory: 'lots' is not valid"),
        ({"folder": "x", "sriovs": {}}, "unknown key 'sriovs'; did you mean 'sriov'?"),
    ],
)
def test_bad_data_is_refused_before_a_node_is_touched(node: Node, given: dict[str, Any], message: str) -> None:
    node.data = {"device_plugins": given}
    with pytest.raises(DeployError) as caught:
        node.deploy(task.render, {})
    assert str(caught.value).startswith("@fake/node-a.device_plugins: ")
    assert message in str(caught.value)
