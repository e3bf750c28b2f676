"""eRDMA's driver on a real node: from a vendor's signed repository, built by DKMS there, loaded, upgraded, refused.

The package is the kernel's own erdma with the parameter `compat_mode` added (lab/packages/erdma.py): it is read back from the
kernel, and does nothing else. No device is there for it.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from lab import Node, repository
from lab.command import run
from lab.image import Image
from lab.packages import erdma, toolchain
from tasks.drivers import erdma as task
from tests.lab.conftest import Done, changed, refusal, said, succeeded
from tests.lab.conftest import deploy as deploy_node
from tests.lab.drivers.conftest import as_debian_makes_it

RING = "/etc/apt/keyrings/trackbed-erdma.gpg"
SOURCE = "/etc/apt/sources.list.d/trackbed-erdma.sources"
WRONG = "0" * 40

# Compiler, headers and a build: minutes of an emulated CPU.
pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def vendor(fresh_nodes: tuple[Node, ...]) -> repository.Repository:
    """The vendor's packages."""
    return erdma.vendor(fresh_nodes[0].image)


def deploy(url: str, fingerprint: str, version: str, **more: object) -> Done:
    """The deploy of the first node, in compatibility mode."""
    given = {"uri": url, "key": f"{url}/key.asc", "fingerprint": fingerprint}
    wanted = {"source": "dkms", "dkms": {"repository": given, "version": version}, "compat_mode": True}
    return deploy_node(erdma=wanted, **more)


def state(node: Node) -> str:
    """All that the task may touch, but for gpg, by which it looks at the key."""
    return node.sh(
        "dpkg-query -W '*dkms*' 'gcc*' 'linux-headers*' 2>/dev/null || true; ls -R /usr/src /var/lib/dkms 2>/dev/null || true;"
        "ls /etc/apt/keyrings /etc/apt/sources.list.d /etc/modprobe.d /etc/modules-load.d; lsmod | grep erdma || true"
    )


def loaded(node: Node, version: str) -> None:
    release = node.sh("uname -r").strip()
    assert node.sh("dkms status").splitlines() == [f"erdma/{version}, {release}, x86_64: installed"]
    assert "/updates/dkms/erdma.ko" in node.sh("modinfo -n erdma")
    assert node.sh("cat /sys/module/erdma/version /sys/module/erdma/parameters/compat_mode").split() == [version, "Y"]
    assert node.sh("apt-mark showhold").split() == ["erdma-dkms"]


def test_a_key_with_another_fingerprint_is_refused_and_the_node_left_as_it_was(
    bare: Node, url: str, vendor: repository.Repository
) -> None:
    before = state(bare)
    assert f"has the fingerprint {vendor.fingerprint}, expected is {WRONG}" in refusal(deploy(url, WRONG, "1.0"))
    assert state(bare) == before


def test_the_driver_is_built_on_the_node_loaded_in_its_mode_and_then_left_alone(
    bare: Node, vendor: repository.Repository, url: str
) -> None:
    succeeded(deploy(url, vendor.fingerprint, "1.0", kernel={}))
    loaded(bare, "1.0")
    assert changed(deploy(url, vendor.fingerprint, "1.0", kernel={})) == []


def corrupted(vendor: repository.Repository, version: str, folder: Path) -> Path:
    """The same repository with one bit of a package changed."""
    shutil.copytree(vendor.folder, folder, copy_function=os.link)
    package = folder / vendor.deb("erdma-dkms", version).name
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    package.unlink()
    package.write_bytes(content)
    return folder


def test_an_upgrade_that_is_corrupted_leaves_the_driver_and_a_good_one_replaces_it(
    bare: Node, vendor: repository.Repository, url: str, tmp_path: Path
) -> None:
    succeeded(deploy(url, vendor.fingerprint, "1.0", kernel={}))
    with repository.serve(corrupted(vendor, "1.1", tmp_path / "corrupted")) as bad:
        assert "Hash Sum mismatch" in refusal(deploy(bad, vendor.fingerprint, "1.1", kernel={}))
    loaded(bare, "1.0")
    succeeded(deploy(url, vendor.fingerprint, "1.1", kernel={}))
    loaded(bare, "1.1")


