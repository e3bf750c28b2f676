"""OFED on real nodes: the distribution's, and the vendor's in names and shapes, rxe for its drivers (lab/packages/ofed)."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab import Node, repository
from lab.packages import ofed
from tests.boots import boot_id
from tests.lab.conftest import DEPLOYED, Done, changed, eventually, kept, pyinfra, refusal, settled, succeeded
from tests.lab.conftest import deploy as deploy_node
from tests.lab.drivers.test_peer_memory import install_modules

FIRST, SECOND = list(ofed.DOCA)[:2]
BUILDER = "builder"
REQUEST = "/var/lib/trackbed/reboots/ofed"


def deploy(data: dict[str, Any], **more: Any) -> Done:
    """Deploy the first node with this OFED."""
    return deploy_node(ofed=data, **more)


def loaded(node: Node) -> tuple[str, str, str]:
    """For rxe: the loaded srcversion, the installed srcversion, and the file that modprobe would load."""
    output = node.sh(
        "cat /sys/module/rdma_rxe/srcversion || echo none;"
        ' echo "$(modinfo -F srcversion rdma_rxe)"; modinfo -n rdma_rxe'
    )
    first, second, path = output.splitlines()
    return first, second, path


def loaded_as_installed(node: Node) -> str:
    """The srcversion of rxe, which is loaded as DKMS has installed it."""
    runs, installed, path = loaded(node)
    assert runs == installed
    assert "/updates/dkms/" in path
    return runs


def devices(node: Node) -> int:
    """How many RDMA devices there are."""
    return len(json.loads(node.sh("rdma -j link")))


@contextmanager
def used(node: Node) -> Iterator[None]:
    """A program that waits for a peer has a device open."""
    node.sh("systemd-run --quiet --unit=user ib_write_bw --ib-dev=$(ls /sys/class/infiniband | head -n1)")
    eventually(
        "an open device",
        lambda: node.run(["sh", "-c", "ls -l /proc/[0-9]*/fd | grep -q /dev/infiniband"]).returncode == 0,
    )
    yield
    node.run(["systemctl", "stop", "user"])


ROCE, IWARP = ("192.0.2.1", "192.0.2.2"), ("192.0.2.129", "192.0.2.130")


@pytest.fixture
def linked(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Both nodes with the distribution's OFED, rxe on a VF and siw on a PF, and addresses for both."""
    succeeded(pyinfra("-y", "--json", "inventories/lab.py", "deploy.py", "--data", 'ofed={"inbox": {}}'))
    first, second = nodes[0].machine.nics
    for node, roce, iwarp in zip(nodes, ROCE, IWARP, strict=True):
        node.sh(f"ip addr add {roce}/25 dev {first.netdev}v0; ip link set {first.netdev}v0 up")
        node.sh(
            f"ip addr add {iwarp}/25 dev {second.netdev}; modprobe siw; rdma link add siw0 type siw netdev {second.netdev}"
        )
    return nodes


def between(nodes: tuple[Node, ...], server: str, client: str) -> str:
    """Run a pair of programs; what the client says."""
    nodes[0].sh(f"systemd-run --quiet --collect --unit=peer {server}")
    # One that was refused once, and comes again, may leave perftest's server waiting for the first for ever.
    eventually("the server listens", lambda: "LISTEN" in nodes[0].sh("rdma resource show cm_id"))
    try:
        return nodes[1].run(["sh", "-c", client], timeout=300, check=True).stdout
    finally:
        nodes[0].run(["systemctl", "stop", "peer"])


@pytest.mark.campaign
def test_the_distribution_s_rdma_carries_data_between_nodes_over_roce_and_iwarp(linked: tuple[Node, ...]) -> None:
    links = [{link["netdev"]: link for link in json.loads(node.sh("rdma -j link"))} for node in linked]
    first, second = linked[0].machine.nics
    for by_netdev in links:
        assert {by_netdev[f"{first.netdev}v0"]["state"], by_netdev[second.netdev]["state"]} == {"ACTIVE"}
    for address in (ROCE[0], IWARP[0]):
        output = between(linked, f"rping -s -a {address} -C 3", f"rping -c -v -C 3 -a {address}")
        assert output.count("ping data: rdma-ping-") == 3
    mine, theirs = (by_netdev[f"{first.netdev}v0"]["ifname"] for by_netdev in links)
    options = "--size=4096 --iters=50"
    output = between(
        linked, f"ib_write_bw --ib-dev={mine} -R {options}", f"ib_write_bw --ib-dev={theirs} -R {options} {ROCE[0]}"
    )
    assert re.search(r"^ *4096 +50 +[\d.]+ +[\d.]*[1-9]", output, re.MULTILINE), output


