"""Device plugins' manifests: their inputs, their content, and whether the API would accept them."""

import json
from typing import Any

import pytest
import yaml
from attrs import evolve

from agent.spec.node import from_mapping
from tasks.kubernetes import manifests as task
from tasks.kubernetes.manifests.device_plugins import (
    DAEMON_SETS,
    DevicePlugins,
    Dra,
    Erdma,
    ErdmaPlugin,
    Multus,
    NetworkPlugins,
    Networks,
    Nvidia,
    RdmaCni,
    SharedRdma,
    Sriov,
    SriovCni,
    Whereabouts,
)
from tasks.kubernetes.manifests.discovered import Discovered, discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.hardware import (
    ERDMA,
    GPUS,
    IB,
    INTEL,
    RAIL0,
    RAIL1,
    SELECTED,
    VF,
    VIRTIO,
    function,
    hardware,
    nic,
    rdma,
)
from tests.deploy.kubernetes.kubernetes_api import faults

ERI = "aliyun.accelerator/erdma"
TAINT = {"key": "readiness.k8s.io/trackbed", "operator": "Exists", "effect": "NoSchedule"}
SPEC = from_mapping({"node_name": "node-a", "nics": [{"name": "rail0", "select": {"pci": "0000:21:00.0"}}]})
WANTED = DevicePlugins("made", networks=Networks("10.56.217.0/24"))
SECOND_VF = {**VF, "address": "0000:21:00.7", "index": 5, "rdma": [rdma("mlx5_7")]}


def node_with(*functions: Any, nccl: str = "", **more: Any) -> Discovered:
    return discover(hardware(*functions, **more), SPEC, SELECTED, nccl)


FLEET = {
    "gpu-1": node_with({**RAIL0, "vfs": [VF, SECOND_VF]}, RAIL1, VIRTIO, others=GPUS, nccl="NCCL_IB_HCA=mlx5\n"),
    "gpu-2": node_with(RAIL0, others=GPUS, nccl="NCCL_IB_HCA=mlx5\n"),
    "erdma-1": node_with(ERDMA, VIRTIO, nccl="NCCL_IB_DISABLE=1\nNCCL_IB_HCA=\n"),
    "cpu-1": node_with(INTEL, VIRTIO),
    "ib-1": node_with(IB, VIRTIO),
}


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def every(rendered: dict[str, str]) -> list[dict[str, Any]]:
    return [each for name, text in rendered.items() if name != "kustomization.yaml" for each in documents(text)]


def config(rendered: dict[str, str], plugin: str) -> Any:
    (config_map,) = [
        each for each in documents(rendered[f"{plugin}-device-plugin.yaml"]) if each["kind"] == "ConfigMap"
    ]
    return json.loads(config_map["data"]["config.json"])


def daemon_sets(rendered: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in every(rendered) if each["kind"] == "DaemonSet"}


def test_shared_rdma_s_configuration() -> None:
    assert config(manifests(WANTED, FLEET), "rdma-shared") == {
        "periodicUpdateInterval": 300,
        "configList": [
            {
                **{"resourceName": "hca_shared_devices_b", "resourcePrefix": "rdma", "rdmaHcaMax": 63},
                "selectors": {"vendors": ["15b3"], "deviceIDs": ["101b"]},
            }
        ],
    }


def test_another_resource_name_and_limits() -> None:
    wanted = evolve(WANTED, shared_rdma=SharedRdma(resource_name="hca", rdma_hca_max=8, periodic_update_interval=0))
    settings = config(manifests(wanted, FLEET), "rdma-shared")
    assert (settings["periodicUpdateInterval"], settings["configList"][0]["rdmaHcaMax"]) == (0, 8)
    assert settings["configList"][0]["resourceName"] == "hca"


INTEL_VFS = {"vendors": ["8086"], "devices": ["10ca"]}
MLX5_VFS = {"vendors": ["15b3"], "devices": ["101c"], "drivers": ["mlx5_core"], "isRdma": True}


def test_sriov_s_configuration_has_a_resource_for_each_kind_of_vf() -> None:
    assert config(manifests(WANTED, FLEET), "sriov")["resourceList"] == [
        {"resourceName": "vf", "selectors": {**INTEL_VFS, "drivers": ["igbvf"], "pfNames": ["ens3f0#0"]}},
        {"resourceName": "vf_ib", "selectors": {**MLX5_VFS, "pfNames": ["ib0#0"]}},
        {"resourceName": "vf_rdma", "selectors": {**MLX5_VFS, "pfNames": ["ens1f0#0,5"]}},
        {"resourceName": "vf_vfio", "selectors": {**INTEL_VFS, "drivers": ["vfio-pci"], "pfNames": ["ens3f0#1"]}},
    ]


