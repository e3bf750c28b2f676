"""Pods with a VF of their own, as rendered: sriov-network-device-plugin, Multus, sriov-cni or host-device, and rdma-cni.

It takes two nodes of the lab whose kernel has an rxe that works in pods (TRACKBED_LAB_DEBIAN=13-backports), and plugins that
the Go module proxy may not serve.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Node
from lab.cluster import network_plugins
from lab.cluster.control_plane import ControlPlane
from tests.cluster import rendered
from tests.cluster.conftest import LONG, Cluster, restore
from tests.deploy.examples.perftest_commands import commands
from tests.lab.conftest import settled

pytestmark = pytest.mark.campaign

RESOURCE, PODS, HOST_DEVICE = "sriov/vf_rdma", "sriov-test", "host-device-test"
# The data of the lab's cluster, with each RDMA device in one network namespace only. The second NIC has no VFs: so each
# node has one VF for pods, and the two are on one network.
INVENTORY = """
from pathlib import Path as _Path

from inventories.lab_cluster import lab as _nodes
from lab.cluster import manifests as _manifests
from lab.cluster import network_plugins as _network_plugins


def _data(data):
    first, second = data["nics"]
    return {
        **data,
        "nics": [first, {**second, "vfs": {"count": 0}, "rdma": None}],
        "rdma": {"netns_mode": "exclusive"},
        "device_plugins": _manifests.wanted(_Path($folder), _network_plugins.built(), vfs="0"),
        "kubernetes": {**data["kubernetes"], "required_resources": ["sriov/vf_rdma"]},
        "ready_timeout": 900,
    }


lab = [(name, _data(data)) for name, data in _nodes]
"""


def prepare(plane: ControlPlane, node: Node) -> None:
    """A node that has not joined, booted with RDMA devices in one network namespace each, as docs/inventory/host.md says."""
    restore(plane, node)
    node.sh("echo options ib_core netns_mode=0 > /etc/modprobe.d/test.conf; sync")
    node.power_cut()
    node.boot()
    # Once settled, the spec before this one is fulfilled, with more VFs. The plugin needs numbers of character devices without
    # gaps (docs/rdma-in-pods.md), so all VFs go before the deploy makes those that are wanted now.
    settled(node)
    node.sh("systemctl stop trackbed")
    for nic in node.machine.nics:
        node.sh(f"echo 0 > /sys/bus/pci/devices/{nic.pci}/sriov_numvfs", timeout=LONG)


@pytest.fixture(scope="module")
def deployed(fresh_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """The cluster, with one VF for pods on each node, and the folder of the rendered manifests."""
    rendered.needs_roce_in_pods(fresh_cluster)
    if missing := set(network_plugins.BUILDS) - set(network_plugins.built()):
        pytest.skip(f"the Go module proxy does not serve {' and '.join(sorted(missing))}")
    if not network_plugins.has_sriov_device_plugin():
        pytest.skip("the Go module proxy does not serve sriov-network-device-plugin")
    with rendered.deployed(fresh_cluster, tmp_path_factory.mktemp("vf-pods"), INVENTORY, prepare) as folder:
        rendered.have(fresh_cluster, RESOURCE, 1)
        yield fresh_cluster, folder


@pytest.fixture(scope="module", params=[PODS, HOST_DEVICE])
def pods(
    deployed: tuple[Cluster, Path], request: pytest.FixtureRequest
) -> Iterator[tuple[Cluster, str, list[rendered.OwnNetdev]]]:
    """The two pods with a VF each: by sriov-cni as rendered, and by the network of host-device."""
    cluster, folder = deployed
    if request.param == HOST_DEVICE:
        text = (folder / f"{PODS}-pods.yaml").read_text()
        assert text.count("/sriov-vf-rdma") == 2
        text = text.replace(PODS, HOST_DEVICE).replace("/sriov-vf-rdma", "/host-device-vf-rdma")
        (folder / f"{HOST_DEVICE}-pods.yaml").write_text(text)
    with rendered.running(cluster.plane, folder, request.param):
        yield cluster, request.param, rendered.own_netdevs(cluster.plane, request.param)


def test_a_pod_has_its_vf_with_its_rdma_device_alone(pods: tuple[Cluster, str, list[rendered.OwnNetdev]]) -> None:
    cluster, names, netdevs = pods
    for role, own in zip(("server", "client"), netdevs, strict=True):
        node = rendered.node_of(cluster, f"{names}-{role}")
        vf = node.machine.nics[0].vf_pcis[0]
        uevent = cluster.plane.kubectl("exec", f"{names}-{role}", "--", "cat", "/sys/class/net/net1/device/uevent")
        assert f"PCI_SLOT_NAME={vf}" in uevent
        assert own.device not in node.sh("rdma link")
        assert f"{node.machine.nics[0].netdev}v0:" not in node.sh("ip -oneline link")
        # The agent sees that it is in use, and the node stays ready.
        assert node.run(["trackbed", "status"]).returncode == 0


@pytest.mark.parametrize("pair", commands("rdma-test"), ids=lambda pair: pair[1])
def test_data_between_two_pods_with_vfs(
    pods: tuple[Cluster, str, list[rendered.OwnNetdev]], pair: tuple[str, str]
) -> None:
    cluster, names, netdevs = pods
    rendered.exchange_by(cluster, names, netdevs, pair)
