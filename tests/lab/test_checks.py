"""The checks that operators run on their own nodes, run on ours: none may fail, and only the named ones be skipped."""

import re

from lab import Node
from lab.checks import MAY_SKIP, ROOT, run


def test_the_operators_checks_pass_on_a_good_node(nodes: tuple[Node, ...]) -> None:
    checked = run(nodes, capture=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(MAY_SKIP) * len(nodes)} skipped" in checked.stdout


def test_the_operators_checks_fail_on_a_broken_node(node: Node) -> None:
    first, second = node.machine.nics
    node.sh("systemctl stop trackbed")
    node.sh(f"ip link set {first.netdev} vf 2 trust off")
    node.sh(f"ip link set {first.netdev}v1 mtu 1500")
    node.sh(f"echo 0-3 > /proc/irq/$(ls /sys/bus/pci/devices/{second.pci}/msi_irqs | tail -1)/smp_affinity_list")
    node.sh(f"echo 0 > /sys/class/net/{first.netdev}v0/queues/rx-0/rps_cpus")
    # modprobe would then load Debian's module, which is not the loaded one.
    node.sh("rm /lib/modules/$(uname -r)/updates/rdma_rxe.ko; depmod")
    node.sh("echo pcspkr >> /etc/modules-load.d/trackbed.conf")
    # A label of what the node has not, by two writers, and a directive of NFD's; an interface and a device that are not.
    node.sh("sed -i 's|gpu-use-type|aliyun.accelerator/erdma|' /etc/trackbed/labels.json")
    features = "/etc/kubernetes/node-feature-discovery/features.d/trackbed"
    node.sh(f"printf '# +no-label\\naliyun.accelerator/erdma=true\\n' >> {features}")
    node.sh("sed -i 's/IFNAME=.*/IFNAME=eth9/; s/HCA=.*/HCA==mlx5_9\\nNCCL_IB_GID_INDEX=200/' /etc/nccl.conf")
    checked = run((node,), capture=True)
    for group in ("test_sriov", "test_links", "test_irq", "test_rps", "test_ready", "test_drivers"):
        assert f"FAILED tests/node/{group}.py" in checked.stdout, checked.stdout
    for group in ("test_labels", "test_modules"):
        names = re.findall(r"^def (test_\w+)", (ROOT / "tests" / "node" / f"{group}.py").read_text(), re.MULTILINE)
        assert [name for name in names if f"FAILED tests/node/{group}.py::{name}" not in checked.stdout] == [], (
            checked.stdout
        )
