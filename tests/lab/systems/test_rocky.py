"""The branches for the RHEL family, run by a real dnf and rpm: base packages, vendors' repositories, version locks, DKMS.

The node is a Debian that looks like Rocky Linux 9 (lab/lookalikes/rocky.py). grubby, SELinux, the kernel's own packages and
NetworkManager were not run.
"""

import subprocess
from collections.abc import Iterator

import pytest

from lab import Node, repository, rpm
from lab.packages import docker, erdma, nvidia, toolchain
from tests.lab.conftest import inventory_data, pyinfra, ready
from tests.lab.containers.test_container_engine import is_set_for_kubernetes
from tests.lab.containers.test_container_runtime import dump, write
from tests.lab.drivers.test_erdma import WRONG, changed, said
from tests.lab.systems.conftest import System, as_deployed, system

# Two of them need a compiler on an emulated CPU, or Go programs that are built here.
pytestmark = pytest.mark.campaign

LOCKS = "/etc/dnf/plugins/versionlock.list"


@pytest.fixture(scope="module")
def rocky() -> Iterator[System]:
    """The node."""
    with system("rocky-9") as made:
        yield made


@pytest.fixture
def node(rocky: System) -> Node:
    """The node in its state after the first deploy. What earlier tests changed is undone."""
    return as_deployed(rocky)


def deploy(**data: object) -> subprocess.CompletedProcess[str]:
    """The deploy of the node with these values of the inventory."""
    return pyinfra("-y", "--json", "inventories/lab.py", "deploy.py", *inventory_data(data))


def locks(node: Node) -> list[str]:
    """dnf's version locks."""
    return [line for line in node.sh(f"cat {LOCKS}").splitlines() if line and not line.startswith("#")]


def installed(node: Node) -> set[str]:
    """The packages that rpm says are installed."""
    return set(node.sh("rpm -qa --queryformat '%{NAME}\\n'").split())


def test_a_fresh_node_is_ready_after_one_deploy_and_a_second_one_changes_nothing(rocky: System) -> None:
    node = as_deployed(rocky)
    assert node.sh(". /etc/os-release; echo $ID $VERSION_ID").split() == ["rocky", "9.4"]
    assert node.run(["sh", "-c", "command -v apt-get || command -v dpkg"]).returncode != 0
    assert ready(node)
    # The default Python is too old, so the agent has another one, which dnf installed.
    assert node.sh("python3 -c 'import sys; print(sys.version_info[1])'").strip() == "9"
    agent = node.sh("readlink /proc/$(systemctl show -P MainPID trackbed)/exe").strip()
    assert agent == "/usr/bin/python3.11"
    assert {"python3.11", "jq", "libibverbs-utils"} <= installed(node)
    again = deploy()
    assert again.returncode == 0, said(again)
    assert changed(again) == []


def test_the_container_engine_and_nvidia_s_runtime_come_from_signed_repositories(node: Node) -> None:
    engine = rpm.like("docker", docker.vendor(node.image))
    toolkit = rpm.like("nvidia", nvidia.vendor(node.image))
    with repository.serve(engine.folder) as engine_url, repository.serve(toolkit.folder) as toolkit_url:
        wanted = {
            "container_engine": {
                "name": "containerd",
                "source": "vendor",
                "version": docker.VERSION,
                "repository": engine.given(engine_url),
            },
            "container_runtime": {
                "engines": ["containerd"],
                "version": nvidia.VERSION,
                # NVIDIA signs the metadata instead of the packages.
                "repository": {**toolkit.given(toolkit_url), "repo_gpgcheck": True},
            },
        }
        first = deploy(**wanted)
        assert first.returncode == 0, said(first)
        is_set_for_kubernetes(node)
        assert any('default_runtime_name = "nvidia"' in line for line in dump(node))
        assert f"containerd.io-0:{docker.VERSION}.*" in locks(node)
        again = deploy(**wanted)
        assert again.returncode == 0, said(again)
        assert changed(again) == []


def test_a_driver_is_built_by_dkms_locked_upgraded_and_no_longer_locked_after_the_removal(node: Node) -> None:
    tools = rpm.like("mirror", toolchain.mirror(node.image))
    vendor = rpm.like("erdma", erdma.vendor(node.image))
    release = node.sh("uname -r").strip()
    with repository.serve(tools.folder) as mirror, repository.serve(vendor.folder) as url:
        # The RHEL family has DKMS only in EPEL, which the operator must add.
        epel = f"[epel]\nname=EPEL, of Trackbed's lab\nbaseurl={mirror}\ngpgcheck=1\ngpgkey={mirror}/{tools.key.name}\n"
        write(node, "/etc/yum.repos.d/epel.repo", epel)
        # The build needs a compiler and the kernel's headers. Here they have Debian's names.
        node.sh(
            f"rm -f /lib/modules/{release}/updates/erdma.ko; depmod; dnf install -y gcc-12 linux-headers-{release}",
            timeout=900,
        )

        def wanted(version: str, fingerprint: str) -> dict[str, object]:
            given = {**vendor.given(url), "fingerprint": fingerprint}
            return {"source": "dkms", "dkms": {"repository": given, "version": version}, "compat_mode": True}

        refused = deploy(erdma=wanted("1.0-1", WRONG))
        assert refused.returncode != 0
        assert f"has the fingerprint {vendor.fingerprint}, expected is {WRONG}" in said(refused)
        assert node.run(["rpm", "-q", "erdma-dkms"]).returncode != 0
        for version in erdma.VERSIONS:
            done = deploy(erdma=wanted(f"{version}-1", vendor.fingerprint))
            assert done.returncode == 0, said(done)
            assert node.sh("cat /sys/module/erdma/version /sys/module/erdma/parameters/compat_mode").split() == [
                version,
                "Y",
            ]
            assert f"/{release}/extra/erdma.ko" in node.sh("modinfo -n erdma")
            assert [line for line in locks(node) if "erdma" in line] == [f"erdma-dkms-0:{version}-1.*"]
        again = deploy(erdma=wanted(f"{version}-1", vendor.fingerprint))
        assert again.returncode == 0, said(again)
        assert changed(again) == []

    removed = pyinfra("-y", "inventories/lab.py", "deploys/remove.py")
    assert removed.returncode == 0, said(removed)
    assert locks(node) == []
    assert node.sh("ls /etc/yum.repos.d /etc/pki/rpm-gpg | grep trackbed || true") == ""


def test_kernel_updates_are_held_and_allowed_again(node: Node) -> None:
    def held() -> list[str]:
        return sorted(line.split("-0:")[0] for line in locks(node))

    first = deploy(kernel={"headers": False, "hold": True})
    assert first.returncode == 0, said(first)
    assert held() == ["kernel", "kernel-core", "kernel-modules"]
    again = deploy(kernel={"headers": False, "hold": True})
    assert again.returncode == 0, said(again)
    assert changed(again) == []
    allowed = deploy(kernel={"headers": False, "hold": False})
    assert allowed.returncode == 0, said(allowed)
    assert held() == []


def test_the_distribution_s_rdma_tools_are_installed(node: Node) -> None:
    tools = {"librdmacm-utils", "infiniband-diags", "perftest"}
    assert installed(node) & tools == set()
    done = deploy(ofed={"inbox": {}})
    assert done.returncode == 0, said(done)
    assert installed(node) >= tools
    node.sh("ibstat -l; command -v rping ib_write_bw")
    again = deploy(ofed={"inbox": {}})
    assert changed(again) == []
