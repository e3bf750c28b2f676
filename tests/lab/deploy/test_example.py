"""The worked example on a real node: the groups of inventories/prod.py, with stand-ins for their hardware and vendors."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from group_data import erdma as erdma_gpu
from group_data import erdma_cpu
from lab import Node, repository
from lab.packages import erdma, nvidia, ofed, toolchain
from tasks.kubernetes.labels import LABELS, NFD
from tests.lab.conftest import Done, changed, condition, pyinfra, ready
from tests.lab.deploy.test_manifests import config, devices_of_nccl
from tests.lab.drivers.conftest import as_debian_makes_it
from tests.lab.drivers.test_ofed import FIRST, in_inventory
from tests.lab.drivers.test_peer_memory import install_modules

FEATURE = "feature.node.kubernetes.io"
VFS_WITH_RDMA = {f"{FEATURE}/network-{each}": "true" for each in ("rdma.capable", "sriov.capable", "sriov.configured")}
# The lab's node in a group of the example: what is given for the host overrides the group's data. Emulated VFs have RDMA
# devices, their PFs have none.
INVENTORY = """
from inventories.lab import virtual as _virtual

_name, _lab = _virtual[0]
_nics = [{**nic, "rdma": {"pf": False, "vfs": True, "link_layer": "Ethernet"}} for nic in _lab["nics"]]
_data = {**_lab, "nics": _nics, "kernel_modules": ["igbvf", "ib_uverbs", "ib_umad", "rdma_ucm"], "ready_timeout": 900}
"""


def deploy(folder: Path, groups: tuple[str, ...], **given: Any) -> Done:
    """Deploy the first node as a host of these groups; ``given``: data of the host."""
    inventory = folder / "fleet.py"
    given = {"kubelet": None, "device_plugins": {"folder": str(folder / "manifests")}, **given}
    hosts = "".join(f"{group} = [(_name, {{**_data, **{given!r}}})]\n" for group in groups)
    inventory.write_text(INVENTORY + hosts)
    # A compiler, a driver that DKMS builds, and a container engine: half an hour of an emulated CPU.
    return pyinfra("-y", "--json", "--group-data", "group_data", str(inventory), "deploy.py", timeout=3600)


def labels(node: Node) -> dict[str, str]:
    """The labels for the reporter and for NFD. The key `kubernetes` is not given, so the reporter publishes none."""
    features = [line for line in node.sh(f"cat {NFD}").splitlines() if not line.startswith("#")]
    of_reporter = json.loads(node.sh(f"cat {LABELS}"))["labels"]
    return {each["key"]: each["value"] for each in of_reporter} | dict(line.split("=", 1) for line in features)


def test_a_node_for_spark_and_horovod(node: Node, tmp_path: Path) -> None:
    group = ("bare_metal_sriov",)
    # In the example's cluster the GPU nodes publish the label of the shared plugin. Here no node does.
    plugins = {"folder": str(tmp_path / "manifests"), "shared_rdma": None}
    assert "Limits | Locked memory" in changed(deploy(tmp_path, group, device_plugins=plugins))
    assert changed(deploy(tmp_path, group, device_plugins=plugins)) == []
    assert ready(node)
    assert condition(node, "RdmaDevices")["status"] == "True"
    assert labels(node) == {**VFS_WITH_RDMA, "workload": "spark"}
    assert "LimitMEMLOCK=infinity" in node.sh("cat /etc/systemd/system/containerd.service.d/*trackbed*.conf")
    pools = json.loads(config((tmp_path / "manifests" / "sriov-device-plugin.yaml").read_text()))["resourceList"]
    assert [pool["resourceName"] for pool in pools] == ["vf_rdma"]
    assert (tmp_path / "manifests" / "kustomization.yaml").exists()


@pytest.mark.campaign
def test_a_gpu_node_with_roce_rails(node: Node, tmp_path: Path) -> None:
    drivers, toolkit = ofed.vendor(node.image, FIRST), nvidia.vendor(node.image)
    with (
        as_debian_makes_it(node, toolchain.mirror(node.image)),
        repository.serve(drivers.folder) as doca,
        repository.serve(toolkit.folder) as runtime,
    ):
        node.sh("rm -f /lib/modules/$(uname -r)/updates/rdma_rxe.ko; depmod")
        install_modules(node)
        # Debian's engine, which the vendor's repository has here, too; the deploy trusts that repository only with its key.
        node.sh(
            f"echo 'deb [trusted=yes] {runtime} ./' >> /etc/apt/sources.list; apt-get -qq update;"
            " DEBIAN_FRONTEND=noninteractive apt-get -qqy --no-install-recommends install containerd runc;"
            " sed -i '$d' /etc/apt/sources.list; apt-get -qq update",
            timeout=900,
        )
        given: dict[str, Any] = {
            "ofed": in_inventory(drivers, doca, FIRST),
            "container_runtime": {"engines": ["containerd"], "repository": toolkit.given(runtime)},
            "device_plugins": {
                "folder": str(tmp_path / "manifests"),
                "shared_rdma": {"resource_name": "hca", "rails": True},
            },
            # The node has no GPU, and four CPUs.
            "gpu_driver": None,
            "gpus": None,
            "irqs": {"exclude_cpus": "0"},
        }
        first = deploy(tmp_path, ("connectx_roce", "own_cluster"), **given)
        assert {"OFED | DOCA-OFED", "OFED | Loaded modules", "GPU peer memory | nvidia_peermem now"} <= set(
            changed(first)
        )
        assert changed(deploy(tmp_path, ("connectx_roce", "own_cluster"), **given)) == []
    assert ready(node)
    assert labels(node) == {"rdma": "hca", **VFS_WITH_RDMA, "gpu-use-type": "exclusive"}
    devices_of_nccl(node)
    assert "nvidia-container-runtime" in node.sh("containerd config dump")
    kinds = [
        each["kind"]
        for path in sorted((tmp_path / "manifests").glob("*device-plugin.yaml"))
        for each in yaml.safe_load_all(path.read_text())
        if each
    ]
    assert kinds.count("DaemonSet") == 2


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("group", "loaded", "policy"),
    [(erdma_gpu, "Y", {"gpu-use-type": "exclusive"}), (erdma_cpu, "N", {"workload": "spark"})],
    ids=["erdma", "erdma_cpu"],
)
def test_an_erdma_instance(node: Node, tmp_path: Path, group: ModuleType, loaded: str, policy: dict[str, str]) -> None:
    vendor = erdma.vendor(node.image)
    groups = (group.__name__.rpartition(".")[2], "managed_cluster")
    with (
        as_debian_makes_it(node, toolchain.mirror(node.image, "infiniband-diags")),
        repository.serve(vendor.folder) as url,
    ):
        given: dict[str, Any] = {
            # The vendor's installer does not support Debian. There is no eRDMA device, and no GPU.
            "erdma": {
                "source": "dkms",
                "dkms": {"repository": vendor.given(url), "version": "1.0"},
                "compat_mode": group.erdma["compat_mode"],
            },
            "gpus": None,
            "container_runtime": None,
            # Such an instance has neither VFs nor other RDMA devices. This node has both.
            "device_plugins": {"folder": str(tmp_path / "manifests"), "shared_rdma": None, "sriov": None},
        }
        assert "eRDMA | Driver loaded" in changed(deploy(tmp_path, groups, **given))
        assert changed(deploy(tmp_path, groups, **given)) == []
    assert ready(node)
    assert node.sh("cat /sys/module/erdma/parameters/compat_mode").strip() == loaded
    assert labels(node) == {f"{FEATURE}/network-rdma.capable": "true", **policy}