def test_only_the_given_vfs_are_allocated() -> None:
    pools = config(manifests(evolve(WANTED, sriov=Sriov(vfs="1-7")), FLEET), "sriov")["resourceList"]
    assert [pool["selectors"]["pfNames"] for pool in pools] == [["ens1f0#5"], ["ens3f0#1"]]


def erdma(plugin: ErdmaPlugin, **more: Any) -> dict[str, str]:
    return manifests(evolve(WANTED, erdma=Erdma(plugin=plugin, **more)), FLEET)


ACS = "registry.cn-shanghai.aliyuncs.com/acs"


@pytest.mark.parametrize(
    ("plugin", "image", "resources"),
    [
        (
            "ack", f"{ACS}/k8s-rdma-sriov-dev-plugin:v1.0.0-b3dcbc5-aliyun",
            {"requests": {"cpu": "300m", "memory": "300Mi"}, "limits": {"cpu": "300m", "memory": "300Mi"}},
        ),
        (
            "rdma-device-plugin", f"{ACS}/rdma-device-plugin",
            {"requests": {"cpu": "10m", "memory": "20Mi"}, "limits": {"cpu": "1", "memory": "200Mi"}},
        ),
    ],
)  # fmt: skip
def test_each_form_of_the_erdma_plugin_has_its_own_manifests(
    plugin: ErdmaPlugin, image: str, resources: dict[str, Any]
) -> None:
    rendered = erdma(plugin)
    config_map, daemon_set = documents(rendered["erdma-device-plugin.yaml"])
    assert config_map["metadata"] == {"name": "rdma-devices", "namespace": "kube-system"}
    more = {"deviceType": "eRDMA"} if plugin == "ack" else {}
    assert json.loads(config_map["data"]["config.json"]) == {"mode": "hca", **more}
    pod = daemon_set["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostNetwork"]
    assert pod["nodeSelector"] == {ERI: "true"}
    critical = {"key": "CriticalAddonsOnly", "operator": "Exists"}
    assert pod["tolerations"] == [TAINT, {"operator": "Exists", "effect": "NoSchedule"}, critical]
    assert container["image"] == image
    assert container["securityContext"] == {"privileged": True}
    assert container["resources"] == resources
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"device-plugins": "/var/lib/kubelet/device-plugins", "config": "/k8s-rdma-sriov-dev-plugin"}
    (config_volume,) = [volume["configMap"] for volume in pod["volumes"] if volume["name"] == "config"]
    assert config_volume == {"name": "rdma-devices", "items": [{"key": "config.json", "path": "config.json"}]}
    assert [limits(pod) for pod in documents(rendered["erdma-test-pods.yaml"])] == [{"rdma/hca": "1"}] * 2


def test_an_image_of_another_region_is_used() -> None:
    assert (
        'image: "registry.cn-beijing/x:1"' in erdma("ack", image="registry.cn-beijing/x:1")["erdma-device-plugin.yaml"]
    )


def test_the_erdma_controller_brings_its_own_manifests() -> None:
    rendered = erdma("controller")
    assert "erdma-device-plugin.yaml" not in rendered
    assert [limits(pod) for pod in documents(rendered["erdma-test-pods.yaml"])] == [{"aliyun/erdma": "1"}] * 2


def limits(pod: dict[str, Any]) -> Any:
    (container,) = pod["spec"]["containers"]
    return container["resources"]["limits"]


def test_no_two_config_maps_share_a_name() -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in every(manifests(WANTED, FLEET))]
    assert len(names) == len(set(names))
    assert ("ConfigMap", "rdma-shared-devices") in names
    assert ("ConfigMap", "rdma-devices") in names


def test_each_plugin_selects_nodes_by_its_label_and_tolerates_the_taint() -> None:
    pods = {name: each["spec"]["template"]["spec"] for name, each in daemon_sets(manifests(WANTED, FLEET)).items()}
    assert {name: spec["nodeSelector"] for name, spec in pods.items()} == {
        "rdma-shared-device-plugin": {"rdma": "hca"},
        "sriov-device-plugin": {"feature.node.kubernetes.io/network-sriov.configured": "true"},
        "erdma-device-plugin": {"aliyun.accelerator/erdma": "true"},
        "nvidia-device-plugin": {"nvidia.com/gpu.present": "true"},
    }
    assert all(TAINT in spec["tolerations"] for spec in pods.values())
    assert set(pods) == set(DAEMON_SETS.values())


