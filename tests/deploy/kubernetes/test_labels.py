import json
import re
from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError

from tasks.common.archive import ROOT
from tasks.common.texts import HEADER
from tasks.kubernetes import labels
from tasks.kubernetes.kubelet_arguments import ENVIRONMENT, NodeKubelet
from tasks.kubernetes.label_keys import fault
from tasks.kubernetes.labels import DROP_IN, DROP_IN_TEXT, LABELS, NFD
from tests.deploy.conftest import Answers, Node, Result, files, of
from tests.deploy.hardware import CONNECTX, ERDMA, GPUS, RAIL1, UMAD, UVERBS, VIRTIO, function, has, nic, nics, rdma

KUBELET = of(NodeKubelet)
CAPABLE = "feature.node.kubernetes.io/network-rdma.capable"
SRIOV = "feature.node.kubernetes.io/network-sriov.capable"
HCA = {"key": "rdma", "value": "hca", "role": "plugin", "resource": "rdma/hca_shared_devices_b"}
ERI = {"key": "aliyun.accelerator/erdma", "value": "true", "role": "plugin", "resource": "rdma/hca"}
RDMA = {"key": CAPABLE, "value": "true", "role": "fact", "resource": None}
PUBLISHES = {"server": "https://api.example.net:6443", "ca_file": "ca.pem"}
ARGUMENTS = "/etc/trackbed/.kubelet-registration.env.new"
FEATURES = "/etc/kubernetes/node-feature-discovery/features.d/.trackbed.new"
EXCLUSIVE = {"key": "gpu-use-type", "value": "exclusive", "role": "fact", "resource": None}


def deploy(node: Node, given: dict[str, Any] | None, answers: Answers, **data: Any) -> Result:
    labelled = {"labels": {"register_tainted": False, **(given or {})}, "kubernetes": PUBLISHES}
    node.data = data if given is None else {**labelled, **data}
    return node.deploy(labels.publish, answers)


def published(result: Result) -> Any:
    return json.loads(result.uploads["/etc/trackbed/.labels.json.new"])["labels"]


def test_capabilities_are_those_that_the_node_has(node: Node) -> None:
    result = deploy(node, {"policy": {"gpu-use-type": "exclusive"}}, has(CONNECTX, VIRTIO))
    assert published(result) == [RDMA, EXCLUSIVE, HCA]
    assert result.flat[-1].endswith(f"sh put {LABELS} --")


def test_where_no_reporter_publishes_nfd_gets_what_it_may_publish_and_the_rest_is_named(node: Node) -> None:
    node.data = {"labels": {"policy": {"gpu-use-type": "exclusive", "example.net/team": "ml"}}}
    result = node.deploy(labels.publish, has(CONNECTX))
    assert published(result) == [EXCLUSIVE, HCA]
    assert result.uploads[FEATURES].decode() == f"{HEADER}example.net/team=ml\n{CAPABLE}=true\n"
    (said,) = [line for line in result.log if "nobody publishes" in line]
    assert "nobody publishes gpu-use-type, rdma: " in said
    published_too = deploy(node, {}, has(CONNECTX))
    assert not any("features.d" in path for path in published_too.uploads)
    assert not any("nobody publishes" in line for line in published_too.log)


