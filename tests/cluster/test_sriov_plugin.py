"""A VF that the kubelet has given to a pod, with the real sriov-network-device-plugin: only the PodResources API shows this.

The kubelet of MicroK8s, a snap, has another root directory. A test gives the lab's kubelet that directory; no snap runs.
"""

from collections.abc import Iterator

import pytest

from agent.spec.node import parse
from lab import LabError, Node
from lab.cluster import manifests as pods
from lab.cluster import programs
from lab.go import go_programs
from lab.hardware import Nic
from tasks.hardware import NodeHardware
from tasks.kubernetes.manifests.device_plugins import DevicePlugins, Sriov
from tasks.kubernetes.manifests.discovered import discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.cluster.conftest import LONG, Member
from tests.cluster.test_operations import logs
from tests.cluster.test_stories import allocatable
from tests.lab.conftest import eventually, give, spec
from tests.lab.deploy.test_manifests import config

PLUGIN = "sriov-plugin-of-a-test"
FOLDER = "/opt/sriov-plugin"  # /run is noexec
RESOURCE = "sriov/vf_rdma"
DEFAULT, MICROK8S = "/var/lib/kubelet", "/var/snap/microk8s/common/var/lib/kubelet"
FLAGS = f"{DEFAULT}/kubeadm-flags.env"

pytestmark = pytest.mark.campaign


def configuration(node: Node) -> str:
    """The plugin's configuration by our manifest for this node: the first VF of each PF."""
    hardware = NodeHardware().process(["inspection", *node.sh("trackbed inspect --json").splitlines()])
    assert hardware is not None
    wanted, plugin = parse(node.sh("cat /etc/trackbed/node.json")), Sriov(vfs="0")
    hardware_of_nodes = discover(hardware, wanted, plugin.node_selector)
    made = manifests(DevicePlugins("unused", shared_rdma=None, sriov=plugin), {node.name: hardware_of_nodes})
    return config(made["sriov-device-plugin.yaml"])


@pytest.fixture
def plugin(member: Member) -> Iterator[Member]:
    """The plugin as a service of the node: a pod of its own would show no more here."""
    plane, node, _ = member
    try:
        built = go_programs.ensure(programs.SRIOV_PLUGIN)
    except LabError as error:
        pytest.skip(f"{programs.SRIOV_PLUGIN.name} cannot be built here: {error.what}")
    node.write(f"{FOLDER}/config.json", configuration(node))
    node.copy({"sriovdp": built / "sriovdp", "pci.ids": programs.pci_ids()}, FOLDER, LONG)
    node.sh(
        f"systemd-run --unit={PLUGIN} --setenv=PCIDB_PATH={FOLDER}/pci.ids {FOLDER}/sriovdp "
        f"--config-file={FOLDER}/config.json --resource-prefix=sriov --logtostderr"
    )
    yield member
    plane.kubectl("delete", "pod", "given", "--ignore-not-found", timeout=LONG)
    node.sh(f"systemctl stop {PLUGIN}; rm -r {FOLDER}")


@pytest.fixture(params=[DEFAULT, MICROK8S])
def root_dir(plugin: Member, request: pytest.FixtureRequest) -> Iterator[str]:
    """The kubelet's root directory. It looks for plugins below that, and this plugin serves in the default one."""
    node, folder = plugin[1], request.param
    if folder == DEFAULT:
        yield folder
        return
    mounted = f"{folder}/plugins_registry"
    node.sh(f"mkdir -p {mounted}; mount --bind {DEFAULT}/plugins_registry {mounted}")
    node.sh(f"cp {FLAGS} /run/kubelet-flags; sed -i 's,$, --root-dir={folder},' {FLAGS}; systemctl restart kubelet")
    yield folder
    node.sh(f"cp /run/kubelet-flags {FLAGS}; systemctl restart kubelet; umount {mounted}")


def give_vfs(node: Node, rail: Nic, count: int) -> None:
    """Give the node its spec with another number of VFs of one NIC."""
    wanted = spec(node)
    (nic,) = (each for each in wanted["nics"] if each["name"] == rail.name)
    nic["vfs"]["count"] = count
    give(node, wanted)


def plan(node: Node) -> str:
    return node.run(["trackbed", "plan"], timeout=LONG).stdout


def test_a_vf_that_the_kubelet_gave_to_a_pod_is_in_use_by_its_name(plugin: Member, root_dir: str) -> None:
    plane, node, name = plugin
    eventually(
        "the kubelet serves there", lambda: f" {root_dir}/pod-resources/" in node.sh("ss --listening --unix"), LONG
    )
    eventually("two VFs are allocatable", lambda: allocatable(plane, name, RESOURCE) == "2", LONG)
    pod = pods.pod("given", ["sh", "-c", "echo $PCIDEVICE_SRIOV_VF_RDMA; exec sleep 3600"])
    pod["spec"]["containers"][0]["resources"] = {"limits": {RESOURCE: "1"}}
    pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": name}
    plane.apply(pod)
    eventually("the pod says what it has", lambda: logs(plane, "given") != "", LONG)
    vf = logs(plane, "given").strip()
    (nic,) = [nic for nic in node.machine.nics if vf == nic.vf_pcis[0]]
    before, wanted = spec(node), spec(node)
    (entry,) = [each for each in wanted["nics"] if each["name"] == nic.name]
    vfs = entry["vfs"]
    vfs["count"] -= 1
    # The pod may have a VF of either PF. A PF of the spec has a group for its last VF, which would be beyond the new count.
    vfs["groups"] = [group for group in vfs.get("groups", ()) if group["index"] != str(vfs["count"])]
    try:
        give(node, wanted)
        # No descriptor is open and no netdev was moved, so only the kubelet knows of the allocation.
        eventually("deferred, and the pod is named", lambda: f"pod default/given ({nic.pci}#0)" in plan(node), LONG)
        assert node.sh(f"cat /sys/bus/pci/devices/{nic.pci}/sriov_numvfs").strip() == str(vfs["count"] + 1)
    finally:
        give(node, before)
