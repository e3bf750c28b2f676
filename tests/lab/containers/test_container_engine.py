"""containerd on a real node: Debian's, and one like Docker's containerd.io, which disables the plugin of Kubernetes."""

from collections.abc import Iterator

import pytest

from lab import Node, repository
from lab.packages import docker, toolchain
from tests.lab.conftest import changed, deploy, refusal, succeeded
from tests.lab.containers.test_container_runtime import dump, running
from tests.lab.drivers.conftest import as_debian_makes_it

MAIN = "/etc/containerd/config.toml"
CGROUP = "SystemdCgroup = true"

# Packages are unpacked by an emulated CPU, and each deploy takes half a minute.
pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def vendor(fresh_nodes: tuple[Node, ...]) -> repository.Repository:
    """The repository with containerd.io."""
    return docker.vendor(fresh_nodes[0].image)


@pytest.fixture
def bare(node: Node) -> Iterator[Node]:
    """A node whose mirror has Debian's containerd."""
    with as_debian_makes_it(node, toolchain.mirror(node.image, "containerd", "busybox-static", "gpg")) as made:
        yield made


DISTRIBUTION = {"name": "containerd"}


def from_vendor(url: str, vendor: repository.Repository) -> dict[str, object]:
    """The data for the test's repository."""
    return {**DISTRIBUTION, "source": "vendor", "version": docker.VERSION, "repository": vendor.given(url)}


def is_set_for_kubernetes(node: Node) -> None:
    """By containerd's own word."""
    plugins = [line.split() for line in node.sh("ctr plugins ls").splitlines() if " cri " in line]
    assert [plugin[-1] for plugin in plugins] == ["ok"]
    assert [line for line in dump(node) if "runtimes.runc.options]" in line and CGROUP in line] != []
    assert node.sh("systemctl is-enabled containerd").strip() == "enabled"


def start_container(node: Node) -> list[str]:
    """A container that runs; its process."""
    node.sh(
        "mkdir -p /srv/rootfs/bin /srv/rootfs/proc /srv/rootfs/dev /srv/rootfs/sys; cp /bin/busybox /srv/rootfs/bin\n"
        "ctr run --detach --rootfs /srv/rootfs old /bin/busybox sleep 9999",
        timeout=300,
    )
    return running(node)


def test_containerd_of_the_distribution(bare: Node) -> None:
    succeeded(deploy(container_engine=DISTRIBUTION))
    is_set_for_kubernetes(bare)
    # Debian's own settings are still there.
    assert 'bin_dir = "/usr/lib/cni"' in bare.sh(f"cat {MAIN}")
    assert changed(deploy(container_engine=DISTRIBUTION)) == []


def test_containerd_of_the_vendor_serves_kubernetes(bare: Node, url: str, vendor: repository.Repository) -> None:
    wanted = from_vendor(url, vendor)
    succeeded(deploy(container_engine=wanted))
    is_set_for_kubernetes(bare)
    # The packaged comments are there, and so is the former file.
    assert "#root = " in bare.sh(f"cat {MAIN}")
    assert bare.sh(f"cat {MAIN}.previous") == docker.CONFIG
    assert bare.sh("apt-mark showhold").split() == ["containerd.io"]
    assert changed(deploy(container_engine=wanted)) == []

    refused = refusal(deploy(container_engine=DISTRIBUTION))
    assert "the node has containerd.io" in refused
    is_set_for_kubernetes(bare)


def test_containers_keep_running_while_the_file_is_changed(bare: Node, url: str, vendor: repository.Repository) -> None:
    wanted = from_vendor(url, vendor)
    succeeded(deploy(container_engine=wanted))
    # busybox asks for another initramfs: minutes of an emulated CPU.
    bare.write("/etc/initramfs-tools/update-initramfs.conf", "update_initramfs=no\n")
    bare.sh("apt-get -q -y install busybox-static", timeout=600)
    containers = start_container(bare)
    assert len(containers) == 1
    bare.write(MAIN, 'version = 2\n# mine\noom_score = -10\n[metrics]\n  address = "127.0.0.1:1338"\n')
    succeeded(deploy(container_engine=wanted))
    is_set_for_kubernetes(bare)
    text = bare.sh(f"cat {MAIN}")
    assert "# mine" in text
    assert 'address = "127.0.0.1:1338"' in text
    assert running(bare) == containers


def test_if_containerd_does_not_accept_a_file_the_former_one_is_restored(bare: Node) -> None:
    succeeded(deploy(container_engine=DISTRIBUTION))
    unit = f"[Service]\nExecStartPre=/usr/bin/sh -c '! grep -q \"{CGROUP}\" {MAIN}'\n"
    bare.write("/etc/systemd/system/containerd.service.d/refuses.conf", unit)
    bare.write(MAIN, "version = 2\n")
    bare.sh("systemctl daemon-reload; systemctl restart containerd")
    refused = refusal(deploy(container_engine=DISTRIBUTION))
    assert "its former files are restored" in refused
    assert bare.sh(f"cat {MAIN}") == "version = 2\n"
    assert bare.sh("systemctl is-active containerd").strip() == "active"
