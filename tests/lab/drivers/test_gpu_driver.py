"""NVIDIA's driver on a real node, by packages that have the names of NVIDIA's (lab/packages/gpu_driver.py) and no GPU."""

import pytest

from lab import Node, repository
from lab.packages import gpu_driver
from tests.lab.conftest import Done, changed, refusal, succeeded
from tests.lab.conftest import deploy as deploy_node

OLD, NEW = gpu_driver.VERSIONS
REQUEST = "/var/lib/trackbed/reboots/gpu_driver"
FRESH = [
    f"GPU driver | {name}"
    for name in (
        "The kernel's own drivers not loaded",
        "nvidia-driver: key of its repository",
        "nvidia-driver: repository",
        "Version",
        "Packages",
        "Loaded modules",
        "Persistence daemon",
    )
]

# Compiler, headers and a build: minutes of an emulated CPU.
pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def vendor(fresh_nodes: tuple[Node, ...]) -> repository.Repository:
    """The repository, which has both versions."""
    return gpu_driver.vendor(fresh_nodes[0].image)


def deploy(url: str, vendor: repository.Repository, version: str, **more: object) -> Done:
    """The deploy of the first node. The test's repository is a flat one at its root."""
    return deploy_node(gpu_driver={"version": version, "repository": vendor.given(url), **more}, kernel={})


def versions(node: Node) -> set[str]:
    """The versions of all packages of the driver, of the loaded module, and of what nvidia-smi prints."""
    packages = node.sh("dpkg-query -W -f '${db:Status-Abbrev}${Version}\\n' 'nvidia-*' | sed -n 's/^ii *//p'").split()
    others = node.sh("cat /sys/module/nvidia/version; nvidia-smi").split()
    return {version.removesuffix("-1") for version in (*packages, *others)}


def test_the_driver_is_installed_at_its_version_and_then_left_alone(
    bare: Node, url: str, vendor: repository.Repository
) -> None:
    assert set(FRESH) <= set(changed(deploy(url, vendor, OLD)))
    # The repository has a newer one, on which the packages could depend as well.
    assert versions(bare) == {OLD}
    assert bare.sh("systemctl is-enabled nvidia-persistenced; systemctl is-active nvidia-persistenced").split() == [
        "enabled",
        "active",
    ]
    assert "blacklist nouveau" in bare.sh("modprobe --showconfig")
    assert changed(deploy(url, vendor, OLD)) == []


def test_a_driver_in_use_is_not_replaced(bare: Node, url: str, vendor: repository.Repository) -> None:
    succeeded(deploy(url, vendor, OLD))
    # A job, as far as the deploy can see: a process that has the device open.
    bare.sh("mknod /dev/nvidia0 c 1 3; systemd-run --unit=job sh -c 'exec sleep infinity </dev/nvidia0'")
    assert "GPUs are in use by sleep (" in refusal(deploy(url, vendor, NEW))
    assert versions(bare) == {OLD}

    bare.sh("systemctl stop job")
    succeeded(deploy(url, vendor, NEW))
    assert versions(bare) == {NEW}
    assert bare.sh("systemctl is-active nvidia-persistenced").strip() == "active"
    assert bare.run(["test", "-e", REQUEST]).returncode != 0
    # The newer dependencies would do for the older packages. They are replaced all the same.
    succeeded(deploy(url, vendor, OLD))
    assert versions(bare) == {OLD}


def test_a_module_that_cannot_be_unloaded_requests_a_reboot(
    bare: Node, url: str, vendor: repository.Repository
) -> None:
    succeeded(deploy(url, vendor, OLD))
    # As memory that an RDMA device has registered: the module has a user, and no process has a GPU open.
    bare.sh("modprobe nvidia_peermem; systemd-run --unit=holder sh -c 'exec sleep infinity </dev/gpu-memory'")
    succeeded(deploy(url, vendor, NEW))
    assert "another could not be unloaded" in bare.sh(f"cat {REQUEST}")
    assert bare.sh("cat /sys/module/nvidia/version").strip() == OLD


def test_nouveau_waits_for_a_reboot(bare: Node, url: str, vendor: repository.Repository) -> None:
    bare.sh("modprobe nouveau")
    succeeded(deploy(url, vendor, OLD))
    assert "nouveau is loaded" in bare.sh(f"cat {REQUEST}")
    assert bare.run(["test", "-e", "/sys/module/nvidia"]).returncode != 0
    assert changed(deploy(url, vendor, OLD)) == []
    # As after the reboot.
    bare.sh("modprobe -r nouveau")
    succeeded(deploy(url, vendor, OLD))
    assert versions(bare) == {OLD}
    assert bare.run(["test", "-e", REQUEST]).returncode != 0


def test_the_fabric_manager_needs_nvswitches(bare: Node, url: str, vendor: repository.Repository) -> None:
    refused = refusal(deploy(url, vendor, OLD, fabric_manager=True))
    assert "nvidia-fabricmanager does not start" in refused
    bare.sh(f"touch {gpu_driver.NVSWITCH}; systemctl reset-failed nvidia-fabricmanager")
    succeeded(deploy(url, vendor, OLD, fabric_manager=True))
    assert versions(bare) == {OLD}
    assert bare.sh("systemctl is-active nvidia-fabricmanager").strip() == "active"