@pytest.mark.parametrize("taint", ["nvidia.com/gpu", "dedicated"])
@pytest.mark.parametrize("name", sorted(DAEMON_SETS.values()))
def test_a_plugin_runs_on_nodes_that_the_operator_keeps_for_some_pods(name: str, taint: str) -> None:
    """Without it such a node would never have the resource, and its taint would never be lifted."""
    pod = daemon_sets(manifests(WANTED, FLEET))[name]["spec"]["template"]["spec"]
    assert any(
        each["operator"] == "Exists" and each.get("key", taint) == taint and each.get("effect") == "NoSchedule"
        for each in pod["tolerations"]
    )


def test_a_plugin_is_made_of_the_nodes_that_its_daemon_set_selects() -> None:
    card = function("0000:3b:00.0", "15b3:101d", "ens7", rdma("mlx5_0"))
    spark = evolve(node_with(nic("port0", card)), labels={"workload": "spark"})
    unwanted = evolve(node_with({**RAIL0, "nic": None}), labels={})
    only = manifests(WANTED, {"gpu-2": FLEET["gpu-2"]})
    mixed = manifests(WANTED, {"gpu-2": FLEET["gpu-2"], "spark-1": spark, "old-1": unwanted})
    assert config(mixed, "rdma-shared") == config(only, "rdma-shared")
    with pytest.raises(ValueError, match=r"shared_rdma: .* none of the hosts that need the plugin \(spark-1\); add"):
        manifests(WANTED, {"spark-1": spark, "old-1": unwanted})


def test_another_configuration_makes_new_pods() -> None:
    def digest(wanted: DevicePlugins) -> str:
        daemon_set = daemon_sets(manifests(wanted, FLEET))["rdma-shared-device-plugin"]
        return str(daemon_set["spec"]["template"]["metadata"]["annotations"]["trackbed.internal/config"])

    assert digest(WANTED) == digest(evolve(WANTED, namespace="rdma"))
    assert digest(WANTED) != digest(evolve(WANTED, shared_rdma=SharedRdma(rdma_hca_max=8)))


