"""An older release of DOCA in place of a newer one. Packages require a version or any later one. Real apt, which simulates."""

import re
import shutil
from pathlib import Path

import pytest

from tasks.drivers.ofed import doca
from tasks.packages import vendor_repository
from tests.deploy.scripts import sh

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="a node's script for apt")

KERNEL = "mlnx-ofed-kernel-dkms"
OLD = {"doca-ofed": "3.2.0-1", KERNEL: "25.10.OFED.25.10.1.2.2", "rdma-core": "2510mlnx58-1.2510067"}
NEW = {"doca-ofed": "3.2.1-1", KERNEL: "25.10.OFED.25.10.1.7.1", "rdma-core": "2510mlnx60-1.2510070"}
# The distribution has a newer one than the vendor.
SWITCH, VENDORS_SWITCH = "3.5.0-1", "3.1.2-1"


def stanzas(packages: dict[str, str], *more: str) -> str:
    """The packages as in an index of apt, or in dpkg's status. The profile requires the others, or later ones."""
    texts = []
    for name, version in packages.items():
        release = OLD if version in OLD.values() else NEW
        needs = [f"{part} (>= {need})" for part, need in release.items() if name == "doca-ofed" and part != name]
        fields = [f"Package: {name}", f"Version: {version}", "Architecture: all", "Maintainer: x <x@example.net>"]
        fields += [*more, *([f"Depends: {', '.join(needs)}"] if needs else []), "Description: x"]
        texts.append("\n".join(fields) + "\n")
    return "\n".join(texts)


class Node:
    """A folder that apt and dpkg take for a node. Its apt simulates an installation."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("etc/apt.conf.d", "etc/sources.list.d", "etc/preferences.d", "lists/partial", "dpkg/updates"):
            (root / folder).mkdir(parents=True)
        (root / "apt.conf").write_text(
            f'Dir::Etc "{root}/etc"; Dir::State "{root}"; Dir::State::status "{root}/dpkg/status"; Dir::Cache "{root}"; '
            f'APT::Sandbox::User "root"; APT::Get::Simulate "true"; Debug::NoLocking "true";'
        )

    def have(self, packages: dict[str, str]) -> None:
        (self.root / "dpkg/status").write_text(stanzas(packages, "Status: install ok installed"))

    def repository(self, name: str, packages: dict[str, str]) -> str:
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        checksum = f"SHA256: {'0' * 64}"
        (folder / "Packages").write_text(stanzas(packages, f"Filename: ./{name}.deb", "Size: 1", checksum))
        (self.root / f"etc/sources.list.d/{name}.list").write_text(f"deb [trusted=yes] file:{folder} ./\n")
        return f"file:{folder}"

    def run(self, text: str, *arguments: str) -> list[str]:
        return sh(text, *arguments, APT_CONFIG=f"{self.root}/apt.conf", DPKG_ADMINDIR=f"{self.root}/dpkg")

    def install(self, *names: str) -> dict[str, str]:
        """What apt installs, by the deploy's own command."""
        lines = self.run(vendor_repository._APT, "", "", *names)
        found = (re.match(r"Inst (\S+) \[\S+\] \((\S+)", line) for line in lines)
        return {match[1]: match[2] for match in found if match}

    def left(self, uri: str) -> list[str]:
        found = doca.LeftBehind().process(self.run(doca._LEFT_BEHIND["debian"], uri))
        return [f"{each.name}={each.version}" for each in found]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.have({**NEW, "openvswitch-switch": SWITCH, "jq": "1.6-2"})
    node.repository("debian", {"openvswitch-switch": SWITCH, "jq": "1.6-2"})
    return node


def test_a_profile_that_goes_back_leaves_its_drivers_and_they_are_found(node: Node) -> None:
    uri = node.repository("doca", {**OLD, "openvswitch-switch": VENDORS_SWITCH})
    # As apt resolves it: the newer drivers satisfy the older profile.
    assert node.install("doca-ofed=3.2.0-1") == {"doca-ofed": "3.2.0-1"}
    node.have({**NEW, "doca-ofed": OLD["doca-ofed"], "openvswitch-switch": SWITCH, "jq": "1.6-2"})
    left = node.left(uri)
    # The distribution still has its own switch, so that did not come with the newer release.
    assert left == [f"{KERNEL}={OLD[KERNEL]}", f"rdma-core={OLD['rdma-core']}"]
    assert node.install(*left) == {name: OLD[name] for name in (KERNEL, "rdma-core")}
    node.have({**OLD, "openvswitch-switch": SWITCH})
    assert node.left(uri) == []


def test_nothing_is_left_behind_by_an_upgrade_or_a_first_installation(node: Node) -> None:
    uri = node.repository("doca", NEW)
    assert node.left(uri) == []
    node.install("jq")
    assert node.left(uri) == []
    node.have({**OLD, "jq": "1.6-2"})
    assert node.left(uri) == []
    assert node.install("doca-ofed=3.2.1-1") == NEW
    node.have({})
    assert node.left(uri) == []


def test_a_repository_with_both_releases_says_nothing_about_what_is_installed(node: Node) -> None:
    uri = node.repository("doca", OLD)
    (node.root / "doca/Packages").write_text(f"{(node.root / 'doca/Packages').read_text()}\n{stanzas(NEW, 'Size: 1')}")
    node.install("jq")
    assert node.left(uri) == []


@pytest.mark.parametrize("by", ["pin", "hold"])
def test_what_keeps_apt_from_a_version_is_named(node: Node, by: str) -> None:
    node.repository("doca", NEW)
    node.have({KERNEL: "25.01.OFED"} if by == "hold" else {"jq": "1.6-2"})
    status, pins = node.root / "dpkg/status", node.root / "etc/preferences.d/site"
    if by == "hold":
        status.write_text(status.read_text().replace("Status: install ok", "Status: hold ok"))
        said = f"these packages are held, which may be the cause (apt-mark unhold): {KERNEL}"
    else:
        pins.write_text(f"Package: {KERNEL}\nPin: version *\nPin-Priority: -1\n")
        said = f"{pins} has pins of packages, which may be the cause"
    (pins.parent / "trackbed-doca").write_text("")
    with pytest.raises(AssertionError) as failed:
        node.install("doca-ofed=3.2.1-1")
    assert said in str(failed.value)
    assert str(failed.value).count("which may be the cause") == 1