@pytest.fixture(scope="module")
def builder(deployed: tuple[Node, ...]) -> Node:
    """A deployed node that can build modules, without the lab's own rxe, and with no package source but those of a test."""
    node = deployed[0]
    if kept() and node.has(BUILDER):
        return node
    node.restore(DEPLOYED)
    vendor = ofed.vendor(node.image, FIRST)
    with repository.serve(vendor.folder) as url:
        node.sh(
            "rm /lib/modules/$(uname -r)/updates/rdma_rxe.ko; depmod; rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*"
            " /var/lib/apt/lists; echo force-unsafe-io > /etc/dpkg/dpkg.cfg.d/lab;"
            f" echo 'deb [trusted=yes] {url} ./' > /etc/apt/sources.list; apt-get -qq update;"
            " DEBIAN_FRONTEND=noninteractive apt-get -qqy --no-install-recommends install"
            " dkms gcc-12 make gpg linux-headers-$(uname -r);"
            " rm -rf /etc/apt/sources.list /var/lib/apt/lists",
            timeout=900,
        )
    settled(node)
    node.snapshot(BUILDER)
    return node


@pytest.fixture
def node_that_builds(builder: Node) -> Node:
    """It, whatever the tests before did."""
    builder.restore(BUILDER)
    return builder


@pytest.fixture
def doca(node_that_builds: Node) -> Iterator[Any]:
    """What the inventory says for a version of DOCA, whose repository is served."""
    with ExitStack() as served:

        def given(version: str) -> dict[str, Any]:
            made = ofed.vendor(node_that_builds.image, version)
            url = served.enter_context(repository.serve(made.folder))
            return in_inventory(made, url, version)

        yield given


def in_inventory(made: repository.Repository, url: str, version: str) -> dict[str, Any]:
    """What the inventory says for a version of DOCA in a repository that is served."""
    given = {"version": version, "fingerprint": made.fingerprint, "repository": url, "key": f"{url}/key.asc"}
    return {"doca": given}


def bundle(node: Node, version: str, name: str = ofed.DEBIAN) -> dict[str, Any]:
    """What it says for a bundle."""
    path = ofed.bundle(node.image, version, name)
    sha256 = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    return {"mlnx_ofed": {"bundle": str(path), "sha256": sha256}}


@pytest.mark.campaign
def test_doca_is_built_held_loaded_and_upgraded(node_that_builds: Node, doca: Any) -> None:
    node, first = node_that_builds, doca(FIRST)
    before = devices(node)
    assert "OFED | Loaded modules" in changed(deploy(first))
    runs = loaded_as_installed(node)
    kernel = node.sh("uname -r").strip()
    assert f"mlnx-ofed-kernel/{ofed.DOCA[FIRST]}, {kernel}, x86_64: installed" in node.sh("dkms status")
    assert node.sh("apt-mark showhold") == "doca-ofed\n"
    assert ofed.RDMA_CORE in node.sh("dpkg-query -W rdma-core")
    assert devices(node) == before
    assert changed(deploy(first)) == []

    # An update of the distribution puts its own in the place of the vendor's.
    node.sh("sed -i 's/^Version: 2510mlnx.*/Version: 44.0-2/' /var/lib/dpkg/status")
    assert changed(deploy(first)) == ["OFED | The vendor's rdma-core"]
    assert ofed.RDMA_CORE in node.sh("dpkg-query -W rdma-core")

    assert "OFED | Loaded modules" in changed(deploy(doca(SECOND)))
    assert loaded_as_installed(node) != runs
    assert devices(node) == before


@pytest.mark.campaign
def test_modules_in_use_stay_until_nobody_uses_them(node_that_builds: Node, doca: Any) -> None:
    node, given = node_that_builds, doca(FIRST)
    with used(node):
        done = deploy(given)
        assert "OFED | Loaded modules" in changed(done)
        assert re.search(r"not reloaded now: ib_write_bw \(pid \d+\)", done.stderr)
        runs, installed, _ = loaded(node)
        assert runs != installed
        assert f"rdma_rxe ({installed})" in node.sh(f"cat {REQUEST}")
        # The request stays; nothing else is to be done.
        assert changed(deploy(given)) == []
    assert changed(deploy(given)) == ["OFED | Loaded modules"]
    loaded_as_installed(node)
    assert node.run(["test", "-e", REQUEST]).returncode != 0


