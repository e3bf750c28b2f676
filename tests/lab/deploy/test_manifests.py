"""Device plugins' manifests against the plugin's own parser, and rendered from what real nodes have."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve

from agent.spec.node import from_mapping
from lab import Node
from lab.go import go_programs
from lab.go.go_programs import Build
from tasks.kubernetes.manifests.device_plugins import DevicePlugins, SharedRdma
from tasks.kubernetes.manifests.discovered import discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.hardware import RAIL0, SECOND, SELECTED, hardware
from tests.lab.conftest import ROOT, Done, deploy, inventory_data, pyinfra, succeeded
from tests.programs import failure, success

SPEC = from_mapping({"node_name": "a", "nics": [{"name": "rail0", "select": {"pci": "0000:21:00.0"}}]})
PARSER = Build("plugin-config", (".",), ROOT / "lab" / "go" / "plugin-config", usual_s=40)


def config(text: str) -> str:
    """The configuration in a plugin's manifest."""
    (config_map,) = [each for each in yaml.safe_load_all(text) if each and each["kind"] == "ConfigMap"]
    return str(config_map["data"]["config.json"])


def devices_of_nccl(node: Node) -> set[str]:
    """The RDMA devices of NCCL's file, which are all that the node has."""
    devices = set(node.sh("ls /sys/class/infiniband").split())
    (hcas,) = [line for line in node.sh("cat /etc/nccl.conf").splitlines() if line.startswith("NCCL_IB_HCA==")]
    assert set(hcas.removeprefix("NCCL_IB_HCA==").split(",")) == devices
    return devices


def parse(text: str, folder: Path) -> Done:
    """Let k8s-rdma-shared-dev-plugin's own code read it."""
    path = folder / "config.json"
    path.write_text(text)
    program = go_programs.ensure(PARSER) / "plugin-config"
    return subprocess.run([program, path], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("plugin", "strangers"),
    [
        (SharedRdma(), []),
        (SharedRdma("a/b:1", "x.example", "hca", 1, 0), []),
        # Narrowed by netdev, and a resource for each rail.
        (SharedRdma(rails=True), [SECOND]),
    ],
)
def test_the_plugins_own_parser_accepts_the_configuration(
    tmp_path: Path, plugin: SharedRdma, strangers: list[dict[str, Any]]
) -> None:
    made = manifests(
        evolve(DevicePlugins("made"), shared_rdma=plugin), {"a": discover(hardware(RAIL0, *strangers), SPEC, SELECTED)}
    )
    success(parse(config(made["rdma-shared-device-plugin.yaml"]), tmp_path))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"resourceName": "hca-b"}, "contains invalid characters"),
        ({"selectors": {}}, 'neither "selectors" nor "devices"'),
        ({"selectors": {"deviceIds": ["101b"], "devices": ["a"]}}, 'unknown field "devices"'),
    ],
)
def test_the_plugins_own_parser_refuses_a_wrong_configuration(
    tmp_path: Path, change: dict[str, Any], error: str
) -> None:
    document = {"configList": [{"resourceName": "hca", "selectors": {"vendors": ["15b3"]}, **change}]}
    assert error in failure(parse(json.dumps(document), tmp_path))


@pytest.mark.campaign
def test_labels_nccl_and_manifests_are_of_what_the_nodes_have(nodes: tuple[Node, ...], tmp_path: Path) -> None:
    node = nodes[0]
    node.sh("modprobe -a ib_umad rdma_ucm")
    data = {
        "labels": {"capabilities": ["rdma", "feature.node.kubernetes.io/network-sriov.configured"]},
        "nccl": {"network_type": 1},
        "device_plugins": {"folder": str(tmp_path), "networks": {"subnet": "10.56.217.0/24"}},
    }
    for _ in range(2):
        done = succeeded(pyinfra("-y", "--json", "inventories/lab.py", "deploy.py", *inventory_data(data)))
    results = json.loads(done.stdout)["results"]
    assert results["totals"]["success"] == 0, [each["name"] for each in results["operations"] if each["success"]]

    labels = {each["key"]: each for each in json.loads(node.sh("cat /etc/trackbed/labels.json"))["labels"]}
    assert labels["rdma"]["resource"] == "rdma/hca_shared_devices_b"
    assert len(devices_of_nccl(node)) == 11

    shared = json.loads(config((tmp_path / "rdma-shared-device-plugin.yaml").read_text()))
    assert shared["configList"][0]["selectors"] == {"vendors": ["8086"], "deviceIDs": ["10ca"]}
    pools = json.loads(config((tmp_path / "sriov-device-plugin.yaml").read_text()))["resourceList"]
    assert [(pool["resourceName"], pool["selectors"]["pfNames"]) for pool in pools] == [
        ("vf_rdma", ["ens1f0#0-6", "ens2f0#0-3"])
    ]
    assert (tmp_path / "nccl.yaml").read_text().count("kind: ConfigMap") == 1
    assert sorted(path.name for path in (tmp_path / "nodes").iterdir()) == ["node1.json", "node2.json"]


@pytest.mark.campaign
def test_a_kubelet_that_has_not_joined_gets_its_first_labels_and_the_taint(node: Node) -> None:
    unit = "EnvironmentFile=-/etc/default/kubelet\\nExecStart=/bin/echo kubelet $KUBELET_EXTRA_ARGS\\nType=oneshot\\n"
    node.sh(f"printf '[Service]\\n{unit}' > /etc/systemd/system/kubelet.service")
    node.sh("printf 'KUBELET_EXTRA_ARGS=\"--v=4\"\\n' > /etc/default/kubelet; systemctl daemon-reload")
    given = {"policy": {"gpu-use-type": "exclusive"}, "writers": {"gpu-use-type": "kubelet"}, "register_tainted": True}
    succeeded(deploy(labels=given))
    # By systemd's own reading of the files: the operator's argument stays, ours come after it.
    node.sh("systemctl start kubelet")
    journal = node.sh("journalctl -u kubelet -o cat --no-pager")
    wanted = "--node-labels=gpu-use-type=exclusive --register-with-taints=readiness.k8s.io/trackbed:NoSchedule"
    assert f"kubelet --v=4 {wanted}" in journal
