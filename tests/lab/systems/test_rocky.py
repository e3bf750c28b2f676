"""The branches for the RHEL family, run by a real dnf and rpm: base packages, vendors' repositories, version locks, DKMS.

The node is a Debian that looks like Rocky Linux 9 (lab/lookalikes/rocky.py). grubby, SELinux, the kernel's own packages and
NetworkManager were not run.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lab import Node, repository, rpm
from lab.packages import docker, erdma, gpu_driver, nvidia, ofed, toolchain
from tests.lab.conftest import changed, deploy, pyinfra, ready, refusal, said, succeeded
from tests.lab.containers.test_container_engine import is_set_for_kubernetes
from tests.lab.containers.test_container_runtime import dump
from tests.lab.drivers.test_erdma import WRONG
from tests.lab.drivers.test_ofed import bundle, in_inventory, loaded
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
    assert changed(deploy()) == []


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
        succeeded(deploy(**wanted))
        is_set_for_kubernetes(node)
        assert any('default_runtime_name = "nvidia"' in line for line in dump(node))
        assert f"containerd.io-0:{docker.VERSION}.*" in locks(node)
        assert changed(deploy(**wanted)) == []


@contextmanager
def epel(node: Node) -> Iterator[None]:
    """The node has EPEL, where the RHEL family has DKMS, and can build modules. The lab's own drivers are gone from its disk.

    The compiler and the kernel's headers have Debian's names.
    """
    tools = rpm.like("mirror", toolchain.mirror(node.image))
    with repository.serve(tools.folder) as mirror:
        text = f"[epel]\nname=EPEL, of Trackbed's lab\nbaseurl={mirror}\ngpgcheck=1\ngpgkey={mirror}/{tools.key.name}\n"
        node.write("/etc/yum.repos.d/epel.repo", text)
        release = node.sh("uname -r").strip()
        node.sh(
            f"rm -f /lib/modules/{release}/updates/*; depmod; dnf install -y gcc-12 linux-headers-{release}",
            timeout=900,
        )
        yield


def test_a_driver_is_built_by_dkms_locked_upgraded_and_no_longer_locked_after_the_removal(node: Node) -> None:
    vendor = rpm.like("erdma", erdma.vendor(node.image))
    release = node.sh("uname -r").strip()
    with epel(node), repository.serve(vendor.folder) as url:

        def wanted(version: str, fingerprint: str) -> dict[str, object]:
            given = {**vendor.given(url), "fingerprint": fingerprint}
            return {"source": "dkms", "dkms": {"repository": given, "version": version}, "compat_mode": True}

        refused = refusal(deploy(erdma=wanted("1.0-1", WRONG)))
        assert f"has the fingerprint {vendor.fingerprint}, expected is {WRONG}" in refused
        assert node.run(["rpm", "-q", "erdma-dkms"]).returncode != 0
        for version in erdma.VERSIONS:
            succeeded(deploy(erdma=wanted(f"{version}-1", vendor.fingerprint)))
            assert node.sh("cat /sys/module/erdma/version /sys/module/erdma/parameters/compat_mode").split() == [
                version,
                "Y",
            ]
            assert f"/{release}/extra/erdma.ko" in node.sh("modinfo -n erdma")
            assert [line for line in locks(node) if "erdma" in line] == [f"erdma-dkms-0:{version}-1.*"]
        assert changed(deploy(erdma=wanted(f"{version}-1", vendor.fingerprint))) == []

    succeeded(pyinfra("-y", "inventories/lab.py", "deploys/remove.py"))
    assert locks(node) == []
    assert node.sh("ls /etc/yum.repos.d /etc/pki/rpm-gpg | grep trackbed || true") == ""


def test_doca_is_built_locked_and_loaded_and_in_use_it_gets_into_the_initramfs(node: Node) -> None:
    first, second = list(ofed.DOCA)[:2]
    release = node.sh("uname -r").strip()
    image = f"/boot/initramfs-{release}.img"
    with ExitStack() as served:
        served.enter_context(epel(node))

        def wanted(version: str) -> dict[str, object]:
            made = rpm.like(f"doca-{version}", ofed.vendor(node.image, version, ofed.RHEL))
            url = served.enter_context(repository.serve(made.folder))
            return {"ofed": in_inventory(made, url, version)}

        older, newer = wanted(first), wanted(second)
        done = deploy(**older)
        assert "OFED | Loaded modules" in changed(done), said(done)
        runs, installed_file, path = loaded(node)
        assert runs == installed_file
        assert f"/{release}/extra/rdma_rxe.ko" in path
        assert f"{ofed.RHEL}/{ofed.DOCA[first]}, {release}, x86_64: installed" in node.sh("dkms status")
        assert locks(node) == [f"doca-ofed-0:{first}.*"]
        assert changed(deploy(**older)) == []

        # The initramfs has the module, as on a server that boots from the network.
        node.write("/etc/dracut.conf.d/rdma.conf", 'add_drivers+=" rdma_rxe "\n')
        node.sh(f"dracut --force --kver {release}", timeout=900)
        node.sh("systemd-run --quiet --unit=user sh -c 'exec sleep infinity </dev/infiniband/uverbs0'")
        busy = deploy(**newer)
        assert "not reloaded now: sleep (pid " in busy.stderr, said(busy)
        again, installed_file, path = loaded(node)
        assert again == runs != installed_file
        assert f"rdma_rxe ({installed_file})" in node.sh("cat /var/lib/trackbed/reboots/ofed")
        assert locks(node) == [f"doca-ofed-0:{second}.*"]
        # The next boot loads the new one.
        inside = node.sh(f"lsinitrd --file {path.lstrip('/').replace('lib/', 'usr/lib/', 1)} {image} | sha256sum")
        assert inside == node.sh(f"sha256sum < {path}")
        node.sh("systemctl stop user")
        assert changed(deploy(**newer)) == ["OFED | Loaded modules"]
        assert loaded(node)[0] == installed_file


def test_mlnx_ofed_is_installed_from_its_bundle_locked_loaded_and_upgraded(node: Node) -> None:
    release = node.sh("uname -r").strip()
    parts = ("mlnx-ofed-kernel-dkms", "mlnx-ofed-kernel-utils", "ofed-scripts")

    def wanted(version: str) -> dict[str, object]:
        return {"ofed": bundle(node, version, ofed.RHEL)}

    with epel(node):
        # The vendor's installer expects it.
        node.sh("dnf install -y dkms", timeout=300)
    for version in ofed.MLNX_OFED:
        done = deploy(**wanted(version))
        assert {"OFED | MLNX_OFED", "OFED | Loaded modules"} <= set(changed(done)), said(done)
        runs, installed_file, path = loaded(node)
        assert runs == installed_file
        assert f"/{release}/extra/rdma_rxe.ko" in path
        assert node.sh("ofed_info -s") == f"MLNX_OFED_LINUX-{version}:\n"
        kernel = f"24.10.OFED.{version.replace('-', '.')}"
        assert sorted(locks(node)) == [f"{part}-0:{kernel}-1.*" for part in parts]
        assert changed(deploy(**wanted(version))) == []
    succeeded(pyinfra("-y", "inventories/lab.py", "deploys/remove.py"))
    assert locks(node) == []


def test_the_gpu_driver_is_locked_at_its_version_before_it_is_installed_and_replaced_only_if_unused(node: Node) -> None:
    old, new = gpu_driver.VERSIONS
    vendor = rpm.like("gpu-driver", gpu_driver.vendor(node.image))

    def versions() -> set[str]:
        packages = node.sh("rpm -qa --queryformat '%{VERSION}\n' '*nvidia*'").split()
        return {*packages, *node.sh("cat /sys/module/nvidia/version; nvidia-smi").split()}

    def locked() -> set[str]:
        return {line.rpartition("-0:")[2] for line in locks(node)}

    with epel(node), repository.serve(vendor.folder) as url:

        def wanted(version: str) -> dict[str, object]:
            return {"gpu_driver": {"version": version, "repository": vendor.given(url)}}

        succeeded(deploy(**wanted(old)))
        # The repository also has newer packages, which fulfil the dependencies as well.
        assert versions() == {old}
        assert locked() == {f"{old}-1.*"}
        assert node.sh("systemctl is-enabled nvidia-persistenced; systemctl is-active nvidia-persistenced").split() == [
            "enabled",
            "active",
        ]
        assert changed(deploy(**wanted(old))) == []
        node.sh("mknod /dev/nvidia0 c 1 3; systemd-run --unit=job sh -c 'exec sleep infinity </dev/nvidia0'")
        assert "GPUs are in use by sleep (" in refusal(deploy(**wanted(new)))
        assert versions() == {old}
        node.sh("systemctl stop job")
        succeeded(deploy(**wanted(new)))
        assert versions() == {new}
        assert locked() == {f"{new}-1.*"}
        # The scripts of the older packages have DKMS install the module, and DKMS keeps the newer one.
        succeeded(deploy(**wanted(old)))
        assert versions() == {old}
        assert locked() == {f"{old}-1.*"}
        assert changed(deploy(**wanted(old))) == []


def test_kernel_updates_are_held_and_allowed_again(node: Node) -> None:
    def held() -> list[str]:
        return sorted(line.split("-0:")[0] for line in locks(node))

    succeeded(deploy(kernel={"headers": False, "hold": True}))
    assert held() == ["kernel", "kernel-core", "kernel-modules"]
    assert changed(deploy(kernel={"headers": False, "hold": True})) == []
    succeeded(deploy(kernel={"headers": False, "hold": False}))
    assert held() == []


def test_the_distribution_s_rdma_tools_are_installed(node: Node) -> None:
    tools = {"librdmacm-utils", "infiniband-diags", "perftest"}
    assert installed(node) & tools == set()
    succeeded(deploy(ofed={"inbox": {}}))
    assert installed(node) >= tools
    node.sh("ibstat -l; command -v rping ib_write_bw")
    assert changed(deploy(ofed={"inbox": {}})) == []
