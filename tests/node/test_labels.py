"""Labels and NCCL's settings: what their files say, against lspci, ip, rdma and sysfs."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.labels

LABELS = "/etc/trackbed/labels.json"
NFD = "/etc/kubernetes/node-feature-discovery/features.d/trackbed"
KUBELET = "/etc/trackbed/kubelet-registration.env"
NCCL = "/etc/nccl.conf"
FEATURE = "feature.node.kubernetes.io"

# node-feature-discovery reads no larger file.
NFD_LIMIT = 65536


def text(node: Node, path: str) -> str:
    return node.run('if [ -e "$1" ]; then cat "$1"; fi', path)


def written(node: Node) -> dict[str, dict[str, str]]:
    """The labels of each writer's file that is there."""
    labels: dict[str, dict[str, str]] = {}
    if content := text(node, LABELS):
        labels[LABELS] = {label["key"]: label["value"] for label in json.loads(content)["labels"]}
    if content := text(node, NFD):
        labels[NFD] = dict(line.split("=", 1) for line in content.splitlines() if not line.startswith("#"))
    if given := re.search(r"--node-labels=(\S+?)[\s\"]", text(node, KUBELET)):
        labels[KUBELET] = dict(label.split("=", 1) for label in given[1].split(","))
    return labels


def rdma_links(node: Node) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = json.loads(node.run("rdma -j link"))
    return links


def of_pci_functions(node: Node) -> list[str]:
    """The PCI functions below which sysfs has an RDMA device."""
    return re.findall(r"(\S+)/infiniband", node.run("cd /sys/bus/pci/devices; ls -d */infiniband 2>/dev/null || true"))


def lspci(node: Node, ids: str) -> list[str]:
    return node.run('lspci -Dn -d "$1"', ids).splitlines()


def has_shared_hca(node: Node) -> object:
    there = node.run("ls /dev/infiniband 2>/dev/null || true").split()
    kinds = {re.sub(r"\d+$", "", name) for name in there}
    return rdma_links(node) and {"uverbs", "umad", "rdma_cm"} <= kinds


def has_rdma(node: Node) -> object:
    return rdma_links(node) and of_pci_functions(node)


def offers_vfs(node: Node) -> object:
    return re.findall(r"Total VFs: [1-9]", node.run("lspci -vv"))


def has_vfs(node: Node) -> object:
    return re.findall(r"Number of VFs: [1-9]", node.run("lspci -vv"))


def loaded(node: Node) -> object:
    return {"ib_uverbs", "rdma_ucm"} <= {line.split()[0] for line in node.run("lsmod").splitlines()}


def has_gpu(node: Node) -> object:
    return re.findall(r"Kernel driver in use: nvidia$", node.run("lspci -k -d 10de:"), re.MULTILINE)


mellanox = partial(lspci, ids="15b3:")

CAPABILITIES: dict[str, Callable[[Node], object]] = {
    "rdma": has_shared_hca,
    "aliyun.accelerator/erdma": partial(lspci, ids="1ded:107f"),
    f"{FEATURE}/network-rdma.capable": has_rdma,
    f"{FEATURE}/network-sriov.capable": offers_vfs,
    f"{FEATURE}/network-sriov.configured": has_vfs,
    f"{FEATURE}/custom-rdma.capable": mellanox,
    f"{FEATURE}/custom-rdma.available": loaded,
    f"{FEATURE}/pci-15b3.present": mellanox,
    "network.nvidia.com/operator.mofed.wait": mellanox,
    "nvidia.com/gpu.present": has_gpu,
}
"""What the node must have for each label that is given by rule, by a tool that is not ours."""


def test_the_node_has_what_its_labels_say(node: Node) -> None:
    keys = sorted({key for labels in written(node).values() for key in labels} & CAPABILITIES.keys())
    findings = [Finding(key, "label", "what it stands for", "nothing", bool(CAPABILITIES[key](node))) for key in keys]
    judge(node, findings, "no label that is given by rule")


def test_each_label_has_one_writer(node: Node) -> None:
    files = written(node)
    keys = sorted({key for labels in files.values() for key in labels})
    writers = {key: [path for path, labels in files.items() if key in labels] for key in keys}
    judge(node, [equal(key, "files that give it", writers[key][:1], writers[key]) for key in keys], "no label")


def test_nfd_reads_its_file(node: Node) -> None:
    """A regular file, not hidden, not too large, with an empty or assigning line only."""
    size = node.run('if [ -e "$1" ]; then stat -c "%F|%s" "$1"; fi', NFD).strip()
    findings = []
    if size:
        kind, _, length = size.partition("|")
        findings = [
            equal(NFD, "kind (stat)", "regular file", kind),
            Finding(NFD, "bytes (stat)", f"at most {NFD_LIMIT}", length, int(length) <= NFD_LIMIT),
            equal(NFD, "directives", [], re.findall(r"^# \+.*", text(node, NFD), re.MULTILINE)),
        ]
    judge(node, findings, "no labels by nfd")


def nccl(node: Node) -> dict[str, str]:
    """As NCCL reads its file: each line is split at its first '='."""
    lines = [line.partition("=") for line in text(node, NCCL).splitlines() if "=" in line and line[0] != "#"]
    return {name: value for name, _, value in lines}


def test_nccl_s_interface_is_there(node: Node) -> None:
    # '=' makes NCCL take the name exactly, and not each that begins with it.
    name = nccl(node).get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    findings = [Finding(NCCL, f"interface {name} (ip link)", "there", "not there", name in node.links)] if name else []
    judge(node, findings, "no file for nccl")


def test_nccl_s_rdma_devices_are_there(node: Node) -> None:
    given = nccl(node)

    def findings() -> Iterator[Finding]:
        if given.get("NCCL_IB_DISABLE") == "1":
            yield equal(NCCL, "NCCL_IB_HCA", "", given.get("NCCL_IB_HCA"))
            return
        have = [link["ifname"] for link in rdma_links(node)]
        wanted = given["NCCL_IB_HCA"]
        for entry in wanted.lstrip("=^").split(","):
            name = entry.partition(":")[0]
            fits = [device for device in have if device == name or (wanted[0] != "=" and device.startswith(name))]
            yield Finding(NCCL, f"RDMA device {name} (rdma link)", "there", have, bool(fits))

    judge(node, findings() if given else [], "no file for nccl")


def test_nccl_s_gid_is_of_roce_v2(node: Node) -> None:
    given = nccl(node)
    index, names = given.get("NCCL_IB_GID_INDEX"), given.get("NCCL_IB_HCA", "")

    def findings() -> Iterator[Finding]:
        for entry in names.lstrip("=").split(","):
            path = f"/sys/class/infiniband/{entry.partition(':')[0]}/ports/1/gid_attrs/types/{index}"
            yield equal(path, "type of GID", "RoCE v2", node.run('cat "$1" 2>&1 || true', path).strip())

    judge(node, findings() if index and names.startswith("=") else [], "no index of a gid")