UPLINK = nic("uplink", VIRTIO)
WITHOUT_UMAD = [rdma("mlx5_0", chars=chars) for chars in ((UVERBS,), (UVERBS, {**UMAD, "present": False}))]
ALL = {"capabilities": list(labels.CAPABILITIES)}
CASES: dict[str, tuple[dict[str, Any], Answers, list[Any], list[Any]]] = {
    "a card of no NIC of the spec": ({}, has(CONNECTX, UPLINK), nics(UPLINK), [RDMA]),
    "a node that lacks the NIC of its spec": ({}, has(CONNECTX), nics(RAIL1), [RDMA]),
    "no RDMA device": ({}, has(VIRTIO), [], []),
    "eRDMA": ({}, has(ERDMA, VIRTIO), [], [ERI, RDMA]),
    "no umad": ({}, has(function("0000:21:00.0", "15b3:101b", "ens1f0", WITHOUT_UMAD[0])), [], [RDMA]),
    "umad is absent": ({}, has(function("0000:21:00.0", "15b3:101b", "ens1f0", WITHOUT_UMAD[1])), [], [RDMA]),
    "no rdma_cm": ({}, has(CONNECTX, rdma_cm=False), [], [RDMA]),
    "no capability": (ALL, has(VIRTIO, others=("gpu 0000:50:00.0",)), [], []),
    "another resource of the plugin": (
        {"capabilities": ["rdma"], "resources": {"rdma": "rdma/hca"}}, has(CONNECTX), [], [{**HCA, "resource": "rdma/hca"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "answers", "of_spec", "expected"), CASES.values(), ids=CASES)
def test_each_label_is_published_where_the_hardware_has_what_it_says(
    node: Node, given: dict[str, Any], answers: Answers, of_spec: list[Any], expected: list[Any]
) -> None:
    assert published(deploy(node, given, answers, nics=of_spec)) == expected


def test_each_capability_is_published_by_its_rule(node: Node) -> None:
    written = {each["key"]: each["value"] for each in published(deploy(node, ALL, has(CONNECTX, ERDMA, others=GPUS)))}
    assert list(written) == sorted(labels.CAPABILITIES)
    assert written["network.nvidia.com/operator.mofed.wait"] == "false"


def test_each_label_has_one_writer(node: Node) -> None:
    given = {
        "capabilities": ["rdma", SRIOV],
        "policy": {"gpu-use-type": "exclusive", "example.net/rack": "b7"},
        "writers": {SRIOV: "nfd", "gpu-use-type": "kubelet"},
        "register_tainted": True,
    }
    extra = {KUBELET: ['arguments "--v=4 --node-ip=10.0.0.1"', "passes"]}
    result = deploy(node, given, {**has(CONNECTX), **extra})
    assert [each["key"] for each in published(result)] == ["example.net/rack", "rdma"]
    assert result.uploads[FEATURES].decode() == f"{HEADER}{SRIOV}=true\n"
    assert result.uploads[ARGUMENTS].decode() == (
        f'{HEADER}KUBELET_EXTRA_ARGS="--v=4 --node-ip=10.0.0.1 --node-labels=gpu-use-type=exclusive '
        '--register-with-taints=readiness.k8s.io/trackbed:NoSchedule"\n'
    )
    folder, _, name = DROP_IN.rpartition("/")
    assert result.uploads[f"{folder}/.{name}.new"].decode() == DROP_IN_TEXT
    assert result.flat[-1].endswith(f"put {NFD} put {ENVIRONMENT} put {DROP_IN} --")
    assert "systemctl daemon-reload" in result.flat[-1]
    assert not any("restart" in command for command in result.flat)


def test_nothing_changes_if_all_files_are_up_to_date(node: Node) -> None:
    given = {"capabilities": ["rdma", SRIOV], "writers": {SRIOV: "nfd"}}
    document = json.dumps({"labels": [HCA]}, indent=2)
    there = files(**{LABELS: document, NFD: f"{HEADER}{SRIOV}=true"})
    assert deploy(node, given, {**has(CONNECTX), **there}).did_nothing


def test_without_the_key_there_are_no_files(node: Node) -> None:
    assert deploy(node, None, {}).flat == []
    result = deploy(node, None, files(**{LABELS: "{}", ENVIRONMENT: "x", DROP_IN: "y"}))
    (command,) = result.flat
    assert command.endswith(f"sh remove {LABELS} remove {ENVIRONMENT} remove {DROP_IN} --")
    assert "systemctl daemon-reload" in command
    (command,) = deploy(node, None, files(**{LABELS: "{}"})).flat
    assert "daemon-reload" not in command


def test_unknown_hardware_is_refused_only_in_the_execute_phase(node: Node) -> None:
    result = deploy(node, {}, {})
    assert (list(result.planned.values()), result.failed, result.uploads) == ([True], True, {})
    assert "hardware is unknown" in "\n".join(result.log)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["drops"], "the kubelet's unit does not use KUBELET_EXTRA_ARGS"),
        (["arguments --register-with-taints=a=b:NoSchedule", "passes"], "add readiness.k8s.io/trackbed:NoSchedule"),
    ],
)
def test_a_kubelet_that_takes_no_arguments_is_refused_with_nothing_written(
    node: Node, answer: list[str], message: str
) -> None:
    result = deploy(node, {"register_tainted": True}, {**has(CONNECTX), KUBELET: answer})
    assert result.failed
    assert message in "\n".join(result.log)
    assert result.uploads == {}


def test_more_labels_than_nfd_reads_are_refused(node: Node) -> None:
    many = {f"x.net/{n}": "y" * 60 for n in range(1000)}
    with pytest.raises(DeployError, match="NFD reads at most 65536"):
        node.deploy(labels.publish, has(CONNECTX), labels={"policy": many, "writers": dict.fromkeys(many, "nfd")})


@pytest.mark.parametrize(
    "key", ["node-role.kubernetes.io/gpu", "kubernetes.io/x", "a.k8s.io/x", "a.feature.node.kubernetes.io/x"]
)
def test_a_label_that_the_cluster_s_policies_refuse_is_refused(node: Node, key: str) -> None:
    """With such a label in it, the API server refuses the whole patch of a ready Node."""
    assert policy_refuses(key)
    given = {"policy": {key: "", "example.net/rack": "b7"}}
    with pytest.raises(DeployError, match=rf"labels: {key}: of kubernetes\.io and k8s\.io a reporter may set only"):
        deploy(node, given, has(CONNECTX))
    node.data = {"labels": given}
    assert not node.deploy(labels.publish, has(CONNECTX)).failed


