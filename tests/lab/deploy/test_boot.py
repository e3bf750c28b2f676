"""Settings that need a boot, with the real grub: it boots the node from the menu that the deploy has made it write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Node, repository
from lab.packages import toolchain
from lab.qemu import boot_loader
from tests.boots import boot_id
from tests.lab.conftest import inventory_data, pyinfra, ready, said, succeeded, wait_ready
from tests.lab.containers.test_container_runtime import install

pytestmark = pytest.mark.campaign

# A node that boots is slow.
TIMEOUT = 900
REBOOT = {"reboot": {"policy": "allow", "timeout": 900}}
REQUESTS = "mkdir -p /var/lib/trackbed/reboots; ls /var/lib/trackbed/reboots"


@pytest.fixture
def loaded(node: Node, tmp_path: Path) -> Iterator[Node]:
    """The node, booted by a boot loader of its own."""
    mirror = toolchain.mirror(node.image, "grub2-common", "grub-pc-bin")
    with repository.serve(mirror.folder) as url:
        install(node, url, "grub2-common", "grub-pc-bin")
    made = boot_loader.install(node, tmp_path / "loader.raw")
    wait_ready(made, TIMEOUT)
    yield made
    made.power_cut()


def deploy(**data: object) -> str:
    data["ready_timeout"] = TIMEOUT
    given = inventory_data(data)
    return said(succeeded(pyinfra("-y", "--limit", "node1", "inventories/lab.py", "deploy.py", *given)))


def arguments(node: Node) -> list[str]:
    return node.sh("cat /proc/cmdline").split()


def test_boot_settings_take_effect_at_one_reboot_and_end_at_another(loaded: Node) -> None:
    node = loaded
    first = boot_id(node)
    wanted = {
        "boot": {"arguments": ["trackbed.test=1", "iommu=pt"], "hugepages": True, "sysctls": {"kernel.panic": "17"}},
        "hugepages": [{"size": "2M", "count": 4, "numa_node": 0}, {"size": "2M", "count": 6, "numa_node": 1}],
        "kernel_modules": ["igbvf", "dummy"],
        "kernel_module_options": {"dummy": {"numdummies": 3}},
    }
    printed = deploy(**wanted)
    missing = "kernel arguments trackbed.test=1 hugepagesz=2M hugepages=0:4,1:6 are not in effect"
    assert f"reboot wanted: boot: {missing}; the host is not rebooted" in printed
    assert "trackbed.test=1" not in arguments(node)

    deploy(**wanted, **REBOOT)
    second = boot_id(node)
    assert second != first
    assert arguments(node)[-4:] == ["trackbed.test=1", "iommu=pt", "hugepagesz=2M", "hugepages=0:4,1:6"]
    pools = "/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
    assert node.sh(f"cat {pools.format(0)} {pools.format(1)}").split() == ["4", "6"]
    # Before the agent, whose unit comes later.
    assert "2.00 MiB page size, pre-allocated 10 pages" in node.sh("journalctl -k -b --no-pager | grep HugeTLB")
    assert node.sh("cat /proc/sys/kernel/panic").strip() == "17"
    assert node.sh("ls -d /sys/class/net/dummy*").split() == [f"/sys/class/net/dummy{number}" for number in range(3)]
    assert node.sh(REQUESTS) == ""
    assert ready(node)
    recovery = [line for line in node.sh("grep vmlinuz /boot/grub/grub.cfg").splitlines() if " single" in line]
    assert all("trackbed.test" not in line for line in recovery)

    deploy(**REBOOT)
    assert boot_id(node) != second
    assert not {"trackbed.test=1", "hugepagesz=2M"} & {*arguments(node)}
    assert "trackbed.test" not in node.sh("cat /boot/grub/grub.cfg")
    assert node.run(["test", "-e", "/etc/default/grub.d/95-trackbed.cfg"]).returncode == 1
    assert node.sh(REQUESTS) == ""
    assert ready(node)