def pods(rendered: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The pods of each file with pods."""
    return {name: documents(text) for name, text in rendered.items() if name.endswith("-pods.yaml")}


def test_test_pods_lock_memory_ask_for_one_and_leave_the_node_to_the_scheduler() -> None:
    by_name = pods(manifests(WANTED, FLEET))
    assert {name: {str(limits(pod)) for pod in each} for name, each in by_name.items()} == {
        "rdma-test-pods.yaml": {"{'rdma/hca_shared_devices_b': '1'}"},
        "macvlan-test-pods.yaml": {"{'rdma/hca_shared_devices_b': '1'}"},
        "sriov-test-pods.yaml": {"{'sriov/vf_rdma': '1'}"},
        "sriov-ib-test-pods.yaml": {"{'sriov/vf_ib': '1'}"},
        "erdma-test-pods.yaml": {"{'rdma/hca': '1'}"},
    }
    for pod in (pod for each in by_name.values() for pod in each):
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert pod["spec"]["nodeSelector"]
        assert "nodeName" not in pod["spec"]


def test_a_test_pod_has_a_netdev_with_an_address_for_its_gid() -> None:
    made = manifests(WANTED, FLEET)
    networks = {each["metadata"]["name"]: each for each in documents(made["networks.yaml"])}
    used = {}
    for name, pairs in pods(made).items():
        for pod in pairs:
            (network,) = pod["metadata"].get("annotations", {None: None}).values()
            assert pod["spec"].get("hostNetwork", False) == (network is None)
            used[name] = network
    assert used == {
        "rdma-test-pods.yaml": None,
        "erdma-test-pods.yaml": None,
        "macvlan-test-pods.yaml": "default/macvlan-ens1f0",
        "sriov-test-pods.yaml": "default/sriov-vf-rdma",
        "sriov-ib-test-pods.yaml": "default/host-device-vf-ib",
    }
    assert {"macvlan-ens1f0", "sriov-vf-rdma", "host-device-vf-ib"} <= set(networks)
    # Multus gives the network the VF that the pod was given of this resource.
    resource = networks["sriov-vf-rdma"]["metadata"]["annotations"]["k8s.v1.cni.cncf.io/resourceName"]
    assert [limits(pod) for pod in pods(made)["sriov-test-pods.yaml"]] == [{resource: "1"}] * 2


def test_the_macvlans_of_test_pods_are_on_a_rail_that_most_nodes_have() -> None:
    renamed = nic("rail0", function("0000:21:00.0", "15b3:101b", "ens0", rdma("mlx5_0")))
    by_name = pods(manifests(WANTED, {"a": node_with(renamed), "b": node_with(RAIL1), "c": node_with(RAIL1)}))
    asked = [pod["metadata"]["annotations"] for pod in by_name["macvlan-test-pods.yaml"]]
    assert asked == [{"k8s.v1.cni.cncf.io/networks": "default/macvlan-ens2f0"}] * 2


@pytest.mark.parametrize(
    ("wanted", "rail"),
    [
        (evolve(WANTED, networks=None), RAIL1),
        (WANTED, nic("rail1", function("0000:41:00.0", "15b3:101b", "ib0", rdma("mlx5_1", transport="InfiniBand")))),
        (WANTED, {**RAIL1, "rdma": [], "vfs": [VF]}),
    ],
    ids=["no networks", "InfiniBand", "only VFs have RDMA devices"],
)
def test_no_test_pods_with_a_macvlan_that_has_no_gid(wanted: DevicePlugins, rail: Any) -> None:
    rendered = manifests(wanted, {"a": node_with(rail)})
    assert "rdma-test-pods.yaml" in rendered
    assert "macvlan-test-pods.yaml" not in rendered


def test_nccl_s_settings_are_one_config_map_for_each_content() -> None:
    config_maps = {each["metadata"]["name"]: each["data"] for each in documents(manifests(WANTED, FLEET)["nccl.yaml"])}
    assert config_maps == {
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
    rendered = manifests(WANTED, FLEET)
    (kustomization,) = documents(rendered["kustomization.yaml"])
    assert set(rendered) - set(kustomization["resources"]) == {"kustomization.yaml", *pods(rendered)}


def test_settings_reach_the_manifests() -> None:
    wanted = evolve(WANTED, nvidia=Nvidia(image="a.b/c:1", runtime_class="nvidia"), namespace="gpu")
    daemon_set = daemon_sets(manifests(wanted, FLEET))["nvidia-device-plugin"]
    assert daemon_set["metadata"]["namespace"] == "gpu"
    pod = daemon_set["spec"]["template"]["spec"]
    assert (pod["runtimeClassName"], pod["containers"][0]["image"]) == ("nvidia", "a.b/c:1")


def test_every_file_that_may_be_rendered_is_known() -> None:
    plugins = NetworkPlugins(Multus(), Whereabouts(), SriovCni(), RdmaCni())
    by_plugins = manifests(evolve(WANTED, network_plugins=plugins), FLEET)
    by_claims = manifests(evolve(WANTED, sriov=None, dra=Dra("dra.net")), FLEET)
    assert {*by_plugins, *by_claims} == task.OURS


@pytest.mark.parametrize("namespace", ["123", "null", "true", "1e3"])
def test_a_namespace_that_yaml_reads_as_something_else_stays_a_name(namespace: str) -> None:
    plugins = NetworkPlugins(Multus(), Whereabouts(), SriovCni(), RdmaCni())
    networks = Networks("10.56.217.0/24", namespace=namespace)
    wanted = evolve(WANTED, namespace=namespace, networks=networks, network_plugins=plugins)
    namespaces = [each.get("metadata", {}).get("namespace", "") for each in every(manifests(wanted, FLEET))]
    assert {each for each in namespaces if not isinstance(each, str)} == set()
    assert namespace in namespaces


def test_every_object_of_a_core_kind_is_valid_in_the_api_s_schema() -> None:
    objects = [each for each in every(manifests(WANTED, FLEET)) if each["kind"] != "NetworkAttachmentDefinition"]
    assert len(objects) == 4 + 4 + 1 + 10 + 1
    assert {each["metadata"]["name"]: faults(each) for each in objects if faults(each)} == {}


def test_the_api_s_schema_would_say_what_is_wrong() -> None:
    (pod, *_) = documents(manifests(WANTED, FLEET)["rdma-test-pods.yaml"])
    pod["spec"]["nodeSelecter"] = pod["spec"].pop("nodeSelector")
    pod["spec"]["containers"][0]["command"] = "sleep infinity"
    assert {each.partition(":")[0] for each in faults(pod)} == {"$.spec", "$.spec.containers[0].command"}