@pytest.mark.campaign
def test_peer_memory_is_reloaded_only_without_users(node_that_builds: Node, doca: Any) -> None:
    node, given = node_that_builds, doca(FIRST)
    install_modules(node)
    node.sh("modprobe nvidia_peermem; systemd-run --quiet --unit=gpu sh -c 'exec sleep infinity < /dev/gpu-memory'")
    eventually("a user", lambda: node.sh("cat /sys/module/nvidia_peermem/refcnt") == "1\n")
    done = deploy(given)
    assert "OFED | Loaded modules" in changed(done)
    assert "nvidia_peermem: 1 in use" in done.stderr
    assert node.run(["test", "-e", REQUEST]).returncode == 0
    node.sh("systemctl stop gpu")
    assert changed(deploy(given)) == ["OFED | Loaded modules"]
    loaded_as_installed(node)
    node.sh("test -e /sys/module/nvidia_peermem")


@pytest.mark.campaign
def test_modules_in_use_are_loaded_by_a_reboot_that_the_policy_allows(node_that_builds: Node, doca: Any) -> None:
    node, before = node_that_builds, boot_id(node_that_builds)
    with used(node):
        succeeded(deploy(doca(FIRST), reboot={"policy": "allow"}))
    assert boot_id(node) != before
    loaded_as_installed(node)
    assert node.run(["test", "-e", REQUEST]).returncode != 0


@pytest.mark.campaign
def test_a_driver_that_does_not_compile_is_refused_with_the_compiler_s_words(node_that_builds: Node, doca: Any) -> None:
    node, before = node_that_builds, loaded(node_that_builds)
    assert "the vendor has made a mistake" in refusal(deploy(doca(ofed.BROKEN)))
    assert loaded(node) == before


@pytest.mark.campaign
def test_without_kernel_headers_nothing_is_installed(node_that_builds: Node, doca: Any) -> None:
    node = node_that_builds
    node.sh("rm /lib/modules/$(uname -r)/build")
    packages = node.sh("dpkg -l")
    for given in (doca(FIRST), bundle(node, ofed.MLNX_OFED[0])):
        assert re.search(r"headers of the running kernel \S+ are", refusal(deploy(given)))
        assert node.sh("dpkg -l") == packages


@pytest.mark.campaign
def test_mlnx_ofed_is_installed_held_loaded_and_upgraded(node_that_builds: Node) -> None:
    node = node_that_builds
    first, second = (bundle(node, version) for version in ofed.MLNX_OFED)
    assert {"OFED | MLNX_OFED", "OFED | Loaded modules"} <= set(changed(deploy(first)))
    runs = loaded_as_installed(node)
    assert node.sh("apt-mark showhold").split() == ["mlnx-ofed-kernel-dkms", "mlnx-ofed-kernel-utils", "ofed-scripts"]
    assert node.run(["test", "-e", "/var/log/firmware-updated"]).returncode != 0
    # Neither the bundle nor what was unpacked stays.
    assert node.sh("ls /var/lib/trackbed/ofed") == "installed\n"
    assert changed(deploy(first)) == []

    with used(node):
        done = deploy(second)
        assert {"OFED | MLNX_OFED", "OFED | Loaded modules"} <= set(changed(done))
        assert "not reloaded now: ib_write_bw" in done.stderr
        assert node.sh("ofed_info -s") == f"MLNX_OFED_LINUX-{ofed.MLNX_OFED[1]}:\n"
        assert loaded(node)[0] == runs
        succeeded(deploy(second, reboot={"policy": "allow"}))
    assert loaded_as_installed(node) != runs
    assert node.run(["test", "-e", REQUEST]).returncode != 0


@pytest.mark.campaign
def test_a_wrong_bundle_or_option_is_refused(node_that_builds: Node, tmp_path: Path) -> None:
    given = bundle(node_that_builds, ofed.MLNX_OFED[0])
    packages = node_that_builds.sh("dpkg -l")
    for change, error in (
        ({"sha256": "0" * 64}, "mlnx_ofed.sha256: "),
        ({"bundle": str(tmp_path / "absent.tgz")}, "No such file or directory; give the path of the .tgz"),
        ({"options": ["--no-such-option"]}, "mlnxofedinstall does not know one of the options"),
    ):
        assert error in refusal(deploy({"mlnx_ofed": {**given["mlnx_ofed"], **change}}))
    assert node_that_builds.sh("dpkg -l") == packages
