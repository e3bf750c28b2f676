"""An older release in place of a newer one, by real dnf and rpm in a folder. Packages require a version or any later one."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from lab import rpm
from lab.rpm import Rpm
from tasks.drivers.ofed import doca
from tasks.packages import _AVAILABLE, AvailableVersions, vendor_repository
from tests.deploy.scripts import sh
from tests.stand_ins import program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("dnf", "rpmbuild", "createrepo_c"))), reason="a node's script for dnf"
    ),
]

KERNEL = "mlnx-ofa_kernel"
# The distribution has a newer switch than the vendor, and an older rdma-core.
DISTRIBUTION = [
    Rpm("dash", "1-1", provides=("/bin/sh",)),
    Rpm("openvswitch", "3.5.0-1"),
    Rpm("rdma-core", "48.0-1"),
    Rpm("jq", "1.6-2"),
]


def doca_release(profile: str, kernel: str, libraries: str) -> list[Rpm]:
    requires = (f"{KERNEL} >= {kernel}", f"rdma-core >= {libraries}", "openvswitch")
    parts = [Rpm(KERNEL, f"{kernel}-1"), Rpm("rdma-core", f"{libraries}-1"), Rpm("openvswitch", "3.1.2-1")]
    return [Rpm("doca-ofed", f"{profile}-044501", requires), *parts]


OLD, NEW = doca_release("3.2.0", "25.10.1", "2510mlnx58"), doca_release("3.2.1", "25.10.7", "2510mlnx60")


def gpu_release(version: str) -> list[Rpm]:
    libraries = Rpm("libnvidia-ml", f"{version}-1")
    return [Rpm("nvidia-open", f"{version}-1", (f"libnvidia-ml >= {version}",)), libraries]


def repository(folder: Path, packages: Iterable[Rpm]) -> Path:
    folder.mkdir()
    for package in packages:
        rpm.build(folder, package)
    rpm.index(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The repositories."""
    folder = tmp_path_factory.mktemp("repositories")
    packages = {
        "base": DISTRIBUTION,
        "old": OLD,
        "new": NEW,
        "gpu": [*gpu_release("570.86.15"), *gpu_release("580.95.05")],
    }
    return {name: repository(folder / name, of_it) for name, of_it in packages.items()}


class Node:
    """A folder into which dnf installs. Its dnf and rpm are programs in front of the real ones."""

    def __init__(self, root: Path, made: dict[str, Path]) -> None:
        self.root, self.made = root, made
        (root / "repos").mkdir()
        self.entry("base", "base")
        options = f"--installroot={root}/node --setopt=reposdir={root}/repos --setopt=cachedir={root}/cache"
        program(
            root / "bin/dnf",
            f'exec dnf {options} --setopt=plugins=0 --setopt=tsflags=noscripts --setopt=gpgcheck=0 --releasever=9 "$@"',
        )
        program(root / "bin/rpm", f'exec rpm --root {root}/node "$@"')
        for name in ("dnf", "rpm"):
            path = root / "bin" / name
            path.write_text(path.read_text().replace(f"exec {name} ", f"exec {shutil.which(name)} "))

    def entry(self, name: str, source: str) -> None:
        text = f"[{name}]\nname={name}\nbaseurl=file://{self.made[source]}\nenabled=1\n"
        (self.root / f"repos/{name}.repo").write_text(text)

    def run(self, text: str, *arguments: str) -> list[str]:
        log = f"{self.root}/node/var/log/dnf5.log"
        return sh(text, *arguments, programs=self.root / "bin", DNF5_LOG=log)

    def install(self, *names: str) -> None:
        """By the deploy's own command."""
        self.run(vendor_repository._DNF, "", "", "", *names)

    def left(self) -> list[str]:
        found = doca.LeftBehind().process(self.run(doca._LEFT_BEHIND["rhel"], "", "trackbed-doca"))
        return [f"{each.name}-{each.version}" for each in found]

    def has(self) -> set[str]:
        words = ["rpm", "--root", str(self.root / "node"), "-qa", "--queryformat", "%{NAME}-%{VERSION}-%{RELEASE}\n"]
        return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()) - {"dash-1-1"}


def test_the_drivers_of_a_profile_go_back_with_it(tmp_path: Path, made: dict[str, Path]) -> None:
    node = Node(tmp_path, made)
    assert node.left() == []
    node.entry("trackbed-doca", "new")
    node.install("doca-ofed-3.2.1-044501", "jq")
    newer = {f"{KERNEL}-25.10.7-1", "rdma-core-2510mlnx60-1"}
    others = {"openvswitch-3.5.0-1", "jq-1.6-2"}
    assert node.has() == {"doca-ofed-3.2.1-044501", *newer, *others}
    assert node.left() == []
    node.entry("trackbed-doca", "old")
    # As dnf resolves it: the newer drivers satisfy the older profile.
    node.install("doca-ofed-3.2.0-044501")
    assert node.has() == {"doca-ofed-3.2.0-044501", *newer, *others}
    assert node.left() == [f"{KERNEL}-25.10.1-1", "rdma-core-2510mlnx58-1"]
    node.install(*node.left())
    # The distribution still has its own switch, so that did not come with the newer release.
    assert node.has() == {"doca-ofed-3.2.0-044501", f"{KERNEL}-25.10.1-1", "rdma-core-2510mlnx58-1", *others}
    assert node.left() == []
    # Before an upgrade the older packages are in no repository, and are none that a newer release has left.
    node.entry("trackbed-doca", "new")
    node.install("jq")
    assert node.left() == []


def test_the_libraries_of_a_gpu_driver_go_back_with_it(tmp_path: Path, made: dict[str, Path]) -> None:
    node = Node(tmp_path, made)
    node.entry("trackbed-nvidia-driver", "gpu")
    node.install("nvidia-open-580.95.05-*")
    node.install("nvidia-open-570.86.15-*")
    assert node.has() == {"nvidia-open-570.86.15-1", "libnvidia-ml-580.95.05-1"}
    available = AvailableVersions().process(node.run(_AVAILABLE["rhel"], "libnvidia-ml"))
    assert available == [("libnvidia-ml", "570.86.15"), ("libnvidia-ml", "580.95.05")]
    node.install("libnvidia-ml-570.86.15-*")
    assert node.has() == {"nvidia-open-570.86.15-1", "libnvidia-ml-570.86.15-1"}