def test_a_label_that_the_cluster_s_policies_admit_is_published(node: Node) -> None:
    keys = ["feature.node.kubernetes.io/x", "nvidia.com/gpu.present", "mykubernetes.io/x", "rack"]
    assert not any(map(policy_refuses, keys))
    result = deploy(node, {"policy": dict.fromkeys(keys, "y")}, {**has(CONNECTX), KUBELET: ["passes"]})
    assert {*keys} <= {each["key"] for each in published(result)}


def policy_refuses(key: str) -> bool:
    """Whether fleet/cluster/nodes-policy.yaml refuses a reporter's change of this label: its pattern, and its exception."""
    text = (ROOT / "fleet/cluster/nodes-policy.yaml").read_text()
    (pattern,), (exception,) = (
        re.findall(each, text) for each in (r"!k\.matches\('(.*)'\)", r"k\.startsWith\('(.*)'\)")
    )
    return re.search(pattern, key) is not None and not key.startswith(exception)


@pytest.mark.parametrize("given", [None, {}, {"capabilities": []}])
def test_where_a_reporter_publishes_a_node_registers_with_the_taint(node: Node, given: dict[str, Any] | None) -> None:
    node.data = {"kubernetes": PUBLISHES, **({} if given is None else {"labels": given})}
    result = node.deploy(labels.publish, has(CONNECTX))
    assert f"--register-with-taints={labels.TAINT}" in result.uploads[ARGUMENTS].decode()
    assert (f"/etc/trackbed/.{LABELS.rpartition('/')[2]}.new" in result.uploads) is (given is not None)


@pytest.mark.parametrize(
    "data",
    [
        {"kubernetes": PUBLISHES, "labels": {"register_tainted": False}},
        {"labels": {}},
        {"kubernetes": PUBLISHES, "kubelet": {"policy": "hold", "distribution": "k3s"}},
        {"kubernetes": PUBLISHES, "kubelet": {"policy": "hold", "unit": "own-kubelet.service"}},
        {"labels": {}, "kubelet": {"policy": "hold", "distribution": "rke2"}},
    ],
    ids=["told not to", "nobody to lift it", "it is unknown", "another unit", "unknown, and nobody to lift it"],
)
def test_where_no_reporter_publishes_a_node_registers_without_the_taint(node: Node, data: dict[str, Any]) -> None:
    result = node.deploy(labels.publish, has(CONNECTX), **data)
    assert not result.failed
    assert ARGUMENTS not in result.uploads


def test_a_kubelet_that_has_the_taint_from_its_operator_is_left_alone(node: Node) -> None:
    arguments = f"arguments --register-with-taints=example.net/new=x:NoSchedule,{labels.TAINT}"
    result = node.deploy(labels.publish, {KUBELET: [arguments, "passes"]}, kubernetes=PUBLISHES)
    assert not result.failed
    assert result.flat == []


@pytest.mark.parametrize(
    ("arguments", "taints", "named"),
    [
        ("", "gpu=yes:NoSchedule", True),
        ("", "registerWithTaints", True),
        ("", labels.TAINT, False),
        (f"--register-with-taints=gpu=yes:NoSchedule,{labels.TAINT}", "gpu=yes:NoSchedule", False),
    ],
)
def test_taints_that_a_new_node_would_lack_are_named(node: Node, arguments: str, taints: str, named: bool) -> None:
    node.data = {"kubernetes": PUBLISHES}
    result = node.deploy(labels.publish, {KUBELET: [f"arguments {arguments}", f"taints {taints}", "passes"]})
    assert not result.failed
    assert any(f"it lacks its taints {taints}: " in line for line in result.log) is named


@pytest.mark.parametrize(
    ("key", "kubelet", "nfd"),
    [
        ("gpu-use-type", True, False),
        ("nvidia.com/gpu.present", True, True),
        ("aliyun.accelerator/erdma", True, True),
        ("feature.node.kubernetes.io/x", True, True),
        ("a.feature.node.kubernetes.io/x", True, True),
        ("profile.node.kubernetes.io/x", True, True),
        ("node.kubernetes.io/x", True, False),
        ("x.kubelet.kubernetes.io/x", True, False),
        ("node-role.kubernetes.io/worker", False, False),
        ("kubernetes.io/role", False, False),
        ("x.k8s.io/y", False, True),
        ("example.net/rack", True, True),
    ],
)
def test_the_kubelet_and_nfd_may_write_only_some_keys(key: str, kubelet: bool, nfd: bool) -> None:
    assert (fault(key, "v", "kubelet") is None) is kubelet
    assert (fault(key, "v", "nfd") is None) is nfd
    assert fault(key, "v", "reporter") is None