def test_a_build_that_fails_shows_its_cause(bare: Node, vendor: repository.Repository, tmp_path: Path) -> None:
    tree, pool = tmp_path / "tree", tmp_path / "pool"
    run(["dpkg-deb", "-x", vendor.deb("erdma-dkms", "1.0"), tree])
    source = tree / "usr/src/erdma-1.0"
    (source / "dkms.conf").unlink()
    with (source / "erdma_cm.c").open("a") as file:
        file.write("\nthis does not compile;\n")
    pool.mkdir()
    repository.dkms_deb(pool, "erdma", "1.2", source, erdma.CONF)
    repository.sign(pool)
    with repository.serve(pool) as url:
        failed = refusal(deploy(url, repository.Repository(pool).fingerprint, "1.2", kernel={}))
    assert " /var/lib/dkms/erdma/1.2/build/make.log:" in failed
    assert "erdma_cm.c:" in failed
    assert "error: unknown type name" in failed


def boot_into(node: Node, release: str, folder: Path) -> Node:
    """Boot another kernel that is installed on the node: the lab has no boot loader."""
    for name, file in (("vmlinuz", f"vmlinuz-{release}"), ("initrd.img", f"initrd.img-{release}")):
        with (folder / name).open("wb") as copy:
            command = ["ssh", "-F", str(node.ssh_config), node.name, "--", "cat", f"/boot/{file}"]
            subprocess.run(command, stdout=copy, check=True)
    (folder / "disk.raw").symlink_to(node.image.disk)
    node.sh("sync")
    node.power_cut()
    other = attrs.evolve(node, image=Image(folder))
    other.power_on()
    other.wait_ssh()
    assert other.sh("uname -r").strip() == release
    return other


def test_the_driver_follows_another_kernel(node: Node, vendor: repository.Repository, url: str, tmp_path: Path) -> None:
    own = toolchain.kernel_of(node.image)
    release = own.release.replace("-amd64", "-rt-amd64")
    packages = [f"linux-{kind}-{release}={own.version}" for kind in ("image", "headers")]
    with as_debian_makes_it(node, toolchain.mirror(node.image, *packages)):
        succeeded(deploy(url, vendor.fingerprint, "1.0", kernel={}))
        pending = succeeded(deploy(url, vendor.fingerprint, "1.0", kernel={"release": release}))
        assert f"kernel {release} is installed, and {own.release} runs" in said(pending)
        assert f"erdma/1.0, {release}, x86_64: installed" in node.sh("dkms status")
        try:
            other = boot_into(node, release, tmp_path)
            # The lab's RDMA devices are built for its own kernel alone, and under emulation a real-time kernel's PF answers its
            # VFs too late.
            others = {"nccl": {"network_type": 2}, "nics": []}
            succeeded(deploy(url, vendor.fingerprint, "1.0", kernel={"release": release}, **others))
            assert other.sh("cat /sys/module/erdma/version").strip() == "1.0"
            assert f"/{release}/updates/dkms/erdma.ko" in other.sh("modinfo -n erdma")
            assert other.run(["test", "-e", "/var/lib/trackbed/reboots/kernel"]).returncode != 0
        finally:
            node.power_cut()
            node.power_on()


@pytest.fixture
def with_needs(node: Node) -> Iterator[Node]:
    """A node whose mirror has what the vendor's installer builds with."""
    with as_debian_makes_it(node, toolchain.mirror(node.image, *task.INSTALLER_NEEDS["debian"])) as made:
        yield made


def test_the_installer_runs_with_its_checksum_alone_and_once(with_needs: Node) -> None:
    bare = with_needs
    # The vendor's is for other systems; what is run here is the same on all of them.
    bare.sh("rm /etc/os-release; printf 'ID=ubuntu\nNAME=Ubuntu\nVERSION_ID=\"22.04\"\n' > /etc/os-release")
    archive = erdma.installer(bare.image)
    with repository.serve(archive.parent) as url:

        def install(sha256: str) -> Done:
            wanted = {"source": "installer", "installer": {"url": f"{url}/{archive.name}", "sha256": sha256}}
            return deploy_node(erdma={**wanted, "compat_mode": True}, kernel={})

        assert "it was not run" in refusal(install("0" * 64))
        assert bare.run(["test", "-e", "/usr/src/erdma-1.0"]).returncode != 0
        succeeded(install(hashlib.sha256(archive.read_bytes()).hexdigest()))
        assert bare.sh("cat /sys/module/erdma/version /sys/module/erdma/parameters/compat_mode").split() == ["1.0", "Y"]
        assert changed(install(hashlib.sha256(archive.read_bytes()).hexdigest())) == []
